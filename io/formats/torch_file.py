"""A file of ``torch.save``: a state_dict, also inside other dicts and lists. Only tensors and plain data are loaded.

torch maps the file, so rows are read on demand. To write it, torch needs every tensor at once: they are mapped, too,
from an unnamed file next to the new one.
"""

from __future__ import annotations

import pickle
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np

import penstock.interrupts as interrupts
from penstock.config.specs import WEIGHTS
from penstock.errors import InputError
from penstock.filesystem import atomic_files
from penstock.frames import Array
from penstock.io.formats.table_format import TableFormat, TablesToWrite, Tensor, first_bytes
from penstock.io.registry import Library

LIBRARY = Library("torch", "torch")
_TITLE = "a file of torch.save"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


def _tensors(path: Path, stack: ExitStack) -> tuple[dict[str, Tensor], dict[str, str]]:
    torch = LIBRARY.load(_TITLE)
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        (name,) = re.findall(r"GLOBAL '?([\w.]+)", str(error))[:1] or ["an unknown object"]
        problem = f"contains {name}, and only tensors and plain data are loaded; save a state_dict, with torch.save"
        raise InputError(problem, source=str(path)) from None
    except Exception as error:  # torch raises many types for a damaged file
        if "_use_new_zipfile_serialization" in str(error):
            problem = "not a file of torch.save, or in its format before 1.6; load it there and save it again"
            raise InputError(problem, source=str(path)) from None
        raise
    tensors, others = {}, {}
    for name, value in _leaves(state, ""):
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
            tensors[name] = tensor_of(value, torch)
        else:
            others[name] = f"no dense tensor, but {type(value).__name__}"
    return tensors, others


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what nested dicts and lists contain, with the path to it, joined by dots."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple) and not hasattr(value, "shape"):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        yield name, value
        return
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else key)


def tensor_of(value: Any, torch: Any) -> Tensor:
    """Return a tensor of torch as one to read."""
    value = value.detach()

    def read(start: int, stop: int) -> Array:
        rows = value[start:stop]
        array: Array = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        return array

    return Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."), read)


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    torch = LIBRARY.load("--format torch")
    folder = out.absolute().parent
    atomic_files.make_folders(folder)
    with tempfile.TemporaryFile(dir=folder) as scratch, atomic_files.publishing(out) as file:
        state: dict[str, Any] = {}
        for name in saved.tables:
            state |= {key: torch.from_numpy(array) for key, array in _mapped(scratch, saved, name).items()}
        try:
            torch.save(state, file)
        except RuntimeError as error:  # about the end of the file, which torch writes also after an error of the disk
            raise _first_cause(error) from None
    atomic_files.discard_orphans(out)
    return [out]


def _mapped(scratch: IO[bytes], saved: TablesToWrite, name: str) -> dict[str, Array]:
    """Write the arrays of a table to the end of a file, and return them mapped, by their names in the state_dict."""
    arrays: dict[str, Array] = {
        f"{name}.{'weight' if part == WEIGHTS else part}": rows for part, rows in saved.parts(name).items()
    }
    if (keys := saved.keys(name)) is not None:
        arrays[f"{name}.keys"] = keys
    mapped: dict[str, Array] = {}
    for key, array in arrays.items():
        interrupts.check()
        first = scratch.seek(0, 2)
        scratch.write(np.ascontiguousarray(array).data)
        scratch.flush()
        # Private: torch refuses arrays that are read-only.
        mapped[key] = np.memmap(scratch, array.dtype, "c", first, array.shape) if array.size else array
    return mapped


def _first_cause(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error


FORMAT = TableFormat(
    name="torch",
    title=_TITLE,
    library=LIBRARY,
    is_at=lambda path: first_bytes(path, 4) == b"PK\x03\x04" or (path.is_file() and path.suffix in _SUFFIXES),
    tensors=_tensors,
    write=_write,
    out="a file",
    has_keys=True,
)
