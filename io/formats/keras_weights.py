"""Weights of Keras, ``.weights.h5``: HDF5, a dataset per variable. Layers are called by their names in the model.

The file does not say which variables the optimizer's slots belong to: ``--map optimizer/vars/2=user/accumulators``.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from penstock.io.formats.numpy_folder import rows_of
from penstock.io.formats.table_format import TableFormat, Tensor, first_bytes
from penstock.io.registry import Library

_LIBRARY = Library("h5py", "keras")
_TITLE = "a weights file of Keras (HDF5)"


def _tensors(path: Path, stack: ExitStack) -> tuple[dict[str, Tensor], dict[str, str]]:
    library = _LIBRARY.load(_TITLE)
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if not isinstance(value, library.Dataset):
            return
        name = _called(name, value)
        if value.external or value.is_virtual:  # they could be any files of this machine
            others[name] = "its values are in other files, which are not read"
        else:
            tensors[name] = Tensor(tuple(value.shape), value.dtype.name, partial(rows_of, value))

    stack.enter_context(library.File(path, "r")).visititems(add)
    return tensors, others


def _called(name: str, dataset: Any) -> str:
    """Return ``layers/user/vars/0`` for ``layers/embedding/vars/0`` of a layer that the model calls user."""
    layer = dataset.parent.attrs.get("name")
    parts = name.split("/")
    if isinstance(layer, str) and len(parts) > 2 and parts[-2] == "vars" and parts[0] != "optimizer":
        parts[-3] = layer
    return "/".join(parts)


FORMAT = TableFormat(
    name="keras",
    title=_TITLE,
    library=_LIBRARY,
    is_at=lambda path: first_bytes(path, 8) == b"\x89HDF\r\n\x1a\n",
    tensors=_tensors,
)
