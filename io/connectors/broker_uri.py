"""The spelling of brokers: ``kafka://BROKERS/TOPIC`` and ``nats://HOST:PORT/STREAM``."""

from __future__ import annotations

from penstock.errors import InputError, UsageError
from penstock.io.connectors.broker_partition import Partition
from penstock.io.connectors.kafka_partition import kafka_partitions
from penstock.io.connectors.nats_stream import NatsStream
from penstock.io.patience import Patience

SCHEMES = ("kafka://", "nats://", "tls://")


def open_partitions(uri: str, patience_s: float) -> list[Partition]:
    """Return the partitions of a topic, in order of number.

    Raises UsageError for another URI, an unknown topic or wrong credentials, InputError if no broker is reachable.
    """
    if uri.startswith("kafka://"):
        patience = Patience(patience_s, starts_over=False)
        while True:
            try:
                return kafka_partitions(uri)
            except OSError as error:
                address = uri.partition("?")[0]
                patience.wait(InputError(f"the broker cannot be reached: {error}", source=address))
    if uri.startswith(SCHEMES):
        return [NatsStream(uri)]
    raise UsageError(f"{uri}: expected kafka://BROKER:PORT/TOPIC or nats://HOST:PORT/STREAM")
