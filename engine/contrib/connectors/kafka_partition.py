"""A partition of a Kafka topic: a message's offset, counted from 1, is the number of its frame."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.contrib.connectors.kafka_client import (
    ERRORS,
    KAFKA,
    PARTITION_EOF,
    TIMEOUT_S,
    Topic,
    kafka_failures,
    kafka_topic,
)
from penstock.contrib.connectors.kafka_topic_id import TopicId
from penstock.io.partitions.broker_partition import Message, Partition, RetainedRange
from penstock.io.partitions.partition_source import TopicKind

SOURCE = TopicKind(
    title="Kafka",
    form="kafka://BROKER:PORT,…/TOPIC",
    example="kafka://127.0.0.1:9092/gradients",
    errors=ERRORS,
    library=KAFKA,
    unit="its offset in a partition, from 1",
    partitions=lambda uri: kafka_partitions(uri),
)
# Messages that one read takes.
BATCH = 256


class KafkaPartition(Partition):
    """One partition, assigned by hand. Kafka's committed offsets follow the checkpoint, to show the lag only."""

    def __init__(self, topic: Topic, topic_id: TopicId, number: int) -> None:
        super().__init__(f"kafka/{topic.name}/{number}", f"{topic.description}, partition {number}")
        self._topic, self._topic_id, self._number = topic, topic_id, number
        self._creation: str | None = None  # as ``creation`` returned it last
        self._consumer: Any = None
        self._lost: Any = None  # the error with which all brokers were lost

    def place(self, number: int) -> str:
        return f"{self.description}, offset {number - 1}"

    def creation(self) -> str | None:
        self._creation = self._topic_id.ask(self._connect())
        return self._creation

    def retained_range(self) -> RetainedRange:
        with self._failures():
            low, high = self._connect().get_watermark_offsets(self._at(0), timeout=TIMEOUT_S, cached=False)
        return RetainedRange(low + 1, high)

    def seek(self, number: int) -> None:
        with self._failures():
            self.drained = 0
            self._connect().assign([self._at(number - 1)])

    def read(self, timeout_s: float) -> Sequence[Message]:
        messages: list[Message] = []
        with self._failures():
            consumer = self._connect()
            first = consumer.poll(timeout_s)
            if first is None:
                if self._lost is not None:
                    raise self._topic.client.KafkaException(self._lost)
                return messages
            for message in (first, *consumer.consume(BATCH, 0)):  # those that have arrived: no further wait
                error = message.error()
                if error is None:
                    messages.append(Message(message.offset() + 1, message.value()))
                elif error.name() == PARTITION_EOF:
                    self.drained = message.offset()  # also where markers of transactions follow the last message
                elif messages:
                    self.seek(messages[-1].number + 1)  # the next read meets the error again
                    break
                else:
                    raise self._topic.client.KafkaException(error)
        recent = self._topic_id.recent(self._connect())
        if self._creation is not None and recent != self._creation:
            raise OSError("the topic was deleted and created again")
        return messages

    def acknowledge(self, number: int) -> None:
        with suppress(self._topic.client.KafkaException):
            self._connect().commit(offsets=[self._at(number)], asynchronous=True)

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _at(self, offset: int) -> Any:
        return self._topic.at(self._number, offset)

    def _connect(self) -> Any:
        if self._consumer is None:
            self._lost = None
            self._consumer = self._topic.consumer(self._note)
        return self._consumer

    def _note(self, lost: Any) -> None:
        self._lost = lost

    def _failures(self) -> Any:
        return kafka_failures(self._topic, place=self.description)


def kafka_partitions(uri: str) -> list[Partition]:
    """Return the partitions of ``kafka://BROKER,BROKER/TOPIC?SETTING=VALUE``, in order of number.

    Raises UsageError for another URI, an unknown topic or wrong credentials, OSError if no broker can be reached.
    """
    topic = kafka_topic(uri)
    consumer = topic.consumer()
    try:
        numbers = topic.partitions(consumer)
        topic_id = TopicId(topic, len(numbers))
        return [KafkaPartition(topic, topic_id, number) for number in numbers]
    finally:
        consumer.close()
