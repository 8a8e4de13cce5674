"""A file of ``torch.save``: a state_dict, also inside other dicts and lists. Only tensors and plain data are loaded,
with NumPy's numbers and arrays. No class of the user is imported: ``torch_pickles`` finds where a refused one is.

torch maps the file, so rows are read on demand. To write it, torch needs every tensor at once: they are mapped, too,
from an unnamed file next to the new one. Slots and keys are in a file of their own: torch's ``load_state_dict`` refuses
a state_dict with more than a model's parameters.
"""

from __future__ import annotations

import codecs
import pickle
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError
from penstock.base.filesystem import atomic_files
from penstock.contrib.formats.numpy_files import rows_of
from penstock.contrib.formats.torch_pickles import refusal
from penstock.contrib.formats.torch_states import groups_of, states_of, with_names
from penstock.io.registry import Library
from penstock.io.table_formats.table_format import (
    Contents,
    TableFormat,
    TablesToWrite,
    Tensor,
    arrays_of,
    first_bytes,
    leaves,
    library_errors,
    zip_names,
)
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array
from penstock.model.row_encodings import BFLOAT16

LIBRARY = Library("torch", "torch")
_TITLE = "a file of torch.save"
_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"  # a pickle of torch's magic number


def _contents(path: Path, stack: ExitStack) -> Contents:
    torch = LIBRARY.load(_TITLE)
    names = zip_names(path)
    if names and any(name.endswith("/constants.pkl") for name in names):
        save = f"torch.save(torch.jit.load({str(path)!r}).state_dict(), NEW)"
        raise InputError(f"a TorchScript archive, of torch.jit.save; save its state_dict: {save}", source=str(path))
    with library_errors(path, _TITLE), torch.serialization.safe_globals(_numpy_globals()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about kinds of tensors that are skipped
        try:
            state = torch.load(path, map_location="cpu", mmap=names is not None, weights_only=True)
        except pickle.UnpicklingError as error:
            (name,) = re.findall(r"GLOBAL '?([\w.]+)", str(error))[:1] or ["an unknown class"]
            if "weights only" not in str(error).lower():
                raise  # it is damaged
            raise InputError(refusal(path, name, names or ()), source=str(path)) from None
    contents, plain = Contents({}, {}), dict[str, Any]()
    for keys, value in leaves(state):
        name = ".".join(map(str, keys)) or path.stem  # a tensor alone
        if isinstance(value, bool | int | float | str):
            plain[name] = value
        elif isinstance(value, torch.Tensor) and not value.ndim and not value.is_meta and not value.is_complex():
            plain[name] = value.item()
        if name in contents.tensors:
            raise InputError(f"'{name}' is two of its tensors, by keys with dots; save one of them", source=str(path))
        if isinstance(value, np.ndarray) and value.ndim:
            contents.tensors[name] = Tensor(value.shape, value.dtype.name, partial(rows_of, value))
        elif not isinstance(value, torch.Tensor):
            contents.others[name] = f"no dense tensor, but {type(value).__name__}"
        elif value.is_quantized:
            contents.others[name] = "a quantized tensor; save it after dequantize()"
        elif value.is_meta:
            contents.others[name] = "a tensor on torch's meta device, which has no values"
        elif value.is_nested:
            contents.others[name] = "a nested tensor; save it after to_padded_tensor()"
        elif value.layout != torch.strided:
            contents.others[name] = f"a {str(value.layout).removeprefix('torch.')} tensor; save it after to_dense()"
        else:
            contents.tensors[name] = tensor_of(value, torch)
    named = with_names(contents, groups_of(state), str(path))
    return named._replace(states=states_of(named, plain))


def _numpy_globals() -> list[Any]:
    """Return what NumPy's numbers and arrays are pickled by, under the names of NumPy 1 and 2: none runs code."""
    functions: list[Any] = [np.int64(0).__reduce__()[0], np.zeros(0).__reduce__()[0]]
    named = [(made, f"numpy.{core}.multiarray.{made.__name__}") for made in functions for core in ("core", "_core")]
    dtypes = [type(np.dtype(code)) for code in "?bBhHiIlLqQefdSU"]
    return [*named, np.ndarray, np.dtype, *dtypes, codecs.encode]


def tensor_of(value: Any, torch: Any) -> Tensor:
    """Return a tensor of torch as one to read."""
    value = value.detach()

    def read(start: int, stop: int) -> Array:
        rows = value[start:stop]
        # With force: views that are conjugated or negative are resolved.
        array: Array = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)
        return array

    return Tensor(tuple(value.shape), str(value.dtype).removeprefix("torch."), read)


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    torch = LIBRARY.load("--format torch")
    folder = out.absolute().parent
    atomic_files.make_folders(folder)
    weights, slots = dict[str, Any](), dict[str, Any]()
    with tempfile.TemporaryFile(dir=folder) as scratch, ExitStack() as stack:
        for name in saved.tables:
            for part, array in _mapped(scratch, saved, name).items():
                state, key = (weights, "weight") if part == WEIGHTS else (slots, part)
                tensor = torch.from_numpy(array)
                is_bfloat16 = part == WEIGHTS and saved.rows is BFLOAT16
                state[f"{name}.{key}"] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
        files = [stack.enter_context(_saved(torch, weights, out))]
        beside = out.with_name(f"{out.stem}.slots{out.suffix}")
        if slots:
            files.append(stack.enter_context(_saved(torch, slots, beside)))
        else:
            atomic_files.remove(beside)  # of an earlier export
        for file in files:
            file.publish()
        for place in {file.path.parent for file in files}:
            atomic_files.sync_folder(place)
    written = [out, beside] if slots else [out]
    for path in written:
        atomic_files.discard_orphans(path)
    return written


@contextmanager
def _saved(torch: Any, state: dict[str, Any], path: Path) -> Iterator[atomic_files.File]:
    """Give the complete file of a state_dict, which has no name yet. It is removed if the block fails."""
    file = atomic_files.File(path)
    with file.all_or_nothing():
        try:
            torch.save(state, file)
        except RuntimeError as error:  # about the end of the file, which torch writes also after an error of the disk
            raise _first_cause(error) from None
        file.complete()
        yield file


def _mapped(scratch: IO[bytes], saved: TablesToWrite, name: str) -> dict[str, Array]:
    """Write the arrays of a table to the end of a file, and return them mapped, by part."""
    mapped: dict[str, Array] = {}
    for key, array in arrays_of(saved, name).items():
        interrupts.check()
        first = scratch.seek(-scratch.seek(0, 2) % 8, 2)
        scratch.write(np.ascontiguousarray(array).data)
        scratch.flush()
        # Private: torch refuses arrays that are read-only.
        mapped[key] = np.memmap(scratch, array.dtype, "c", first, array.shape) if array.size else array
    return mapped


def _first_cause(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error


def _is_at(path: Path) -> bool:
    names = zip_names(path)
    if names is None:
        return first_bytes(path, len(_BEFORE_1_6)) == _BEFORE_1_6
    if not names:  # damaged
        return path.suffix in _SUFFIXES
    return any(name.endswith("/data.pkl") for name in names)


FORMAT = TableFormat(
    name="torch",
    title=_TITLE,
    library=LIBRARY,
    is_at=_is_at,
    contents=_contents,
    write=_write,
    out="a file of the weights, and one with .slots in its name",
    has_keys=True,
)
