"""``make matrix``: run tests with versions of Airflow, Spark, Python and PostgreSQL that the test suite does not
use."""
