"""The page in Airflow's shell, and its API."""
