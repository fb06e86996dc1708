"""An application that loads the classes of a short batch, for the class-data archive. ``startup`` runs it."""

from __future__ import annotations

import pyarrow as pa
from pyspark.sql import SparkSession


def main() -> None:
    spark = SparkSession.builder.appName("pgchange-warm-up").config("spark.ui.enabled", "true").getOrCreate()
    frame = spark.createDataFrame(pa.table({"key": ["a", "b"], "value": [1, 2]}))
    frame.groupBy("key").sum("value").toArrow()
    spark.stop()


if __name__ == "__main__":
    main()
