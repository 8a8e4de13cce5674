"""A target in a log-compacted Kafka topic: a message per row, whose key is the table and the id (docs/follow.md).

A delta is one transaction. Its last message, in partition 0, names the job and the step; compaction keeps the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import StateError
from penstock.filesystem.state_files import parsed_json
from penstock.io.brokers.kafka_client import PARTITION_EOF, TIMEOUT_S, kafka_failures, kafka_topic, silent
from penstock.io.flight import Delta
from penstock.io.targets.changes import changes_of
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

MARK, STEP = b"penstock", "penstock.step"
# Offsets from the end in which the last mark is looked for first.
_TAIL = 1000
_COMMIT_S = 60.0


def row_key(table: str, id_: int) -> bytes:
    """Return the key of a row's messages, ``TABLE/ID``. That of a mark has no slash."""
    return f"{table}/{id_}".encode()


class KafkaTopic(Target):
    """The topic of ``kafka://BROKERS/TOPIC``. It exists, and its ``cleanup.policy`` is compact."""

    def __init__(self, uri: str) -> None:
        self._topic = kafka_topic(uri)
        super().__init__(self._topic.where)
        self._producer: Any = None

    def stored(self) -> Stored | None:
        with self._failures(), self._consumer() as consumer:
            self._opened()  # ends the transaction of a follower that was killed
            low, high = consumer.get_watermark_offsets(self._topic.at(0, 0), timeout=TIMEOUT_S, cached=False)
            tail = _TAIL
            while True:
                first = max(low, high - tail)
                marks = [message for message in self._scan(consumer, 0, first) if message.key() == MARK]
                if marks or first == low:
                    break
                tail *= 10
            if not marks:
                self._check_empty(consumer)
                return None
            mark = parsed_json(marks[-1].value())
            return Stored(Job.decoded(mark["job"], self.name), int(mark["step"]))

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        kept = {row_key(of.table, id_) for of in tables for id_ in of.ids.tolist()}
        with self._failures(), self._transaction(job, step) as send:
            with self._consumer() as consumer:
                for key in sorted(self._live(consumer) - kept):
                    send(key, None)
            _send_rows(send, tables)

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        with self._failures():
            for delta in deltas:
                with self._transaction(job, delta.step) as send:
                    _send_rows(send, changes_of([delta], job))

    def close(self) -> None:
        self._producer = None  # a new one with the same transactional.id ends its transaction

    def _opened(self) -> Any:
        if self._producer is None:
            settings = {"transactional.id": f"penstock-{self._topic.name}", "transaction.timeout.ms": "600000"}
            producer = self._topic.client.Producer({**settings, **self._topic.settings}, logger=silent())
            producer.init_transactions(TIMEOUT_S)
            self._producer = producer
        return self._producer

    @contextmanager
    def _transaction(self, job: Job, step: int) -> Iterator[Any]:
        """Give a function that sends a key and a value, in one transaction that ends with the mark of the step."""
        producer = self._opened()
        headers = [(STEP, str(step).encode())]

        def send(key: bytes, value: bytes | None, **at: int) -> None:
            while True:
                try:
                    producer.produce(self._topic.name, value, key, headers=headers, **at)
                    return
                except BufferError:  # the client's queue is full
                    producer.poll(1.0)

        producer.begin_transaction()
        try:
            yield send
            send(MARK, json.dumps({"job": job.encoded(), "step": step}).encode(), partition=0)
            producer.commit_transaction(_COMMIT_S)
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _consumer(self) -> Iterator[Any]:
        consumer = self._topic.consumer()
        try:
            self._topic.partitions(consumer)  # there is such a topic, and it may be read
            yield consumer
        finally:
            consumer.close()

    def _scan(self, consumer: Any, partition: int, first: int) -> Iterator[Any]:
        """Yield the messages of a partition from an offset to its present end."""
        at = self._topic.at(partition, first)
        _, high = consumer.get_watermark_offsets(at, timeout=TIMEOUT_S, cached=False)
        consumer.assign([at])
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

    def _live(self, consumer: Any) -> set[bytes]:
        """Return the keys of all rows that the topic has."""
        live: set[bytes] = set()
        for partition in self._topic.partitions(consumer):
            low, _ = consumer.get_watermark_offsets(self._topic.at(partition, 0), timeout=TIMEOUT_S, cached=False)
            for message in self._scan(consumer, partition, low):
                if message.value() is None:
                    live.discard(message.key())
                elif message.key() != MARK:
                    live.add(message.key())
        return live

    def _check_empty(self, consumer: Any) -> None:
        for partition in self._topic.partitions(consumer):
            low, high = consumer.get_watermark_offsets(self._topic.at(partition, 0), timeout=TIMEOUT_S, cached=False)
            if high > low and next(iter(self._scan(consumer, partition, low)), None) is not None:
                raise StateError(f"{self.name}: holds messages that penstock follow has not written; use another topic")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        with failures(self.name), kafka_failures(self.name, self._topic.client):
            yield


def _send_rows(send: Any, tables: Sequence[TableRows]) -> None:
    for of in tables:
        for id_, row in zip(of.ids.tolist(), of.rows.astype("<f4", copy=False), strict=True):
            send(row_key(of.table, id_), row.tobytes())
        for id_ in of.removed.tolist():
            send(row_key(of.table, id_), None)
