"""safetensors: a file with a JSON header and the bytes of every tensor, or a folder of them, as Hugging Face has.

Its library reads the header, and rows are read from the mapped file: the library copies them. It is written here: the
library would need all tensors in memory at once.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, listed
from penstock.base.filesystem import atomic_files
from penstock.io.registry import Library
from penstock.io.table_formats.table_format import (
    Contents,
    TableFormat,
    TablesToWrite,
    Tensor,
    arrays_of,
    first_bytes,
    indexed_shards,
    library_errors,
)
from penstock.model.config.specs import WEIGHTS
from penstock.model.row_encodings import FLOAT32, ROWS_KEY

_LIBRARY = Library("safetensors", "safetensors")
_TITLE = "a safetensors file"
_INDEX = "*.safetensors.index.json"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "I64": "int64", "U64": "uint64"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BYTES = {"U8": 1, "BF16": 2, "F32": 4, "I64": 8, "U64": 8}  # of what is written
_ENCODED = {"float32": "F32", "bfloat16": "BF16", "int8": "U8"}  # encoding of the weights → dtype
_ALIGNMENT = 8  # of the first tensor, in bytes


def _contents(path: Path, stack: ExitStack) -> Contents:
    import ml_dtypes  # noqa: F401 (NumPy knows bfloat16 by it)

    library = _LIBRARY.load(_TITLE)
    contents = Contents({}, {})
    for place in [path] if path.is_file() else _files(path):
        with library_errors(place, _TITLE):
            file = stack.enter_context(library.safe_open(place, framework="numpy"))
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            mapped = _Mapped(place)
        for name, rows in slices.items():
            if name in contents.tensors:
                raise InputError(f"'{name}' is in two of its files; give one of them", source=str(path))
            contents.tensors[name] = mapped.tensor(name, rows.get_dtype(), tuple(rows.get_shape()))
    return contents


def _files(folder: Path) -> list[Path]:
    """Return the files that the index of a folder names, all of them without an index."""
    indices = sorted(folder.glob(_INDEX))
    if len(indices) > 1:
        several = listed(index.name for index in indices)
        raise InputError(f"has several indices ({several}); give a single file", source=str(folder))
    if not indices:
        return sorted(folder.glob("*.safetensors"))
    return indexed_shards(indices[0], "safetensors")


class _Mapped:
    """The tensors of one file, whose header the library has validated."""

    def __init__(self, path: Path) -> None:
        self._memory = np.memmap(path, np.uint8, "r")
        self._begin = 8 + int.from_bytes(self._memory[:8].tobytes(), "little")
        self._header = json.loads(self._memory[8 : self._begin].tobytes())

    def tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        first, end = self._header[name]["data_offsets"]
        memory = self._memory[self._begin + first : self._begin + end]

        def read(start: int, stop: int) -> Any:
            return memory.view(np.dtype(_DTYPES[dtype])).reshape(shape)[start:stop]

        return Tensor(shape, _DTYPES.get(dtype, dtype), read)


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    header: dict[str, Any] = {"__metadata__": {"penstock.global_step": str(step)}}
    if saved.rows is not FLOAT32:
        header["__metadata__"][ROWS_KEY.decode()] = saved.rows.name
    end = 0
    for name in saved.tables:
        keys, num_rows = saved.keys(name), saved.num_rows(name)
        entries: list[tuple[str, str, list[int]]] = []
        for part, dim in saved.part_dims(name).items():
            dtype = _ENCODED[saved.rows.name] if part == WEIGHTS else "F32"
            entries.append((part, dtype, [num_rows, dim // 2 if dtype == "BF16" else dim]))  # of bytes
        entries += [] if keys is None else [("keys", _NAMES[keys.dtype.name], [num_rows])]
        for part, dtype, shape in entries:
            first, end = end, end + int(np.prod(shape)) * _BYTES[dtype]
            header[f"{name}/{part}"] = {"dtype": dtype, "shape": shape, "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-len(text) % _ALIGNMENT + len(text))
    atomic_files.make_folders(out.absolute().parent)
    with atomic_files.publishing(out) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in saved.tables:
            for array in arrays_of(saved, name).values():
                interrupts.check()
                file.write(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
    atomic_files.discard_orphans(out)
    return [out]


def _is_at(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("*.safetensors")) or any(path.glob(_INDEX))
    start = first_bytes(path, 9)
    if path.is_file() and path.suffix == ".safetensors":
        return True
    return start[8:] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size


FORMAT = TableFormat(
    name="safetensors",
    title=_TITLE,
    library=_LIBRARY,
    is_at=_is_at,
    contents=_contents,
    write=_write,
    out="a file",
    has_keys=True,
)
