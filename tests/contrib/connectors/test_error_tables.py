"""What ends a command at once, and what is retried: every row of every connector's table of errors.

A stubbed call of the library raises the error, in the path that ``follow``, ``replay`` and clients take. A
clock that the pauses advance stands for the time.
"""

import errno
import logging
import os
import ssl
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import penstock as ps
import penstock.serving.flight.connection as connection
from penstock.base.errors import PenstockError
from penstock.cli.main import judged
from penstock.io import patience
from penstock.io.error_tables import OBJECT_STORE_ERRORS, UNLISTED
from penstock.io.sources.source_kinds import source_kinds
from penstock.serving.flight import TableAt
from penstock.serving.flight.answers import Status
from penstock.serving.followers.follower import Follower
from penstock.serving.followers.target_kinds import open_target, target_kinds

SECRET, TOKEN, ROW = "hunter2", "t0ken-of-a-service", "\x01rowrow"
PATIENCE_S = 150.0


def of_errno(name):
    number = getattr(errno, name)
    return OSError(number, os.strerror(number))


FILE_ERRORS = [
    *((2, of_errno(name)) for name in ("EACCES", "EPERM", "EROFS", "ENOTDIR", "ENAMETOOLONG", "ENOLCK", "EOPNOTSUPP")),
    *((None, of_errno(name)) for name in ("ENOSPC", "EDQUOT", "EIO", "ESTALE", "EMFILE")),
]
STORE_ERRORS = [
    (2, OSError("error sending request: invalid peer certificate: UnknownIssuer")),
    (2, OSError("curlCode: 35, SSL routines::wrong version number")),
    (2, OSError("Client error with status 400 Bad Request: <Code>ExpiredToken</Code>")),
    (2, OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body.")),
    (2, OSError("Generic S3 error: Client error with status 403 Forbidden: <Code>InvalidAccessKeyId</Code>")),
    (2, OSError("the credential provider was not enabled: no providers in chain provided credentials")),
    (2, OSError("AWS Error UNKNOWN (HTTP status 301) during HeadObject operation: No response body.")),
    (2, OSError("<Code>AuthorizationHeaderMalformed</Code> the region 'us-east-1' is wrong; expecting 'eu-west-1'")),
    (2, OSError("AWS Error NO_SUCH_BUCKET during GetObject operation: The specified bucket does not exist")),
    (None, OSError("Client error with status 503 Service Unavailable: <Code>SlowDown</Code>")),
    (None, OSError("Server error: http status 500")),
]
GONE = [(None, of_errno("ECONNREFUSED")), (None, OSError("dns error: failed to lookup address information"))]


def redis_errors():
    from redis import exceptions
    from redis._parsers.base import BaseParser

    def replied(text, wrapped=False):
        error = BaseParser.parse_error(text)
        if wrapped:  # as a pipeline does
            error.args = (f"Command # 3 (HSET penstock:user 7 {ROW}) of pipeline caused error: {error.args[0]}",)
        return error

    def connecting(cause):
        error = exceptions.ConnectionError("Error 1 connecting to 127.0.0.1:6379.")
        error.__context__ = cause
        return error

    return [
        (2, replied("CROSSSLOT Keys in request don't hash to the same slot", wrapped=True)),
        (2, replied("MOVED 866 127.0.0.1:7002")),
        (2, replied("CLUSTERDOWN Hash slot not served")),
        (2, replied("NOPERM this user has no permissions to run the 'hset' command", wrapped=True)),
        (2, replied("EXECABORT Transaction discarded because of: NOPERM this user has no permissions to run 'exec'")),
        (2, replied("NOAUTH Authentication required.")),
        (2, replied("WRONGPASS invalid username-password pair or user is disabled.")),
        (2, replied(f"ERR unknown command 'HELLO', with args beginning with: '3' 'AUTH' 'default' '{SECRET}'")),
        (
            2,
            replied(
                f"ERR unknown command `HSET`, with args beginning with: `penstock:user`, `7`, `{ROW}`", wrapped=True
            ),
        ),
        (2, replied("ERR DB index is out of range")),
        (2, replied("ERR Client names cannot contain spaces, newlines or special characters.")),
        (2, replied("WRONGTYPE Operation against a key holding the wrong kind of value", wrapped=True)),
        (2, connecting(ssl.SSLCertVerificationError("certificate verify failed: self-signed certificate"))),
        (2, connecting(ssl.SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version number"))),
        (2, connecting(PermissionError(errno.EACCES, "Permission denied"))),
        (None, replied("READONLY You can't write against a read only replica.", wrapped=True)),
        (None, replied("OOM command not allowed when used memory > 'maxmemory'.", wrapped=True)),
        (None, replied("LOADING Redis is loading the dataset in memory")),
        (None, replied("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.")),
        (None, replied("MISCONF Redis is configured to save RDB snapshots, but it's currently unable to")),
        (None, replied("NOREPLICAS Not enough good replicas to write.")),
        (None, exceptions.WatchError("Watched variable changed.")),
        (None, connecting(TimeoutError("_ssl.c:989: The handshake operation timed out"))),
        (None, connecting(FileNotFoundError(errno.ENOENT, "No such file or directory"))),
        (None, connecting(of_errno("ECONNREFUSED"))),
        (None, exceptions.TimeoutError("Timeout reading from socket")),
    ]


def lmdb_errors():
    import lmdb

    return [
        (5, lmdb.InvalidError("rows.lmdb: MDB_INVALID: File is not an LMDB file")),
        (5, lmdb.CorruptedError("mdb_get: MDB_CORRUPTED: Located page was wrong type")),
        (5, lmdb.VersionMismatchError("rows.lmdb: MDB_VERSION_MISMATCH")),
        (2, lmdb.ReadonlyError("rows.lmdb: Read-only")),
        (2, lmdb.Error("rows.lmdb: Permission denied")),
        (None, lmdb.ReadersFullError("mdb_txn_begin: MDB_READERS_FULL")),
        (None, lmdb.MapResizedError("mdb_txn_begin: MDB_MAP_RESIZED")),
        (None, lmdb.DiskError("mdb_txn_commit: No space left on device")),
        (None, OSError("the file was replaced while it was opened")),
        *FILE_ERRORS,
    ]


def kafka_errors():
    import confluent_kafka as kafka

    def failed(name, text=None):
        return kafka.KafkaException(kafka.KafkaError(getattr(kafka.KafkaError, name), text))

    refused = ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED")
    refused += ("GROUP_AUTHORIZATION_FAILED", "CLUSTER_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
    final = ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", *refused, "_SSL", "_INVALID_ARG", "UNSUPPORTED_VERSION")
    final += ("UNSUPPORTED_SASL_MECHANISM", "INVALID_TRANSACTION_TIMEOUT", "MSG_SIZE_TOO_LARGE")
    healing = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "LEADER_NOT_AVAILABLE", "_FENCED")
    healing += ("NOT_ENOUGH_REPLICAS", "COORDINATOR_NOT_AVAILABLE", "INVALID_PRODUCER_EPOCH", "OFFSET_OUT_OF_RANGE")
    return [*((2, failed(name)) for name in final), *((None, failed(name)) for name in healing)]


def nats_errors():
    import nats

    def answered(code, err_code, text):
        try:
            nats.js.errors.APIError.from_error({"code": code, "err_code": err_code, "description": text})
        except nats.js.errors.APIError as error:
            return error

    return [
        (2, answered(404, 10059, "stream not found")),
        (2, answered(503, 10039, "JetStream not enabled for account")),
        (2, nats.errors.AuthorizationError()),
        (None, OSError("the stream was deleted and created again")),
        (2, nats.errors.Error("nats: 'Authorization Violation'")),
        (2, nats.errors.Error('nats: permissions violation for publish to "$js.api.stream.info.gradients"')),
        (2, nats.errors.SecureConnRequiredError()),
        (2, ssl.SSLCertVerificationError("certificate verify failed: Hostname mismatch")),
        (2, ssl.SSLError("[SSL: WRONG_VERSION_NUMBER] wrong version number")),
        (None, answered(503, 10008, "JetStream system temporarily unavailable")),
        (None, nats.js.errors.ServiceUnavailableError()),
        (None, TimeoutError("SSL handshake timed out")),
        (None, nats.errors.NoServersError()),
        (None, nats.errors.TimeoutError()),
        (None, of_errno("ECONNREFUSED")),
    ]


def delta_errors():
    from deltalake import exceptions

    return [
        (5, exceptions.DeltaProtocolError("The table's minimum writer version is 99")),
        (5, exceptions.SchemaMismatchError("Cannot merge types")),
        (None, exceptions.CommitFailedError("Transaction failed: Version 3 already exists")),
        *FILE_ERRORS,
        *STORE_ERRORS,
        *GONE,
    ]


def lance_errors():
    return [(None, OSError("Commit conflict for version 7")), *FILE_ERRORS, *STORE_ERRORS, *GONE]


def flight_errors():
    return [
        (2, flight.FlightUnauthenticatedError("the token is missing or wrong")),
        (2, flight.FlightUnauthorizedError("the token is a reader's, and this call needs a producer's")),
        (2, flight.FlightUnavailableError("Ssl handshake failed: certificate verify failed")),
        (2, flight.FlightUnavailableError("Ssl handshake failed: wrong version number")),
        (3, pa.ArrowNotImplementedError("no such method")),
        (2, pa.ArrowInvalid("gRPC returned resource exhausted error, with message: Received message larger than max")),
        (None, pa.ArrowInvalid("gRPC returned resource exhausted error, with message: too many requests")),
        (None, flight.FlightUnavailableError("connection refused")),
        (None, flight.FlightTimedOutError("deadline exceeded")),
    ]


def iceberg_errors():
    from pyiceberg import exceptions

    return [
        (2, exceptions.UnauthorizedError("NotAuthorizedException: Credential was not located")),
        (2, exceptions.ForbiddenError("ForbiddenException")),
        (2, exceptions.OAuthError("invalid_client: wrong secret")),
        (2, exceptions.NotInstalledError("pip install 'pyiceberg[glue]'")),
        (2, ValueError("URI missing, please provide using --uri, the config or environment variable")),
        (3, exceptions.NoSuchTableError("Table does not exist: training.gradients")),
        (None, exceptions.ServerError("InternalServerError")),
        (None, exceptions.ServiceUnavailableError("try again")),
        *STORE_ERRORS,
        *GONE,
    ]


def table_errors():
    return [(3, OSError("Not found: s3://bucket/rows/_versions")), *STORE_ERRORS, *GONE]


# Title → (library, its errors)
TARGET_ERRORS = {
    "Redis": ("redis", redis_errors),
    "LMDB": ("lmdb", lmdb_errors),
    "Kafka": ("confluent_kafka", kafka_errors),
    "Delta Lake": ("deltalake", delta_errors),
    "Lance": ("lance", lance_errors),
    "Parquet": ("pyarrow", lambda: FILE_ERRORS),
    "shared files": ("pyarrow", lambda: FILE_ERRORS),
    "A Python function": ("pyarrow", lambda: FILE_ERRORS),
}
SOURCE_ERRORS = {
    "Kafka": ("confluent_kafka", kafka_errors),
    "NATS JetStream": ("nats", nats_errors),
    "Delta Lake": ("deltalake", table_errors),
    "Lance": ("lance", table_errors),
    "Iceberg": ("pyiceberg", iceberg_errors),
    "Arrow Flight": ("pyarrow", flight_errors),
}
TARGETS = {kind.title: kind for kind in target_kinds()}
SOURCES = {kind.title: kind for kind in source_kinds()}


@pytest.fixture
def lines(monkeypatch):
    """The lines of the log, with a clock that pauses advance."""
    clock = SimpleNamespace(now_s=0.0)

    def pause(seconds):
        clock.now_s += seconds

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(patience, "interrupts", SimpleNamespace(pause=pause))
    monkeypatch.delenv("no_proxy", raising=False)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log = logging.getLogger("penstock")
    log.addHandler(handler)
    yield records
    log.removeHandler(handler)


class Service:
    """The client of a service with one table."""

    def tables(self):
        return {"user": pa.schema([("id", pa.int64()), ("row", pa.list_(pa.float32(), 2))])}

    def status(self):
        return Status(version="a-0-0", epochs=[("0", 0, False)])

    def table(self, name):
        return TableAt(np.zeros((3, 2), np.float32), ps.Version("a-0-0"))


def raising(error):
    def call(*_, **__):
        raise error

    return call


def asynchronous(error):
    async def call(*_, **__):
        raise error

    return call


def stub_library(monkeypatch, title, error):
    """Let the call of the library that comes first raise an error."""
    if title == "Redis":
        monkeypatch.setattr("redis.Redis.hmget", raising(error))
    elif title == "LMDB":
        monkeypatch.setattr("lmdb.open", raising(error))
    elif title == "Kafka":
        client = SimpleNamespace(init_transactions=raising(error), list_topics=raising(error), poll=lambda *_: None)
        client.close = lambda: None
        monkeypatch.setattr("confluent_kafka.Producer", lambda *_, **__: client)
        monkeypatch.setattr("confluent_kafka.Consumer", lambda *_, **__: client)
    elif title == "NATS JetStream":
        monkeypatch.setattr("nats.connect", asynchronous(error))
    elif title == "Delta Lake":
        monkeypatch.setattr("deltalake.DeltaTable", raising(error))
    elif title == "Lance":
        monkeypatch.setattr("lance.dataset", raising(error))
    elif title == "Iceberg":
        monkeypatch.setattr("pyiceberg.catalog.load_catalog", raising(error))
    elif title == "Arrow Flight":
        client = SimpleNamespace(do_action=raising(error), close=lambda: None)
        monkeypatch.setattr(connection, "dial", lambda *_: (client, None))
    else:
        monkeypatch.setattr(type(open_target(*FILE_TARGETS[title])), "stored", raising(error))


FILE_TARGETS = {
    "Parquet": ("parquet:rows",),
    "shared files": ("shared:rows",),
    "A Python function": ("function_rows:update", "state.json"),
}
TARGET_URIS = {
    "Redis": f"redis://user:{SECRET}@127.0.0.1:6379/0",
    "Kafka": f"kafka://127.0.0.1:9092/rows?sasl.password={SECRET}",
    "LMDB": "lmdb:rows.lmdb",
    "Delta Lake": "delta:s3://bucket/rows?region=us-east-1",
    "Lance": "lance:s3://bucket/rows",
}
SOURCE_URIS = {
    **TARGET_URIS,
    "NATS JetStream": f"nats://user:{SECRET}@127.0.0.1:4222/gradients",
    "Iceberg": "iceberg:lake/training.gradients",
}


def follow(title):
    """Follow into a target until it fails."""
    target = open_target(*FILE_TARGETS.get(title) or (TARGET_URIS[title],))
    Follower(Service(), target, PATIENCE_S, 0.2).run(once=True)


def read(title):
    """Open a source as ``replay`` and ``serve`` do."""
    if title == "Arrow Flight":
        with ps.connect("grpc://127.0.0.1:1", TOKEN, patience_s=PATIENCE_S) as client, connection.as_source():
            client.status()
    for source in SOURCES[title].open(SOURCE_URIS[title], PATIENCE_S):
        with closing(source):
            source.fix_end()


def check(run, code, exhausted, lines):
    """Check how a command ends, what it has logged, and that no line has a secret. Return the error."""
    with pytest.raises(PenstockError) as raised:
        run()
    error, text = raised.value, str(raised.value)
    assert judged(error)[0] == (exhausted if code is None else code), text
    retries = [line for line in lines if line.startswith("retrying ")]
    if code is None:
        assert text.endswith(f"; retried for {PATIENCE_S:g} s (patience)")
        minutes = [round(int(line.split("retried_s=")[1].split()[0]) / 60) for line in retries]
        assert minutes == [0, 1, 2]
        assert all(line.endswith('patience="150 s"') and "error=" in line for line in retries)
    else:
        assert not retries
        assert "patience" not in text
    for line in (text, *lines):
        assert "\n" not in line
        assert not any(secret in line for secret in (SECRET, TOKEN, ROW, "rowrow"))
    return text


def each_error(errors, title, lines, monkeypatch):
    """Yield the code and the error of each row, raised by the first call of the library. Skip without the library."""
    library, errors_of = errors[title]
    pytest.importorskip(library)
    for code, error in errors_of():
        lines.clear()
        with monkeypatch.context() as patch:
            stub_library(patch, title, error)
            yield code, error


@pytest.mark.parametrize("title", TARGET_ERRORS)
def test_a_follower_ends_or_retries_as_the_table_of_its_target_says(title, lines, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.lmdb").touch()
    for code, error in each_error(TARGET_ERRORS, title, lines, monkeypatch):
        text = check(lambda: follow(title), code, 6, lines)
        assert UNLISTED not in text
        assert TARGETS[title].errors.row(error).advice in text


@pytest.mark.parametrize("title", SOURCE_ERRORS)
def test_a_reader_ends_or_retries_as_the_table_of_its_source_says(title, lines, monkeypatch):
    for code, error in each_error(SOURCE_ERRORS, title, lines, monkeypatch):
        text = check(lambda: read(title), code, 3, lines)
        assert UNLISTED not in text
        assert SOURCES[title].errors.row(error).advice in text


@pytest.mark.parametrize(("errors", "kinds"), [(TARGET_ERRORS, TARGETS), (SOURCE_ERRORS, SOURCES)])
def test_every_row_of_every_table_has_been_tried(errors, kinds):
    assert errors.keys() == kinds.keys()
    for title, kind in kinds.items():
        try:
            samples = errors[title][1]()
        except ImportError:
            continue
        tried = {kind.errors.row(error).meaning for _, error in samples}
        assert {row.meaning for row in kind.errors.rows} - tried == set(), title


@pytest.mark.parametrize("title", ["Redis", "Delta Lake", "Lance", "Parquet"])
def test_an_error_that_no_table_lists_is_retried_and_said_to_be_unlisted(title, lines, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(TARGET_ERRORS[title][0])
    error = OSError("something else")
    if title == "Redis":
        from redis.exceptions import RedisError

        error = RedisError("something else")
    stub_library(monkeypatch, title, error)
    assert f"something else {UNLISTED}" in check(lambda: follow(title), None, 6, lines)
    assert UNLISTED in lines[0]


def test_a_long_failure_is_logged_again_each_minute_with_what_fails_now(lines, monkeypatch):
    waiting = patience.Patience(float("inf"))
    for number in range(130):
        waiting.wait(ps.InputError(f"failure {number // 50}"))
    assert lines == [
        'retrying error="failure 0" retried_s=0 patience="no limit"',
        'retrying error="failure 1" retried_s=61 patience="no limit"',
        'retrying error="failure 2" retried_s=121 patience="no limit"',
    ]


@pytest.mark.parametrize(("code", "error"), [*STORE_ERRORS, (3, OSError("When reading: HTTP 404 Not Found"))])
def test_an_object_store_that_refuses_a_source_is_a_mistake_of_the_caller(code, error, monkeypatch):
    fs = SimpleNamespace(get_file_info=raising(error))
    monkeypatch.setattr("penstock.io.sources.opening.filesystem_of", lambda text: (fs, "bucket/log.arrow"))
    with pytest.raises(PenstockError) as raised:
        ps.Engine(config()).run(f"s3://key:{SECRET}@bucket/log.arrow")
    assert judged(raised.value)[0] == (code or 3)
    assert str(raised.value).startswith("s3://bucket/log.arrow: ")
    assert SECRET not in str(raised.value)
    assert OBJECT_STORE_ERRORS.row(error).advice in str(raised.value)


def config():
    return ps.EmbeddingConfig.from_tables([ps.TableConfig(8, 2, name="user", optimizer=ps.SGD(0.1))])
