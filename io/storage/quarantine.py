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

from penstock.errors import StateError, UsageError
from penstock.filesystem.append_file import GrowingFile, IsCommitted, existing_path
from penstock.io.decoding.bad_rows import SCHEMA
from penstock.io.storage.arrow_output import ArrowOutput

_MODE = "quarantine"
_FILES = (".arrow", ".feather")
_FIRST_BYTES = 8  # of an Arrow IPC file: magic, padding; a stream follows


def parse_on_bad_row(text: str) -> tuple[str, Path | None]:
    """Parse ``error``, ``drop`` or ``quarantine=FILE`` into the reader's action and the file. Raises UsageError."""
    mode, equals, name = text.partition("=") if isinstance(text, str) else (repr(text), "", "")
    if mode == _MODE and name:
        return mode, _checked(Path(name))
    if mode == _MODE:
        raise UsageError("on_bad_row: quarantine needs the name of a file: quarantine=FILE")
    if equals or mode not in ("error", "drop"):
        raise UsageError(f"on_bad_row: expected error, drop or quarantine=FILE, got '{text}'")
    return mode, None


def check_new(path: Path) -> None:
    """Raise UsageError if the file exists: it may be the only copy of its rows."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: exists; a quarantine is never written over: move it, or give another name")


class QuarantineWriter:
    """Appends bad rows; ``commit`` makes them durable; ``close`` completes the file and gives it its name.

    path : ``.arrow`` and ``.feather`` are Arrow IPC files, every other name is an Arrow IPC stream
    committed : the last return value of ``commit``, to resume from; None for a new file
    is_committed : whether a commit refers to a new file, called when it is closed; None: there is no checkpoint
    is_new : a file that no commit refers to yet

    Raises UsageError if the file exists, StateError if it differs from the committed one, and OSError, which
    names the file; after an OSError it writes nothing more, and close keeps only the committed part.
    """

    def __init__(
        self, path: Path, committed: Mapping[str, int] | None = None, is_committed: IsCommitted = None
    ) -> None:
        self._path = _checked(path)
        self._is_file = path.suffix in _FILES
        self._sink = ArrowOutput()
        self._num_bytes = self._crc = self.num_rows = 0
        self._writer = (pa.ipc.new_file if self._is_file else pa.ipc.new_stream)(self._sink, SCHEMA)
        if committed is None:
            check_new(path)
        else:
            self._resume(committed)
        self._last = dict(committed or {})  # the durable part
        self._growing = GrowingFile(path, None if committed is None else self._num_bytes, is_committed)
        self.is_new = self._growing.is_new

    def append(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Append the bad rows of one frame as one batch: when read again, they are one frame."""
        if not batches:
            return
        whole = pa.concat_batches(list(batches)) if len(batches) > 1 else batches[0]
        self._writer.write_batch(whole)
        self.num_rows += whole.num_rows
        self._write()

    def commit(self) -> dict[str, int]:
        """Make everything appended durable. Returns the position for a later run to resume from, as plain numbers."""
        if self._position() != self._last:  # a run commits often, and bad rows are few
            self._growing.commit()
            self._last = self._position()
        return self._last

    def close(self) -> None:
        """Complete the file and give it its name. After an error, keep only the committed part."""
        self._growing.end(self._write_end)

    def _write_end(self) -> None:
        self._writer.close()
        self._write()

    def _position(self) -> dict[str, int]:
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
        file = existing_path(self._path, check_new)
        expected = {key: committed[key] for key in ("bytes", "crc", "rows")}
        try:
            if expected["bytes"]:
                self._feed(file, expected["bytes"], expected["crc"])
        except (OSError, pa.ArrowException, EOFError) as error:
            raise StateError(f"{self._path}: the quarantine of the checkpoint cannot be read: {error}") from error
        if self._position() != expected:
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
