"""The vectors of a file that the rows of a table start from, by id or key. Others start from zeros.

Files of torch, NumPy and safetensors are mapped, Parquet is read. The digest is that of the whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from penstock.base.errors import InputError, StateError, listed
from penstock.base.validation import NO_URI
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.config.specs import WEIGHTS, TableSpec
from penstock.model.config.tables import FromFile
from penstock.model.frames import Float32, Int64

if TYPE_CHECKING:
    from penstock.io.table_formats.table_format import Tensor


class VectorFile(NamedTuple):
    """A file of vectors. path : absolute; digest : SHA-256 of its bytes, hexadecimal"""

    path: str
    digest: str

    @classmethod
    def at(cls, path: str) -> VectorFile:
        """Return the file as it is now. Raises InputError if it cannot be read."""
        if "://" in path:
            raise InputError(f"initial vectors: {NO_URI}", source=path)
        try:
            status = os.stat(path)
            if not Path(path).is_file():
                raise InputError("expected a file of vectors", source=path)
            digest = _digest(os.path.abspath(path), status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", source=path) from None
        return cls(os.path.abspath(path), digest)


class Vectors:
    """The vectors of a table. ids : int64, ascending; None: 0, 1, 2, …; rows : float32 (n, dim)"""

    def __init__(self, ids: Int64 | None, rows: Float32) -> None:
        self._ids, self._rows = ids, rows

    @property
    def ids(self) -> Int64:
        """The ids that have a vector, ascending."""
        return np.arange(len(self._rows)) if self._ids is None else self._ids

    def fill(self, keys: npt.NDArray[np.int64], out: Float32) -> None:
        """Write the vectors of keys to ``out``, zeros where there are none: float32 (n, dim)."""
        places = keys if self._ids is None else np.searchsorted(self._ids, keys)
        found = (places >= 0) & (places < len(self._rows))
        if self._ids is not None:
            found[found] = self._ids[places[found]] == keys[found]
        out[~found] = 0
        out[found] = self._rows[places[found]]


# By table, file, range of ids and dim; whoever fills rows keeps what is open.
_OPENED: WeakValueDictionary[tuple[str, VectorFile, int, int], Vectors] = WeakValueDictionary()


def file_of(spec: TableSpec) -> VectorFile | None:
    """Return the file that a table starts from; None: it starts otherwise. Raises InputError if it cannot be read."""
    return VectorFile.at(spec.initializer.path) if isinstance(spec.initializer, FromFile) else None


def open_vectors(spec: TableSpec) -> Vectors:
    """Return the vectors of a table. Raises InputError for a file that does not fit it."""
    file, size = file_of(spec), spec.vocabulary_size
    assert file is not None
    if spec.dynamic is not None:
        size = ANY_UINT64 if spec.id_type == "uint64" else ANY_INT64
    return _opened(spec.drawn_as, file, size, spec.dim)


def described(spec: TableSpec) -> str:
    """Return what ``vectors_of`` opens, as text. Raises InputError if the file cannot be read."""
    file = file_of(spec)
    assert file is not None
    return json.dumps([*file, spec.drawn_as])


def vectors_of(text: str, id_type: str, dim: int) -> Vectors:
    """Return the vectors of a dynamic table, of this process or of another one.

    text : of ``described``. Raises StateError: the file is gone or has changed; InputError: it does not fit the table
    """
    path, digest, table = json.loads(text)
    file, size = VectorFile(path, digest), ANY_UINT64 if id_type == "uint64" else ANY_INT64
    if (vectors := _OPENED.get((table, file, size, dim))) is None:
        check(file, f"table '{table}'")
        vectors = _opened(table, file, size, dim)
    return vectors


def check(file: VectorFile, place: str) -> None:
    """Raise StateError unless a file is as it was. place : who needs it, for the message"""
    needs = f"{place} needs the vectors that its rows start from"
    try:
        now = VectorFile.at(file.path)
    except InputError as error:
        raise StateError(f"{needs}: {error}; put back the file as it was") from None
    if now.digest != file.digest:
        raise StateError(
            f"{needs}, and {file.path} has changed: SHA-256 {now.digest[:12]}…, not {file.digest[:12]}…; put back the "
            "file as it was"
        )


@lru_cache(64)
def _digest(path: str, *_: int) -> str:
    """Return the SHA-256 of a file. _ : what differs in another one of that path"""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(table: str, file: VectorFile, size: int, dim: int) -> Vectors:
    from penstock.io.table_formats.table_format import first_bytes, format_of

    path = Path(file.path)
    if (vectors := _OPENED.get((table, file, size, dim))) is None:
        if first_bytes(path, 4) == b"PAR1" or path.suffix == ".parquet":
            vectors = _of_parquet(path, table, size, dim)
        else:
            contents = format_of(path).contents
            assert contents is not None  # only a folder is Parquet
            with ExitStack() as stack:
                vectors = _of_tensors(contents(path, stack).tensors, file.path, table, size, dim)
        _OPENED[table, file, size, dim] = vectors
    return vectors


def _of_parquet(path: Path, table: str, size: int, dim: int) -> Vectors:
    from penstock.io.table_files import read_vectors

    blocks = list(read_vectors(path, table, size, dim))
    ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in blocks)])
    rows = np.concatenate([np.zeros((0, dim), np.float32), *(rows for _, rows in blocks)])
    if (ids[1:] > ids[:-1]).all():
        return Vectors(ids, rows)
    order = np.argsort(ids)
    return Vectors(ids[order], rows[order])


def _of_tensors(tensors: dict[str, Tensor], source: str, table: str, size: int, dim: int) -> Vectors:
    from penstock.io.table_formats.tensor_blocks import blocks
    from penstock.io.table_formats.tensor_names import KEYS, WantedTable, guessed_part

    matrices = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    named = [name for name in matrices if name == table or guessed_part(name) == (table, WEIGHTS)]
    chosen = matrices if len(matrices) == 1 else named
    if len(chosen) != 1:
        problem = f"expected one tensor of vectors, or one that is named like table '{table}'"
        raise InputError(f"{problem}; there: {listed(tensors) or 'nothing'}", source=source)
    (name,) = chosen
    tensor, dynamic = tensors[name], size in (ANY_INT64, ANY_UINT64)
    place = f"'{name}', the initial rows of table '{table}'"
    if tensor.dtype != "float32":
        raise InputError(f"{place}: expected float32, got {tensor.dtype}; convert the vectors first", source=source)
    parts, num_rows = {WEIGHTS: name}, tensor.shape[0]
    if tensor.shape[1] != dim or (not dynamic and num_rows > size):
        expected = f"({'rows' if dynamic else f'at most {size}'}, {dim})"
        raise InputError(f"{place}: expected shape {expected}, got {tensor.shape}", source=source)
    if dynamic:
        parts[KEYS] = _keys_name(tensors, source, table, size, num_rows)
    wanted = WantedTable(table, "", {WEIGHTS: dim}, None if dynamic else num_rows, None, None)
    ids = [block for block, _ in blocks(tensors, wanted, parts, source, Counter())]  # of finite rows
    rows = np.ascontiguousarray(tensor.read(0, num_rows), np.float32)
    if not dynamic:
        return Vectors(None, rows)
    keys = np.concatenate([np.zeros(0, np.int64), *ids])
    order = np.argsort(keys)
    return Vectors(keys[order], rows[order])


def _keys_name(tensors: dict[str, Tensor], source: str, table: str, size: int, num_rows: int) -> str:
    """Return the name of the tensor with the keys of a dynamic table."""
    dtype = "uint64" if size == ANY_UINT64 else "int64"
    names = [name for name in ("keys", f"{table}/keys", f"{table}.keys") if name in tensors]
    if not names or tensors[names[0]].shape != (num_rows,) or tensors[names[0]].dtype != dtype:
        problem = f"table '{table}' is dynamic: expected also a tensor 'keys' of {dtype} and shape ({num_rows},)"
        raise InputError(f"{problem}; there: {listed(tensors)}", source=source)
    return names[0]
