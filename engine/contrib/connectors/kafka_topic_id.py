"""The id of a Kafka topic: another one after the topic was deleted and created again. And whether it has grown."""

from __future__ import annotations

import threading
import time
from typing import Any

from penstock.base.events import report
from penstock.contrib.connectors.kafka_client import KAFKA, TIMEOUT_S, Topic, kafka_failures, silent

# How long an id is trusted while messages are read: the client does not notice a topic that was created again.
TRUSTED_S = 1.0


class TopicId:
    """The id of one topic, for the threads of all its partitions. num_partitions : that are read"""

    def __init__(self, topic: Topic, num_partitions: int) -> None:
        self._topic, self._num_partitions = topic, num_partitions
        self._lock = threading.Lock()
        self._admin: Any = None
        self._asked_s = 0.0
        self._id: str | None = None

    def ask(self, consumer: Any) -> str | None:
        """Ask the brokers for the id. None: they have none, as those before 2.8. Raises UsageError, OSError."""
        with self._lock:
            self._id = self._ask(consumer)
            self._asked_s = time.monotonic()
            return self._id

    def recent(self, consumer: Any) -> str | None:
        """Return the id as it was a moment ago. Raises as ``ask``."""
        if time.monotonic() - self._asked_s < TRUSTED_S:
            return self._id
        return self.ask(consumer)

    def _ask(self, consumer: Any) -> str | None:
        topic = self._topic
        with kafka_failures(topic):
            metadata = consumer.list_topics(topic.name, timeout=TIMEOUT_S)
            self._warn_of(len(metadata.topics[topic.name].partitions))
            if metadata.controller_id not in metadata.brokers:
                return None  # librdkafka's mock cluster, which no request of an administrator reaches
            if self._admin is None:
                admin = KAFKA.load("kafka://", ".admin")
                self._admin = admin.AdminClient(topic.settings, logger=silent())
            names = topic.client.TopicCollection([topic.name])
            topic_id = self._admin.describe_topics(names, request_timeout=TIMEOUT_S)[topic.name].result().topic_id
        bits = (topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits())
        return f"id {topic_id}" if any(bits) else None

    def _warn_of(self, num_partitions: int) -> None:
        """Warn once if the topic has more partitions than are read: those that it had at the start."""
        if num_partitions > self._num_partitions:
            hint = "restart to read the others"
            fields = {"topic": self._topic.description, "partitions": num_partitions, "read": self._num_partitions}
            report("topic_has_grown", **fields, hint=hint)
            self._num_partitions = num_partitions
