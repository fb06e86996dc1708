"""``make matrix``: tests beside the versions of Airflow, Spark, Python and PostgreSQL that the suite does not have."""
