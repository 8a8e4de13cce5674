"""``EmbeddingBag`` and ``Embedding``: torch's modules, without a weight.

A pull happens outside of a compiled graph; all between it and the push is torch's own code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional

from penstock.base.errors import UsageError, UsageTypeError
from penstock.base.limited_calls import LimitedCall
from penstock.contrib.torch.pulled_rows import PulledRows, check_integers, ids_of, leaf_of, planned
from penstock.contrib.torch.stores import Ids, Pulled, Store

# What torch says where a whole graph is required.
NOT_COMPILED = "penstock pulls rows outside of compiled graphs; compile without fullgraph=True"


class Planned(NamedTuple):
    """The lookups of one forward pass, and their rows. plan : what the module needs besides the rows"""

    ids: dict[str, Ids]
    plan: Any
    pulled: Pulled


class StoreModule(torch.nn.Module):  # type: ignore[misc]
    """What all modules of a store share: prefetches, the place of their tensors, and their entry in a state_dict."""

    def __init__(self, store: Store, device: Any, dtype: Any) -> None:
        super().__init__()
        if not isinstance(store, Store):
            raise UsageTypeError(f"store: expected what penstock.torch.store returns, got {type(store).__name__}")
        self.store = store
        self._like = torch.empty(0, device=device, dtype=dtype)  # no buffer: neither saved nor sent by DDP
        self._prefetched: tuple[object, LimitedCall[Planned]] | None = None
        # Tables whose rows get no gradient.
        self._frozen = {name for name, info in store.tables.items() if info.is_frozen}

    def prefetch(self, features: Any) -> None:
        """Pull the rows of the next batch on a thread. The next forward pass with the same object uses them.

        Parameters
        ----------
        features : object
            The first argument of the next forward pass: the same object, unchanged.

        Notes
        -----
        The forward pass pulls those rows again that changed meanwhile, so that they are of the current step: those of
        this process's frames, or all of them if others have stepped. Rows that are loaded into an engine meanwhile are
        not noticed.
        """
        self._prefetched = features, self.store.submit(lambda: self._looked_up(features))

    def _looked_up(self, features: Any) -> Planned:
        """Return the lookups of features with their rows. Called on any thread."""
        ids, plan = self._plan(features)
        return Planned(ids, plan, self.store.pull(ids))

    def _plan(self, features: Any) -> tuple[dict[str, Ids], Any]:
        """Return the distinct ids of every table, and what ``forward`` needs besides."""
        raise NotImplementedError

    def _take(self, features: Any) -> Planned:
        """Return the lookups of a forward pass, prefetched or not, with current rows."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or prefetched[0] is not features:
            return self._looked_up(features)
        result = self.store.outcome(prefetched[1])
        return result._replace(pulled=self.store.refreshed(result.ids, result.pulled))

    def _leaf(self, looked_up: Planned, names: list[str], padding: int | None = None) -> torch.Tensor:
        """Return the rows of tables in one tensor. If it gets a gradient, the next step pushes that.

        names : all frozen, or none
        """
        rows = [looked_up.pulled.rows[name] for name in names]
        needs_grad = self.training and torch.is_grad_enabled() and not self._frozen.intersection(names)
        leaf = leaf_of(rows, self._like, needs_grad, padding)
        if leaf.requires_grad:
            self._warn_without_step()
            ids, step = {name: looked_up.ids[name] for name in names}, looked_up.pulled.version.step
            # Pending once a backward pass reaches it: until then, only the graph refers to it, and zero_grad drops
            # nothing whose backward pass is still to come.
            add = partial(_add_pending, self.store, next(self.store.passes), ids, step, padding)
            leaf.register_post_accumulate_grad_hook(add)
        return leaf

    def _warn_without_step(self) -> None:
        """Warn if rows have gradients that nothing pushes."""
        if self.store.step_owner is None and self.store.pending:
            warnings.warn(
                "rows have gradients, but no Step pushes them, so that they do not change; create "
                "penstock.torch.Step(model, optimizer), and call its zero_grad() and step() instead of the optimizer's",
                stacklevel=2,
            )

    # ---- torch.nn.Module

    def requires_grad_(self, requires_grad: bool = True) -> StoreModule:
        """Set whether training changes the rows that this module reads, from its next forward pass on.

        That of a module around it reaches parameters only; ``penstock.torch.requires_grad_`` reaches rows, too. A table
        that its configuration freezes stays frozen.

        Parameters
        ----------
        requires_grad : bool
            False: this module freezes its rows.

        Returns
        -------
        StoreModule
            This module.
        """
        return self._set_frozen(self.table_names(), not requires_grad)

    def _set_frozen(self, tables: Iterable[str], is_frozen: bool) -> StoreModule:
        if is_frozen:
            self._frozen.update(tables)
        else:
            self._frozen.difference_update(name for name in tables if not self.store.tables[name].is_frozen)
        return self

    def table_names(self) -> list[str]:
        """Return the tables that this module reads."""
        raise NotImplementedError

    @property
    def frozen(self) -> frozenset[str]:
        """The tables whose rows this module freezes."""
        return frozenset(self._frozen)

    @property
    def like(self) -> torch.Tensor:
        """A tensor of the device and type of the results."""
        return self._like

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> StoreModule:
        super()._apply(fn, recurse)
        self._like = fn(self._like)
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """Return what ``state_dict`` contains in place of the tables: a reference to their state."""
        return self.store.reference()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Check that the store has the tables that a ``state_dict`` refers to. Raises StateError."""
        self.store.check_reference(state)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageTypeError(
            f"cannot pickle or copy '{type(self).__name__}': its rows are in {self.store!r}; save state_dict() and the "
            "tables, or copy what penstock.torch.materialized returns, which reaches modules in a torch.nn.ModuleList, "
            "but none in a list"
        )


def requires_grad_(module: torch.nn.Module, requires_grad: bool = True) -> torch.nn.Module:
    """Set whether training changes a model: its parameters, as torch does, and the rows that its modules read.

    Parameters
    ----------
    module : torch.nn.Module
        The model, or a part of it.
    requires_grad : bool
        False: freeze all of it.

    Returns
    -------
    torch.nn.Module
        The module.

    Raises
    ------
    UsageTypeError
        If ``module`` is no module.

    Notes
    -----
    The method ``requires_grad_`` of a model reaches parameters only, and rows are none. A module that reads the same
    table and is not part of this one trains its rows all the same. As in torch, a ``state_dict`` does not contain it.

    Examples
    --------
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> bag = pt.EmbeddingBag(8, 2, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table]))))
    >>> model = pt.requires_grad_(torch.nn.Sequential(bag, torch.nn.Linear(2, 1)), False)
    >>> model(torch.tensor([[5, 3]])).requires_grad
    False
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageTypeError(f"requires_grad_: expected a torch.nn.Module, got {type(module).__name__}")
    module.requires_grad_(requires_grad)
    for part in module.modules():
        if isinstance(part, StoreModule):
            part.requires_grad_(requires_grad)
    return module


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add_pending(
    store: Store, number: int, ids: dict[str, Ids], step: int, padding: int | None, rows: torch.Tensor
) -> None:
    """Add rows that have a gradient to those that the next step pushes. Another backward pass adds to the gradient."""
    store.pending[number] = PulledRows(ids, rows, step, padding)


def checked_table(store: Store, table: str | None, num_embeddings: int, embedding_dim: int) -> str:
    """Return the name of a module's table. Raises UsageError if the sizes are others."""
    name, info = store.info(table)
    if info.dim != embedding_dim:
        raise UsageError(f"table '{name}': its dim is {info.dim}, got embedding_dim={embedding_dim}")
    if info.num_rows is not None and info.num_rows != num_embeddings:
        raise UsageError(f"table '{name}': its vocabulary_size is {info.num_rows}, got num_embeddings={num_embeddings}")
    return name


def whole_weight(store: Store, table: str, like: torch.Tensor) -> torch.Tensor:
    """Return all rows of a table as a tensor. Raises UsageError for a dynamic table."""
    if store.tables[table].num_rows is None:
        raise UsageError(
            f"table '{table}' is dynamic: torch has no module for its keys; penstock.torch.materialized has one"
        )
    return torch.tensor(store.contents([table])[table].rows).to(like.device, like.dtype)


class _SingleTable(StoreModule):
    """A module of one table: its arguments, checked as torch does."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        store: Store,
        table: str | None,
        max_norm: float | None,
        padding_idx: int | None,
        scale_grad_by_freq: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__(store, device, dtype)
        self.scale_grad_by_freq = scale_grad_by_freq
        if max_norm is not None:
            raise UsageError("max_norm: a lookup changes no row of an engine; clip with its configuration instead")
        self.table = checked_table(self.store, table, num_embeddings, embedding_dim)
        if padding_idx is not None and store.tables[self.table].num_rows is not None:  # of a dynamic table, it is a key
            # torch's checks and words.
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise UsageError("padding_idx must be within num_embeddings")
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx

    def table_names(self) -> list[str]:
        return [self.table]

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        mode = f", mode={self.mode!r}" if hasattr(self, "mode") else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{mode}, table={self.table!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"'{type(self).__name__}' has no weight: its rows are in table '{self.table}'; materialize() copies "
                "them, Engine.load_parameters sets them, and the initializer of TableConfig draws them"
            )
        return super().__getattr__(name)

    def _plan(self, features: Any) -> tuple[dict[str, Ids], Any]:
        ids, index = planned({self.table: ids_of(features)})
        return ids, index[self.table]

    @torch.compiler.disable(reason=NOT_COMPILED)  # type: ignore[untyped-decorator]
    def _pull(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return rows, for every id the index of its row, and the index of the padding row."""
        looked_up = self._take(ids)
        padding = None
        if self.padding_idx is not None:
            (places,) = (looked_up.ids[self.table] == self.padding_idx).nonzero()
            padding = int(places[0]) if len(places) else None
        rows = self._leaf(looked_up, [self.table], padding)
        if self.scale_grad_by_freq and rows.requires_grad:
            # Not left to torch, whose embedding_bag on a CPU divides by the counts of other ids.
            counts = np.bincount(looked_up.plan, minlength=len(rows))[:, None]
            rows.register_hook(partial(torch.mul, torch.from_numpy(1 / counts).to(self._like)))
        return rows, tensor_of(looked_up.plan, self._like).reshape(ids.shape), padding


def tensor_of(index: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    """Return indices as a tensor on the device of ``like``."""
    return torch.from_numpy(index).to(like.device, non_blocking=True)


class EmbeddingBag(_SingleTable):
    """``torch.nn.EmbeddingBag`` over a table of a store: the arguments, results and errors of torch, but no weight.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        The table's vocabulary_size and dim; of a dynamic table, ``num_embeddings`` is not checked.
    max_norm, norm_type
        Refused: a lookup changes no row.
    scale_grad_by_freq : bool
        As in torch.
    mode : {"sum", "mean", "max"}
        As in torch.
    sparse : bool
        Has no effect: a frame contains the rows of the batch only.
    include_last_offset : bool
        As in torch.
    padding_idx : int or None
        As in torch; the row reads as zeros. Of a dynamic table, a key, also one below 0.
    device, dtype
        Device and type of the results; ``to`` changes them.
    table : str or None
        The table; None: the only one.
    store : Store
        What ``penstock.torch.store`` returns.

    Examples
    --------
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table])))
    >>> bag = pt.EmbeddingBag(8, 2, mode="sum", store=store)
    >>> bag(torch.tensor([5, 3, 5]), torch.tensor([0, 1])).tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = True,
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: Any = None,
        table: str | None = None,
        store: Store,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, store, table, max_norm, padding_idx, scale_grad_by_freq, device, dtype
        )
        if mode not in ("sum", "mean", "max"):
            raise UsageError("mode has to be one of sum, mean or max")
        if mode == "max" and scale_grad_by_freq:
            raise UsageError("max mode does not support scaling the gradient by the frequency")
        self.mode, self.include_last_offset = mode, include_last_offset

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the bags' embeddings, as ``torch.nn.EmbeddingBag.forward`` does.

        Parameters
        ----------
        input, offsets, per_sample_weights : Tensor
            As in torch, on any device.

        Returns
        -------
        Tensor
            Shape (bags, embedding_dim).
        """
        if offsets is not None:
            check_integers(offsets, "offsets")
        rows, index, padding = self._pull(input)
        return functional.embedding_bag(
            index,
            rows,
            None if offsets is None else offsets.to(index.device, index.dtype),
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def materialize(self) -> torch.nn.EmbeddingBag:
        """Return a ``torch.nn.EmbeddingBag`` with the rows of the table as its weight: a copy of the whole table."""
        return torch.nn.EmbeddingBag(
            self.num_embeddings,
            self.embedding_dim,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
            _weight=whole_weight(self.store, self.table, self._like),
        )


class Embedding(_SingleTable):
    """``torch.nn.Embedding`` over a table of a store: the arguments, results and errors of torch, but no weight.

    Parameters
    ----------
    num_embeddings, embedding_dim : int
        The table's vocabulary_size and dim; of a dynamic table, ``num_embeddings`` is not checked.
    padding_idx : int or None
        As in torch; the row reads as zeros. Of a dynamic table, a key, also one below 0.
    max_norm, norm_type
        Refused: a lookup changes no row.
    scale_grad_by_freq : bool
        As in torch.
    sparse : bool
        Has no effect: a frame contains the rows of the batch only.
    device, dtype
        Device and type of the results; ``to`` changes them.
    table : str or None
        The table; None: the only one.
    store : Store
        What ``penstock.torch.store`` returns.

    Examples
    --------
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> embedding = pt.Embedding(8, 2, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table]))))
    >>> embedding(torch.tensor([[5, 3]])).shape
    torch.Size([1, 2, 2])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
        table: str | None = None,
        store: Store,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, store, table, max_norm, padding_idx, scale_grad_by_freq, device, dtype
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Return the embeddings of ids.

        Parameters
        ----------
        input : Tensor
            Integers of any shape, on any device.

        Returns
        -------
        Tensor
            The shape of ``input``, followed by embedding_dim.
        """
        rows, index, padding = self._pull(input)
        return functional.embedding(index, rows, padding)

    def materialize(self) -> torch.nn.Embedding:
        """Return a ``torch.nn.Embedding`` with the rows of the table as its weight: a copy of the whole table."""
        return torch.nn.Embedding(
            self.num_embeddings,
            self.embedding_dim,
            self.padding_idx,
            scale_grad_by_freq=self.scale_grad_by_freq,
            _weight=whole_weight(self.store, self.table, self._like),
        )
