from airflow_pgchange.example_dags.flight_delays import flight_delays_dag  # noqa: F401
