"""Connections to PostgreSQL by the name that Airflow keeps them under."""
