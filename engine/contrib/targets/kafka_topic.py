"""A target in a log-compacted Kafka topic: a message per row, whose key is the table and the id (docs/follow.md).

A delta is one transaction. Its last message, the mark in partition 0, names the job, the epoch, the step and the number
of partitions, which decides where a key's messages are; compaction keeps the last one. A new producer fences the one
before, and then compares the mark, so that of two followers neither writes after the other without having read what
that one wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import penstock.base.interrupts as interrupts
from penstock.base.errors import PenstockError, StateError, TargetError
from penstock.base.filesystem.state_files import parsed_json
from penstock.contrib.connectors.kafka_client import (
    ERRORS,
    KAFKA,
    PARTITION_EOF,
    TIMEOUT_S,
    kafka_failures,
    kafka_topic,
    silent,
)
from penstock.serving.followers.target import Stored, TableRows, Target
from penstock.serving.followers.target_kinds import TargetKind

TARGET = TargetKind(
    title="Kafka",
    form="kafka://BROKER:PORT/TOPIC",
    schemes=("kafka:",),
    example="kafka://127.0.0.1:9092/rows",
    errors=ERRORS,
    library=KAFKA,
    holds="one message per change in a topic",
    transaction="of Kafka, per delta",
    open=lambda uri: KafkaTopic(uri),
)
MARK, STEP = b"penstock", "penstock.step"
# Offsets from the end in which the last mark is looked for first.
_TAIL = 10
_COMMIT_S = 60.0
_LOOK_S = 1.0  # between two looks for a signal


def row_key(table: str, id_: int) -> bytes:
    """Return the key of a row's messages, ``TABLE/ID``. That of a mark has no slash."""
    return f"{table}/{id_}".encode()


class _Mark(NamedTuple):
    """num_partitions : of the topic when it was written"""

    stored: Stored
    num_partitions: int


class KafkaTopic(Target):
    """The topic of ``kafka://BROKERS/TOPIC``. It exists, and its ``cleanup.policy`` is compact."""

    per_delta = True

    def __init__(self, uri: str) -> None:
        self._topic = kafka_topic(uri)
        super().__init__(self._topic.description)
        self._producer: Any = None
        self._reader: Any = None
        self._mark: tuple[tuple[int, int], _Mark | None] | None = None  # the last one, and the watermarks then
        self._num_partitions = 0  # of the topic, as it was compared with the mark

    def stored(self) -> Stored | None:
        return self._last_mark()

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        kept = {row_key(rows.table, id_) for rows in tables for id_ in rows.ids.tolist()}
        self.compare(self._last_mark(), before)
        with self._transaction(new) as send:
            for key in sorted(self._live() - kept):
                send(key, None)
            _send_rows(send, tables)

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        self.compare(self._last_mark(), before)
        with self._transaction(new) as send:
            _send_rows(send, changes)

    def close(self) -> None:
        self._producer = None  # a new one with the same transactional.id ends its transaction
        self._mark = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _connect(self) -> Any:
        if self._producer is None:
            settings = {"transactional.id": f"penstock-{self._topic.name}", "transaction.timeout.ms": "600000"}
            producer = self._topic.client.Producer(
                {**settings, **self._topic.settings, "error_cb": self._topic.note}, logger=silent()
            )
            with kafka_failures(self._topic, producer):
                producer.init_transactions(TIMEOUT_S)
            self._producer = producer
        return self._producer

    @contextmanager
    def _transaction(self, new: Stored) -> Iterator[Any]:
        """Give a function that sends a key and a value, in one transaction that ends with the mark."""
        producer = self._connect()
        headers = [(STEP, str(new.version.step).encode())]

        def send(key: bytes, value: bytes | None, **place: int) -> None:
            while True:
                try:
                    producer.produce(self._topic.name, value, key, headers=headers, **place)
                    return
                except BufferError:  # the client's queue is full
                    producer.poll(_LOOK_S)
                    interrupts.check()

        producer.begin_transaction()
        try:
            yield send
            mark = {**new.encoded(), "job": new.job.encoded(), "partitions": self._num_partitions}
            send(MARK, json.dumps(mark).encode(), partition=0)
            try:
                self._check_partitions(self._num_partitions)  # the producer may have noticed others in between
            except StateError:
                producer.abort_transaction(TIMEOUT_S)
                raise
            self._commit(producer)
        except BaseException:
            self.close()
            raise

    def _commit(self, producer: Any) -> None:
        """Commit the open transaction, by calls between which a signal ends the wait."""
        end_s = time.monotonic() + _COMMIT_S
        while True:
            try:
                producer.commit_transaction(_LOOK_S)
                return
            except self._topic.client.KafkaException as error:
                if error.args[0].name() != "_TIMED_OUT" or not error.args[0].retriable() or time.monotonic() > end_s:
                    raise
            interrupts.check()

    def _last_mark(self) -> Stored | None:
        """Return what the last mark names, which no other producer can follow from here on without fencing this one."""
        self._connect()  # ends the transaction of a follower that was killed
        consumer = self._consumer()
        low, high = consumer.get_watermark_offsets(self._topic.at(0, 0), timeout=TIMEOUT_S, cached=False)
        if self._mark is None or self._mark[0] != (low, high):
            self._mark = (low, high), self._find_mark(consumer, low, high)
        mark = self._mark[1]
        self._check_partitions(None if mark is None else mark.num_partitions)
        return None if mark is None else mark.stored

    def _check_partitions(self, expected: int | None) -> None:
        """Raise StateError if the topic has grown, so that new messages of a key would not follow its older ones.

        expected : None: no mark names the number
        """
        self._num_partitions = len(self._topic.partitions(self._consumer()))
        if expected not in (None, self._num_partitions):
            raise StateError(
                f"{self.name}: the topic had {expected} partition{'s' * (expected != 1)}, now {self._num_partitions}: "
                "the rows of a key would be in several of them; follow into a new topic"
            )

    def _find_mark(self, consumer: Any, low: int, high: int) -> _Mark | None:
        tail = _TAIL
        while True:
            first = max(low, high - tail)
            marks = [message for message in self._scan(consumer, 0, first) if message.key() == MARK]
            if marks:
                fields = parsed_json(marks[-1].value())
                return _Mark(Stored.decoded(fields, self.name), fields["partitions"])
            if first == low:
                self._check_empty(consumer)
                return None
            tail *= 10

    def _consumer(self) -> Any:
        if self._reader is None:
            # A broker answers the requests of a connection in order: no other one waits long for messages to come.
            topic = self._topic._replace(settings={"fetch.wait.max.ms": "10", **self._topic.settings})
            self._reader = topic.consumer()
            self._topic.partitions(self._reader)  # there is such a topic, and it may be read
        return self._reader

    def _scan(self, consumer: Any, partition: int, first: int = 0) -> Iterator[Any]:
        """Yield the messages of a partition from an offset, or from its beginning, to its present end."""
        low, high = consumer.get_watermark_offsets(self._topic.at(partition, 0), timeout=TIMEOUT_S, cached=False)
        first = max(first, low)
        consumer.assign([self._topic.at(partition, first)])
        is_over = first >= high
        while not is_over:
            message = consumer.poll(TIMEOUT_S)
            if message is None:
                raise OSError(f"partition {partition}: no message in {TIMEOUT_S:g} seconds")
            if message.error() is None:
                yield message
                is_over = message.offset() + 1 >= high
            elif message.error().name() == PARTITION_EOF:
                is_over = True
            else:
                raise self._topic.client.KafkaException(message.error())
        consumer.unassign()

    def _live(self) -> set[bytes]:
        """Return the keys of all rows that the topic has."""
        live: set[bytes] = set()
        consumer = self._consumer()
        for partition in self._topic.partitions(consumer):
            for message in self._scan(consumer, partition):
                if message.value() is None:
                    live.discard(message.key())
                elif message.key() != MARK:
                    live.add(message.key())
        return live

    def _check_empty(self, consumer: Any) -> None:
        for partition in self._topic.partitions(consumer):
            if next(self._scan(consumer, partition), None) is not None:
                raise StateError(f"{self.name}: holds messages that penstock follow has not written; use another topic")

    @contextmanager
    def failures(self) -> Iterator[None]:
        try:
            with kafka_failures(self._topic, self._producer):
                yield
        except PenstockError:
            raise
        except OSError as error:
            raise TargetError(f"{self.name}: {error}") from error


def _send_rows(send: Any, tables: Sequence[TableRows]) -> None:
    for rows in tables:
        for id_, row in zip(rows.ids.tolist(), rows.little_endian, strict=True):
            send(row_key(rows.table, id_), row.tobytes())
        for id_ in rows.removed.tolist():
            send(row_key(rows.table, id_), None)
