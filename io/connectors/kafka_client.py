"""What sources and targets in Kafka share: the URI of a topic, and the errors of librdkafka's client."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from penstock.errors import UsageError
from penstock.io.registry import Library

KAFKA = Library("confluent_kafka", "kafka")
TIMEOUT_S = 5.0
# The name of the error that is the end of a partition.
PARTITION_EOF = "_PARTITION_EOF"
_ALL_LOST = "_ALL_BROKERS_DOWN"
_URI = re.compile(r"kafka://([^/?#\s]+)/([^/?#\s]+)(?:\?(\S*))?")
# Names of librdkafka's errors that no retry can fix.
_UNKNOWN = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_EXCEPTION", "_INVALID_ARG"}
_REFUSED = {
    "_AUTHENTICATION",
    "SASL_AUTHENTICATION_FAILED",
    "TOPIC_AUTHORIZATION_FAILED",
    "GROUP_AUTHORIZATION_FAILED",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
}


class Topic(NamedTuple):
    """A topic and how to reach it. client : the module; settings : of librdkafka, from the URI, with the brokers

    description : the topic, for messages, without settings
    """

    client: Any
    name: str
    settings: dict[str, str]
    description: str

    def partitions(self, consumer: Any) -> list[int]:
        """Return the numbers of the topic's partitions. Raises UsageError if there is no such topic, OSError."""
        with kafka_failures(self.description, self.client):
            metadata = consumer.list_topics(self.name, timeout=TIMEOUT_S).topics[self.name]
            if metadata.error is not None:
                raise self.client.KafkaException(metadata.error)
            return sorted(metadata.partitions)

    def consumer(self, lost: Callable[[Any], object] = lambda _: None) -> Any:
        """Return a consumer of committed messages that commits nothing by itself.

        lost : called by a read, with the error, if no broker is reachable: the client itself only waits for one
        """
        fixed = {"enable.auto.commit": "false", "enable.partition.eof": "true", "auto.offset.reset": "error"}

        def report(error: Any) -> None:
            if error.name() == _ALL_LOST:
                lost(error)

        defaults = {"group.id": "penstock", "isolation.level": "read_committed"}
        with kafka_failures(self.description, self.client):
            return self.client.Consumer(
                {**defaults, **self.settings, **fixed, "error_cb": report},
                logger=silent(),
            )

    def at(self, partition: int, offset: int) -> Any:
        return self.client.TopicPartition(self.name, partition, offset)


def kafka_topic(uri: str) -> Topic:
    """Parse ``kafka://BROKER,BROKER/TOPIC?SETTING=VALUE``. Raises UsageError."""
    match = _URI.fullmatch(uri)
    if match is None:
        raise UsageError(f"{uri.partition('?')[0]}: expected kafka://BROKER:PORT,…/TOPIC?SETTING=VALUE&…")
    brokers, topic, query = match.groups()
    settings = {**dict(parse_qsl(query or "", keep_blank_values=True)), "bootstrap.servers": brokers}
    return Topic(KAFKA.load("kafka://"), topic, settings, f"kafka://{brokers}/{topic}")


def silent() -> logging.Logger:
    """Return a logger for librdkafka's messages: errors are reported in one line where they matter."""
    logger = logging.getLogger("penstock.kafka")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


@contextmanager
def kafka_failures(topic: str, kafka: Any) -> Iterator[None]:
    """Convert the client's errors: to UsageError, or to OSError where a new connection may help."""
    try:
        yield
    except kafka.KafkaException as error:
        failure = error.args[0]
        kind, text = failure.name(), failure.str()
        if kind in _UNKNOWN:
            raise UsageError(f"{topic}: {text}") from error
        if kind in _REFUSED:
            raise UsageError(f"{topic}: {text}; check the credentials in the settings") from error
        raise OSError(text) from error
