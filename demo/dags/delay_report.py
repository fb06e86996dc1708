from airflow_pgchange.example_dags.delay_report import delay_report_dag  # noqa: F401
