"""A target in an LMDB file: one database per table, from ids to rows (docs/follow.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import StateError, UsageError
from penstock.io.flight import Delta
from penstock.io.optional import library
from penstock.io.targets.changes import changes_of
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

STATE = b"penstock"
# Address space, not disk: the file grows as needed, and the map doubles when it is full.
MAP_BYTES = 1 << 30
MOST_TABLES = 1 << 16


def rows_name(table: str) -> bytes:
    """Return the name of a table's database: from the id, 8 bytes big-endian, to its row, float32 little-endian."""
    return b"rows/" + table.encode()


class LmdbFile(Target):
    """The file of ``lmdb:PATH``. Readers in other processes see each transaction as a whole."""

    def __init__(self, path: str) -> None:
        super().__init__(f"lmdb:{path}")
        if not path:
            raise UsageError("lmdb:: expected lmdb:PATH")
        self._lmdb = library("lmdb", "lmdb", "lmdb:")
        self._path = Path(path)
        self._opened: Any = None
        self._map_bytes = MAP_BYTES

    def stored(self) -> Stored | None:
        with self._failures():
            env = self._env()
            with env.begin() as txn:
                has_state = txn.get(STATE) is not None
                if not has_state:
                    if txn.stat()["entries"]:
                        raise StateError(f"{self.name}: the file holds something else; use another path")
                    return None
            state = env.open_db(STATE)
            with env.begin(db=state) as txn:
                job, step = txn.get(b"job"), txn.get(b"step")
        return None if job is None or step is None else Stored(Job.decoded(job, self.name), int(step))

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        kept = {rows_name(of.table) for of in tables}

        def write(txn: Any) -> None:
            names = [name for name in txn.cursor().iternext(values=False) if name.startswith(b"rows/")]
            for name in names:
                txn.drop(self._env().open_db(name, txn), delete=name not in kept)
            for of in tables:
                _put(txn, self._env().open_db(rows_name(of.table), txn), of)
            state = self._env().open_db(STATE, txn)
            txn.put(b"job", job.encoded().encode(), db=state)
            txn.put(b"step", str(step).encode(), db=state)

        self._written(write)

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        def write(txn: Any) -> None:
            for of in changes_of(deltas, job):
                table = self._env().open_db(rows_name(of.table), txn)
                _put(txn, table, of)
                for key in _keys(of.removed):
                    txn.delete(key, db=table)
            txn.put(b"step", str(step).encode(), db=self._env().open_db(STATE, txn))

        self._written(write)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _written(self, write: Callable[[Any], None]) -> None:
        """Run a write transaction, again with twice the map if it is full."""
        with self._failures():
            while True:
                try:
                    with self._env().begin(write=True) as txn:
                        write(txn)
                    return
                except self._lmdb.MapFullError:
                    self._map_bytes = 2 * self._env().info()["map_size"]
                    self.close()

    def _env(self) -> Any:
        if self._opened is None:
            size = self._path.stat().st_size if self._path.exists() else 0
            size = max(self._map_bytes, 2 * size)
            self._opened = self._lmdb.open(str(self._path), subdir=False, max_dbs=MOST_TABLES, map_size=size)
        return self._opened

    def _failures(self) -> Any:
        return failures(self.name, self._lmdb.Error)


def _keys(ids: Any) -> Iterator[bytes]:
    encoded = ids.astype(ids.dtype.newbyteorder(">")).tobytes()
    return (encoded[at : at + 8] for at in range(0, len(encoded), 8))


def _put(txn: Any, table: Any, of: TableRows) -> None:
    rows = of.rows.astype("<f4", copy=False)
    with txn.cursor(table) as cursor:
        cursor.putmulti(zip(_keys(of.ids), (row.tobytes() for row in rows), strict=True))
