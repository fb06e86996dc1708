from airflow_pgchange.example_dags.pgchange_maintenance import pgchange_maintenance_dag  # noqa: F401
