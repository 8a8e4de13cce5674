"""The parts and batches of a source, and the guard around every call into Arrow.

The readers of containers and objects create Parts; the framing consumes them. This module opens
nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, PenstockError
from penstock.io.error_tables import OBJECT_STORE_ERRORS
from penstock.io.table_formats.unread_formats import ENCRYPTED_PARQUET
from penstock.model.frames import Position

END_KEY, STEP_KEY = b"penstock.end", b"penstock.step"

# The errors that pyarrow, or a file object that it calls, is known to raise for damaged bytes.
RAISED = (
    pa.ArrowException,
    ArithmeticError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


@dataclass(eq=False)  # not frozen: there are thousands a second, and creating a frozen one takes four times as long
class Batch:
    """One record batch and its location. source : the name of its part

    ends_frame : whether its metadata ends its frame; step : of that frame, if it has no rows
    after : in a source that can seek, where it continues after a number of rows of the batch
    """

    source: str
    data: pa.RecordBatch
    index: int | None  # None: the source has no batches (Parquet)
    first_row: int  # of the batch, counted over the part
    ends_frame: bool = False
    step: int | None = None
    after: Callable[[int], Position] | None = None

    @property
    def num_rows(self) -> int:
        return int(self.data.num_rows)

    @property
    def is_frame_of_no_rows(self) -> bool:
        """Return whether it says that a producer has no rows in a step."""
        return self.ends_frame and self.step is not None and not self.num_rows

    def error(self, row: int, problem: str, column: str | None, reason: str | None = None) -> InputError:
        """row : of the batch"""
        position = row if self.index is not None else self.first_row + row
        return InputError(problem, source=self.source, batch=self.index, row=position, column=column, reason=reason)


@dataclass(frozen=True)
class PlainRoles:
    """The columns of plain batches that are read, and how many batches at once.

    table : of all rows; "" if ``table_column``, a dictionary, says it of each
    step, gradient : None: there is none, or it is not read; width : floats of a gradient, 0: its list says how many
    most_rows : of several batches; ends_frames : whether every batch ends its frame
    """

    table: str
    id: str
    gradient: str | None
    step: str | None
    width: int
    most_rows: int
    ends_frames: bool
    table_column: str | None = None


Batches = Generator[Any, None, None]  # each a Batch or, for a part with plain roles, a BatchRun


@dataclass
class Part:
    """One schema and its batches. Requesting the next part of the source closes the files of this one.

    has_boundaries : whether record batches delimit frames (else frames need columns or a number of rows)
    ends_are_marked : whether metadata marks the batches that end a frame, so that other batches end none
    batches : given the columns in use, yields them; raises InputError at a damaged or missing end
    total : batches, rows or bytes of it, None where its length is unknown; done : of these, read so far
    has_checksums : whether the batches read so far carry checksums
    plain : columns that are read from several plain batches at once, where the part can; None: all batches one by one
    verifies : whether checksums are checked, for which every byte is read
    verified : whether it was read to its end, with checksums that all match
    """

    name: str
    schema: pa.Schema
    has_boundaries: bool
    batches: Callable[[list[str]], Batches]
    container: str = ""
    total: int | None = None
    done: int = 0
    plain: PlainRoles | None = None
    verifies: bool = True
    verified: bool = False
    has_checksums: bool = False
    ends_are_marked: bool = False

    def __post_init__(self) -> None:
        try:
            for column in self.schema:
                _read_names(column)
        except UnicodeDecodeError as error:
            raise InputError(f"a column's name is not UTF-8 ({error.reason})", source=self.name) from error

    def fraction(self) -> float | None:
        """Return the share of it read so far; None: its length is unknown."""
        return self.done / max(1, self.total) if self.total is not None else None


Parts = Generator[Part, None, None]


class Source:
    """Parts in order.

    open_parts : called for every reading; closing the generator closes what is open
    num_parts : the number of parts, if their lengths can be known; None: it is one, whose length may be unknown
    is_ready : whether it can be read ahead: it never waits for data, or reports its pauses
    """

    def __init__(
        self, name: str, open_parts: Callable[[], Parts], num_parts: int | None = None, is_ready: bool = False
    ) -> None:
        self.name, self.is_ready = name, is_ready
        self._open_parts, self._num_parts = open_parts, num_parts
        self._num_read = 0  # parts before this one
        self._part: Part | None = None

    def parts(self) -> Parts:
        with closing(self._open_parts()) as parts:
            for self._num_read, self._part in enumerate(parts):
                yield self._part

    def fraction(self) -> float | None:
        """Return the share of the bytes read so far, if the length is known."""
        if self._part is None:
            return None if self._num_parts is None else 0.0
        inside, num_parts = self._part.fraction(), self._num_parts or 1
        if inside is None and num_parts == 1:
            return None
        return (self._num_read + (inside or 0.0)) / num_parts


def _read_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError if the name of this field, or of one inside it, is not text; pyarrow decodes lazily."""
    _ = field.name
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    for child in range(kind.num_fields):
        _read_names(kind.field(child))


@contextmanager
def arrow_errors(problem: str, source: str, batch: int | None = None, column: str | None = None) -> Iterator[None]:
    """Convert Arrow's errors about damaged bytes to InputError; penstock's errors and interrupts pass."""
    try:
        yield
    except PenstockError:
        raise
    except RAISED as error:
        if "://" in source and isinstance(error, OSError) and OBJECT_STORE_ERRORS.is_refusal(error):
            raise OBJECT_STORE_ERRORS.converted(error, source, OSError) from error
        raise input_error(error, problem, source, batch, column) from error


def input_error(
    error: BaseException, problem: str, source: str, batch: int | None = None, column: str | None = None
) -> InputError:
    """Return the InputError of an error about damaged bytes. Raises KeyboardInterrupt after a signal."""
    interrupts.check()  # a signal ends Arrow's network calls with an error
    if "decrypt" in str(error):
        return InputError(ENCRYPTED_PARQUET, source=source)
    return InputError(f"{problem}: {reason(error)}", source=source, batch=batch, column=column)


def reason(error: BaseException) -> str:
    """Return the error's text, without the Python traceback that Arrow appends if a producer in Python failed."""
    if isinstance(error, UnicodeEncodeError):
        return "its name is not UTF-8, and Arrow knows no other names; rename it"
    return str(error).split(". Detail: Python exception", 1)[0].strip() or type(error).__name__


def data_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of the rows of a batch; with views, before pyarrow 24, those of its buffers."""
    try:
        return int(batch.nbytes)
    except pa.ArrowTypeError:
        return int(batch.get_total_buffer_size())


def end_of_frame(metadata: Any, source: str, index: int) -> tuple[bool, int | None]:
    """Return whether a batch's custom metadata ends its frame, and the step that it names, for a frame without rows."""
    fields = {} if metadata is None else dict(metadata)
    if STEP_KEY not in fields:
        return END_KEY in fields, None
    try:
        return END_KEY in fields, checked_step(int(fields[STEP_KEY]))
    except ValueError:
        return END_KEY in fields, checked_step(fields[STEP_KEY], source, index)


def checked_step(step: Any, source: str = "", index: int | None = None) -> int:
    """Return the step that a batch's metadata names. Raises InputError."""
    if type(step) is not int or not -(1 << 63) <= step < 1 << 63:
        problem = f"metadata {STEP_KEY.decode()}: expected an int64, got {step!r:.50}"
        raise InputError(problem, source=source, batch=index)
    return step
