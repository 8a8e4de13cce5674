"""What sources and targets in Kafka share: the URI of a topic, and the errors of librdkafka's client."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from penstock.io.error_tables import ErrorRow, ErrorTable
from penstock.io.registry import Library, match_uri

KAFKA = Library("confluent_kafka", "kafka")
TIMEOUT_S = 5.0
# After which a consumer reports that a broker has stopped to answer; librdkafka's default is a minute.
SOCKET_MS = "10000"
# The name of the error that is the end of a partition.
PARTITION_EOF = "_PARTITION_EOF"
_ALL_LOST = "_ALL_BROKERS_DOWN"
_URI = re.compile(r"kafka://([^/?#@\s]+)/([^/?#@\s]+)(?:\?((?:[\w.]+=[^\s&#]*&?)*))?")


def _names(error: Any) -> Iterator[str]:
    """Yield the name of a client's error: alone, as callbacks get it, or inside an exception."""
    yield from (each.name() for each in getattr(error, "args", (error,)) if hasattr(each, "name"))


def _text(error: Any) -> str:
    return " ".join(" ".join(each.str() for each in getattr(error, "args", (error,)) if hasattr(each, "str")).split())


ERRORS = ErrorTable(
    ErrorRow(
        "there is no such topic or partition",
        2,
        "UNKNOWN_TOPIC_OR_PART _UNKNOWN_TOPIC _UNKNOWN_PARTITION TOPIC_EXCEPTION",
        advice="create the topic, or correct its name",
    ),
    ErrorRow(
        "the broker refuses the user: authentication, or an ACL of a topic, group, cluster or transactional id",
        2,
        "_AUTHENTICATION SASL_AUTHENTICATION_FAILED TOPIC_AUTHORIZATION_FAILED GROUP_AUTHORIZATION_FAILED "
        "CLUSTER_AUTHORIZATION_FAILED TRANSACTIONAL_ID_AUTHORIZATION_FAILED DELEGATION_TOKEN_AUTHORIZATION_FAILED "
        "DELEGATION_TOKEN_EXPIRED SECURITY_DISABLED",
        advice="check the credentials in the settings, and the ACLs of the user",
    ),
    ErrorRow(
        "the TLS handshake fails: the certificate is not trusted, or one of the client is required",
        2,
        "_SSL",
        advice="check security.protocol, ssl.ca.location and the certificates of the client in the settings",
    ),
    ErrorRow(
        "a setting is wrong, or the broker does not support it",
        2,
        "_INVALID_ARG INVALID_CONFIG _UNSUPPORTED_FEATURE UNSUPPORTED_VERSION UNSUPPORTED_SASL_MECHANISM "
        "ILLEGAL_SASL_STATE INVALID_TRANSACTION_TIMEOUT UNSUPPORTED_FOR_MESSAGE_FORMAT INVALID_REQUIRED_ACKS "
        "INVALID_GROUP_ID POLICY_VIOLATION _NOT_IMPLEMENTED",
        advice="correct the settings in the URI",
    ),
    ErrorRow(
        "a message is too large",
        2,
        "MSG_SIZE_TOO_LARGE INVALID_MSG_SIZE RECORD_LIST_TOO_LARGE",
        advice="raise message.max.bytes in the settings, and max.message.bytes of the topic",
    ),
    ErrorRow(
        "no broker can be reached, or answers in time",
        None,
        "_TRANSPORT _ALL_BROKERS_DOWN _RESOLVE _TIMED_OUT _TIMED_OUT_QUEUE _MSG_TIMED_OUT NETWORK_EXCEPTION "
        "REQUEST_TIMED_OUT _DESTROY",
    ),
    ErrorRow(
        "the brokers elect leaders, have too few replicas, or limit the client",
        None,
        "LEADER_NOT_AVAILABLE NOT_LEADER_FOR_PARTITION BROKER_NOT_AVAILABLE REPLICA_NOT_AVAILABLE NOT_ENOUGH_REPLICAS "
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND NOT_CONTROLLER COORDINATOR_LOAD_IN_PROGRESS COORDINATOR_NOT_AVAILABLE "
        "NOT_COORDINATOR _WAIT_COORD KAFKA_STORAGE_ERROR OFFSET_NOT_AVAILABLE PREFERRED_LEADER_NOT_AVAILABLE "
        "FENCED_LEADER_EPOCH UNKNOWN_LEADER_EPOCH UNKNOWN_TOPIC_ID THROTTLING_QUOTA_EXCEEDED _LEADER_NOT_AVAILABLE",
    ),
    ErrorRow(
        "another follower has the transactional id now: the step in the topic decides who is ahead (5)",
        None,
        "_FENCED INVALID_PRODUCER_EPOCH PRODUCER_FENCED CONCURRENT_TRANSACTIONS INVALID_TXN_STATE _STATE _CONFLICT "
        "_PREV_IN_PROGRESS _FATAL UNKNOWN_PRODUCER_ID OUT_OF_ORDER_SEQUENCE_NUMBER INVALID_PRODUCER_ID_MAPPING "
        "TRANSACTION_COORDINATOR_FENCED _PURGE_QUEUE _PURGE_INFLIGHT",
    ),
    ErrorRow(
        "the next message is no longer there: what the topic retains decides (5)",
        None,
        "OFFSET_OUT_OF_RANGE _AUTO_OFFSET_RESET _NO_OFFSET",
    ),
    names=_names,
    text=_text,
)


class Topic(NamedTuple):
    """A topic and how to reach it. client : the module; settings : of librdkafka, from the URI, with the brokers

    description : the topic, for messages, without settings
    causes : the last error of a connection that no retry helps: the client itself retries, and then only reports that
        no broker answers
    """

    client: Any
    name: str
    settings: dict[str, str]
    description: str
    causes: deque[Any] | None = None

    def note(self, error: Any) -> None:
        """Note an error that the client reports to a callback."""
        if self.causes is not None and ERRORS.is_final(error):
            self.causes.append(error)

    def partitions(self, consumer: Any) -> list[int]:
        """Return the numbers of the topic's partitions. Raises UsageError if there is no such topic, OSError."""
        with kafka_failures(self, consumer):
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
            self.note(error)
            if error.name() == _ALL_LOST:
                lost(error)

        defaults = {"group.id": "penstock", "isolation.level": "read_committed", "socket.timeout.ms": SOCKET_MS}
        with kafka_failures(self):
            return self.client.Consumer(
                {**defaults, **self.settings, **fixed, "error_cb": report},
                logger=silent(),
            )

    def at(self, partition: int, offset: int) -> Any:
        return self.client.TopicPartition(self.name, partition, offset)


def kafka_topic(uri: str) -> Topic:
    """Parse ``kafka://BROKER,BROKER/TOPIC?SETTING=VALUE``. Raises UsageError."""
    form = "kafka://BROKER:PORT,…/TOPIC?SETTING=VALUE&…"
    brokers, topic, query = match_uri(_URI, uri, form, "&#%+", "a setting, such as a password,").groups()
    settings = {**dict(parse_qsl(query or "", keep_blank_values=True)), "bootstrap.servers": brokers}
    return Topic(KAFKA.load("kafka://"), topic, settings, f"kafka://{brokers}/{topic}", deque(maxlen=1))


def silent() -> logging.Logger:
    """Return a logger for librdkafka's messages: errors are reported in one line where they matter."""
    logger = logging.getLogger("penstock.kafka")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger


@contextmanager
def kafka_failures(topic: Topic, client: Any = None, place: str = "") -> Iterator[None]:
    """Convert the client's errors: to UsageError, or to OSError where a new connection may help.

    client : the consumer or producer, whose callbacks may have a reason; place : for messages; "": the topic
    """
    causes: deque[Any] = deque() if topic.causes is None else topic.causes
    try:
        yield
    except topic.client.KafkaException as error:
        failure = error
        if client is not None and not ERRORS.is_final(error):
            try:
                client.poll(0)
            except topic.client.KafkaException as fatal:  # the error was the first sign of it
                failure = fatal
        if causes and not ERRORS.is_final(failure):
            failure = causes.pop()
        raise ERRORS.converted(failure, place or topic.description, OSError) from error
    causes.clear()
