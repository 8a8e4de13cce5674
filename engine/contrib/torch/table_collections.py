"""``EmbeddingBagCollection`` and ``EmbeddingCollection``: many features and tables with one lookup.

Tables of one dim and pooling share a tensor of rows, so that a forward pass is one embedding operation per such group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional

from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.torch.jagged import JaggedTensor, KeyedTensor, jagged_features
from penstock.contrib.torch.modules import NOT_COMPILED, StoreModule, checked_table, tensor_of, whole_weight
from penstock.contrib.torch.pulled_rows import ids_of, joined, planned
from penstock.contrib.torch.stores import Ids, Store, no_table

_MODES = {"SUM": "sum", "MEAN": "mean"}
_ATTRIBUTES = ("name", "num_embeddings", "embedding_dim", "feature_names")


class _Group(NamedTuple):
    """Tables whose rows share a tensor. outputs : (feature, name in the result, table), in the order of the lookups"""

    mode: str
    tables: list[str]
    outputs: list[tuple[str, str, str]]


class _Lookups(NamedTuple):
    """The lookups of a group in one forward pass. rows : of its tables; index : of every value

    weights : likewise, or None; offsets : of each feature's samples; all_offsets : of those of all features, among all
    values; ids : each feature's
    """

    rows: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor | None
    offsets: list[torch.Tensor]
    all_offsets: torch.Tensor
    ids: list[torch.Tensor]


class _Collection(StoreModule):
    """What both collections share: their configurations, groups of tables, and the lookups of a batch."""

    def __init__(self, tables: Sequence[Any], device: Any = None, dtype: Any = None, *, store: Store) -> None:
        super().__init__(store, device, dtype)
        self._configs: dict[str, Any] = {}
        for table in tables:
            missing = [name for name in _ATTRIBUTES if not hasattr(table, name)]
            if missing:
                raise UsageTypeError(
                    "tables: expected torchrec's configurations, or objects with the same attributes; "
                    f"{type(table).__name__} has no {', '.join(missing)}"
                )
            if isinstance(table.feature_names, str):
                raise UsageTypeError(
                    f"table '{table.name}': expected feature_names as a list, got {table.feature_names!r}"
                )
            if table.name in self._configs:
                raise UsageError(f"Duplicate table name {table.name}")
            checked_table(store, table.name, table.num_embeddings, table.embedding_dim)
            self._configs[table.name] = table
        if not self._configs:
            raise UsageError("tables: expected at least one configuration")
        uses = [feature for table in tables for feature in table.feature_names]
        groups: dict[tuple[int, str], _Group] = {}
        self._names: list[str] = []  # of the results, in torchrec's order
        for table in tables:
            mode = self.mode_of(table)
            group = groups.setdefault((table.embedding_dim, mode), _Group(mode, [], []))
            group.tables.append(table.name)
            for feature in table.feature_names:
                name = feature if uses.count(feature) == 1 else f"{feature}@{table.name}"
                self._names.append(name)
                group.outputs.append((feature, name, table.name))
        self._groups = list(groups.values())
        self._features = list(dict.fromkeys(uses))

    def mode_of(self, table: Any) -> str:
        return ""

    def outputs(self) -> list[tuple[str, str, str]]:
        """Return (feature, name in the result, table) of every result, in order."""
        uses = [(feature, name) for name, config in self._configs.items() for feature in config.feature_names]
        return [(feature, name, table) for (feature, table), name in zip(uses, self._names, strict=True)]

    def _plan(self, features: Any) -> tuple[dict[str, Ids], Any]:
        """Return the distinct ids of every table; the features, and by (feature, table) the index of every id."""
        jagged = jagged_features(features, self._features)
        values = {name: ids_of(feature.values, f"feature '{name}': ") for name, feature in jagged.items()}
        uses: dict[str, list[str]] = {name: list(config.feature_names) for name, config in self._configs.items()}
        ids, index = planned({name: joined([values[feature] for feature in uses[name]]) for name in uses})
        places: dict[tuple[str, str], Ids] = {}
        for name, of_table in uses.items():
            ends = np.cumsum([len(values[feature]) for feature in of_table])[:-1]
            places |= {
                (feature, name): part for feature, part in zip(of_table, np.split(index[name], ends), strict=True)
            }
        return ids, (jagged, places)

    @torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
    def _pull(self, features: Any, is_weighted: bool) -> list[_Lookups]:
        """Return the lookups of every group."""
        looked_up = self._take(features)
        jagged, places = looked_up.plan
        batches = {len(feature.offsets) - 1 for feature in jagged.values()}
        if len(batches) > 1:
            raise UsageError(f"features: expected the same number of samples in each, got {sorted(batches)}")
        result = []
        for group in self._groups:
            trained = [name for name in group.tables if name not in self._frozen]
            frozen = [name for name in group.tables if name in self._frozen]
            sizes = [len(looked_up.ids[name]) for name in (*trained, *frozen)]
            base = dict(zip((*trained, *frozen), accumulate([0, *sizes[:-1]]), strict=True))
            index = [places[feature, table] + base[table] for feature, _, table in group.outputs]
            used = [jagged[feature] for feature, _, _ in group.outputs]
            weights = None
            if is_weighted:
                for name, feature in zip((name for name, _, _ in group.outputs), used, strict=True):
                    if feature.weights is None:
                        raise UsageError(f"feature '{name}': is_weighted=True needs weights")
                    if feature.weights.shape != feature.values.shape:
                        raise UsageError(
                            f"feature '{name}': expected weights of shape {tuple(feature.values.shape)}, that of the "
                            f"ids, got {tuple(feature.weights.shape)}"
                        )
                weights = torch.cat([feature.weights.to(self._like) for feature in used])
            leaves = [self._leaf(looked_up, names) for names in (trained, frozen) if names]
            rows = leaves[0] if len(leaves) == 1 else torch.cat(leaves)
            offsets = [feature.offsets for feature in used]
            places_of_all, ids = tensor_of(np.concatenate(index), self._like), [feature.values for feature in used]
            result.append(_Lookups(rows, places_of_all, weights, offsets, self._joined(offsets), ids))
        return result

    def _joined(self, offsets: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the offsets of all features' samples among the values of all features."""
        ends = list(accumulate((int(part[-1]) for part in offsets), initial=0))
        parts = [part[:-1] + end for part, end in zip(offsets, ends[:-1], strict=True)]
        return torch.cat([*parts, torch.tensor(ends[-1:], device="cpu")]).to(self._like.device)

    def requires_grad_(self, requires_grad: bool = True, tables: Iterable[str] | None = None) -> _Collection:
        """Set whether training changes the rows of tables, from the next forward pass on.

        Parameters
        ----------
        requires_grad : bool
            False: this module freezes the rows.
        tables : iterable of str or None
            Names of tables, the others stay as they are; None: all.

        Returns
        -------
        EmbeddingBagCollection or EmbeddingCollection
            This module.

        Raises
        ------
        UsageError
            If a table is none of this module's; nothing changes then.
        UsageTypeError
            If ``tables`` is a name and not a list of names.
        """
        if isinstance(tables, str):
            raise UsageTypeError(f"requires_grad_: expected tables as a list of names, got {tables!r}")
        names = self.table_names() if tables is None else list(tables)
        for name in names:
            if name not in self._configs:
                raise no_table("requires_grad_", name, self._configs)
        self._set_frozen(names, not requires_grad)
        return self

    def table_names(self) -> list[str]:
        return list(self._configs)

    @property
    def device(self) -> torch.device:
        """The device of the results."""
        return self._like.device

    def materialize(self) -> torch.nn.ModuleDict:
        """Return table → torch's module with the same rows: copies of whole tables."""
        weights = {name: whole_weight(self.store, name, self._like) for name in self._configs}
        return torch.nn.ModuleDict({name: self._twin(self._configs[name], weights[name]) for name in weights})

    def _twin(self, config: Any, weight: torch.Tensor) -> torch.nn.Module:
        """Return torch's module with a table's rows."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return "\n".join(
            f"({name}): {config.num_embeddings}, {config.embedding_dim}, features={list(config.feature_names)}"
            for name, config in self._configs.items()
        )


class EmbeddingBagCollection(_Collection):
    """Pooled embeddings of many features, as torchrec's module of this name.

    Parameters
    ----------
    tables : sequence of configurations
        torchrec's EmbeddingBagConfig, or any object with its attributes ``name``, ``embedding_dim``,
        ``num_embeddings``, ``feature_names`` and ``pooling``.
    is_weighted : bool
        Whether features have weights; only for sum pooling.
    device, dtype
        Device and type of the results; ``to`` changes them.
    store : Store
        What ``penstock.torch.store`` returns.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table])))
    >>> config = SimpleNamespace(
    ...     name="user", num_embeddings=8, embedding_dim=2, feature_names=["clicked"], pooling="SUM"
    ... )
    >>> bags = pt.EmbeddingBagCollection(tables=[config], store=store)
    >>> bags({"clicked": (torch.tensor([5, 3, 5]), torch.tensor([0, 1, 3]))})["clicked"].tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(
        self, tables: Sequence[Any], is_weighted: bool = False, device: Any = None, dtype: Any = None, *, store: Store
    ) -> None:
        super().__init__(tables, device, dtype, store=store)
        self._is_weighted = is_weighted

    def is_weighted(self) -> bool:
        """Return whether features have weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configurations of the tables."""
        return list(self._configs.values())

    def mode_of(self, table: Any) -> str:
        pooling = getattr(table, "pooling", "SUM")
        name = str(getattr(pooling, "value", pooling)).upper()
        if name not in _MODES:
            raise UsageError(f"table '{table.name}': expected pooling SUM or MEAN, got {name}")
        return _MODES[name]

    def forward(self, features: Any) -> KeyedTensor:
        """Return the pooled embeddings of every feature.

        Parameters
        ----------
        features : KeyedJaggedTensor or dict
            torchrec's, or feature → (values, offsets) or (values, offsets, weights); offsets of shape (batch + 1,).

        Returns
        -------
        KeyedTensor
            A feature of several tables is called ``FEATURE@TABLE``, as in torchrec.
        """
        pooled: dict[str, torch.Tensor] = {}
        for group, lookups in zip(self._groups, self._pull(features, self._is_weighted), strict=True):
            bags = functional.embedding_bag(
                lookups.index,
                lookups.rows,
                lookups.all_offsets,
                mode=group.mode,
                per_sample_weights=lookups.weights,
                include_last_offset=True,
            )
            # unbind: its backward pass is one copy, that of a slice per feature a tensor of all features each.
            parts = bags.view(len(group.outputs), len(lookups.offsets[0]) - 1, bags.shape[1]).unbind(0)
            pooled.update((name, part) for (_, name, _), part in zip(group.outputs, parts, strict=True))
        return KeyedTensor(self._names, [pooled[name] for name in self._names])

    def _twin(self, config: Any, weight: torch.Tensor) -> torch.nn.EmbeddingBag:
        return torch.nn.EmbeddingBag(*weight.shape, mode=self.mode_of(config), include_last_offset=True, _weight=weight)


class EmbeddingCollection(_Collection):
    """Embeddings of the single ids of many features, as torchrec's module of this name.

    Parameters
    ----------
    tables : sequence of configurations
        torchrec's EmbeddingConfig, or any object with its attributes ``name``, ``embedding_dim``, ``num_embeddings``
        and ``feature_names``; all of one dim.
    device, dtype
        Device and type of the results; ``to`` changes them.
    need_indices : bool
        Whether results have the ids as their weights, as in torchrec.
    store : Store
        What ``penstock.torch.store`` returns.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table])))
    >>> config = SimpleNamespace(name="user", num_embeddings=8, embedding_dim=2, feature_names=["clicked"])
    >>> embeddings = pt.EmbeddingCollection(tables=[config], store=store)
    >>> clicked = embeddings({"clicked": (torch.tensor([5, 3, 5]), torch.tensor([0, 1, 3]))})["clicked"]
    >>> clicked.values().shape, clicked.lengths().tolist()
    (torch.Size([3, 2]), [1, 2])
    """

    def __init__(
        self, tables: Sequence[Any], device: Any = None, dtype: Any = None, *, need_indices: bool = False, store: Store
    ) -> None:
        super().__init__(tables, device, dtype, store=store)
        self._need_indices = need_indices

    def need_indices(self) -> bool:
        """Return whether results have the ids as their weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the dim of the tables."""
        return int(next(iter(self._configs.values())).embedding_dim)

    def embedding_configs(self) -> list[Any]:
        """Return the configurations of the tables."""
        return list(self._configs.values())

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names in the result by table."""
        names = iter(self._names)
        return [[next(names) for _ in config.feature_names] for config in self._configs.values()]

    def forward(self, features: Any) -> dict[str, JaggedTensor]:
        """Return the embeddings of every feature's ids.

        Parameters
        ----------
        features : KeyedJaggedTensor or dict
            As for ``EmbeddingBagCollection``; weights are ignored.

        Returns
        -------
        dict of str to JaggedTensor
            A feature of several tables is called ``FEATURE@TABLE``, as in torchrec.
        """
        result = {}
        for group, lookups in zip(self._groups, self._pull(features, False), strict=True):
            rows = functional.embedding(lookups.index, lookups.rows)
            parts = rows.split([int(offsets[-1]) for offsets in lookups.offsets])
            for (_, name, _), part, offsets, ids in zip(
                group.outputs, parts, lookups.offsets, lookups.ids, strict=True
            ):
                weights = ids.to(rows.device) if self._need_indices else None
                result[name] = JaggedTensor(part, offsets.to(rows.device), weights)
        return {name: result[name] for name in self._names}

    def _twin(self, config: Any, weight: torch.Tensor) -> torch.nn.Embedding:
        return torch.nn.Embedding(*weight.shape, _weight=weight)
