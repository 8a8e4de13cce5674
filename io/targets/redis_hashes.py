"""A target in Redis: one hash per table, from ids to rows (docs/follow.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.errors import TargetError, UsageError
from penstock.io.flight import Delta
from penstock.io.optional import library
from penstock.io.targets.changes import changes_of
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

STATE = "penstock-state"
# Fields in one command, and of a new table in one pipeline: Redis serves other clients between two commands.
FIELDS, PIPELINE_FIELDS = 1_000, 10_000
_TIMEOUT_S = 30.0


def rows_key(table: str) -> str:
    """Return the key of a table's hash: from the id in decimal to its row, float32 little-endian."""
    return f"penstock:{table}"


def _new_key(table: str) -> str:
    return f"penstock-new:{table}"


class RedisHashes(Target):
    """The database of a ``redis://`` URI. Rows are replaced and applied by MULTI/EXEC, together with the step."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.rpartition("@")[2] if "@" in uri else uri)  # without a password
        self._redis = library("redis", "redis", uri.partition(":")[0] + "://")
        try:
            self._client = self._redis.Redis.from_url(uri, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}; expected redis://HOST:PORT/DATABASE") from None

    def stored(self) -> Stored | None:
        with self._failures():
            job, step = self._client.hmget(STATE, "job", "step")
        return None if job is None or step is None else Stored(Job.decoded(job, self.name), int(step))

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        before = self.stored()
        with self._failures():
            for of in tables:
                self._client.unlink(_new_key(of.table))
                for first in range(0, len(of.ids), PIPELINE_FIELDS):
                    with self._client.pipeline(transaction=False) as pipe:
                        some = slice(first, first + PIPELINE_FIELDS)
                        _set(pipe, _new_key(of.table), TableRows(of.table, of.ids[some], of.rows[some], of.removed))
                        pipe.execute()
            with self._client.pipeline() as pipe:
                pipe.unlink(*map(rows_key, {*job.tables, *(before.job.tables if before else ())}))
                for of in tables:
                    if len(of.ids):
                        pipe.rename(_new_key(of.table), rows_key(of.table))
                pipe.hset(STATE, mapping={"job": job.encoded(), "step": step})
                pipe.execute()

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        with self._failures(), self._client.pipeline() as pipe:
            pipe.watch(STATE)
            stored = pipe.hget(STATE, "job")
            if stored is None or Job.decoded(stored, self.name) != job:
                raise TargetError(f"{self.name}: it was emptied, or another process has written to it")
            pipe.multi()
            for of in changes_of(deltas, job):
                _set(pipe, rows_key(of.table), of)
                for first in range(0, len(of.removed), FIELDS):
                    pipe.hdel(rows_key(of.table), *map(str, of.removed[first : first + FIELDS].tolist()))
            pipe.hset(STATE, "step", step)
            pipe.execute()

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
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


def _set(pipe: Any, key: str, of: TableRows) -> None:
    """Set the rows of a hash."""
    rows = of.rows.astype("<f4", copy=False)
    for first in range(0, len(of.ids), FIELDS):
        some = slice(first, first + FIELDS)
        fields: Mapping[Any, Any] = {
            id_: row.tobytes() for id_, row in zip(of.ids[some].tolist(), rows[some], strict=True)
        }
        pipe.hset(key, mapping=fields)
