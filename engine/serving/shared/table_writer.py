"""``SharedWriter``: shared tables of a program that has no engine, such as a replica that follows a service."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from penstock.base.errors import UsageError
from penstock.model.config.id_ranges import valid_ids
from penstock.model.frames import Array, Float32, Int64
from penstock.model.row_encodings import FLOAT32, encoding_of
from penstock.model.version import Version
from penstock.pyx import update
from penstock.pyx.row_keys import RowKeys, num_words
from penstock.rows.initializers import InitialRows
from penstock.rows.shared.folder import SharedFolder
from penstock.rows.shared.header import KeyFile, TableLayout, words_per_row
from penstock.rows.shared.lookups import as_words, words_of

# One writes; a step counts its pages for one more thread than it is given.
_THREADS = 2


class SharedTable(NamedTuple):
    """A table to create: ids below ``num_rows``, or any keys, for which it grows beyond ``num_rows``.

    Attributes
    ----------
    name : str
        The table's name.
    dim : int
        Floats per row.
    num_rows : int
        The number of ids, or of rows for keys at first.
    id_type : {"int64", "uint64"}
        Type of the keys.
    has_keys : bool
        Whether ids are keys.
    absent : InitialRows
        What a key without a row reads: zeros, if nothing else is set.
    rows : {"float32", "bfloat16", "int8"}
        How rows are stored; in less than 32 bits per value for readers that save memory.
    """

    name: str
    dim: int
    num_rows: int
    id_type: str = "int64"
    has_keys: bool = False
    absent: InitialRows = InitialRows()
    rows: str = FLOAT32.name


class SharedWriter:
    """Writes shared tables by id, in a program that has no engine. One thread calls it (docs/readers.md).

    Parameters
    ----------
    path : str or path
        The folder, which stays locked until ``close``.

    Raises
    ------
    StateError
        If another program writes the folder.

    Notes
    -----
    Create tables, write all of their rows, ``publish`` them; then change rows within ``step``. Tables may be created
    again at any time: readers keep the published ones until the next ``publish``.

    Examples
    --------
    >>> import penstock as ps
    >>> from penstock.shared.table_writer import SharedTable, SharedWriter
    >>> writer = SharedWriter("replica")
    >>> writer.create([SharedTable("user", dim=2, num_rows=8)])
    >>> writer.publish(ps.Version("0"))
    >>> with writer.step(ps.Version("1")):
    ...     writer.write("user", [5], [[0.5, 1.0]])
    >>> ps.Reader("replica").lookup("user", [5, 3]).tolist()
    [[0.5, 1.0], [0.0, 0.0]]
    >>> writer.close()
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = SharedFolder(path)
        self._tables: dict[str, _Rows] = {}
        self._is_published = self._in_step = False
        self._config, self._version, self._durable_step = "", Version("0"), 0
        self._frame_time: int | None = None

    def create(self, tables: Sequence[SharedTable], config: str = "") -> None:
        """Begin new tables, whose rows are 0, and which have no keys.

        Parameters
        ----------
        tables : sequence of SharedTable
            The tables.
        config : str
            SHA-256 of the configuration, for readers.

        Raises
        ------
        CapacityError
            If there is no room for their files; the published tables stay.
        """
        self._folder.discard()
        self._config, self._is_published = config, False
        self._tables = {table.name: _Rows(self._folder, table) for table in tables}

    def write(self, table: str, ids: Any, rows: Array) -> None:
        """Set the weights of distinct ids.

        Parameters
        ----------
        table : str
            The table's name.
        ids : array_like of int, shape (n,)
            Distinct ids, or keys.
        rows : array_like of float32, shape (n, dim)
            Their weights; of a table of encoded rows, also their bytes: uint8, shape (n, bytes).

        Raises
        ------
        UsageError
            For an id outside the table.
        CapacityError
            If a table of keys cannot grow.
        """
        target = self._table(table)
        wanted = valid_ids(table, ids, target.layout.id_range)
        values = target.as_stored(rows)
        if target.num_lacking(wanted):
            self._grow(table, target.num_lacking(wanted))
            target = self._tables[table]
        target.write(wanted, values)

    def remove(self, table: str, keys: Any) -> None:
        """Remove keys; those without a row are skipped.

        Parameters
        ----------
        table : str
            The table's name.
        keys : array_like of int, shape (n,)
            Distinct keys.
        """
        target = self._table(table)
        if target.keys is None:
            raise UsageError(f"table '{table}': its rows have no keys, and none can be removed")
        target.remove(valid_ids(table, keys, target.layout.id_range))

    @contextmanager
    def step(self, version: Version, durable_step: int = 0, frame_time: int | None = None) -> Iterator[None]:
        """Change rows of published tables together: consistent reads are of the rows before, or of those after.

        Parameters
        ----------
        version : Version
            Of the rows after.
        durable_step : int
            Of the last commit.
        frame_time : int or None
            The largest time of the frames in the rows, in seconds since 1970; None: unknown.

        Yields
        ------
        None

        Notes
        -----
        An error in the context leaves the tables as those of a step that failed: readers refuse them.
        """
        words = self._folder.words
        if words is None or not self._is_published:
            raise UsageError("publish the tables first")
        words.begin()
        self._in_step = True
        try:
            yield
        except BaseException:
            self._folder.fail()
            raise
        finally:
            self._in_step = False
        words, history = self._folder.words, self._folder.history  # of the next generation, if a table has grown
        assert words is not None
        assert history is not None
        if version != self._version.at(version.step):
            history.write(version)
        self._version, self._durable_step, self._frame_time = version, durable_step, frame_time
        words.end(version.step)
        words.durable_step, words.frame_time = durable_step, frame_time

    def publish(self, version: Version, durable_step: int = 0, frame_time: int | None = None) -> None:
        """Make the created tables those that readers read.

        Parameters
        ----------
        version : Version
            Of their rows.
        durable_step : int
            Of the last commit.
        frame_time : int or None
            As of ``step``.
        """
        self._version, self._durable_step, self._frame_time = version, durable_step, frame_time
        self._publish()

    def lock(self) -> None:
        """Lock the folder again after ``close``. Raises StateError if another program writes it."""
        self._folder.lock()

    def close(self) -> None:
        """Unlock the folder; the published tables stay."""
        if not self._is_published:
            self._folder.discard()
        self._folder.close()

    # ---- inside

    def _table(self, name: str) -> _Rows:
        if name not in self._tables:
            raise UsageError(f"no table '{name}' among the shared ones")
        return self._tables[name]

    def _publish(self) -> None:
        layouts = [table.layout for table in self._tables.values()]
        version, durable_step = self._version, self._durable_step
        words = self._folder.publish(layouts, _THREADS, version, durable_step, self._config, self._in_step)
        words.frame_time = self._frame_time
        self._is_published = True

    def _grow(self, name: str, num_lacking: int) -> None:
        """Continue with tables of the next generation, of which one has at least twice the rows."""
        before, was_published = self._tables, self._is_published
        tables = {}
        for table in before.values():
            spec, size = table.spec, table.layout.num_rows
            num_rows = 2 * size + num_lacking if spec.name == name else size
            tables[spec.name] = _Rows(self._folder, spec._replace(num_rows=num_rows))
        for table in before.values():
            tables[table.spec.name].take_over(table)
        self._tables = tables
        if was_published:
            self._publish()


class _Rows:
    """One table in files of the next generation."""

    def __init__(self, folder: SharedFolder, spec: SharedTable) -> None:
        self.spec, name, num_rows = spec, spec.name, spec.num_rows
        self._encoding = encoding_of(spec.rows)
        dim = words_per_row(self._encoding, spec.dim)
        rule = update.TableRule("sgd", {}, dim=dim, vocabulary_size=num_rows, rows_per_shard=num_rows, name=name)
        self._floats = folder.allocate("rows", rule.end, np.float32)
        self._step = update.Step([rule], [self._floats])
        counters = folder.allocate("pages", _THREADS * self._step.counters_per_thread, np.uint64)
        self._step.count_pages([counters.reshape(_THREADS, -1)])
        self.keys: RowKeys | None = None
        file = None
        if spec.has_keys:
            memory, salt = folder.allocate("keys", num_words(num_rows), np.uint64), secrets.randbits(64)
            self.keys, file = RowKeys(memory, num_rows, salt), KeyFile(folder.name(memory), salt, -1, spec.absent)
            self._free = np.arange(num_rows - 1, -1, -1)
            self._num_free = num_rows
        self.layout = TableLayout(
            name,
            spec.dim,
            num_rows,
            num_shards=1,
            mod=False,
            rows_per_shard=num_rows,
            shards_per_part=1,
            row_floats=rule.row_floats,
            first_float=rule.first_float,
            first_page=rule.first_page,
            rows=(folder.name(self._floats),),
            pages=(folder.name(counters),),
            id_type=spec.id_type,
            keys=file,
            encoding=self._encoding.name,
        )

    def as_stored(self, rows: Array) -> Float32:
        """Return float32 rows, or the bytes of encoded ones, as they are stored."""
        values, encoding = np.asarray(rows), self._encoding
        are_bytes = encoding is not FLOAT32 and values.dtype == np.uint8
        if are_bytes and values.shape[1:] == (encoding.width(self.spec.dim),):
            return words_of(values)
        return as_words(encoding, np.ascontiguousarray(values, np.float32))

    def num_lacking(self, ids: Int64) -> int:
        """Return for how many of distinct ids there is no room."""
        if self.keys is None:
            return 0
        return max(0, int((self.keys.rows(ids) < 0).sum()) - self._num_free)

    def write(self, ids: Int64, values: Float32) -> None:
        rows = ids
        if self.keys is not None:
            rows = self.keys.rows(ids)
            new = np.flatnonzero(rows < 0)
            self._num_free -= len(new)
            rows[new] = self._free[self._num_free : self._num_free + len(new)]
        self._step.copy(0, np.ascontiguousarray(rows), values, 0, True)
        self._step.run(list, 1)  # one thread has no tasks for others
        if self.keys is not None:
            self.keys.insert(ids[new], rows[new])

    def remove(self, keys: Int64) -> None:
        assert self.keys is not None
        rows = self.keys.rows(keys)
        self.keys.remove(keys)
        free = np.unique(rows[rows >= 0])
        self._free[self._num_free : self._num_free + len(free)] = free
        self._num_free += len(free)

    def take_over(self, before: _Rows) -> None:
        """Copy the rows and keys of the table before."""
        np.copyto(self._floats[: len(before._floats)], before._floats)
        if self.keys is not None and before.keys is not None:
            keys, rows = before.keys.items()
            self.keys.insert(keys, rows)
            used = np.zeros(self.layout.num_rows, bool)
            used[rows] = True
            free = np.flatnonzero(~used)[::-1]
            self._free[: len(free)], self._num_free = free, len(free)
