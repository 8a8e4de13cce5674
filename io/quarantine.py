"""Write bad rows to an Arrow file: one batch per frame with bad rows, complete however the run ends.

During a run the rows are in ``.FILE.part``; FILE appears at the end, only complete, with a checkpoint only
if a commit refers to it. The return value of ``commit`` belongs in a checkpoint: a later run resumes from it, and
truncates everything that a killed run wrote afterwards. ``decoding.bad_rows`` defines the columns.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.base.errors import StateError, UsageError
from penstock.base.filesystem.append_file import GrowingFile, IsCommitted, check_new, existing_path
from penstock.base.validation import place
from penstock.io.arrow_output import ArrowOutput
from penstock.io.decoding.bad_rows import SCHEMA

_MODE = "quarantine"
_FILES = (".arrow", ".feather")
_FIRST_BYTES = 8  # of an Arrow IPC file: magic, padding; a stream follows


def parse_on_bad_row(text: str) -> tuple[str, Path | None]:
    """Parse ``error``, ``drop`` or ``quarantine=FILE`` into the reader's action and the file. Raises UsageError."""
    mode, equals, name = text.partition("=") if isinstance(text, str) else (repr(text), "", "")
    if mode == _MODE and name:
        return mode, _checked(place("on_bad_row", name))
    if mode == _MODE:
        raise UsageError("on_bad_row: quarantine needs the name of a file: quarantine=FILE")
    if equals or mode not in ("error", "drop"):
        raise UsageError(f"on_bad_row: expected error, drop or quarantine=FILE, got '{text}'")
    return mode, None


class QuarantineWriter:
    """Appends bad rows; ``commit`` makes them durable; ``close`` completes the file and gives it its name.

    Parameters
    ----------
    path : pathlib.Path
        ``.arrow`` and ``.feather`` are Arrow IPC files, every other name is an Arrow IPC stream.
    committed : mapping of str to int, or None
        The last return value of ``commit``, to resume from; None for a new file.
    is_committed : callable or None
        Whether a commit refers to a new file, called when it is closed; None: there is no checkpoint.

    Attributes
    ----------
    is_new : bool
        A file that no commit refers to yet.
    num_rows : int
        Rows appended so far.

    Raises
    ------
    UsageError
        If the file exists.
    StateError
        If the file differs from the committed one.
    OSError
        If the file cannot be written, with its name. The writer then writes nothing more, and ``close`` keeps only the
        committed part.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, optimizer=ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> rows = pa.table({"step": [0, 0], "id": [5, 9], "gradient": [[1.0, 2.0]] * 2})
    >>> report = engine.run(rows, on_bad_row="quarantine=bad.arrows")  # which uses this class
    >>> bad = pa.ipc.open_stream("bad.arrows").read_all()
    >>> report.dropped, bad["id"].to_pylist(), bad["reason"].to_pylist()
    ({'id_out_of_range': 1}, [9], ['id_out_of_range'])
    """

    def __init__(
        self, path: Path, committed: Mapping[str, int] | None = None, is_committed: IsCommitted = None
    ) -> None:
        self._path = _checked(path)
        self._is_file = path.suffix in _FILES
        self._sink = ArrowOutput()
        self._num_bytes = self._crc = self.num_rows = 0
        self._writer = (pa.ipc.new_file if self._is_file else pa.ipc.new_stream)(self._sink, SCHEMA)
        if committed is not None and not committed["bytes"] and not existing_path(path).exists():
            committed = None  # without rows there is nothing to continue, so the name may be another one
        if committed is None:
            check_new(path)
        else:
            self._resume(committed)
        self._last = dict(committed or {})  # the durable part
        self._growing = GrowingFile(path, None if committed is None else self._num_bytes, is_committed)
        self.is_new = self._growing.is_new

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append the bad rows of one frame as one batch: when read again, they are one frame.

        Parameters
        ----------
        batches : sequence of pyarrow.RecordBatch
            The frame's ``bad_rows``.
        """
        if not batches:
            return
        whole = pa.concat_batches(list(batches)) if len(batches) > 1 else batches[0]
        self._writer.write_batch(whole)
        self.num_rows += whole.num_rows
        self._write()

    def commit(self) -> dict[str, int]:
        """Make everything appended durable.

        Returns
        -------
        dict of str to int
            The state for a later run to resume from: bytes, checksum, rows.
        """
        if self._state() != self._last:  # a run commits often, and bad rows are few
            self._growing.commit()
            self._last = self._state()
        return self._last

    def close(self) -> None:
        """Complete the file and give it its name. After an error, keep only the committed part."""
        self._growing.end(self._write_end)

    def _write_end(self) -> None:
        self._writer.close()
        self._write()

    def _state(self) -> dict[str, int]:
        return {"bytes": self._num_bytes, "crc": self._crc, "rows": self.num_rows}

    def _write(self) -> None:
        """Move Arrow's output to the file."""
        with self._growing.all_or_nothing():
            for piece in self._take():
                self._growing.write(piece)

    def _take(self) -> list[Any]:
        """Return Arrow's output since the last call, counted."""
        pieces = self._sink.take()
        for piece in pieces:
            self._num_bytes, self._crc = self._num_bytes + len(piece), zlib.crc32(piece, self._crc)
        return pieces

    def _resume(self, committed: Mapping[str, int]) -> None:
        """Pass the existing batches to Arrow's writer, so that its footer has the location of every batch."""
        file = existing_path(self._path)
        expected = {key: committed[key] for key in ("bytes", "crc", "rows")}
        if not file.exists():
            raise StateError(
                f"{self._path}: the quarantine of the checkpoint cannot be read: there is no such file; it has "
                f"{expected['rows']:,} rows: give the file that the checkpoint was made with"
            )
        try:
            if expected["bytes"]:
                self._feed(file, expected["bytes"], expected["crc"])
        except (OSError, pa.ArrowException, EOFError) as error:
            raise StateError(f"{self._path}: the quarantine of the checkpoint cannot be read: {error}") from error
        if self._state() != expected:
            problem = "holds other rows than the checkpoint records: give the file that the checkpoint was made with"
            raise StateError(f"{self._path}: the quarantine {problem}")

    def _feed(self, file: Path, num_bytes: int, crc: int) -> None:
        with pa.memory_map(str(file)) as mapped:
            data = mapped.read_buffer(num_bytes)
            if zlib.crc32(data) != crc:  # verified before Arrow reads it
                return
            for batch in pa.ipc.open_stream(data.slice(_FIRST_BYTES if self._is_file else 0)):
                self._writer.write_batch(batch)
                self.num_rows += batch.num_rows
        self._take()


def _checked(path: Path) -> Path:
    if path.suffix == ".parquet":
        raise UsageError(f"{path}: a quarantine is written as Arrow IPC; name it .arrows (stream) or .arrow (file)")
    return path
