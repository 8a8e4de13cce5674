"""Writes deltas where somebody else reads them: a file that appears whole and can be gone on with, a pipe or an object.

What is written is penstock's own log (``log``): every byte under a checksum, and whole only with its closing record.
While a run goes on the deltas stand in ``.FILE.part``; FILE appears when it ends, however it ends. What ``commit``
gives back belongs to a checkpoint: a later run that is handed it goes on from there, and what a killed run wrote after
it, which that run writes once more, is cut off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.fs

from penstock.errors import StateError, UsageError
from penstock.io.growing import GrowingFile, grows_again, part_of
from penstock.io.log import LogWriter
from penstock.io.pipes import open_writer

# What of the committed end of a file is looked at before it is gone on with.
_TAIL_BYTES = 1 << 16


class DeltaWriter:
    """What a file and a stream have in common. Closed at the end of the ``with``, also where an error ends it."""

    def __init__(self, name: str, log: LogWriter, step: int) -> None:
        self.name, self._log, self._step = name, log, step
        self.num_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Raises OSError, which names the target; nothing is written any more then."""
        with self._all_or_nothing():
            self._log.write(batch)
        self.num_rows += batch.num_rows
        self._step = batch["step"][0].as_py()

    def commit(self) -> Mapping[str, int] | None:
        """Everything written is on disk. Returns what a later run goes on from, as plain numbers."""
        return None

    def close(self) -> None:
        """What was written is whole."""
        raise NotImplementedError

    def __enter__(self) -> DeltaWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _all_or_nothing(self) -> AbstractContextManager[None]:
        """After an error in here nothing more is written."""
        raise NotImplementedError


class DeltaFile(DeltaWriter):
    """A file of deltas.

    path : where there is none yet
    committed : what ``commit`` said last, to go on from there; None for a new file
    step : of the last step that changed a row

    Raises UsageError where the file exists, StateError where it is not what was committed, and OSError, which names
    the file; after an OSError nothing more is written, and close leaves only what was committed.
    """

    def __init__(self, path: Path, schema: pa.Schema, step: int, committed: Mapping[str, int] | None = None) -> None:
        self._path, self._part = path, part_of(path)
        if committed is None:
            check_new(path)
        else:
            self._take_up(committed, step)
        kept_bytes = committed["bytes"] if committed else None
        self._growing = GrowingFile(path, committed is not None, kept_bytes)
        log = LogWriter(self._growing.file, schema, committed if kept_bytes else None)
        super().__init__(str(path), log, step)
        if kept_bytes:
            self._check_schema(log.schema)

    def commit(self) -> Mapping[str, int]:
        self._growing.commit()
        state = self._log.state
        return {**state, "tail": _tail(self._part, state["bytes"]), "step": self._step}

    def close(self) -> None:
        if self._growing.closed:
            return
        with self._all_or_nothing():
            self._log.close()
        self._growing.finish()

    def _all_or_nothing(self) -> AbstractContextManager[None]:
        return self._growing.all_or_nothing()

    def _take_up(self, committed: Mapping[str, int], step: int) -> None:
        grows_again(self._path, check_new)
        if committed["step"] != step:
            raise StateError(
                f"{self._path}: its last delta is of step {committed['step']} and the checkpoint of step {step}: a run "
                "between went on without it; give another name, and take the tables anew where it is read"
            )
        try:
            same = _tail(self._part, committed["bytes"]) == committed["tail"]
        except OSError as error:
            raise StateError(f"{self._path}: the deltas of the checkpoint cannot be read: {error.strerror}") from error
        if not same:
            problem = "holds other deltas than the checkpoint says: give the file that it was made with"
            raise StateError(f"{self._path}: {problem}")

    def _check_schema(self, schema: pa.Schema) -> None:
        written = schema.serialize().to_pybytes()
        with open(self._part, "rb") as file:
            if file.read(len(written)) != written:
                self._growing.file.give_up()
                raise StateError(
                    f"{self._path}: its deltas have other columns; go on with the slots they were made with"
                )


class DeltaStream(DeltaWriter):
    """Deltas into an open binary file, a pipe or an object: written as they come, and gone when they are."""

    def __init__(self, name: str, stream: Any, schema: pa.Schema, step: int, own: bool = True) -> None:
        self._stream, self._own, self._broken = stream, own, False
        super().__init__(name, LogWriter(stream, schema), step)

    def close(self) -> None:
        if self._broken:
            return
        with self._all_or_nothing():
            self._log.close()
            if self._own:
                self._stream.close()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._broken = True
            if self._own:
                with contextlib.suppress(OSError):
                    self._stream.close()
            if isinstance(error, OSError):
                error.filename = error.filename or self.name
            raise


def open_deltas(
    target: str | os.PathLike[str], schema: pa.Schema, step: int, committed: Mapping[str, int] | None, keeps: bool
) -> DeltaWriter:
    """A writer for a file, a pipe, "-" (standard output) or a URI that pyarrow.fs opens.

    committed : of the checkpoint that is gone on with; keeps : there is a checkpoint
    Raises UsageError, StateError or OSError.
    """
    text = os.fspath(target)
    path = Path(text)
    if not is_stream(text):
        known = path.exists() or part_of(path).exists()
        return DeltaFile(path, schema, step, committed if known else None)
    if keeps:
        raise UsageError(
            f"{text}: with a checkpoint deltas go into a file, which a later run can go on with; not into a stream"
        )
    if text == "-":
        return DeltaStream("<stdout>", sys.stdout.buffer, schema, step, own=False)
    if "://" not in text:
        return DeltaStream(text, open_writer(path), schema, step)
    try:
        fs, inside = pa.fs.FileSystem.from_uri(text)
        return DeltaStream(text, fs.open_output_stream(inside), schema, step)
    except pa.ArrowInvalid as error:
        raise UsageError(f"{text}: {str(error).splitlines()[0]}") from error


def is_stream(target: str) -> bool:
    """Whether what is written there is gone: standard output, a URI, a pipe or a device."""
    path = Path(target)
    return target == "-" or "://" in target or (path.exists() and not path.is_file() and not path.is_dir())


def check_new(path: Path) -> None:
    """Raise UsageError where there is such a file: its deltas may be all that somebody has to go by."""
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path}: exists; deltas are never written over: move them, or give another name")


def _tail(path: Path, num_bytes: int) -> int:
    """CRC-32 of the last bytes of the first ``num_bytes`` of a file."""
    with open(path, "rb") as file:
        first = max(0, num_bytes - _TAIL_BYTES)
        file.seek(first)
        return zlib.crc32(file.read(num_bytes - first), num_bytes & 0xFFFFFFFF)
