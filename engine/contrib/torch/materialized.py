"""``materialized``: a model to deploy, with torch's own modules that have the rows of its tables.

What replaces a module of one table is a module of torch, or a graph of ``torch.fx``: it loads where penstock is absent.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional

from penstock.base.errors import StateError, UsageTypeError, listed
from penstock.checkpoint.arrays import SavedTables
from penstock.contrib.torch.jagged import Jagged, JaggedTensor, KeyedTensor, jagged_features
from penstock.contrib.torch.modules import Embedding, EmbeddingBag, StoreModule
from penstock.contrib.torch.stores import Store, TableContents
from penstock.contrib.torch.table_collections import EmbeddingBagCollection, EmbeddingCollection
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array, Float32

# Keys to find out what a key without a row reads: as many as are needed to find absent ones, tried in this order.
_PROBES = 1 << 62


def materialized(model: torch.nn.Module, version: str | os.PathLike[str] | None = None) -> torch.nn.Module:
    """Return a copy of a model with torch's own modules in place of those that read tables, ready to deploy.

    Parameters
    ----------
    model : torch.nn.Module
        The model, which stays as it is; also a single module of penstock.
    version : str, path or None
        A checkpoint, or a version of one, ``DIR@VERSION``, whose rows to take. None: the current rows, of one step.

    Returns
    -------
    torch.nn.Module
        For ``torch.export``, AOTInductor and ``torch.save``. Modules that read one table share its rows. The copy has
        the device, dtypes and ``training`` of the model.

    Raises
    ------
    UsageTypeError
        If ``model`` is no module.
    StateError
        If the version is damaged, or lacks a table of the model.

    Warns
    -----
    UserWarning
        If a dynamic table draws a random row for every key that has none: the copy reads zeros for those keys.

    Notes
    -----
    Of a dynamic table, the module looks keys up: ``keys`` are the table's, ascending, and row i of ``rows`` belongs to
    key i; the last row is that of all other keys. Expired keys have none.

    A collection takes a dict of feature → (values, offsets[, weights]) in an exported program. ``torch.save`` of a
    model with collections refers to their classes, so that loading it needs penstock; an exported program does not.

    Examples
    --------
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> bag = pt.EmbeddingBag(8, 2, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table]))))
    >>> deployed = pt.materialized(torch.nn.Sequential(bag, torch.nn.Linear(2, 1)))
    >>> program = torch.export.export(deployed, (torch.tensor([[5, 3]]),))
    >>> program.module()(torch.tensor([[5, 3]])).shape
    torch.Size([1, 1])
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageTypeError(f"materialized: expected a torch.nn.Module, got {type(model).__name__}")
    parts = [part for part in model.modules() if isinstance(part, StoreModule)]
    stores = list({id(part.store): part.store for part in parts}.values())
    tables = {
        id(store): _contents(
            store, sorted({name for part in parts if part.store is store for name in part.table_names()}), version
        )
        for store in stores
    }
    # deepcopy takes what its memo has for an object, and copies all else: shared modules stay shared.
    memo: dict[int, Any] = {id(store): None for store in stores}
    weights: dict[Any, Any] = {}
    for part in parts:
        twin = _twin(part, _Rows(tables[id(part.store)], weights, part.like, id(part.store)))
        memo[id(part)] = twin.train(part.training)
    copied: torch.nn.Module = copy.deepcopy(model, memo)
    return copied


def _contents(
    store: Store, names: Sequence[str], version: str | os.PathLike[str] | None
) -> dict[str, tuple[TableContents, Float32]]:
    """Return every table, and the row of keys without a row."""
    if version is None:
        contents = store.contents(names)
    else:
        saved = SavedTables(version)
        for name in names:
            dim = store.tables[name].dim
            if name not in saved.tables:
                raise StateError(f"{os.fspath(version)}: no table '{name}'; it has {listed(saved.tables)}")
            if (saved_dim := saved.tables[name]["dim"]) != dim:
                raise StateError(
                    f"{os.fspath(version)}: table '{name}' has dim {saved_dim}, and the model expects {dim}"
                )
        contents = {name: TableContents(saved.parts(name)[WEIGHTS], saved.keys(name)) for name in names}
    return {name: (table, _default_row(store, name, table.keys)) for name, table in contents.items()}


def _default_row(store: Store, name: str, keys: Array | None) -> Float32:
    """Return what a key without a row reads; zeros, with a warning, if every such key reads a random row."""
    zeros = np.zeros(store.tables[name].dim, np.float32)
    if keys is None or store.tables[name].num_rows is not None:
        return zeros
    probes = np.setdiff1d(np.arange(_PROBES, _PROBES + len(keys) + 2).astype(keys.dtype), keys)[:2]
    first, second = store.pull({name: probes}).rows[name]
    if np.array_equal(first, second):
        return np.array(first)
    warnings.warn(
        f"table '{name}': keys without a row read zeros in the materialized model, and random initial rows in the "
        "trained one; missing: ZERO in its configuration makes both read zeros",
        stacklevel=4,
    )
    return zeros


class _Rows(NamedTuple):
    """The tables of a store for one module. weights : those that other modules have; like : device and type"""

    tables: Mapping[str, tuple[TableContents, Float32]]
    weights: dict[Any, Any]
    like: torch.Tensor
    store: int

    def lookup(self, table: str, bag: dict[str, Any] | None = None, padding: int | None = None) -> torch.nn.Module:
        """Return the module of a table. bag : arguments of torch's EmbeddingBag; None: an Embedding"""
        contents, default = self.tables[table]
        key = self.store, table, self.like.device, self.like.dtype, padding
        if key not in self.weights:
            self.weights[key] = self._tensors(contents, default, padding)
        rows, keys = self.weights[key]
        if keys is None:
            if bag is not None:
                return torch.nn.EmbeddingBag(*rows.shape, padding_idx=padding, _weight=rows, **bag)
            return torch.nn.Embedding(*rows.shape, padding, _weight=rows)
        place = None if padding is None else int((keys == padding).nonzero()[0, 0])
        module = KeyedRows(keys, rows, place) if bag is None else KeyedBag(keys, rows, place, bag)
        graph = torch.fx.symbolic_trace(module)
        for node in graph.graph.nodes:
            node.type = None  # an annotation as a text, which a pickle cannot refer to
        graph.recompile()
        return graph

    def _tensors(
        self, contents: TableContents, default: Float32, padding: int | None
    ) -> tuple[torch.nn.Parameter, torch.Tensor | None]:
        """Return the rows, and of a dynamic table its keys in the order of their bits as int64, and the default row."""
        rows, keys = contents.rows, None
        if contents.keys is not None:
            keys = contents.keys.view(np.int64)
            if padding is not None and padding not in keys:
                keys, rows = np.append(keys, padding), np.concatenate([rows, np.zeros((1, rows.shape[1]), rows.dtype)])
            order = np.argsort(keys)
            keys, rows = (
                torch.from_numpy(keys[order]).to(self.like.device),
                np.concatenate([rows[order], default[None]]),
            )
        weight = torch.tensor(rows).to(self.like.device, self.like.dtype)
        if padding is not None:  # which reads as zeros
            weight[padding if keys is None else int((keys == padding).nonzero()[0, 0])] = 0
        return torch.nn.Parameter(weight), keys


class KeyedRows(torch.nn.Module):  # type: ignore[misc]
    """The rows of a dynamic table by key. keys : int64 (n,), ascending; rows : (n + 1, dim), the last of other keys"""

    def __init__(self, keys: torch.Tensor, rows: torch.nn.Parameter, padding: int | None) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.rows, self.padding = rows, padding

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return functional.embedding(input=places_of(self.keys, input), weight=self.rows, padding_idx=self.padding)


class KeyedBag(torch.nn.Module):  # type: ignore[misc]
    """Bags over a dynamic table. keys, rows, padding : as for ``KeyedRows``; options : of torch's EmbeddingBag"""

    def __init__(
        self, keys: torch.Tensor, rows: torch.nn.Parameter, padding: int | None, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.rows, self.padding, self.options = rows, padding, options

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return functional.embedding_bag(
            places_of(self.keys, input),
            self.rows,
            offsets,
            per_sample_weights=per_sample_weights,
            padding_idx=self.padding,
            **self.options,
        )


def places_of(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return for every id the index of its row; that of the last row, if it is no key."""
    wanted = ids.to(torch.int64)  # of uint64, the same bits
    if not len(keys):
        return wanted * 0
    place = torch.searchsorted(keys, wanted)
    return torch.where(keys[place.clamp(max=len(keys) - 1)] == wanted, place, len(keys))


class _MaterializedCollection(torch.nn.Module):  # type: ignore[misc]
    """A collection over torch's modules. outputs : (feature, name in the result, table)"""

    def __init__(self, tables: Mapping[str, torch.nn.Module], outputs: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self.tables, self.outputs = torch.nn.ModuleDict(tables), list(outputs)

    def _jagged(self, features: Any) -> dict[str, Jagged]:
        if isinstance(features, Mapping) and torch.compiler.is_exporting():  # offsets have no values to check
            return {name: Jagged(*(*pair, None)[:3]) for name, pair in features.items()}
        return jagged_features(features, list(dict.fromkeys(feature for feature, _, _ in self.outputs)))


class MaterializedBagCollection(_MaterializedCollection):
    """What an EmbeddingBagCollection becomes."""

    def __init__(
        self, tables: Mapping[str, torch.nn.Module], outputs: Sequence[tuple[str, str, str]], is_weighted: bool
    ) -> None:
        super().__init__(tables, outputs)
        self.weighted = is_weighted

    def forward(self, features: Any) -> KeyedTensor:
        jagged = self._jagged(features)
        pooled = []
        for feature, _, table in self.outputs:
            values, offsets, weights = jagged[feature]
            offsets = offsets.to(values.device, values.dtype)
            pooled.append(self.tables[table](values, offsets, weights if self.weighted else None))
        return KeyedTensor([name for _, name, _ in self.outputs], pooled)


class MaterializedCollection(_MaterializedCollection):
    """What an EmbeddingCollection becomes."""

    def __init__(
        self, tables: Mapping[str, torch.nn.Module], outputs: Sequence[tuple[str, str, str]], need_indices: bool
    ) -> None:
        super().__init__(tables, outputs)
        self.indexed = need_indices

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        jagged = self._jagged(features)
        result = {}
        for feature, name, table in self.outputs:
            values, offsets, _ = jagged[feature]
            result[name] = JaggedTensor(self.tables[table](values), offsets, values if self.indexed else None)
        return result


def _twin(part: StoreModule, rows: _Rows) -> torch.nn.Module:
    """Return what replaces a module."""
    if isinstance(part, EmbeddingBag):
        return rows.lookup(
            part.table, {"mode": part.mode, "include_last_offset": part.include_last_offset}, part.padding_idx
        )
    if isinstance(part, Embedding):
        return rows.lookup(part.table, None, part.padding_idx)
    if isinstance(part, EmbeddingBagCollection):
        bags = {
            config.name: rows.lookup(config.name, {"mode": part.mode_of(config), "include_last_offset": True})
            for config in part.embedding_bag_configs()
        }
        return MaterializedBagCollection(bags, part.outputs(), part.is_weighted())
    assert isinstance(part, EmbeddingCollection)
    lookups = {config.name: rows.lookup(config.name) for config in part.embedding_configs()}
    return MaterializedCollection(lookups, part.outputs(), part.need_indices())
