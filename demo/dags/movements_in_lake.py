from airflow_pgchange.example_dags.movements_in_lake import movements_in_lake_dag  # noqa: F401
