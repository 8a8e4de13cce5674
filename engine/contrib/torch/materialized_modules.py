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

from penstock.base.errors import StateError, UsageError, UsageTypeError, listed
from penstock.checkpoint.arrays import SavedTables
from penstock.contrib.torch.jagged import Jagged, JaggedTensor, KeyedTensor, jagged_features
from penstock.contrib.torch.modules import Embedding, EmbeddingBag, StoreModule
from penstock.contrib.torch.stores import Store, TableContents
from penstock.contrib.torch.table_collections import EmbeddingBagCollection, EmbeddingCollection
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Float32


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
        the device, dtypes, hooks and ``training`` of the model, and its rows require a gradient unless all of their
        modules freeze them. A DistributedDataParallel becomes the module inside it.

    Raises
    ------
    UsageTypeError
        If ``model`` is no module; or if a class derived from a module of penstock replaces ``forward``.
    StateError
        If the version is damaged or not retained, or lacks a table of the model.

    Warns
    -----
    UserWarning
        If a dynamic table draws a random row for every key that has none: the copy reads zeros for those keys.

    Notes
    -----
    Of a dynamic table, the module looks keys up: ``keys`` are the table's, ascending, and row i of ``rows`` belongs to
    key i; the last row is that of all other keys. Expired keys have none; of a service, they keep their rows until they
    are swept. Unsigned keys are there as int64 of the same bits.

    Ids are integers as torch's modules take them, int32 or int64 (of a dynamic table, of any type), on the device of
    the copy. A collection takes a dict of feature → (values, offsets[, weights]) in an exported program.

    An exported program needs no penstock. What ``torch.save`` writes refers to classes by name: to those of the model,
    and for collections to penstock's; load it with the same version of penstock.

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
    for part in parts:
        _check(part)
    stores = {id(part.store): part.store for part in parts}
    tables: dict[int, dict[str, _Table]] = {}
    for key, store in stores.items():
        names = sorted({name for part in parts if part.store is store for name in part.table_names()})
        tables[key] = _tables(store, names, version)
    # deepcopy takes what its memo has for an object, and copies all else: shared modules stay shared.
    memo: dict[int, Any] = {id(each): None for store in stores.values() for each in (store, store.engine)}
    weights: dict[Any, Any] = {}
    for part in parts:
        memo[id(part)] = _twin(part, _Rows(tables[id(part.store)], weights, part)).train(part.training)
    for part in reversed(list(model.modules())):  # inner ones first
        if isinstance(part, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            memo[id(part)] = copy.deepcopy(part.module, memo)
    for part in parts:
        hooks = {name: value for name, value in vars(part).items() if name.startswith("_forward")}
        vars(memo[id(part)]).update(copy.deepcopy(hooks, memo))
    copied: torch.nn.Module = copy.deepcopy(model, memo)
    return copied


class _Table(NamedTuple):
    """What a table has. default : the row of keys without a row, float32 (dim,)"""

    contents: TableContents
    default: Float32


def _check(part: StoreModule) -> None:
    """Raise UsageTypeError for a module that does other things than its class of penstock."""
    kind = next(
        kind
        for kind in (EmbeddingBag, Embedding, EmbeddingBagCollection, EmbeddingCollection)
        if isinstance(part, kind)
    )
    if getattr(part.forward, "__func__", None) is not kind.forward:
        raise UsageTypeError(
            f"materialized: {type(part).__name__} replaces the forward of {kind.__name__}, which the copy would lack; "
            f"call a plain {kind.__name__} from a module around it"
        )


def _tables(store: Store, names: Sequence[str], version: str | os.PathLike[str] | None) -> dict[str, _Table]:
    """Return tables by name."""
    if version is None:
        contents = store.contents(names)
    else:
        saved = SavedTables(version)
        for name in names:
            if name not in saved.tables:
                raise StateError(f"{os.fspath(version)}: no table '{name}'; it has {listed(saved.tables)}")
            table, info = saved.tables[name], store.tables[name]
            got = _form(table["dim"], None if "dynamic" in table else table["vocabulary_size"])
            if got != (wanted := _form(info.dim, info.num_rows)):
                raise StateError(f"{os.fspath(version)}: table '{name}' has {got}, and the model expects {wanted}")
        contents = {
            name: TableContents(store.seen(name, saved.parts(name)[WEIGHTS]), saved.keys(name)) for name in names
        }
    tables = {}
    for name, table in contents.items():
        tables[name] = _with_absent(store, name, table)
    return tables


def _form(dim: int, num_rows: int | None) -> str:
    return f"{'keys' if num_rows is None else f'{num_rows:,} rows'} of dim {dim}"


def _with_absent(store: Store, name: str, contents: TableContents) -> _Table:
    """Return a table with what keys without a row read: zeros, with a warning, if each of them reads a random row.

    Raises StateError if the file of their vectors is gone, or has changed.
    """
    absent, present, zeros = store.tables[name].absent, contents.keys, np.zeros((1, store.tables[name].dim), np.float32)
    if absent is None or present is None:
        return _Table(contents, zeros[0])
    if absent.kind == "vectors":
        vectors = absent.vectors(present.dtype.name, zeros.shape[1])
        others = np.setdiff1d(vectors.ids, present.view(np.int64))
        rows = np.empty((len(others), zeros.shape[1]), np.float32)
        vectors.fill(others, rows)
        keys = np.concatenate([present, others.view(present.dtype)])
        contents = TableContents(np.concatenate([contents.rows, store.seen(name, rows)]), keys)
    elif absent.kind in ("zero", "constant"):
        absent.fill(np.zeros(1, present.dtype), zeros)
    else:
        warnings.warn(
            f"table '{name}': keys without a row read zeros in the materialized model, and random initial rows in the "
            "trained one; missing: ZERO in its configuration makes both read zeros",
            stacklevel=4,
        )
    return _Table(contents, store.seen(name, zeros)[0])


class _Rows(NamedTuple):
    """The tables of a store for one of its modules. weights : rows and keys that modules have already"""

    tables: Mapping[str, _Table]
    weights: dict[Any, Any]
    part: StoreModule

    def embedding(self, table: str, padding: int | None = None, **options: Any) -> torch.nn.Module:
        """Return torch's Embedding over a table, or what is like it. options : arguments of torch's class"""
        rows, keys = self._shared(table, padding)
        if keys is None:
            return _with_weight(torch.nn.Embedding(*rows.shape, padding, _weight=rows, **options), rows)
        return _as_graph(KeyedRows(keys, rows, {"padding_idx": _place(keys, padding), **options}))

    def bag(self, table: str, padding: int | None = None, **options: Any) -> torch.nn.Module:
        """Return torch's EmbeddingBag over a table, or what is like it. options : arguments of torch's class"""
        # Torch skips the padding in a bag, so that it needs no row of zeros; but a key needs a row to be skipped by.
        is_dynamic = self.tables[table].contents.keys is not None
        rows, keys = self._shared(table, padding if is_dynamic else None)
        if keys is None:
            bag = torch.nn.EmbeddingBag(*rows.shape, padding_idx=padding, _weight=rows, **options)
            return _with_weight(bag, rows)
        return _as_graph(KeyedBag(keys, rows, {"padding_idx": _place(keys, padding), **options}))

    def _shared(self, table: str, padding: int | None) -> tuple[torch.nn.Parameter, torch.Tensor | None]:
        """Return rows, and of a dynamic table the keys, which all modules share that have the same in common."""
        like = self.part.like
        key = id(self.part.store), table, like.device, like.dtype, padding
        if key not in self.weights:
            self.weights[key] = self._tensors(*self.tables[table], like, padding)
        rows, keys = self.weights[key]
        if table not in self.part.frozen:
            rows.requires_grad_(True)
        return rows, keys

    @staticmethod
    def _tensors(
        contents: TableContents, default: Float32, like: torch.Tensor, padding: int | None
    ) -> tuple[torch.nn.Parameter, torch.Tensor | None]:
        """Return the rows, and of a dynamic table its keys in the order of their bits as int64, and the default row."""
        rows, keys = contents.rows, None
        if contents.keys is not None:
            keys = contents.keys.view(np.int64)
            if padding is not None and padding not in keys:
                keys, rows = np.append(keys, padding), np.concatenate([rows, np.zeros((1, rows.shape[1]), rows.dtype)])
            order = np.argsort(keys)
            keys = torch.from_numpy(keys[order]).to(like.device)
            rows = np.concatenate([rows[order], default[None]])
        weight = torch.tensor(rows).to(like.device, like.dtype)
        if padding is not None:  # which reads as zeros
            weight[padding if keys is None else _place(keys, padding)] = 0
        return torch.nn.Parameter(weight, requires_grad=False), keys


def _with_weight(module: torch.nn.Module, rows: torch.nn.Parameter) -> torch.nn.Module:
    """Return a module of torch whose parameter is these rows, and not another one of the same memory."""
    module.weight = rows
    return module


def _as_graph(module: torch.nn.Module) -> torch.fx.GraphModule:
    """Return a module as a graph, which a pickle contains as code and without penstock's class."""
    graph = torch.fx.symbolic_trace(module)
    for node in graph.graph.nodes:
        node.type = None  # an annotation as a text, which a pickle cannot refer to
    graph.recompile()
    return graph


def _place(keys: torch.Tensor, padding: int | None) -> int | None:
    return None if padding is None else int((keys == padding).nonzero()[0, 0])


class KeyedRows(torch.nn.Module):  # type: ignore[misc]
    """The rows of a dynamic table by key.

    keys : int64 (n,), ascending; rows : (n + 1, dim), the last of other keys; options : of torch's function
    """

    def __init__(self, keys: torch.Tensor, rows: torch.nn.Parameter, options: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.rows, self.options = rows, options

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return functional.embedding(places_of(self.keys, input), self.rows, **self.options)


class KeyedBag(KeyedRows):
    """Bags over a dynamic table."""

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
            **self.options,
        )


def places_of(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return for every id the index of its row; that of the last row, if it is no key."""
    torch._assert(ids.is_floating_point() == False, "ids: expected integers")  # noqa: E712, SLF001
    wanted = ids.to(torch.int64)  # of uint64, the same bits
    if not len(keys):
        return wanted * 0
    place = torch.searchsorted(keys, wanted)
    return torch.where(keys[place.clamp(max=len(keys) - 1)] == wanted, place, len(keys))


class _MaterializedCollection(torch.nn.Module):  # type: ignore[misc]
    """A collection over torch's modules. outputs : (feature, name in the result, table; as attribute, its key)"""

    def __init__(self, tables: Mapping[str, torch.nn.Module], outputs: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleDict()
        keys: dict[str, str] = {}  # of every table; a name may have a dot, or be that of a method of ModuleDict
        for name, module in tables.items():
            keys[name] = name.replace(".", "_")
            while hasattr(self.tables, keys[name]):
                keys[name] += "_"
            self.tables[keys[name]] = module
        self.outputs = [(feature, name, keys[table]) for feature, name, table in outputs]

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
            if not self.weighted:
                weights = None
            elif weights is None:
                raise UsageError(f"feature '{feature}': is_weighted=True needs weights")
            else:
                weights = weights.to(next(self.tables[table].parameters()))
            pooled.append(self.tables[table](values, offsets.to(values.device), weights))
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
            rows = self.tables[table](values)
            indices = values.to(rows.device) if self.indexed else None
            result[name] = JaggedTensor(rows, offsets.to(rows.device), indices)
        return result


def _twin(part: StoreModule, rows: _Rows) -> torch.nn.Module:
    """Return what replaces a module."""
    padding = getattr(part, "padding_idx", None)
    if padding is not None:
        padding = (padding + 2**63) % 2**64 - 2**63  # as int64 of the same bits, as keys are
    if isinstance(part, EmbeddingBag):
        options = {"mode": part.mode, "include_last_offset": part.include_last_offset}
        return rows.bag(part.table, padding, scale_grad_by_freq=part.scale_grad_by_freq, **options)
    if isinstance(part, Embedding):
        return rows.embedding(part.table, padding, scale_grad_by_freq=part.scale_grad_by_freq)
    if isinstance(part, EmbeddingBagCollection):
        bags = {
            config.name: rows.bag(config.name, mode=part.mode_of(config), include_last_offset=True)
            for config in part.embedding_bag_configs()
        }
        return MaterializedBagCollection(bags, part.outputs(), part.is_weighted())
    assert isinstance(part, EmbeddingCollection)
    lookups = {config.name: rows.embedding(config.name) for config in part.embedding_configs()}
    return MaterializedCollection(lookups, part.outputs(), part.need_indices())
