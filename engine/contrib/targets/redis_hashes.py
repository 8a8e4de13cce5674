"""A target in Redis: one hash per table, from ids to rows (docs/follow.md).

A server that is restarted from an older snapshot is connected again without notice, so every transaction watches what
the server stores, compares it, and is discarded if anything changes it before ``EXEC``.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl

import penstock.base.interrupts as interrupts
from penstock.base.errors import TargetError, UsageError
from penstock.io.error_tables import (
    HANDSHAKE,
    NO_TLS,
    UNREACHABLE,
    ErrorRow,
    ErrorTable,
    names_of,
    text_of,
    untrusted,
)
from penstock.io.registry import Library, match_uri
from penstock.serving.followers.target import Stored, TableRows, Target, failures
from penstock.serving.followers.target_kinds import TargetKind


def _reply(error: BaseException) -> str:
    """Return the server's reply without arguments of commands, which are rows of the model or the password."""
    text = text_of(error).rpartition(" of pipeline caused error: ")[2]
    return re.split(r",? with args beginning with", text)[0]


def _names(error: BaseException) -> Iterator[str]:
    yield from names_of(error)
    yield _reply(error).partition(" ")[0]  # the code of a reply, for which redis-py may have no class


_CLUSTER = "give a server without cluster mode: a transaction has keys of several slots, which a cluster refuses"
_RIGHTS = "docs/targets.md lists the commands and keys that the user needs"
ERRORS = ErrorTable(
    ErrorRow("the memory is full (`OOM`)", None, "OutOfMemoryError OOM", "", "raise maxmemory, or free some memory"),
    ErrorRow(
        "the server loads its data, has lost its primary, cannot save, has too few replicas, or runs a script "
        "(`LOADING`, `MASTERDOWN`, `MISCONF`, `NOREPLICAS`, `BUSY`)",
        None,
        "BusyLoadingError MasterDownError LOADING MASTERDOWN MISCONF NOREPLICAS BUSY",
    ),
    ErrorRow(
        "the server is a node of a Redis Cluster",
        2,
        "MovedError AskError ClusterCrossSlotError ClusterDownError ClusterError CROSSSLOT MOVED ASK CLUSTERDOWN",
        "hash to the same slot",
        f"this is a Redis Cluster, which is not a target; {_CLUSTER}",
    ),
    ErrorRow(
        "the user may not run a command, or write a key (`NOPERM`)",
        2,
        "NoPermissionError NOPERM",
        "because of: NOPERM",
        f"check the user in the URI; {_RIGHTS}",
    ),
    ErrorRow(
        "the user or the password is wrong or missing (`WRONGPASS`, `NOAUTH`)",
        2,
        "AuthenticationError AuthorizationError NOAUTH WRONGPASS AuthenticationWrongNumberOfArgsError",
        "without any password configured",
        "check the user and the password in the URI",
    ),
    ErrorRow(
        "the server lacks or renames a command, or has no transactions",
        2,
        "",
        "unknown command|command is disabled|without MULTI",
        f"penstock writes only in transactions; {_RIGHTS}",
    ),
    ErrorRow(
        "the name of the client has spaces", 2, "", "client names cannot contain", "correct client_name in the URI"
    ),
    ErrorRow("there is no such database", 2, "", "DB index is out of range|invalid DB index", "give another /DATABASE"),
    ErrorRow("a key holds another type", 2, "WRONGTYPE", "wrong kind of value", "check the database in the URI"),
    ErrorRow(
        "the server is a replica (`READONLY`), for a moment in a failover",
        None,
        "ReadOnlyError READONLY",
        "",
        "is it the address of the primary?",
    ),
    untrusted("ssl_ca_certs in the URI"),
    NO_TLS,
    ErrorRow("the permissions of the socket", 2, "EACCES EPERM", "permission denied", "check who may open the socket"),
    ErrorRow("another client has changed the step (`WATCH`)", None, "WatchError ExecAbortError EXECABORT"),
    HANDSHAKE,
    ErrorRow("the socket does not exist yet", None, "ENOENT"),
    UNREACHABLE,
    names=_names,
    text=_reply,
)
TARGET = TargetKind(
    title="Redis",
    form="redis://HOST:PORT/DATABASE",
    schemes=("redis://", "rediss://", "unix://"),
    example="redis://127.0.0.1:6379/0",
    errors=ERRORS,
    library=Library("redis", "redis"),
    holds="a hash per table",
    transaction="`MULTI` … `EXEC`",
    open=lambda uri: RedisHashes(uri),
)
STATE = "penstock-state"
# Fields in one command, and of a new table in one pipeline: Redis serves other clients between two commands.
FIELDS, PIPELINE_FIELDS = 1_000, 10_000
_TIMEOUT_S = 30.0
_LOOK_S = 1.0  # between two looks for a signal
# How long the hashes of a fill stay after its last command, if its follower is killed.
_FILL_S = 600
# A key that never exists, for commands that are refused before they run.
_PROBE = "penstock-probe"
# What a transaction runs, harmless even where a server would run it: the first one has too few arguments.
_PROBES = (
    ("HMGET", _PROBE),
    ("HSET", _PROBE, "0", "0"),
    ("HDEL", _PROBE, "0"),
    ("EXPIRE", _PROBE, "1"),
    ("PERSIST", _PROBE),
    ("EXISTS", _PROBE),
    ("RENAME", _PROBE, _PROBE),
    ("UNLINK", _PROBE),
)
# The options that a URI may have: files of TLS are read when the first connection is opened.
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
OPTIONS = (
    *("client_name", "db", "password", "protocol", "socket_keepalive", "username"),
    *(*_FILES, "ssl_ca_path", "ssl_cert_reqs", "ssl_check_hostname", "ssl_password"),
)
_CREDENTIALS = r"(?:[^\s/?#@\[\]]*@)?"
_URI = re.compile(
    rf"(?P<tcp>rediss?://){_CREDENTIALS}(?P<host>[\w.-]*|\[[0-9a-fA-F:.]+\])(?P<port>:\d{{1,5}})?(?:/(?P<db>\d*))?"
    rf"(?:\?(?P<query>[^\s#@?]*))?"
    rf"|(?P<unix>unix://){_CREDENTIALS}(?P<path>/[^\s?#@]+)(?:\?(?P<options>[^\s#@?]*))?"
)


def rows_key(table: str) -> str:
    """Return the key of a table's hash: from the id in decimal to its row, float32 little-endian."""
    return f"penstock:{table}"


def _place(uri: str) -> str:
    """Return the address of a URI without credentials and options. Raises UsageError, without any part of it."""
    form = "redis://USER:PASSWORD@HOST:PORT/DATABASE"
    match = match_uri(_URI, uri, form, "#/?@[]", "a user, a password or an option")
    query = match["query"] or match["options"] or ""
    options = dict(parse_qsl(query, keep_blank_values=True))
    place = (
        f"{match['unix']}{match['path']}" if match["unix"] else f"{match['tcp']}{match['host']}{match['port'] or ''}"
    )
    if match["db"] or "db" in options:
        place += f"/{options.get('db', match['db'])}" if match["tcp"] else f"?db={options['db']}"
    for name, value in options.items():
        if name not in OPTIONS:
            known = f"'{name}'" if re.fullmatch("[a-z_]{1,40}", name) else "an option"
            raise UsageError(f"{place}: {known} cannot be set in the URI; expected {', '.join(OPTIONS)}")
        if name in _FILES:
            try:
                open(value, "rb").close()
            except OSError as error:
                raise UsageError(f"{place}: {name}: {error.filename}: {error.strerror}") from None
    return place


class RedisHashes(Target):
    """The database of a ``redis://`` URI. Rows are replaced and applied by MULTI/EXEC, together with the step."""

    def __init__(self, uri: str) -> None:
        super().__init__(_place(uri))
        self._redis, self._uri = TARGET.load(), uri
        self._opened: Any = None
        try:
            self._redis.ConnectionPool.from_url(uri).make_connection()  # which connects to nothing
        except (ValueError, TypeError, self._redis.exceptions.RedisError) as error:  # of an option, which it names
            raise UsageError(f"{self.name}: {text_of(error)}; correct the options of the URI") from None

    @property
    def _client(self) -> Any:
        if self._opened is None:
            # redis-py limits a handshake of TLS by the time that an answer may take, and a transaction may take long.
            with self._connected(self.connect_s) as trial:
                trial.hmget(STATE, "step")
            self._opened = self._connected(_TIMEOUT_S)
        return self._opened

    def _connected(self, answer_s: float) -> Any:
        """Return a client that retries nothing by itself, and whose waits for an answer end at a signal."""
        client = self._redis.Redis.from_url(
            self._uri,
            socket_timeout=answer_s,
            socket_connect_timeout=self.connect_s,
            retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
        )
        pool = client.connection_pool
        pool.connection_class = _interruptible(pool.connection_class, answer_s)
        return client

    def stored(self) -> Stored | None:
        return self._read(self._client)

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        fill = secrets.token_hex(4)  # so that two followers never fill the same hashes
        filled = {f"penstock-new:{fill}:{rows.table}": rows for rows in tables if len(rows.ids)}
        replaced = {*new.job.tables, *(before.job.tables if before else ())}

        def write(pipe: Any) -> None:
            pipe.unlink(*map(rows_key, replaced))
            for key, rows in filled.items():
                pipe.rename(key, rows_key(rows.table))
                pipe.persist(rows_key(rows.table))

        with self._pipeline() as pipe:
            self._probe(pipe)
        try:
            for key, rows in filled.items():
                self._fill(key, rows)
            self._transact(new, before, write, list(filled))
        except BaseException:
            with suppress(self._redis.exceptions.RedisError):  # else they expire
                self._client.unlink(*filled)
            raise

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        def write(pipe: Any) -> None:
            for rows in changes:
                _set(pipe, rows_key(rows.table), rows)
                for first in range(0, len(rows.removed), FIELDS):
                    pipe.hdel(rows_key(rows.table), *map(str, rows.removed[first : first + FIELDS].tolist()))

        self._transact(new, before, write)

    def _read(self, client: Any) -> Stored | None:
        fields = dict(zip(("job", "epoch", "step"), client.hmget(STATE, "job", "epoch", "step"), strict=True))
        if fields["job"] is None or fields["step"] is None:
            return None
        return Stored.decoded({name: value and value.decode() for name, value in fields.items()}, self.name)

    def _fill(self, key: str, rows: TableRows) -> None:
        """Fill a hash. It begins as a transaction with a time to live, so that a kill leaves none that stays."""
        for first, stop in [(0, 1), *((n, n + PIPELINE_FIELDS) for n in range(0, len(rows.ids), PIPELINE_FIELDS))]:
            with self._client.pipeline(transaction=stop == 1) as pipe:
                _set(pipe, key, TableRows(rows.table, rows.ids[first:stop], rows.rows[first:stop], rows.removed))
                pipe.expire(key, _FILL_S)
                pipe.execute()

    def _transact(
        self, new: Stored, before: Stored | None, write: Callable[[Any], None], filled: Sequence[str] = ()
    ) -> None:
        """Run MULTI … EXEC. filled : keys that it needs, and that the server may have lost meanwhile"""
        with self._pipeline() as pipe:
            self._probe(pipe)
            pipe.watch(STATE, *filled)
            self.compare(self._read(pipe), before)
            if filled and pipe.exists(*filled) != len(filled):
                raise TargetError(f"{self.name}: lost rows that were written for all tables")
            for table in new.job.tables:  # of another type, it would fail alone: a transaction is not taken back
                pipe.hmget(rows_key(table), "0")
            pipe.multi()
            write(pipe)
            pipe.hset(STATE, mapping=new.texts())
            pipe.execute()

    @contextmanager
    def _pipeline(self) -> Iterator[Any]:
        """Give a pipeline, which needs no right to ``UNWATCH`` if the block fails."""
        pipe = self._client.pipeline()
        try:
            yield pipe
        except BaseException:
            if pipe.connection is not None:
                pipe.connection.disconnect()
            pipe.watching = False
            raise
        finally:
            pipe.reset()

    def _probe(self, pipe: Any) -> None:
        """Raise the server's error if it would refuse a command of a transaction. Nothing is written.

        Without ``MULTI``, a server runs the commands that follow it one by one: so it is sent alone. A transaction with
        a command that is refused, here for its missing argument, is never run.
        """
        pipe.watch(STATE, rows_key(""))  # of two slots, in a cluster
        connection, refusals = pipe.connection, []
        connection.send_command("MULTI")
        connection.read_response()
        connection.send_packed_command(connection.pack_commands([*_PROBES, ("EXEC",)]))
        for _ in (*_PROBES, "EXEC"):
            try:
                connection.read_response()
            except self._redis.exceptions.ResponseError as error:
                refusals.append(error)
        pipe.watching = False
        for refusal in refusals:
            if not re.search("wrong number of arguments|previous errors", str(refusal)):
                raise refusal

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def failures(self) -> Any:
        return failures(self.name, ERRORS, self._redis.exceptions.RedisError)


def _interruptible(kind: Any, answer_s: float) -> Any:
    """Return a class of connections that look for a signal while they wait for an answer."""

    class Interruptible(kind):  # type: ignore[misc]
        def read_response(self, *arguments: Any, **options: Any) -> Any:
            end_s = time.monotonic() + answer_s
            try:
                while time.monotonic() < end_s and not self.can_read(_LOOK_S):
                    interrupts.check()
            except BaseException:
                self.disconnect()  # the answer may arrive after all
                raise
            return super().read_response(*arguments, **options)

    return Interruptible


def _set(pipe: Any, key: str, rows: TableRows) -> None:
    """Set the rows of a hash."""
    values = rows.little_endian
    for first in range(0, len(rows.ids), FIELDS):
        part = slice(first, first + FIELDS)
        fields: Mapping[Any, Any] = {
            id_: row.tobytes() for id_, row in zip(rows.ids[part].tolist(), values[part], strict=True)
        }
        pipe.hset(key, mapping=fields)
