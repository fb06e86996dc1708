"""Add the departures, arrivals, cancellations and minutes of delay of each route to its totals.

Adding is correct because a movement never changes once it is written.
"""

from pyspark.sql.functions import coalesce, col, count_if, lit, sum, when

from airflow_pgchange import batch_jobs

for job in batch_jobs():
    departed, arrived = col("kind") == "departure", col("kind") == "arrival"
    routes = job.rows("public.movement", key="id").groupBy("carrier", "origin", "dest")
    figures = routes.agg(
        count_if(departed).alias("departures"),
        count_if(arrived).alias("arrivals"),
        count_if(col("kind") == "cancellation").alias("cancellations"),
        coalesce(sum(when(departed, col("delay"))), lit(0)).alias("departure_delay"),
        coalesce(sum(when(arrived, col("delay"))), lit(0)).alias("arrival_delay"),
    )
    job.merge(figures, into="public.route_delay", key=["carrier", "origin", "dest"], mode="add")
