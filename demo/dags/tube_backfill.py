from airflow_pgchange.example_dags.tube_backfill import tube_backfill_dag  # noqa: F401
