"""Change-driven pipelines on PostgreSQL for Apache Airflow."""

__version__ = "0.1.0"
