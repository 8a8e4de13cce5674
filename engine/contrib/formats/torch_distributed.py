"""A checkpoint of ``torch.distributed.checkpoint`` (DCP): a folder of shards, and a pickle of where they are.

torch would load any pickle. This one may name only the classes of DCP's metadata, so that no file runs code. The
shards are loaded as tensors and plain data only. Of the entries that are not tensors, only the names of an optimizer's
parameters are read.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from penstock.base.errors import InputError
from penstock.contrib.formats.torch_file import LIBRARY, tensor_of
from penstock.contrib.formats.torch_states import Group, with_names
from penstock.io.table_formats.table_format import Contents, TableFormat, Tensor, check_shards, library_errors
from penstock.model.frames import Array

_TITLE = "a checkpoint of torch.distributed.checkpoint"
_METADATA = ".metadata"
_DCP = "torch.distributed.checkpoint"
_ENUM = "_MEM_FORMAT_ENCODING"
_NUMBERED = re.compile(r"((?:.+\.)?)state\.\d+\.")
_NAMES = re.compile(r"((?:.+\.)?)param_groups\.(\d+)\.param_names")
# What torch 2.6 and later write, by module; also its dtypes, and paths of any system.
_CLASSES = {
    f"{_DCP}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        _ENUM,
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}
_PATHS = {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles DCP's metadata, and refuses every other class."""

    def __init__(self, data: bytes, torch: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._torch = torch

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePath
        if (module, name) == ("builtins", "getattr"):  # so Python 3.11.2 pickles a member of an Enum
            return self._member
        if module == "torch" and isinstance(dtype := getattr(self._torch, name, None), self._torch.dtype):
            return dtype
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise _ForeignClassError(f"{module}.{name}")

    def _member(self, owner: Any, name: str) -> Any:
        if owner is not super().find_class(f"{_DCP}.metadata", _ENUM):
            raise _ForeignClassError("builtins.getattr")
        return owner[name]


class _ForeignClassError(pickle.UnpicklingError):
    """A pickle names a class that is not one of DCP's."""


def _contents(path: Path, stack: ExitStack) -> Contents:
    torch, dcp = LIBRARY.load(_TITLE), LIBRARY.load(_TITLE, ".distributed.checkpoint")
    place = path / _METADATA
    contents = Contents({}, {})
    with library_errors(place, _TITLE):  # whatever a damaged pickle, or one of other attributes, causes
        try:
            metadata = _MetadataUnpickler(place.read_bytes(), torch).load()
        except _ForeignClassError as error:
            problem = f"names {error}, which no such checkpoint contains; nothing of it was loaded"
            raise InputError(problem, source=str(place)) from None
        files = {str(info.relative_path) for info in metadata.storage_data.values()}
        for name, entry in dict(metadata.state_dict_metadata).items():
            if isinstance(entry, dcp.metadata.TensorStorageMetadata):
                dtype = str(entry.properties.dtype).removeprefix("torch.")
                shards = _Shards(path, metadata, name, entry, torch, dcp)
                contents.tensors[name] = Tensor(tuple(entry.size), dtype, shards)
            else:
                contents.others[name] = "no tensor"
    check_shards(path, sorted(files), place)
    with library_errors(path, _TITLE):
        groups = list(_groups(path, metadata, torch, dcp))
    return with_names(contents, groups, str(path))


def _groups(path: Path, metadata: Any, torch: Any, dcp: Any) -> Iterator[Group]:
    """Yield the groups with names of optimizers whose states are numbered."""
    entries = metadata.state_dict_metadata
    numbered = {match[1] for name in entries if (match := _NUMBERED.match(name)) is not None}
    for name in entries:
        if (match := _NAMES.fullmatch(name)) is not None and match[1] in numbered:
            params = name.removesuffix("param_names") + "params"
            with library_errors(path, f"plain data, '{name}'"):
                values = _plain(path, metadata, [each for each in (params, name) if each in entries], torch, dcp)
            yield Group(match[1], match[2], values.get(params), values[name])


def _plain(path: Path, metadata: Any, names: Sequence[str], torch: Any, dcp: Any) -> dict[str, Any]:
    """Return entries that are not tensors but plain data, by name."""
    planner = _PlainPlanner(torch)
    none, kind = torch.Size((0,)), dcp.planner.LoadItemType.BYTE_IO
    indices = [dcp.metadata.MetadataIndex(name) for name in names]
    items = [dcp.planner.ReadItem(kind, index, none, index, none, none) for index in indices]
    _read(path, metadata, items, planner, dcp)
    return planner.values


def _read(path: Path, metadata: Any, items: Sequence[Any], planner: Any, dcp: Any) -> None:
    reader = dcp.FileSystemReader(path)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(dcp.planner.LoadPlan(items), planner).wait()


class _Shards:
    """Reads the rows of a tensor: loads those shards whole that have a row, and keeps them until the next ones."""

    def __init__(self, path: Path, metadata: Any, name: str, entry: Any, torch: Any, dcp: Any) -> None:
        self._torch, self._dcp = torch, dcp
        self._path, self._metadata, self._name, self._entry = path, metadata, name, entry
        self._first = self._end = 0
        self._read: Callable[[int, int], Array] | None = None

    def __call__(self, start: int, stop: int) -> Array:
        pieces = []
        while start < stop:
            if self._read is None or not self._first <= start < self._end:
                self._load(start)
            assert self._read is not None
            end = min(stop, self._end)
            pieces.append(self._read(start - self._first, end - self._first))
            start = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _load(self, start: int) -> None:
        """Load the rows from one on, up to the end of the first shard with it, with the columns of all shards."""
        self._read = None
        chunks = [chunk for chunk in self._entry.chunks if chunk.offsets[0] <= start < _end(chunk)]
        if not chunks:
            raise InputError(f"'{self._name}': no shard has row {start}", source=str(self._path))
        self._first, self._end = start, min(self._entry.size[0], *(_end(chunk) for chunk in chunks))
        shape = (self._end - start, *self._entry.size[1:])
        whole = self._torch.zeros(shape, dtype=self._entry.properties.dtype)
        if sum(_count(chunk.sizes[1:]) for chunk in chunks) != _count(shape[1:]):
            raise InputError(f"'{self._name}': row {start} is not complete in its shards", source=str(self._path))
        offsets = self._torch.Size((start, *[0] * (len(shape) - 1)))
        wanted = self._dcp.metadata.ChunkStorageMetadata(offsets=offsets, sizes=self._torch.Size(shape))
        items = self._dcp.planner_helpers.create_read_items_for_chunk_list(self._name, self._entry, [wanted])
        for item in items:
            self._check_form(self._metadata.storage_data[item.storage_index])
        _read(self._path, self._metadata, items, _Planner(whole), self._dcp)
        self._read = tensor_of(whole, self._torch).read

    def _check_form(self, info: Any) -> None:
        """Raise InputError for a shard that was saved with SerializationFormat.SAFETENSORS."""
        with (self._path / info.relative_path).open("rb") as file:
            file.seek(info.offset + 8)
            if file.read(1) == b"{":
                problem = f"'{self._name}': saved as safetensors, which torch does not load from {info.relative_path}"
                advice = "save it again with SerializationFormat.TORCH_SAVE"
                raise InputError(f"{problem}; {advice}", source=str(self._path))


class _Planner:
    """The part of DCP's LoadPlanner that reading tensors needs: the parts of a tensor that the shards fill."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole

    def resolve_tensor(self, item: Any) -> Any:
        part = self._whole
        for axis, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        """Do nothing: the part is a view."""


class _PlainPlanner:
    """The part of DCP's LoadPlanner that reading plain data needs. values : by name"""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.values: dict[str, Any] = {}

    def load_bytes(self, item: Any, value: io.BytesIO) -> None:
        self.values[item.storage_index.fqn] = self._torch.load(value, weights_only=True)


def _end(chunk: Any) -> int:
    return int(chunk.offsets[0] + chunk.sizes[0])


def _count(sizes: Any) -> int:
    return int(np.prod([int(size) for size in sizes], dtype=np.int64))


FORMAT = TableFormat(
    name="dcp",
    title=_TITLE,
    library=LIBRARY,
    is_at=lambda path: (path / _METADATA).is_file(),
    contents=_contents,
)
