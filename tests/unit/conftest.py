from hypothesis import settings

from tests.airflow_home import prepare

prepare()
# The time of a generated example depends on the load of the machine.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
