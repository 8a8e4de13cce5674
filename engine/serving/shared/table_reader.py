"""``Reader``: rows of the tables that another program has in shared files, read without a lock."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

import penstock.base.forks as forks
from penstock.base.errors import StateError, UsageError, listed
from penstock.base.filesystem.state_files import open_regular
from penstock.base.validation import place
from penstock.core.freshness import age_s
from penstock.model.frames import Array
from penstock.model.row_encodings import encoding_of
from penstock.model.version import LookupResult, Version
from penstock.pyx.row_keys import RowKeys
from penstock.pyx.row_reads import StepWords
from penstock.rows.shared.header import (
    CLOSED,
    DESCRIPTION_BEGIN,
    FAILED,
    HEADER,
    HISTORY_BEGIN,
    MOST_BYTES,
    WORDS_BEGIN,
    HeaderHistory,
    TableLayout,
    unpacked,
)
from penstock.rows.shared.locks import boot_id, is_locked, is_written
from penstock.rows.shared.lookups import Deadline, TableReads, read_tables, table_of

# How often a reader looks whether the folder has other tables: those before are not marked as closed if their writer
# was killed in between, or the folder was removed.
_LOOK_S = 1.0
# How often a folder is opened whose files go while they are opened: a writer publishes the next generation.
_ATTEMPTS = 20


class NoTablesError(StateError):
    """There are no shared tables in the folder yet, or only those of an earlier run of the machine."""


class Reader:
    """Reads rows of tables that another program updates, such as ``penstock replay --shared`` (docs/readers.md).

    Parameters
    ----------
    path : str or path
        The folder of the shared tables.
    dtype : {"float32", "bfloat16", "int8"}
        The type of rows that lookups return. int8: uint8, shape (n, dim + 8), FBGEMM's fused 8-bit rows, which torch's
        quantized operators read. Rows stored as ``dtype`` are copied, rows stored as float32 encoded.

    Raises
    ------
    UsageError
        If the dtype is none of these.
    StateError
        If the folder has no shared tables, or damaged ones, or those of another version or of an earlier run of the
        machine.
    PermissionError
        If the files belong to another user: only their owner may read them.

    Notes
    -----
    Thread-safe; a lookup takes no lock, does not wait for the writer's steps, and holds no GIL while it copies rows.
    A row is never a mixture of two steps. After a start of the writer, lookups read its new files. A pickle or a copy
    opens the folder again, as in a worker of ``torch.utils.data.DataLoader``.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared="tables")
    >>> with ps.Reader("tables") as reader:  # usually in another process
    ...     applied = engine.apply({"user": ([5], [[1.0, 2.0]])})
    ...     print(reader.lookup("user", [5, 3]), reader.version)
    [[0.9 0.8]
     [1.  1. ]] 1
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: str = "float32") -> None:
        self._path, self._encoding = place("path", path), encoding_of(dtype, "dtype")
        self._reopening, self._process = threading.Lock(), forks.this_process
        self._tables: _Generation | None = _open_generation(self._path)
        self._looked_s = time.monotonic()

    def __repr__(self) -> str:
        if self._tables is None:
            return f"Reader('{self._path}', closed)"
        return f"Reader('{self._path}', tables: {listed(self.tables)}; step {self.version.step})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return partial(type(self), self._path.absolute(), dtype=self._encoding.name), ()

    def close(self) -> None:
        """Close the files. Lookups in other threads end first."""
        self._tables = None

    # ---- what there is

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables."""
        return tuple(self._current().tables)

    @property
    def version(self) -> Version:
        """The version of the rows: the writer's last step, and its lineage and epoch, if it has some."""
        return self._current().version

    @property
    def durable_step(self) -> int:
        """The last step that the writer has committed; later ones are lost if its machine fails. 0: none."""
        return self._current().words.durable_step

    @property
    def frame_time(self) -> int | None:
        """The largest time of the frames in the rows, in seconds since 1970; None: the writer's frames have none."""
        return self._current().words.frame_time

    @property
    def age_s(self) -> float | None:
        """How old the rows are: the seconds since ``frame_time``; 0 if that is in the future. None: unknown."""
        return age_s(self.frame_time)

    @property
    def layouts(self) -> tuple[TableLayout, ...]:
        """The forms of the tables, and where their rows lie."""
        return tuple(self._current().description.tables)

    @property
    def config(self) -> str:
        """The SHA-256 of the configuration of the tables."""
        return self._current().description.config

    # ---- rows

    def keys(self, table: str) -> npt.NDArray[Any]:
        """Return the keys of a dynamic table that have a row, in no order.

        Parameters
        ----------
        table : str
            The table.

        Returns
        -------
        numpy.ndarray
            int64 or uint64, shape (n,). Keys that a step adds or removes meanwhile may be among them or not.

        Raises
        ------
        UsageError
            If the table is unknown or not dynamic.

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user", dynamic=ps.Dynamic())
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), shared="tables")
        >>> engine.apply({"user": ([2**40], [[1.0, 2.0]])})
        True
        >>> ps.Reader("tables").keys("user").tolist()
        [1099511627776]
        """
        reads = table_of(self._current().tables, table, f"in {self._path}")
        if reads.keys is None:
            raise UsageError(f"table '{table}' is not dynamic: its ids are all below {reads.layout.num_rows}")
        return reads.layout.as_given(reads.keys.items()[0])

    @overload
    def lookup(
        self, table: str, ids: Any, out: Array | None = None, consistent: bool = False, timeout_ms: int = 1000
    ) -> Array: ...

    @overload
    def lookup(self, table: Mapping[str, Any], *, consistent: bool = False, timeout_ms: int = 1000) -> LookupResult: ...

    def lookup(
        self,
        table: str | Mapping[str, Any],
        ids: Any = None,
        out: Array | None = None,
        consistent: bool = False,
        timeout_ms: int = 1000,
    ) -> Array | LookupResult:
        """Return the weights of some ids of a table, or of several tables.

        Parameters
        ----------
        table : str or mapping of str to array_like of int
            The table; or the ids of several tables.
        ids : array_like of int, shape (n,)
            Of one table. Repeats allowed. A key of a dynamic table that has no row reads as the configuration's
            ``missing`` says.
        out : numpy.ndarray or None
            What is returned, contiguous, to write the rows of one table to; None: a new array.
        consistent : bool
            All rows of one step: waits until no step runs during the copy.
        timeout_ms : int
            How long to wait for that, or for a writer that has stopped in the middle of a row.

        Returns
        -------
        numpy.ndarray or LookupResult
            float32, shape (n, dim), or of the reader's ``dtype``; of several tables a dict of such, with the attribute
            ``version``.

        Raises
        ------
        UsageError
            If a table is unknown, an id is not an integer in its range, or the rows are stored neither as float32 nor
            as the reader's ``dtype``.
        ReadTimeoutError
            If the rows could not be read in time; also a TimeoutError.
        StateError
            If the writer ended while it wrote one of the rows, or a step of it failed half way.

        Examples
        --------
        >>> import penstock as ps
        >>> tables = [ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name=name) for name in ("user", "item")]
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables), shared="tables")
        >>> reader = ps.Reader("tables")
        >>> reader.lookup("user", [5, 5])
        array([[1., 1.],
               [1., 1.]], dtype=float32)
        >>> rows = reader.lookup({"user": [5], "item": [0, 7]}, consistent=True)
        >>> rows["user"].shape, rows["item"].shape, rows.version.step
        ((1, 2), (2, 2), 0)
        """
        if isinstance(table, str):
            return self._read({table: ids}, {table: out}, consistent, timeout_ms)[0][table]
        while True:
            before = self.version
            rows, step = self._read(table, {}, consistent, timeout_ms)
            generation = self._current()
            if (version := before.at(step)) == generation.version.at(step):  # else another epoch has begun meanwhile
                return LookupResult(rows, version, generation.words.durable_step)

    def _read(
        self, ids: Mapping[str, Any], out: Mapping[str, Array | None], consistent: bool, timeout_ms: int
    ) -> tuple[dict[str, Array], int]:
        deadline = Deadline(timeout_ms)
        while True:
            generation = self._current()

            def check(reason: str, generation: _Generation = generation) -> None:
                generation.check(reason, deadline)

            try:
                place = f"in {self._path}"
                tables, words = generation.tables, generation.words
                return read_tables(tables, words, ids, out, consistent, check, place, self._encoding)
            except _ClosedError:
                deadline.check("its writer publishes new tables")

    def _current(self) -> _Generation:
        """Return the open generation, or the next one once there is one. Raises StateError after a failed step."""
        generation = self._tables
        if generation is None:
            raise UsageError(f"{self._path}: this reader is closed")
        state = generation.words.state
        if state == CLOSED or self._is_replaced(generation):
            if self._process != forks.this_process:  # at the fork, a thread of the other process may have had the lock
                self._reopening, self._process = threading.Lock(), forks.this_process
            with self._reopening:
                if self._tables is generation:
                    self._tables = generation = _open_generation(self._path)
                return self._tables or generation
        if state == FAILED:
            raise StateError(f"{self._path}: a step of its writer failed half way; start the writer again")
        return generation

    def _is_replaced(self, generation: _Generation) -> bool:
        """Look from time to time whether the folder has another header."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_S:
            return False
        self._looked_s = now_s
        try:
            return not os.path.samestat(generation.stat, os.stat(self._path / HEADER, follow_symlinks=False))
        except OSError:
            return False  # the folder is gone: these rows are the last ones


class _ClosedError(Exception):
    """There is a next generation."""


class _Generation:
    """The files of one generation, mapped.

    stat : of the header's file
    Raises StateError if a file is not as the header describes it.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path / HEADER) as file:
            data, self.stat = file.read(DESCRIPTION_BEGIN + MOST_BYTES), os.fstat(file.fileno())
            self._path, self.description = path, unpacked(data, path / HEADER)
            header = np.frombuffer(mmap.mmap(file.fileno(), DESCRIPTION_BEGIN, access=mmap.ACCESS_READ), np.uint8)
        if self.description.boot != boot_id():
            raise NoTablesError(
                f"{path}: its tables were written before this machine started, or on another one; start their writer "
                "again"
            )
        self.words, self._history = StepWords(header[WORDS_BEGIN:HISTORY_BEGIN].view(np.uint64)), HeaderHistory(header)
        arrays = {}
        for name, num_bytes in self.description.files.items():
            with open_regular(path / name) as file:
                size = os.fstat(file.fileno()).st_size
                if size != num_bytes:
                    raise StateError(
                        f"{path / name}: {size:,} bytes, expected {num_bytes:,}: truncated, or of another header"
                    )
                arrays[name] = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        try:
            self.tables = {table.name: self._reads(table, arrays) for table in self.description.tables}
        except (ValueError, OverflowError) as error:
            raise StateError(f"{path / HEADER}: damaged: {error}") from None

    def _reads(self, table: TableLayout, arrays: Mapping[str, npt.NDArray[np.uint8]]) -> TableReads:
        parts = []
        for rows, pages in zip(table.rows, table.pages, strict=True):
            counters = arrays[pages].view(np.uint64)
            per_thread = len(counters) // self.description.threads
            if len(counters) != per_thread * self.description.threads:
                raise ValueError(
                    f"table '{table.name}': {len(counters)} counters of {self.description.threads} threads"
                )
            parts.append((arrays[rows].view(np.float32), counters.reshape(self.description.threads, per_thread)))
        keys = None
        if table.keys is not None:
            memory = arrays[table.keys.file].view(np.uint64)
            keys = RowKeys(memory, table.num_rows, table.keys.salt, table.keys.expire_after)
        return TableReads(table, parts, keys)

    @property
    def version(self) -> Version:
        return self._history.read(self.words.step)

    def check(self, reason: str, deadline: Deadline) -> None:
        """Raise if a lookup waits in vain. reason : what it waits for"""
        if self.words.state == CLOSED:
            raise _ClosedError
        if self.words.state == FAILED:
            raise StateError(f"{self._path}: a step of its writer failed half way; start the writer again")
        if not is_written(self._path, self.description.generation) and not is_locked(self._path):
            # Its last stores may have come in between.
            if self.words.state == CLOSED:
                raise _ClosedError
            raise StateError(f"{self._path}: {reason}, and its writer has ended; start the writer again")
        deadline.check(reason)


def _open_generation(path: Path) -> _Generation:
    """Open the current generation. Raises StateError, and OSError for files that cannot be read."""
    for attempt in range(_ATTEMPTS):
        try:
            return _Generation(path)
        except FileNotFoundError as error:
            # The files of a header that has just lost its name.
            if attempt == _ATTEMPTS - 1 or os.path.basename(str(error.filename)) == HEADER:
                raise NoTablesError(
                    f"{path}: has no shared tables; start their writer first, such as penstock replay --shared {path}"
                ) from None
        except PermissionError as error:
            raise PermissionError(
                errno.EACCES, "the shared tables belong to another user, who alone may read them", str(error.filename)
            ) from None
    raise AssertionError("unreachable")
