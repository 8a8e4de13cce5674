"""A source's parts and batches, and the guard around every call into Arrow.

What reads a container or an object makes a Part; what cuts frames takes it. Nothing here opens
anything.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

import penstock.interrupts as interrupts
from penstock.errors import InputError, PenstockError

END_KEY = b"penstock.end"

# What pyarrow, or a file object that it calls, is known to raise when the bytes are damaged.
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


@dataclass(eq=False)  # not frozen: there are thousands a second, and a frozen one takes four times as long to make
class Batch:
    """One record batch and where it stood.

    copied : where another process may write to its values: the same with values of its own
    """

    data: pa.RecordBatch
    index: int | None  # None: the source has no batches of its own (Parquet)
    first_row: int  # of the batch, counted over the part
    ends_frame: bool = False
    copied: Callable[[], pa.RecordBatch] | None = None

    def owned(self) -> pa.RecordBatch:
        """Its data, which nobody changes between one look and the next."""
        return self.data if self.copied is None else self.copied()


Batches = Generator[Batch, None, None]


@dataclass
class Part:
    """One schema and its batches. What is open for it is closed when the next part of its source is asked for.

    has_boundaries : whether a record batch means something (else frames need columns or a number of rows)
    ends_are_told : batches say where frames end, so that one that does not say so ends none
    batches : given the columns wanted, yields them; raises InputError at a damaged or missing end
    fraction : of this part read so far, None where its length is unknown
    has_checksums : whether what was read of it carries them
    verified : whether it was read to its end and had checksums, which all fitted
    """

    name: str
    schema: pa.Schema
    has_boundaries: bool
    batches: Callable[[list[str]], Batches]
    num_rows: int | None = None
    container: str = ""
    fraction: Callable[[], float | None] = field(default=lambda: None)
    verified: bool = False
    has_checksums: bool = False
    ends_are_told: bool = False

    def __post_init__(self) -> None:
        try:
            for column in self.schema:
                _read_names(column)
        except UnicodeDecodeError as error:
            raise InputError(f"a column's name is not UTF-8 ({error.reason})", source=self.name) from error


Parts = Generator[Part, None, None]


@dataclass
class Source:
    """Parts in order. ``fraction`` of the bytes read so far, where the length is known.

    parts : closing the generator closes what is open
    """

    name: str
    parts: Callable[[], Parts]
    fraction: Callable[[], float | None] = field(default=lambda: None)


def _read_names(field: pa.Field) -> None:
    """Raise UnicodeDecodeError where this field's name, or one inside it, is no text; pyarrow decodes late."""
    _ = field.name
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    for child in range(kind.num_fields):
        _read_names(kind.field(child))


@contextmanager
def arrow_errors(problem: str, source: str, batch: int | None = None) -> Iterator[None]:
    """Whatever Arrow makes of damaged bytes is an InputError; penstock's own errors and interrupts pass."""
    try:
        yield
    except PenstockError:
        raise
    except RAISED as error:
        interrupts.check()  # Arrow's calls over a network end with an error where a signal arrives
        raise InputError(f"{problem}: {reason(error)}", source=source, batch=batch) from error


def reason(error: BaseException) -> str:
    """The error's text, without the Python traceback that Arrow appends where a producer in Python failed."""
    return str(error).split(". Detail: Python exception", 1)[0].strip() or type(error).__name__


def ends_frame(metadata: Any) -> bool:
    """Whether a batch's custom metadata closes its frame."""
    return metadata is not None and END_KEY in dict(metadata)
