"""What Airflow's face shares: arguments, metrics, and asking a task to stop."""
