"""``Step``: the gradients of pulled rows as one frame, then the optimizer of the dense part."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from penstock.base.errors import PenstockError, StateError, UsageError, UsageTypeError, listed
from penstock.base.validation import whole
from penstock.contrib.torch.modules import StoreModule
from penstock.contrib.torch.open_store import is_distributed
from penstock.contrib.torch.pulled_rows import PulledRows, add_repeated, blocks_of
from penstock.contrib.torch.row_rates import RowRates
from penstock.contrib.torch.stores import Block, EngineStore, StepReport


class _Frame(NamedTuple):
    """Gradients of rows. step : that the first of the rows were read at; rates : by tag; None: the tables' own"""

    blocks: list[Block]
    step: int
    rates: dict[int, float] | None


def _num_ranks() -> int:
    """Return the number of ranks of ``torch.distributed``; without it, 1."""
    return distributed.get_world_size() if is_distributed() else 1


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
        as many frames as ``torch.distributed`` has ranks, or has rounds.
    learning_rates : mapping or None
        Rates of the rows of tables with dynamic learning rates, by the name of the table or by tag. Each is a function
        of the global step, or a scheduler of ``torch.optim``, whose last rate counts; if that has several parameter
        groups, ``(scheduler, NUMBER)``, from 0. None: the rates of the tables' optimizers.
    keep : int
        How many of the versions that ``state_dict`` has tagged stay, in rounds.

    Raises
    ------
    UsageError
        If the modules belong to no store or to several, or an engine of this process would miss the gradients of other
        ranks; or if a table of ``learning_rates`` does not exist, or has another rate than these.
    UsageTypeError
        If ``modules`` is no module, for example parameters, ``dense_optimizer`` no optimizer, or a rate neither a
        function nor a scheduler.

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
        learning_rates: Mapping[str | int, Any] | None = None,
        keep: int = 3,
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
        self._rates = RowRates(learning_rates or {}, self.store.tables)
        self._last_read = 0  # the step that the rows of the last frame were read at
        self._is_checked = False  # for a scaled loss
        if dense_optimizer is not None:
            with suppress(AttributeError):  # a wrapper of an optimizer may have no hooks
                dense_optimizer.register_step_post_hook(self._warn_if_rows_wait)
        ranks = _num_ranks()
        if ranks > 1 and isinstance(self.store, EngineStore):
            raise UsageError(
                f"Step: this engine would get the gradients of one rank of {ranks}; serve its configuration (penstock "
                "serve --num-required …), and give every rank the address"
            )
        if self._rates.tags:
            self.store.check_rates(self._rates.tags)
        required = self.store.num_required
        needs_all = required == ranks > 1 or (self.store.in_rounds and required > 1)
        if synchronous is False and self.store.in_rounds and required > 1:
            raise UsageError(
                f"synchronous=False: the service takes rounds of {required} workers, where a second frame of a step "
                "would be stale; leave it out, or serve --num-required 1 --max-staleness N"
            )
        self.store.synchronous = needs_all if synchronous is None else synchronous
        self._keep = whole("keep", keep, 1)
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

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, those of rows and of the dense optimizer's parameters, in place.

        Parameters
        ----------
        max_norm : float
            The largest norm: larger gradients are scaled down to it.
        norm_type : float
            The p of the norm, above 0; may be ``"inf"``.
        error_if_nonfinite : bool
            Whether a norm that is not finite is an error, before a gradient changes.

        Returns
        -------
        Tensor
            The norm before clipping, of one value.

        Raises
        ------
        UsageError
            If ``norm_type`` is 0 or below, where the rows that a batch has no ids of would count.
        RuntimeError
            If the norm is not finite and ``error_if_nonfinite`` says so: torch's error.

        Notes
        -----
        As ``torch.nn.utils.clip_grad_norm_`` over all weights: a row that several forward passes pulled counts once,
        with the sum of its gradients. Call it after the last backward pass. A GradScaler has to unscale first:
        ``scaler.unscale_(opt)``.

        Each rank clips its own gradients by its own norm, as the gate adds up those of rows later. With
        DistributedDataParallel, dense parameters would drift apart by that, so that this is a UserWarning: clip them
        without the rows.
        """
        if float(norm_type) <= 0:
            raise UsageError(f"clip_grad_norm_: expected norm_type above 0, got {norm_type!r}")
        if self.dense_optimizer is not None and _num_ranks() > 1:
            warnings.warn(
                "clip_grad_norm_: each rank scales its gradients by its own norm, which contains those of its rows, so "
                "that dense parameters drift apart; clip them alone (torch.nn.utils.clip_grad_norm_ of the model's "
                'parameters()), and rows alone (of opt.param_groups[-1]["params"])',
                stacklevel=2,
            )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        # A batch without ids has rows of no size, whose largest value torch refuses to take.
        parameters = [parameter for parameter in parameters if parameter.grad is None or parameter.grad.numel()]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

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
            If a newer Step pushes for this store, or it is closed, or a learning rate is not finite.

        Notes
        -----
        Without gradients of rows no frame is sent, but in rounds of several ranks one without rows. A step that is
        interrupted sends its frame once, or not at all.
        """
        if self.store.step_owner is not self:
            raise UsageError("step: a newer Step pushes the gradients of this store")
        if self._is_accumulating:
            return None
        num_stale, num_frames = self.store.report.stale, self.store.frames
        if closure is None:
            self._push(self._frame())
            if self.dense_optimizer is not None:
                self.dense_optimizer.step()
            loss = None
        else:
            loss = self._step_by(closure)
        if self.store.report.stale > num_stale == 0:
            self._warn_of_stale_frames()
        if self.store.earlier_frames and not num_frames:
            self._warn_of_earlier_frames()
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
        """Return the gradients of rows so far. Raises InputError if one is not finite, UsageError if a rate is not."""
        pulled = self._pending()
        if pulled and not self._is_checked:
            self._check_unscaled()
            self._is_checked = True
        blocks, step = blocks_of(pulled), min((part.step for part in pulled), default=0)
        return _Frame(blocks, step, self._rates.at(step) if blocks and self._rates.tags else None)

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
        self.store.push(frame.blocks, frame.step, frame.rates)

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

    def _warn_of_earlier_frames(self) -> None:
        """Warn before ranks that begin again learn from their first batches twice."""
        store = self.store
        warnings.warn(
            f"the service has {store.earlier_frames} frames of '{store.contributor}' from an earlier run, and this one "
            "goes on after them without load_state_dict: if it repeats their batches, its rows learn from them twice; "
            "save the state before the first step, too, so that each run that begins again can go back to one",
            stacklevel=3,
        )

    # ---- the state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the dense optimizer and the number of frames so far, which are durable then.

        Returns
        -------
        dict

        Notes
        -----
        In rounds of synchronous ranks, the service tags its version of this step, to which ``load_state_dict`` returns.
        """
        self.store.make_durable()
        dense = None if self.dense_optimizer is None else self.dense_optimizer.state_dict()
        return {"dense": dense, "frames": self.store.frames, **self.store.mark(self._keep)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a state: a service skips those of the next frames that it has applied already.

        Parameters
        ----------
        state : dict
            What ``state_dict`` returned.

        Raises
        ------
        StateError
            If the ranks have states of different steps, or the service has no such version.
        UsageError
            If ``state`` is another one, such as that of a torch optimizer; or if this store has pushed frames, or the
            other ranks cannot be reached.

        Notes
        -----
        In rounds of synchronous ranks, all call this, and return together: the first one rolls the service back to the
        version of the state, so that no frame after it counts, and each sends them again.
        """
        if "frames" not in state:
            raise UsageError(
                f"load_state_dict: expected what Step.state_dict returned, got {listed(state) or 'nothing'}; load the "
                "state of a torch optimizer into that optimizer"
            )
        if self.dense_optimizer is not None and state["dense"] is None:
            raise UsageError("load_state_dict: the state is of a Step without a dense optimizer, and this one has one")
        if "tag" in state and self.store.in_rounds and self.store.synchronous:
            self._return_together({name: state[name] for name in ("tag", "version")})
        else:
            self.store.seek(int(state["frames"]))
        if self.dense_optimizer is not None:
            self.dense_optimizer.load_state_dict(state["dense"])

    def _return_together(self, mark: dict[str, Any]) -> None:
        """Bring the service back to a version, with all ranks."""
        ranks = distributed.get_world_size() if is_distributed() else 1
        if ranks != self.store.num_required:
            raise UsageError(
                f"load_state_dict: rounds of {self.store.num_required} workers return to a version together, and "
                f"torch.distributed has {ranks} of them: initialize it in all, or roll back with penstock rollback"
            )
        failed: PenstockError | None = None
        try:  # in all ranks before the return, so that it comes after the last frame of an earlier run
            self.store.claim()
        except PenstockError as error:
            failed = error
        states: list[Any] = [(mark, failed and str(failed))]
        if ranks > 1:
            (mine,), states = states, [None] * ranks
            distributed.all_gather_object(states, mine)
        if failed is not None:
            raise failed
        for rank, (_, text) in enumerate(states):
            if text is not None:  # it would never come to what follows
                raise StateError(f"load_state_dict: rank {rank} failed: {text}")
        marks = [each for each, _ in states]
        if any(each != mark for each in marks):
            steps = ", ".join(f"rank {rank}: {each['tag']}" for rank, each in enumerate(marks))
            raise StateError(f"load_state_dict: the ranks have states of different steps ({steps}); load those of one")
        problem: list[str | None] = [None]
        is_first = ranks == 1 or distributed.get_rank() == 0
        if is_first:
            try:
                self.store.return_to(mark, True)
            except PenstockError as error:
                problem = [str(error)]
        if ranks > 1:
            distributed.broadcast_object_list(problem)
        if problem[0] is not None:
            raise StateError(f"load_state_dict: {problem[0]}")
        if not is_first:
            self.store.return_to(mark, False)

    def __repr__(self) -> str:
        return f"Step({self.store!r}, {self.dense_optimizer!r})"
