"""Code that operators, sensors, triggers and assets share: arguments, metrics, lineage, and Airflow's versions."""
