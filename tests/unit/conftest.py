from hypothesis import settings

from tests.airflow_home import prepare

prepare()
# How long a generated example takes is up to what else the machine does.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
