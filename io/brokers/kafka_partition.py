"""A partition of a Kafka topic: a message's offset, counted from 1, is the number of its frame."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl

from penstock.errors import StateError, UsageError
from penstock.io.brokers.broker_partition import Kept, Message, Partition
from penstock.io.optional import library

_URI = re.compile(r"kafka://([^/?#\s]+)/([^/?#\s]+)(?:\?(\S*))?")
_TIMEOUT_S = 5.0
# Names of librdkafka's errors that no retry can fix.
_GONE = {"OFFSET_OUT_OF_RANGE", "_AUTO_OFFSET_RESET"}
_UNKNOWN = {"UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_EXCEPTION", "_INVALID_ARG"}
_REFUSED = {"_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED"}


class KafkaPartition(Partition):
    """One partition, assigned by hand. Kafka's committed offsets follow the checkpoint, to show the lag only.

    settings : of librdkafka, with the brokers
    """

    def __init__(self, brokers: str, topic: str, number: int, settings: Mapping[str, str]) -> None:
        super().__init__(f"kafka/{topic}/{number}", f"kafka://{brokers}/{topic}, partition {number}")
        self._kafka = library("confluent_kafka", "kafka", "kafka://")
        self._topic, self._number, self._settings = topic, number, settings
        self._consumer: Any = None

    def place(self, number: int) -> str:
        return f"{self.where}, offset {number - 1}"

    def kept(self) -> Kept:
        with _failures(self.where, self._kafka):
            low, high = self._opened().get_watermark_offsets(self._at(0), timeout=_TIMEOUT_S, cached=False)
        return Kept(low + 1, high)

    def seek(self, number: int) -> None:
        with _failures(self.where, self._kafka):
            self._opened().assign([self._at(number - 1)])

    def read(self, timeout_s: float) -> Message | None:
        with _failures(self.where, self._kafka):
            message = self._opened().poll(timeout_s)
            if message is None:
                self.kept()  # fails where the broker has left: the client only waits for it
                return None
            if message.error():
                raise self._kafka.KafkaException(message.error())
            return Message(message.offset() + 1, message.value())

    def acknowledge(self, number: int) -> None:
        with _failures(self.where, self._kafka):
            self._opened().commit(offsets=[self._at(number)], asynchronous=True)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _at(self, offset: int) -> Any:
        return self._kafka.TopicPartition(self._topic, self._number, offset)

    def _opened(self) -> Any:
        if self._consumer is None:
            self._consumer = self._kafka.Consumer(dict(self._settings), logger=_silent())
        return self._consumer


def kafka_partitions(uri: str) -> list[Partition]:
    """Return the partitions of ``kafka://BROKER,BROKER/TOPIC?SETTING=VALUE``, in order of number.

    Raises UsageError for another URI, an unknown topic or wrong credentials, OSError if no broker can be reached.
    """
    found = _URI.fullmatch(uri)
    if found is None:
        raise UsageError(f"{uri.partition('?')[0]}: expected kafka://BROKER:PORT,…/TOPIC?SETTING=VALUE&…")
    brokers, topic, query = found.groups()
    kafka = library("confluent_kafka", "kafka", "kafka://")
    where = f"kafka://{brokers}/{topic}"
    settings = {
        "group.id": "penstock",
        "isolation.level": "read_committed",
        **dict(parse_qsl(query or "", keep_blank_values=True)),
        "bootstrap.servers": brokers,
        "enable.auto.commit": "false",
        "auto.offset.reset": "error",
    }
    with _failures(where, kafka):
        consumer = kafka.Consumer(settings, logger=_silent())
        try:
            metadata = consumer.list_topics(topic, timeout=_TIMEOUT_S).topics[topic]
        finally:
            consumer.close()
        if metadata.error is not None:
            raise kafka.KafkaException(metadata.error)
    return [KafkaPartition(brokers, topic, number, settings) for number in sorted(metadata.partitions)]


def _silent() -> Any:
    """Return a logger for librdkafka's messages: errors are reported in one line where they matter."""
    import logging

    logger = logging.getLogger("penstock.kafka")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


@contextmanager
def _failures(where: str, kafka: Any) -> Iterator[None]:
    """Convert the client's errors."""
    try:
        yield
    except kafka.KafkaException as error:
        found = error.args[0]
        kind, text = found.name(), found.str()
        if kind in _GONE:
            raise StateError(f"{where}: the next frame is no longer retained ({text})") from error
        if kind in _UNKNOWN:
            raise UsageError(f"{where}: {text}") from error
        if kind in _REFUSED:
            raise UsageError(f"{where}: {text}; check the credentials in the settings") from error
        raise OSError(text) from error
