"""Write deltas for other programs: to a file that appears complete and can be resumed, to a pipe or to an object.

The format is penstock's log (``io.log``): checksums cover every byte, and a closing record completes it.
During a run the deltas are in ``.FILE.part``; FILE appears when the run ends, however it ends, with a checkpoint
only if a commit refers to it. The return value of ``commit`` belongs in a checkpoint: a later run resumes from it, and
truncates everything that a killed run wrote afterwards and that the resumed run writes again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs

import penstock.base.forks as forks
from penstock.base.errors import StateError, UsageError
from penstock.base.filesystem.append_file import GrowingFile, IsCommitted, check_new, existing_path, part_of
from penstock.base.filesystem.file_stores import filesystem_at, place_of
from penstock.base.filesystem.pipes import open_writer
from penstock.io.log import LogWriter, schema_of_log

# How much of the committed end of a file is verified before a run resumes it.
_TAIL_BYTES = 1 << 16


class DeltaWriter(AbstractContextManager["DeltaWriter"]):
    """The base of DeltaFile and DeltaStream. The end of the ``with`` block closes it, also after an error.

    is_new : a file that no commit refers to yet
    """

    is_new = False

    def __init__(self, name: str, log: LogWriter, step: int) -> None:
        self.name, self._log, self._step = name, log, step
        self.num_rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Raises OSError, which names the target; after that it writes nothing more."""
        with self._all_or_nothing():
            self._log.write(batch)
        self.num_rows += batch.num_rows
        self._step = batch["step"][0].as_py()

    def commit(self) -> Mapping[str, Any] | None:
        """Make everything written durable. Returns the state for a later run to resume from, as plain data."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Complete the output."""

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _all_or_nothing(self) -> AbstractContextManager[None]:
        """After an error in the block, write nothing more."""


class DeltaFile(DeltaWriter):
    """A file of deltas.

    path : must not exist, for a new file
    committed : the last return value of ``commit``, to resume from; None for a new file
    step : of the last step that changed a row
    is_committed : whether a commit refers to a new file, called when it is closed; None: there is no checkpoint

    Raises UsageError if the file exists, StateError if it differs from the committed one, and OSError, which names
    the file; after an OSError it writes nothing more, and close keeps only the committed part.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        step: int,
        committed: Mapping[str, Any] | None = None,
        is_committed: IsCommitted = None,
    ) -> None:
        self._path = path
        if committed is None:
            check_new(path)
        else:
            self._check_committed(committed, schema, step)
        kept_bytes = committed["bytes"] if committed else None
        self._growing = GrowingFile(path, kept_bytes, is_committed)
        self.is_new = self._growing.is_new
        log = LogWriter(self._growing, schema, committed if kept_bytes else None)
        super().__init__(str(path), log, step)

    def commit(self) -> Mapping[str, Any]:
        self._growing.commit()
        state = self._log.state
        tail = _tail(self._growing.part, state["bytes"])
        return {**state, "tail": tail, "step": self._step, "name": self._path.name}

    def close(self) -> None:
        self._growing.end(self._log.close)

    def _all_or_nothing(self) -> AbstractContextManager[None]:
        return self._growing.all_or_nothing()

    def _check_committed(self, committed: Mapping[str, Any], schema: pa.Schema, step: int) -> None:
        """Raise StateError if the existing file differs from the committed one; leave it unchanged."""
        file = existing_path(self._path)
        if committed["step"] != step:
            raise StateError(
                f"{self._path}: its last delta is of step {committed['step']} and the checkpoint of step {step}: a run "
                "in between continued without it; give another name, and read the tables again where it is followed"
            )
        try:
            same = _tail(file, committed["bytes"]) == committed["tail"]
            same_columns = not committed["bytes"] or _begins_with(file, schema_of_log(schema).serialize().to_pybytes())
        except OSError as error:
            raise StateError(f"{self._path}: the deltas of the checkpoint cannot be read: {error.strerror}") from error
        if not same:
            problem = "holds other deltas than the checkpoint records: give the file that it was made with"
            raise StateError(f"{self._path}: {problem}")
        if not same_columns:
            raise StateError(
                f"{self._path}: its deltas have other columns; continue with the slots that they were made with"
            )


class DeltaStream(DeltaWriter):
    """Deltas into an open binary file, a pipe or an object: written immediately, and irrevocable."""

    def __init__(self, name: str, stream: Any, schema: pa.Schema, step: int, own: bool = True) -> None:
        self._stream, self._own, self._broken = stream, own, False
        self._process = forks.this_process
        super().__init__(name, LogWriter(stream, schema), step)

    def close(self) -> None:
        if self._broken or self._process != forks.this_process:
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
    target: str | os.PathLike[str],
    schema: pa.Schema,
    step: int,
    committed: Mapping[str, Any] | None,
    is_committed: IsCommitted,
) -> DeltaWriter:
    """Open a writer for a file, a pipe, "-" (standard output) or a URI that pyarrow.fs opens.

    committed : of the checkpoint to resume
    is_committed : whether a commit refers to a new file, called when it is closed; None: there is no checkpoint
    Raises UsageError, StateError or OSError.
    """
    text = os.fspath(target)
    path = Path(text)
    if not is_stream(text):
        resumed = committed if _is_known(path, committed) else None
        return DeltaFile(path, schema, step, resumed, is_committed)
    if is_committed is not None:
        raise UsageError(
            f"{place_of(text)}: with a checkpoint deltas go into a file, which a later run can continue; not into a "
            "stream"
        )
    if text == "-":
        return DeltaStream("<stdout>", sys.stdout.buffer, schema, step, own=False)
    if "://" not in text:
        return DeltaStream(text, open_writer(path), schema, step)
    try:
        fs, inside = filesystem_at(text)
        return DeltaStream(place_of(text), fs.open_output_stream(inside), schema, step)
    except pa.ArrowInvalid as error:
        problem = str(error).splitlines()[0].replace(text, place_of(text))
        raise UsageError(f"{place_of(text)}: {problem}") from error


def _is_known(path: Path, committed: Mapping[str, Any] | None) -> bool:
    """Return whether this may be the file that a commit refers to.

    A run that was killed before a commit referred to its file may leave a ``.FILE.part`` of another name.
    """
    if committed is None:
        return False
    return path.exists() or (part_of(path).exists() and committed["name"] == path.name)


def is_stream(target: str) -> bool:
    """Return whether output cannot be taken back: standard output, a URI, a pipe or a device."""
    path = Path(target)
    return target == "-" or "://" in target or (path.exists() and not path.is_file() and not path.is_dir())


def _begins_with(path: Path, data: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(data)) == data


def _tail(path: Path, num_bytes: int) -> int:
    """Return the CRC-32 of the last bytes of the first ``num_bytes`` of a file."""
    with open(path, "rb") as file:
        first = max(0, num_bytes - _TAIL_BYTES)
        file.seek(first)
        return zlib.crc32(file.read(num_bytes - first), num_bytes & 0xFFFFFFFF)
