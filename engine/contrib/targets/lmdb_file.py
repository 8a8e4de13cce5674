"""A target in an LMDB file: one database per table, from ids to rows (docs/follow.md).

The file is opened for each transaction: one that replaces it, such as a backup, is noticed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.base.errors import StateError, UsageError
from penstock.io.error_tables import FILES, ErrorRow, ErrorTable
from penstock.io.registry import Library
from penstock.serving.followers.target import Stored, TableRows, Target, failures
from penstock.serving.followers.target_kinds import TargetKind

ERRORS = ErrorTable(
    ErrorRow(
        "the file is no LMDB file, is damaged, or is of another version of LMDB",
        5,
        "InvalidError CorruptedError VersionMismatchError PageNotFoundError PanicError IncompatibleError",
        "",
        "use another path, or restore the file from a backup",
    ),
    ErrorRow("the caller may not write the file", 2, "ReadonlyError", "", "check the owner and the permissions"),
    ErrorRow(
        "the file is full, was enlarged by another process, or has too many readers",
        None,
        "MapFullError MapResizedError ReadersFullError TxnFullError DbsFullError",
    ),
    ErrorRow("the disk fails, or another process locks the file", None, "DiskError LockError MemoryError"),
    *FILES,
    ErrorRow("the file is replaced or removed while it is opened", None, "ENOENT EINVAL", "the file was replaced"),
)
TARGET = TargetKind(
    title="LMDB",
    form="lmdb:PATH",
    example="lmdb:rows.lmdb",
    errors=ERRORS,
    library=Library("lmdb", "lmdb"),
    holds="a file with a database per table",
    transaction="of LMDB",
    open=lambda uri: LmdbFile(uri),
)
STATE = b"penstock"
# Address space, not disk: the file grows as needed, and the map doubles when it is full.
MAP_BYTES = 1 << 30
MOST_TABLES = 1 << 16
# A disk with less is full: LMDB writes up to 64 pages at once.
_FULL_BYTES = 1 << 20


def rows_name(table: str) -> bytes:
    """Return the name of a table's database: from the id, 8 bytes big-endian, to its row, float32 little-endian."""
    return b"rows/" + table.encode()


class LmdbFile(Target):
    """The file of ``lmdb:PATH``. Readers in other processes see each transaction as a whole."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._path = Path(TARGET.location(uri))
        self._lmdb = TARGET.load()
        self._map_bytes = MAP_BYTES

    def stored(self) -> Stored | None:
        if not self._path.exists():
            return None
        with self._transaction(write=False) as (env, txn):
            return self._read(env, txn)

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        kept = {rows_name(rows.table) for rows in tables}

        def write(env: Any, txn: Any) -> None:
            names = [name for name in txn.cursor().iternext(values=False) if name.startswith(b"rows/")]
            for name in names:
                txn.drop(env.open_db(name, txn), delete=name not in kept)
            for rows in tables:
                _put(txn, env.open_db(rows_name(rows.table), txn), rows)

        self._write(new, before, write)

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        def write(env: Any, txn: Any) -> None:
            for rows in changes:
                table = env.open_db(rows_name(rows.table), txn)
                _put(txn, table, rows)
                for key in _keys(rows.removed):
                    txn.delete(key, db=table)

        self._write(new, before, write)

    def _read(self, env: Any, txn: Any) -> Stored | None:
        if txn.get(STATE) is None:
            if txn.stat()["entries"]:
                raise StateError(f"{self.name}: the file holds something else; use another path")
            return None
        state = env.open_db(STATE, txn)
        fields = {name: txn.get(name.encode(), db=state) for name in ("job", "epoch", "step")}
        fields = {name: value.decode() for name, value in fields.items() if value is not None}
        return Stored.decoded(fields, self.name) if {"job", "step"} <= fields.keys() else None

    def _write(self, new: Stored, before: Stored | None, write: Callable[[Any, Any], None]) -> None:
        """Run a write transaction, again with twice the map if it is full."""
        while True:
            try:
                with self._transaction(write=True) as (env, txn):
                    self.compare(self._read(env, txn), before)
                    write(env, txn)
                    state = env.open_db(STATE, txn)
                    for name, text in new.texts().items():
                        txn.put(name.encode(), text.encode(), db=state)
                return
            except self._lmdb.MapFullError:
                self._map_bytes *= 2
            except self._lmdb.Error as error:
                # LMDB reports a write that ends in the middle, where the disk is full, as an error of the disk.
                free = shutil.disk_usage(self._path.parent).free
                if os.strerror(errno.EIO) not in str(error) or free >= _FULL_BYTES:
                    raise
                raise OSError(errno.ENOSPC, f"the disk is full, with {free:,} bytes free") from error

    @contextmanager
    def _transaction(self, write: bool) -> Iterator[tuple[Any, Any]]:
        if not self._path.parent.is_dir():
            raise UsageError(f"{self.name}: there is no folder {self._path.parent}; create it, or give another path")
        self._path.touch()
        before = self._path.stat()
        self._map_bytes = max(self._map_bytes, 2 * before.st_size)
        with (
            self._lmdb.open(str(self._path), subdir=False, max_dbs=MOST_TABLES, map_size=self._map_bytes) as env,
            env.begin(write=write) as txn,
        ):
            # LMDB does not say which file it has opened: that which was here before and is here now.
            if not os.path.samestat(before, self._path.stat()):
                raise OSError("the file was replaced while it was opened")
            yield env, txn

    def failures(self) -> Any:
        return failures(self.name, ERRORS, self._lmdb.Error)


def _keys(ids: Any) -> Iterator[bytes]:
    encoded = ids.astype(ids.dtype.newbyteorder(">")).tobytes()
    return (encoded[first : first + 8] for first in range(0, len(encoded), 8))


def _put(txn: Any, table: Any, rows: TableRows) -> None:
    values = rows.little_endian
    with txn.cursor(table) as cursor:
        cursor.putmulti(zip(_keys(rows.ids), (row.tobytes() for row in values), strict=True))
