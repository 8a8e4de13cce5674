"""The header of a folder of shared tables: which files have which rows, and the words that change.

The file ``tables``::

    0     magic, 8 bytes          16   SHA-256 of the description
    8     format number, uint32   64   words, uint64 each (pyx/row_reads.pyx: StepWords)
    12    bytes of description    128  lineage and epoch, 64 bytes each, ASCII, ended by zeros
                                  256  words whose sequence is that of lineage and epoch
                                  4096 the description, JSON: constant

A reader trusts nothing of it: everything is checked here before any other file is opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import StateError, UsageError, short
from penstock.base.filesystem.state_files import parsed_json
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.frames import Int64
from penstock.model.row_encodings import ENCODINGS, FLOAT32, RowEncoding
from penstock.model.version import Version
from penstock.pyx.row_reads import StepWords
from penstock.rows.initializers import InitialRows

HEADER = "tables"  # the file
# The number of the format; a reader that knows no encoded rows refuses the second one.
MAGIC, FORMAT, ENCODED_FORMAT = b"penstock", 1, 2
WORDS_BEGIN, HISTORY_BEGIN, DESCRIPTION_BEGIN = 64, 128, 4096
MOST_BYTES = 64 << 20  # of a description
_TEXT_BYTES = 64  # of lineage and epoch
_SEQUENCE_BEGIN = HISTORY_BEGIN + 2 * _TEXT_BYTES
# ``StepWords.state``: rows are read; there is a next generation; a step failed half way.
OPEN, CLOSED, FAILED = 0, 1, 2

_HEAD = struct.Struct("<8sII32s")
# Kind, generation, number. The header has such a name until it is complete.
FILE_NAME = re.compile(r"(?:rows|pages|keys|tables)-[0-9]{1,18}-[0-9]{1,9}")
_MOST = 2**48  # of every count: products of three are checked without overflow in Python
_COUNTS = ("dim", "num_rows", "num_shards", "rows_per_shard", "shards_per_part", "row_floats")
_KEY_FIELDS = ("file", "salt", "expire_after", "absent")
_ABSENT_FIELDS = ("kind", "first", "second", "key")
_DRAWN_KINDS = ("normal", "uniform")
_KINDS = ("zero", "constant", "row_id", "vectors", *_DRAWN_KINDS)
_KEY_FORMS = {"vectors": r'\[".+", "[0-9a-f]{64}", ".*"\]', **dict.fromkeys(_DRAWN_KINDS, "[0-9a-f]{32}")}


class KeyFile(NamedTuple):
    """The keys of a dynamic table. salt, expire_after : as of RowKeys"""

    file: str
    salt: int
    expire_after: int
    absent: InitialRows


@dataclass(frozen=True)
class TableLayout:
    """Where the rows of a table lie.

    num_rows : ids are below it; of a table with keys, that many have a row at once
    num_shards, mod, rows_per_shard, shards_per_part : as in ``pyx.partition.destinations``
    row_floats : of a row with its slots, which follow the ``dim`` weights
    rows, pages : the files of every device: rows from ``first_float`` on, counters of pages from ``first_page`` on
    keys : of a dynamic table
    encoding : how weights are stored; the bytes of encoded ones fill ``num_words`` floats of a row
    """

    name: str
    dim: int
    num_rows: int
    num_shards: int
    mod: bool
    rows_per_shard: int
    shards_per_part: int
    row_floats: int
    first_float: int
    first_page: int
    rows: tuple[str, ...]
    pages: tuple[str, ...]
    id_type: str = "int64"
    keys: KeyFile | None = None
    encoding: str = FLOAT32.name

    @property
    def row_encoding(self) -> RowEncoding:
        return ENCODINGS[self.encoding]

    @property
    def num_words(self) -> int:
        """The floats that the weights of a row take."""
        return words_per_row(self.row_encoding, self.dim)

    @property
    def id_range(self) -> int:
        """The ids, as ``valid_ids`` takes them."""
        if self.keys is None:
            return self.num_rows
        return ANY_UINT64 if self.id_type == "uint64" else ANY_INT64

    def as_given(self, ids: Int64) -> npt.NDArray[Any]:
        """Return ids in their type."""
        return ids.view(self.id_type)


def words_per_row(rows: RowEncoding, dim: int) -> int:
    """Return the floats of 32 bits that hold the weights of an encoded row."""
    return -(-rows.row_bytes(dim) // 4)


@dataclass(frozen=True)
class Description:
    """The constant part of a header.

    generation : counts the headers of a folder
    boot : identifies the run of the machine in whose memory the rows are
    config : SHA-256 of the configuration; "": none
    threads : that have counters for each page
    files : name → bytes
    """

    generation: int
    boot: str
    config: str
    threads: int
    files: Mapping[str, int]
    tables: Sequence[TableLayout]


def packed(description: Description) -> bytes:
    """Return a header whose words are 0."""
    fields, number = asdict(description), FORMAT
    for table in fields["tables"]:
        if table["encoding"] == FLOAT32.name:
            del table["encoding"]
        else:
            number = ENCODED_FORMAT
    text = json.dumps(fields).encode()
    head = _HEAD.pack(MAGIC, number, len(text), hashlib.sha256(text).digest())
    return head.ljust(DESCRIPTION_BEGIN, b"\0") + text


def unpacked(data: bytes, path: Path) -> Description:
    """Return the description of a header. Raises StateError, which names ``path``, for anything but a whole header."""
    if len(data) < _HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise StateError(f"{path}: is no header of shared tables; expected a folder that --shared wrote")
    _, number, length, digest = _HEAD.unpack_from(data)
    if number not in (FORMAT, ENCODED_FORMAT):
        known = f"{FORMAT} and {ENCODED_FORMAT}"
        raise StateError(f"{path}: has format {number}, this version reads {known}; use the version that wrote it")
    text = data[DESCRIPTION_BEGIN:]
    if len(text) != length:
        raise StateError(f"{path}: truncated: {len(text):,} bytes of description, expected {length:,}")
    if hashlib.sha256(text).digest() != digest:
        raise StateError(f"{path}: damaged: its checksum does not match")
    try:
        return _description(_Fields(parsed_json(text)))
    except (ValueError, OverflowError) as error:
        raise StateError(f"{path}: damaged: {short(str(error))}") from None


class HeaderHistory:
    """Lineage and epoch in a header. header : uint8 (n,), its memory; read-only for a reader"""

    def __init__(self, header: npt.NDArray[np.uint8]) -> None:
        self._texts = header[HISTORY_BEGIN:_SEQUENCE_BEGIN].reshape(2, _TEXT_BYTES)
        self._words = StepWords(header[_SEQUENCE_BEGIN : _SEQUENCE_BEGIN + 64].view(np.uint64))

    def write(self, version: Version) -> None:
        """Store those of a version, whose texts are no longer."""
        texts = [text.encode("ascii").ljust(_TEXT_BYTES, b"\0") for text in (version.lineage, version.epoch)]
        self._words.begin()
        self._texts[:] = np.frombuffer(b"".join(texts), np.uint8).reshape(2, -1)
        self._words.end(0)

    def read(self, step: int) -> Version:
        """Return the version of a step with lineage and epoch, which one call of ``write`` stored.

        Raises StateError if they are none.
        """
        while True:
            sequence = self._words.settled()
            lineage, epoch = (text.tobytes().rstrip(b"\0").decode("ascii", "replace") for text in self._texts)
            if self._words.is_still(sequence):
                try:
                    return Version.of(lineage, epoch, step)
                except UsageError as error:
                    raise StateError(f"the header of shared tables is damaged: {error}") from None


# ---- hostile input


class _Fields:
    """The fields of a JSON object. Raises ValueError for a missing one, or one of another type or range."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {type(value).__name__}")
        self.values = value

    def get(self, name: str, kind: type, noun: str) -> Any:
        value = self.values.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"'{name}': expected {noun}, got {short(repr(value))}")
        return value

    def whole(self, name: str, least: int = 0, most: int = _MOST) -> int:
        value: int = self.get(name, int, "a whole number")
        if not least <= value <= most:
            raise ValueError(f"'{name}': expected {least} to {most}, got {value}")
        return value

    def text(self, name: str, matches: Callable[[str], object] = str.isprintable) -> str:
        value: str = self.get(name, str, "a text")
        if not matches(value):
            raise ValueError(f"'{name}': got '{short(value)}'")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"'{name}': expected a number, got {short(repr(value))}")
        return float(value)

    def files(self, name: str) -> tuple[str, ...]:
        return tuple(file_name(text) for text in self.get(name, list, "a list"))


def file_name(text: Any) -> str:
    """Return the name of a file of the folder. Raises ValueError for anything else."""
    if not isinstance(text, str) or not FILE_NAME.fullmatch(text):
        raise ValueError(f"expected the name of a file of rows, pages or keys, got {short(repr(text))}")
    return text


def _description(fields: _Fields) -> Description:
    files = _Fields(fields.get("files", dict, "an object"))
    sizes = {file_name(name): files.whole(name, 1) for name in files.values}
    tables = tuple(_table(_Fields(table), sizes) for table in fields.get("tables", list, "a list"))
    if len({table.name for table in tables}) != len(tables):
        raise ValueError("two tables have one name")
    return Description(
        fields.whole("generation", 1),
        fields.text("boot"),
        fields.text("config"),
        fields.whole("threads", 1, 2**16),
        sizes,
        tables,
    )


def _table(fields: _Fields, sizes: Mapping[str, int]) -> TableLayout:
    table = TableLayout(
        name=fields.text("name"),
        mod=fields.get("mod", bool, "true or false"),
        rows=fields.files("rows"),
        pages=fields.files("pages"),
        id_type=fields.text("id_type", ("int64", "uint64").__contains__),
        keys=None if fields.values.get("keys") is None else _key_file(fields.get("keys", list, "a list")),
        encoding=fields.text("encoding", ENCODINGS.__contains__) if "encoding" in fields.values else FLOAT32.name,
        **{count: fields.whole(count, 1) for count in _COUNTS},
        **{first: fields.whole(first) for first in ("first_float", "first_page")},
    )
    if not table.rows or len(table.rows) != len(table.pages):
        raise ValueError(f"table '{table.name}': {len(table.rows)} files of rows, {len(table.pages)} of pages")
    keys = (table.keys.file,) if table.keys is not None else ()
    for name in (*table.rows, *table.pages, *keys):
        if name not in sizes:
            raise ValueError(f"table '{table.name}': the file {name} is not listed")
    return table


def _key_file(values: list[Any]) -> KeyFile:
    if len(values) != len(_KEY_FIELDS) or not isinstance(values[3], list):
        raise ValueError("'keys': expected four values")
    fields = _Fields(dict(zip(_KEY_FIELDS, values, strict=True)))
    if len(values[3]) != len(_ABSENT_FIELDS):
        raise ValueError("'absent': expected four values")
    absent = _Fields(dict(zip(_ABSENT_FIELDS, values[3], strict=True)))
    kind = absent.text("kind", _KINDS.__contains__)
    return KeyFile(
        file_name(values[0]),
        fields.whole("salt", 0, 2**64 - 1),
        fields.whole("expire_after", -1),
        InitialRows(
            kind,
            absent.number("first"),
            absent.number("second"),
            absent.text("key", re.compile(_KEY_FORMS.get(kind, "")).fullmatch),
        ),
    )
