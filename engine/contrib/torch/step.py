"""``Step``: the gradients of pulled rows as one frame, then the optimizer of the dense part."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.torch.modules import StoreModule
from penstock.contrib.torch.open_store import is_distributed
from penstock.contrib.torch.pulled_rows import PulledRows, add_repeated, blocks_of
from penstock.contrib.torch.stores import Block, EngineStore, StepReport


class _Frame(NamedTuple):
    """Gradients of rows. step : that the first of the rows were read at"""

    blocks: list[Block]
    step: int


def _is_in_first_step(scaler: Any, opt: Any) -> bool:
    """Return whether a GradScaler has scaled its first loss, and has not unscaled the gradients of an optimizer.

    torch has no public name for that; where it has other ones than these, the answer is no.
    """
    state = vars(scaler)
    if not scaler.is_enabled() or state.get("_scale") is None or id(opt) in state.get("_per_optimizer_states", {}):
        return False
    return int(state.get("_growth_tracker", 1)) == 0 and scaler.get_scale() == state.get("_init_scale")


class Step:
    """Pushes the gradients of all rows that were pulled since the last step, and steps the dense optimizer.

    Parameters
    ----------
    modules : torch.nn.Module
        A module of this package, or a model that contains some, all of one store.
    dense_optimizer : torch.optim.Optimizer or None
        Optimizer of the other parameters.
    synchronous : bool or None
        Whether a step waits until the gate has opened, which needs a frame of each other rank. None: if the gate needs
        as many frames as ``torch.distributed`` has ranks.

    Raises
    ------
    UsageError
        If the modules belong to no store or to several, or an engine of this process would miss the gradients of other
        ranks.
    UsageTypeError
        If ``modules`` is no module, for example parameters, or ``dense_optimizer`` no optimizer.

    Notes
    -----
    A frame says the step at which its rows were read. If other frames have opened the gate since, it is stale: it
    changes nothing and counts in ``report``; the dense optimizer steps all the same.

    A ``torch.amp.GradScaler`` takes a Step for an optimizer: ``scaler.step(opt)`` unscales the gradients of rows, too,
    and skips the step if one is not finite. Without a scaler, such a gradient raises InputError, with the table and the
    id, before anything is sent. A first step after a scaled loss that the scaler does not call raises UsageError.

    A step of ``dense_optimizer`` alone while rows have gradients is a UserWarning: it does not push them. A caller that
    steps the optimizer itself, such as a trainer of another library, needs a Step without ``dense_optimizer``, and
    calls its ``step`` and ``zero_grad``, too. If the optimizer raises an error, nothing is sent, and the gradients stay
    until ``zero_grad``.

    Examples
    --------
    >>> import torch
    >>> import penstock as ps, penstock.torch as pt
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> bag = pt.EmbeddingBag(8, 2, store=pt.store(ps.Engine(ps.EmbeddingConfig.from_tables([table]))))
    >>> opt = pt.Step(bag)
    >>> bag(torch.tensor([[5, 3]])).sum().backward()
    >>> opt.step()
    >>> opt.report
    StepReport(step=1, applied=1, stale=0, pending=0)
    >>> bag(torch.tensor([[5]])).tolist()
    [[0.875, 0.875]]
    """

    def __init__(
        self,
        modules: torch.nn.Module,
        dense_optimizer: torch.optim.Optimizer | None = None,
        *,
        synchronous: bool | None = None,
    ) -> None:
        if not isinstance(modules, torch.nn.Module):
            raise UsageTypeError(
                f"Step: expected the model, a torch.nn.Module, got {type(modules).__name__}; give parameters to the "
                "dense optimizer, and put several modules into a torch.nn.ModuleList"
            )
        stores = {module.store for module in modules.modules() if isinstance(module, StoreModule)}
        if len(stores) != 1:
            raise UsageError(f"Step: expected modules of one store, got modules of {len(stores)}")
        (self.store,) = stores
        if dense_optimizer is not None and not hasattr(dense_optimizer, "param_groups"):
            raise UsageTypeError(
                "Step: expected dense_optimizer as a torch.optim.Optimizer, such as "
                f"torch.optim.Adam(model.parameters()), got {dense_optimizer!r}"
            )
        self.dense_optimizer = dense_optimizer
        self._last_read = 0  # the step that the rows of the last frame were read at
        self._is_checked = False  # for a scaled loss
        if dense_optimizer is not None:
            with suppress(AttributeError):  # a wrapper of an optimizer may have no hooks
                dense_optimizer.register_step_post_hook(self._warn_if_rows_wait)
        ranks = distributed.get_world_size() if is_distributed() else 1
        if ranks > 1 and isinstance(self.store, EngineStore):
            raise UsageError(
                f"Step: this engine would get the gradients of one rank of {ranks}; serve its configuration (penstock "
                "serve --num-required …), and give every rank the address"
            )
        required = self.store.num_required
        self.store.synchronous = required == ranks > 1 if synchronous is None else synchronous
        self.store.step_owner = self
        if required > 1 and self.store.reduction == "mean":
            warnings.warn(
                f"the gate takes {required} frames and divides each row's sum by the number of frames that contain the "
                "row (reduction='mean'); gradients add up, as in torch, with reduction='sum'",
                stacklevel=2,
            )

    def _warn_if_rows_wait(self, *_: object) -> None:
        """Warn if the dense optimizer has stepped while gradients of rows wait for this Step."""
        if self.store.step_owner is self and self._pending():
            warnings.warn(
                "the dense optimizer has stepped without the rows, whose gradients stay in memory; call step() and "
                "zero_grad() of penstock.torch.Step instead of the optimizer's, which it calls, too",
                stacklevel=3,
            )

    @property
    def report(self) -> StepReport:
        """The global step, and what became of the frames."""
        return self.store.report

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameters of the dense optimizer, and a group of the pulled rows, for scaling and clipping."""
        groups = [] if self.dense_optimizer is None else self.dense_optimizer.param_groups
        pulled = self._pending()
        add_repeated(pulled)  # a norm of parts is not that of their sum
        return [*groups, {"params": [part.rows for part in pulled]}]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the dense optimizer by parameter; that of rows is in the tables. Lightning asks for it."""
        return {} if self.dense_optimizer is None else self.dense_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The default options of the dense optimizer. Lightning asks for them."""
        return {} if self.dense_optimizer is None else self.dense_optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that rows got so far, and those of the dense optimizer.

        Parameters
        ----------
        set_to_none : bool
            As in torch, for the dense optimizer.
        """
        if self._is_accumulating:
            return
        self._drop_pending()
        if self.dense_optimizer is not None:
            self.dense_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push one frame, and step the dense optimizer.

        Parameters
        ----------
        closure : callable or None
            Computes the loss again, as for the dense optimizer, which may call it several times: the rows get the
            gradients of its last call.

        Returns
        -------
        object
            The loss of the closure; None without one.

        Raises
        ------
        InputError
            If a gradient is not finite; nothing was sent, and the gradients stay until ``zero_grad``.
        ServiceError
            If the service stays unreachable, or a wait reaches its limit (ServiceTimeoutError). The frame is not lost:
            the next step sends it first.
        UsageError
            If a newer Step pushes for this store, or it is closed.

        Notes
        -----
        Without gradients of rows no frame is sent. A step that is interrupted sends its frame once, or not at all.
        """
        if self.store.step_owner is not self:
            raise UsageError("step: a newer Step pushes the gradients of this store")
        if self._is_accumulating:
            return None
        num_stale = self.store.report.stale
        if closure is None:
            self._push(self._frame())
            if self.dense_optimizer is not None:
                self.dense_optimizer.step()
            loss = None
        else:
            loss = self._step_by(closure)
        if self.store.report.stale > num_stale == 0:
            self._warn_of_stale_frames()
        return loss

    # ---- inside

    @property
    def _is_accumulating(self) -> bool:
        """Whether a dense optimizer that accelerate prepared would ignore a step now, until the last micro-batch."""
        return not getattr(getattr(self.dense_optimizer, "gradient_state", None), "sync_gradients", True)

    def _step_by(self, closure: Callable[[], Any]) -> Any:
        """Step as ``step`` does with a closure. Rows change once it has been called for the last time."""
        pending, earlier = self.store.pending, dict(self.store.pending)
        frame: _Frame | None = None
        evaluated: dict[int, PulledRows] = {}  # of the frame; taken out, else the optimizer's hook warns of them

        def evaluate() -> Any:
            nonlocal frame
            evaluated.clear()
            pending.update(earlier)
            loss = closure()
            frame = self._frame()
            evaluated.update(pending)
            pending.clear()
            return loss

        try:
            if self.dense_optimizer is not None:
                loss = self.dense_optimizer.step(evaluate)
            else:
                with torch.enable_grad():
                    loss = evaluate()
        finally:
            pending.update(evaluated)  # also if the optimizer fails: nothing was sent, and the gradients stay
        if frame is not None:
            self._push(frame)
        return loss

    def _pending(self) -> list[PulledRows]:
        """Return the rows that have gradients, in the order of their forward passes."""
        pulled = [part for _, part in sorted(self.store.pending.items())]
        return [part for part in pulled if part.rows.grad is not None]

    def _drop_pending(self) -> None:
        """Drop the gradients of rows: another backward pass through the same graph begins anew."""
        for pulled in self.store.pending.values():
            pulled.rows.grad = None
        self.store.pending.clear()

    def _frame(self) -> _Frame:
        """Return the gradients of rows so far. Raises InputError if one is not finite."""
        pulled = self._pending()
        if pulled and not self._is_checked:
            self._check_unscaled()
            self._is_checked = True
        return _Frame(blocks_of(pulled), min((part.step for part in pulled), default=0))

    def _check_unscaled(self) -> None:
        """Raise UsageError if a GradScaler has begun to scale losses, but does not unscale the gradients of rows."""
        kinds = torch.amp.GradScaler, torch.cuda.amp.GradScaler
        for scaler in gc.get_referrers(*kinds):  # torch lists them nowhere; once, this takes some 30 ms
            if isinstance(scaler, kinds) and _is_in_first_step(scaler, self):
                raise UsageError(
                    f"step: a GradScaler has scaled a loss by {scaler.get_scale():g}, and the gradients of rows were "
                    "not divided by it; call scaler.step(opt) with this Step instead of opt.step(), or "
                    "scaler.unscale_(opt) before it; nothing was sent"
                )

    def _push(self, frame: _Frame) -> None:
        self._drop_pending()  # before the push, so that an interrupted one is not repeated
        self._last_read = frame.step
        self.store.push(frame.blocks, frame.step)

    def _warn_of_stale_frames(self) -> None:
        """Warn of the first stale frame of the store."""
        report = self.store.report
        warnings.warn(
            f"a frame was dropped as stale, with its gradients: its rows were read at step {self._last_read}, and "
            f"other frames had opened the gate before it arrived (the global step is {report.step}); {report.stale} "
            f"of {report.applied + report.stale} frames of this store so far, and opt.report counts further ones; "
            "ranks lose none if the gate requires a frame of each (--num-required)",
            stacklevel=3,
        )

    # ---- the state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dense optimizer and the number of frames so far, which are durable then.

        Returns
        -------
        dict
        """
        self.store.make_durable()
        dense = None if self.dense_optimizer is None else self.dense_optimizer.state_dict()
        return {"dense": dense, "frames": self.store.frames}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a state: a service skips those of the next frames that it has applied already.

        Parameters
        ----------
        state : dict
            What ``state_dict`` returned.
        """
        self.store.seek(int(state["frames"]))
        if self.dense_optimizer is not None:
            self.dense_optimizer.load_state_dict(state["dense"])

    def __repr__(self) -> str:
        return f"Step({self.store!r}, {self.dense_optimizer!r})"
