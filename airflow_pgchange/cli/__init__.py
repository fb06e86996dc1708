"""The command line: ``airflow-pgchange``."""
