"""A target in Redis: one hash per table, from ids to rows (docs/follow.md).

A server that is restarted from an older snapshot is connected again without notice, so every transaction watches what
the server stores, compares it, and is discarded if anything changes it before ``EXEC``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import TargetError, UsageError
from penstock.io.flight import Delta
from penstock.io.registry import Library
from penstock.io.targets.changes import changes_of
from penstock.io.targets.target import Stored, TableRows, Target, failures
from penstock.io.targets.target_kinds import TargetKind

TARGET = TargetKind(
    title="Redis",
    form="redis://HOST:PORT/DATABASE",
    schemes=("redis://", "rediss://", "unix://"),
    example="redis://127.0.0.1:6379/0",
    library=Library("redis", "redis"),
    holds="a hash per table",
    transaction="`MULTI` … `EXEC`",
    open=lambda uri: RedisHashes(uri),
)
STATE = "penstock-state"
# Fields in one command, and of a new table in one pipeline: Redis serves other clients between two commands.
FIELDS, PIPELINE_FIELDS = 1_000, 10_000
_TIMEOUT_S = 30.0
# How long the hashes of a fill stay after its last command, if its follower is killed.
_FILL_S = 600


def rows_key(table: str) -> str:
    """Return the key of a table's hash: from the id in decimal to its row, float32 little-endian."""
    return f"penstock:{table}"


class RedisHashes(Target):
    """The database of a ``redis://`` URI. Rows are replaced and applied by MULTI/EXEC, together with the step."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.rpartition("@")[2] if "@" in uri else uri)  # without a password
        self._redis = TARGET.load()
        try:
            self._client = self._redis.Redis.from_url(uri, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}; expected {TARGET.form}") from None

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

        try:
            for key, rows in filled.items():
                self._fill(key, rows)
            self._transact(new, before, write, list(filled))
        finally:
            if filled:
                self._client.unlink(*filled)

    def apply(self, new: Stored, deltas: Sequence[Delta], before: Stored) -> None:
        def write(pipe: Any) -> None:
            for rows in changes_of(deltas, new.job):
                _set(pipe, rows_key(rows.table), rows)
                for first in range(0, len(rows.removed), FIELDS):
                    pipe.hdel(rows_key(rows.table), *map(str, rows.removed[first : first + FIELDS].tolist()))

        self._transact(new, before, write)

    def _read(self, client: Any) -> Stored | None:
        fields = dict(zip(("job", "epoch", "step"), client.hmget(STATE, "job", "epoch", "step"), strict=True))
        if fields["job"] is None or fields["step"] is None:
            return None
        epoch = fields.pop("epoch")
        return Stored.decoded(fields if epoch is None else {**fields, "epoch": epoch.decode()}, self.name)

    def _fill(self, key: str, rows: TableRows) -> None:
        for first in range(0, len(rows.ids), PIPELINE_FIELDS):
            with self._client.pipeline(transaction=False) as pipe:
                part = slice(first, first + PIPELINE_FIELDS)
                _set(pipe, key, TableRows(rows.table, rows.ids[part], rows.rows[part], rows.removed))
                pipe.expire(key, _FILL_S)
                answers = pipe.execute(raise_on_error=False)  # whose error would name the command, and so the number
            if errors := [answer for answer in answers if isinstance(answer, Exception)]:
                raise errors[0]

    def _transact(
        self, new: Stored, before: Stored | None, write: Callable[[Any], None], filled: Sequence[str] = ()
    ) -> None:
        """Run MULTI … EXEC. filled : keys that it needs, and that the server may have lost meanwhile"""
        with self._client.pipeline() as pipe:
            pipe.watch(STATE, *filled)
            self.compare(self._read(pipe), before)
            if filled and pipe.exists(*filled) != len(filled):
                raise TargetError(f"{self.name}: lost rows that were written for all tables")
            pipe.multi()
            write(pipe)
            state = {"job": new.job.encoded(), "epoch": new.position.epoch, "step": new.position.step}
            pipe.hset(STATE, mapping=state)
            pipe.execute()

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def failures(self) -> Iterator[None]:
        errors = self._redis.exceptions
        try:
            with failures(self.name, errors.RedisError):
                yield
        except TargetError as error:
            cause = error.__cause__
            refused = isinstance(
                cause, errors.AuthenticationError | errors.AuthorizationError | errors.NoPermissionError
            )
            if refused or str(cause).startswith(("NOAUTH", "WRONGPASS", "NOPERM", "WRONGTYPE")):
                raise UsageError(f"{error}; check the user, the password and the database in the URI") from cause
            raise


def _set(pipe: Any, key: str, rows: TableRows) -> None:
    """Set the rows of a hash."""
    values = rows.rows.astype("<f4", copy=False)
    for first in range(0, len(rows.ids), FIELDS):
        part = slice(first, first + FIELDS)
        fields: Mapping[Any, Any] = {
            id_: row.tobytes() for id_, row in zip(rows.ids[part].tolist(), values[part], strict=True)
        }
        pipe.hset(key, mapping=fields)
