"""Keep copies of the tables that are attached to a tube, in the schema with the name of the tube."""

import logging

from airflow_pgchange import batch_jobs

for job in batch_jobs():
    tables = job.attached()
    for shard in sorted(set(job.shards()) - {attached.shard for attached in tables}):
        logging.warning("no attached table has shard %d: what was touched there is copied nowhere", shard)
    for attached in tables:
        job.mirror(attached, into="{tube}.{table}")
