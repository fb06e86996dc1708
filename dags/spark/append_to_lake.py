"""The movements of each batch, appended to an Iceberg table.

To append is right because a movement never changes once it is written.
"""

from airflow_pgchange import batch_jobs
from airflow_pgchange.lake import Iceberg

MOVEMENTS = Iceberg("flights.movement", catalog="lake")

for job in batch_jobs():
    movements = job.rows("public.movement", key="id")
    job.merge(movements, into=MOVEMENTS, key=[], mode="append")
