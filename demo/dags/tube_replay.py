from airflow_pgchange.example_dags.tube_replay import tube_replay_dag  # noqa: F401
