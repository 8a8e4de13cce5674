"""A checkpoint of TensorFlow, of ``tf.train.Checkpoint`` or a Saver, or that of a SavedModel.

A variable is read whole: TensorFlow has no other way. The names of TPUEmbedding are ``embedding/user`` and
``embedding/user/accumulators``.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from penstock.base.errors import InputError
from penstock.io.registry import Library
from penstock.io.table_formats.table_format import Contents, TableFormat, Tensor, WholeTensor, library_errors

_LIBRARY = Library("tensorflow", "tensorflow")
_TITLE = "a TensorFlow checkpoint"
_VARIABLE = "/.ATTRIBUTES/VARIABLE_VALUE"


def _prefix(path: Path) -> Path | None:
    """Return the path of a checkpoint without the suffix of its files; None: there is none."""
    if path.suffix == ".index" and path.is_file():
        return path.with_suffix("")
    indices = sorted(path.glob("*.index"))
    for prefix in (path, path / "variables" / "variables", *(file.with_suffix("") for file in indices[:1])):
        if prefix.with_name(f"{prefix.name}.index").is_file():
            if len(indices) > 1:
                raise InputError(f"holds {len(indices)} checkpoints; give one: {prefix}", source=str(path))
            return prefix
    return None


def _contents(path: Path, stack: ExitStack) -> Contents:
    library, prefix = _LIBRARY.load(_TITLE), _prefix(path)
    with library_errors(path, _TITLE):
        reader = library.train.load_checkpoint(str(prefix))
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    contents = Contents({}, {})
    for name in sorted(set(shapes) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}):
        if dtypes[name].name == "string":
            contents.others[_called(name)] = "a string"
        else:
            whole = WholeTensor(partial(reader.get_tensor, name))
            contents.tensors[_called(name)] = Tensor(tuple(shapes[name]), dtypes[name].name, whole)
    return contents


def _called(name: str) -> str:
    """Return the name of an object's variable without what TensorFlow adds: '/' in a part of a path is written '.S'."""
    if not name.endswith(_VARIABLE):
        return name
    return "/".join(part.replace(".S", "/").replace("..", ".") for part in name.removesuffix(_VARIABLE).split("/"))


FORMAT = TableFormat(
    name="tensorflow",
    title=_TITLE,
    library=_LIBRARY,
    is_at=lambda path: _prefix(path) is not None,
    contents=_contents,
)
