"""Weights of Keras: ``.weights.h5`` and earlier ``.h5``, which are HDF5 with a dataset per variable; shards of them;
and ``.keras``, a ZIP archive with such a file. Layers are called by their names in the model.

The file does not say which variables the optimizer's slots belong to: ``--map optimizer/vars/2=user/accumulators``.
"""

from __future__ import annotations

import zipfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from penstock.contrib.formats.numpy_files import rows_of
from penstock.io.registry import Library
from penstock.io.table_formats.table_format import (
    Contents,
    TableFormat,
    Tensor,
    first_bytes,
    indexed_shards,
    library_errors,
    zip_names,
)
from penstock.model.frames import Array

_LIBRARY = Library("h5py", "keras")
_TITLE = "a weights file of Keras (HDF5)"
_KERAS = "a model file of Keras"
_WEIGHTS = "model.weights.h5"  # in a model file


def _contents(path: Path, stack: ExitStack) -> Contents:
    library = _LIBRARY.load(_TITLE)
    contents = Contents({}, {})
    for place in indexed_shards(path, "Keras's weights") if path.suffix == ".json" else [path]:
        is_model = first_bytes(place, 4) == b"PK\x03\x04"
        opened: Any = place
        with library_errors(place, _KERAS if is_model else _TITLE):
            if is_model:
                archive = stack.enter_context(zipfile.ZipFile(place))
                (name, *_) = [name for name in archive.namelist() if name.endswith(_WEIGHTS)]
                opened = stack.enter_context(archive.open(name))
            file = stack.enter_context(library.File(opened, "r"))
        _add(contents, library, file, place)
    return contents


def _add(contents: Contents, library: Any, file: Any, place: Path) -> None:
    """Add the datasets of an HDF5 file."""

    def add(name: str, value: Any) -> None:
        if not isinstance(value, library.Dataset):
            return
        name = _called(name, value)
        if value.external or value.is_virtual:  # they could be any files of this machine
            contents.others[name] = "a dataset whose values are in other files, which are not read"
        elif value.dtype.kind in "OSU":
            contents.others[name] = "a string"
        elif value.attrs.get("dtype") == "bfloat16" and value.dtype.itemsize == 2:  # HDF5 has no such type
            contents.tensors[name] = Tensor(tuple(value.shape), "bfloat16", partial(_bfloat16_rows, value))
        else:
            contents.tensors[name] = Tensor(tuple(value.shape), value.dtype.name, partial(rows_of, value))

    with library_errors(place, _TITLE):
        file.visititems(add)


def _bfloat16_rows(dataset: Any, start: int, stop: int) -> Array:
    import ml_dtypes

    rows: Array = dataset[start:stop].view(ml_dtypes.bfloat16)
    return rows


def _called(name: str, dataset: Any) -> str:
    """Return ``layers/user/vars/0`` for ``layers/embedding/vars/0`` of a layer that the model calls user."""
    layer = dataset.parent.attrs.get("name")
    parts = name.split("/")
    if isinstance(layer, str) and len(parts) > 2 and parts[-2] == "vars" and parts[0] != "optimizer":
        parts[-3] = layer
    return "/".join(parts)


def _is_at(path: Path) -> bool:
    if first_bytes(path, 8) == b"\x89HDF\r\n\x1a\n" or path.name.endswith(".weights.json"):
        return True
    names = zip_names(path)
    return names is not None and (path.suffix == ".keras" or any(name.endswith(_WEIGHTS) for name in names))


FORMAT = TableFormat(
    name="keras",
    title=_TITLE,
    library=_LIBRARY,
    is_at=_is_at,
    contents=_contents,
)
