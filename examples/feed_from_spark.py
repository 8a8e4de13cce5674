"""Feed a service from Spark: a streaming query pushes every micro-batch as one frame, exactly once.

    python examples/feed_from_spark.py grpc://127.0.0.1:8815 gradients/ query/

Spark decides once which files make a micro-batch, and writes that to ``query/``. After a failure it sends the batch
again under the same number, which is the frame's number here: the service skips a frame that it has. Run the script
again to continue; remove ``.trigger(...)`` to wait for new files.

gradients/ : Parquet files with columns n (the order of the rows), table, id, gradient
"""

import sys
from functools import partial

from pyspark.sql import SparkSession

from penstock.serving.flight import connect

SCHEMA = "n long, table string, id long, gradient array<float>"


def push(address, batch, number):
    """Push micro-batch ``number``, counted from 0. Returns when the service has committed it."""
    rows = batch.orderBy("n").drop("n").toArrow()
    with connect(address) as service:
        service.put([rows], "spark", first=number + 1)


def main(address, source, query):
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(source)
    stream = rows.writeStream.foreachBatch(partial(push, address)).option("checkpointLocation", query)
    stream.trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
