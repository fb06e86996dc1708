from tests.airflow_home import prepare

prepare()
