from airflow_pgchange.example_dags.movement_audit import movement_audit_dag  # noqa: F401
