"""Copies of the tables that touch a tube: of each, in the schema that is called like the tube."""

from airflow_pgchange.spark.job import batch_job

with batch_job() as job:
    for attached in job.attached():
        job.mirror(attached, into="{tube}.{table}")
