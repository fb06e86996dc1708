"""What runs inside Spark: the data source, the staging sink and the job's API. Feeds only, no Airflow."""
