"""A store: the tables that modules read rows of, and the gate that takes their gradients. It knows no torch module.

A frame is a list of blocks, one per pulled tensor, so that nothing is copied on its way to a service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import numpy as np

import penstock.base.forks as forks
from penstock.base.errors import StateError, UsageError, UsageTypeError, close_names, listed, unreleased
from penstock.base.limited_calls import CallThread, LimitedCall
from penstock.base.validation import INT64_MAX
from penstock.model.frames import Array, Float32, Int64
from penstock.model.version import Version
from penstock.pyx.id_table import IdTable
from penstock.rows.initializers import InitialRows

if TYPE_CHECKING:
    from penstock.api.engine import Engine

Ids = Array
T = TypeVar("T")

ROWS_AS_THEY_ARE = "load the modules without the keys that end in _extra_state, with strict=False"
_SAVE_BOTH = "save the engine whenever you save the modules, and restore both"
# How many of the last frames a prefetched batch can have missed; one that missed more is pulled again.
_MOST_MISSED = 8


class TableInfo(NamedTuple):
    """What a module has to know of a table.

    num_rows : None: the table is dynamic
    changes_alone : whether a step changes only rows of its frames; not of a dynamic table or by a non-lazy optimizer
    tag : of its learning rate; None: a constant
    served_rate : what the flags of a service set the tag to; None: nothing
    is_frozen : whether it is never trained
    absent : what keys without a row read; None: the table is not dynamic
    """

    dim: int
    num_rows: int | None
    changes_alone: bool
    tag: int | None = None
    served_rate: float | None = None
    is_frozen: bool = False
    absent: InitialRows | None = None


class StepReport(NamedTuple):
    """The state of the gate after the last ``Step.step``.

    Attributes
    ----------
    step : int
        The global step.
    applied, stale : int
        Frames of this store that entered the gate, and that were dropped because their step was behind.
    pending : int
        Frames in the gate, of all ranks.
    """

    step: int
    applied: int
    stale: int
    pending: int


class Pulled(NamedTuple):
    """Rows, and their version: the earliest, if they were read in several requests."""

    rows: dict[str, Float32]
    version: Version


class TableContents(NamedTuple):
    """All rows of a table. rows : float32, shape (n, dim); keys : of a dynamic table, those of the rows, else None"""

    rows: Float32
    keys: Array | None


class Block(NamedTuple):
    """A part of a frame: the gradient rows of one or several tables, one table after the other.

    ids : table → its distinct ids, in the order of the rows; rows : float32, shape (n, dim)
    """

    ids: Mapping[str, Ids]
    rows: Float32

    def parts(self) -> Iterator[tuple[str, Ids, Float32]]:
        """Yield every table with its ids and rows."""
        begin = 0
        for table, ids in self.ids.items():
            yield table, ids, self.rows[begin : begin + len(ids)]
            begin += len(ids)


def distinct(ids: Ids) -> tuple[Ids, Int64]:
    """Return the distinct ids in order of first appearance, and for every id its index among them."""
    table = IdTable(len(ids))
    index = table.insert(ids.view(np.int64))
    result = np.empty(len(table), ids.dtype)
    result[index] = ids
    return result, index


def no_table(place: str, name: object, tables: Iterable[str]) -> UsageError:
    """Return the error for a table that is none of these. place : begins its text"""
    near = close_names(name, tables) if isinstance(name, str) else []
    hint = f"did you mean '{near[0]}'?" if near else f"expected one of {listed(tables)}"
    return UsageError(f"{place}: no table {name!r}; {hint}")


class Store(ABC):
    """Where modules pull rows from and ``Step`` pushes their gradients to; ``store`` returns one. A context manager.

    Attributes
    ----------
    contributor : str
        The producer of its frames.
    num_required : int
        Frames that open the gate.
    reduction : {"mean", "sum"}
        Whether the gate divides each row's sum by the number of frames that contain the row.
    report : StepReport
        Of the last push.
    """

    contributor: str
    num_required: int
    reduction: str
    tables: dict[str, TableInfo]
    report: StepReport
    engine: Engine | None = None  # of this process

    def __init__(self) -> None:
        self.pending: dict[int, Any] = {}  # PulledRows that have a gradient since the last step, by forward pass
        self.passes = count()
        self.step_owner: object = None  # the newest Step, which alone may push
        self.synchronous = False  # whether a push waits for the frames of all other ranks
        self.in_rounds = False  # whether a step takes one frame of each rank, also one without rows
        self.frames = 0  # number of the contributor's last frame
        self.earlier_frames = 0  # of the contributor, which precede this store without a word of load_state_dict
        self._missed: deque[tuple[int, dict[str, Ids]]] = deque(maxlen=_MOST_MISSED)  # step after a frame, and its ids
        self._prefetcher: CallThread | None = None
        self._is_closed = False
        self._process = forks.this_process

    # ---- rows out

    def pull(self, ids: Mapping[str, Ids]) -> Pulled:
        """Return the rows of distinct ids."""
        self._check_open()
        return self._pull(ids)

    def submit(self, function: Callable[[], T]) -> LimitedCall[T]:
        """Run a function on the thread of prefetches."""
        self._check_open()
        if self._prefetcher is None:
            self._prefetcher = CallThread("penstock-prefetch")
        return self._prefetcher.submit(function, "the rows of a prefetched batch")

    def outcome(self, call: LimitedCall[T]) -> T:
        """Return the result of a call, or raise its error."""
        return call.result()

    def refreshed(self, ids: Mapping[str, Ids], pulled: Pulled) -> Pulled:
        """Return rows that were pulled earlier as they are now: only those that our frames changed are pulled again.

        If frames of others may have changed rows, all of them are.
        """
        changed = self._changed_since(ids, pulled)
        current = self.pull({name: ids[name][indices] for name, indices in changed.items()})
        step = pulled.version.step
        ours = sum(missed > step for missed, _ in self._missed)
        is_alone = self.num_required == 1 and all(self.tables[name].changes_alone for name in ids)
        if current.version != pulled.version.at(step + ours) or (ours and not is_alone):
            return self.pull(ids)
        for name, indices in changed.items():
            pulled.rows[name][indices] = current.rows[name]
        return pulled._replace(version=current.version)

    def _changed_since(self, ids: Mapping[str, Ids], pulled: Pulled) -> dict[str, Int64]:
        """Return by table the indices of ids that frames of ours contained after they were pulled."""
        frames = [frame for step, frame in self._missed if step > pulled.version.step]
        changed = {}
        for name, table_ids in ids.items():
            table = IdTable(len(table_ids))
            table.insert(table_ids.view(np.int64))
            indices = [table.insert(frame[name].view(np.int64)) for frame in frames if name in frame]
            joined = np.unique(np.concatenate([np.zeros(0, np.int64), *indices]))
            changed[name] = joined[joined < len(table_ids)]
        return changed

    def contents(self, names: Sequence[str]) -> dict[str, TableContents]:
        """Return all rows of tables as a forward pass sees them, of one step."""
        self._check_open()
        return self._contents(names)

    def seen(self, table: str, rows: Float32) -> Float32:
        """Return rows of a commit as a forward pass of this store would see them."""
        return rows

    # ---- gradients in

    def push(self, blocks: Sequence[Block], step: int, rates: Mapping[int, float] | None = None) -> None:
        """Push one frame of rows that were read at a step, and set ``report``. rates : by tag; None: the tables'"""
        self._check_open()
        if not blocks and self.synchronous and not self.in_rounds:
            raise UsageError(
                f"step: this batch has no rows, and the gate waits for a frame of each of {self.num_required} ranks; "
                "give every rank at least one id, or serve rounds (penstock serve --workers), which take such a frame"
            )
        if not blocks and not (self.synchronous and self.in_rounds):
            return
        before = self.report.stale
        self._push(blocks, step, rates)
        if self._prefetcher is not None and self.report.stale == before:
            self._missed.append((self.report.step, {name: ids for block in blocks for name, ids in block.ids.items()}))

    # ---- checkpoints

    def check_reference(self, reference: Mapping[str, Any]) -> None:
        """Raise StateError unless this store has the state that a state_dict refers to."""
        if "lineage" in reference:
            raise unreleased("load_state_dict", "save the modules again")
        version, current = Version(reference["version"]), self.reference()
        problem = self._difference(version, Version(current["version"]))
        if not problem and reference["digest"] and current["digest"] and reference["digest"] != current["digest"]:
            problem = f"the engine has another commit of step {version.step} than the modules; {_SAVE_BOTH}"
        if problem:
            raise StateError(f"load_state_dict: {problem}")

    def info(self, table: str | None) -> tuple[str, TableInfo]:
        """Return a table's name and info. table : None: the only one. Raises UsageError."""
        if table is None and len(self.tables) == 1:
            table = next(iter(self.tables))
        if table not in self.tables:
            problem = f"no table '{table}'" if table is not None else "table: say which one"
            raise UsageError(f"{problem}; expected one of {listed(self.tables)}")
        return table, self.tables[table]

    # ---- the end

    def close(self) -> None:
        """Wait for the last acknowledgement, and end. Modules and steps of this store raise UsageError from then on."""
        if self._is_closed:
            return
        self._is_closed = True
        self.pending.clear()
        if self._process != forks.this_process:
            return
        self._close()

    def _end_prefetches(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close(waits=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this store is closed; open another one with penstock.torch.store")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageTypeError(
            f"cannot pickle or copy {self!r}: open one with penstock.torch.store in the process that uses it"
        )

    # ---- of each kind

    @abstractmethod
    def _pull(self, ids: Mapping[str, Ids]) -> Pulled: ...

    @abstractmethod
    def check_rates(self, tags: Collection[int]) -> None:
        """Raise UsageError if frames cannot have the learning rates of these tags alone."""

    @abstractmethod
    def _push(self, blocks: Sequence[Block], step: int, rates: Mapping[int, float] | None) -> None: ...

    @abstractmethod
    def seek(self, frames: int) -> None:
        """Continue after so many frames of this contributor, as a checkpoint of the trainer says."""

    @abstractmethod
    def make_durable(self) -> None:
        """Wait until no crash of a service can take back a frame."""

    def mark(self, keep: int) -> dict[str, Any]:
        """Return what ``return_to`` needs, for a checkpoint of the trainer: a tag of the tables as they are.

        keep : tags that stay
        """
        return {}

    def claim(self) -> None:
        """Take the contributor's name over: no frame of an earlier process of that name counts from here on.

        Raises UsageError if this store has pushed frames.
        """
        raise NotImplementedError

    def return_to(self, mark: Mapping[str, Any], is_first: bool) -> None:
        """Bring the tables back to a mark. is_first : this rank does it, before the others call this"""
        raise NotImplementedError

    @abstractmethod
    def _contents(self, names: Sequence[str]) -> dict[str, TableContents]: ...

    @abstractmethod
    def reference(self) -> dict[str, str]:
        """Return what identifies the state of the tables, as plain data: their version, and a commit's digest."""

    @abstractmethod
    def _difference(self, saved: Version, current: Version) -> str:
        """Return why tables cannot be those of a saved version; '' if they can."""

    @abstractmethod
    def _close(self) -> None: ...


class EngineStore(Store):
    """The tables of an engine in this process."""

    engine: Engine

    def __init__(self, engine: Engine, contributor: str) -> None:
        super().__init__()
        self.engine, self.contributor = engine, contributor
        self.num_required, self.reduction = engine.gate.num_required or 1, engine.reduction
        self.tables = {
            spec.name: TableInfo(
                spec.dim,
                None if spec.dynamic else spec.vocabulary_size,
                spec.dynamic is None and not spec.rule.non_lazy,
                spec.tag,
                is_frozen=not spec.trainable,
                absent=None if spec.dynamic is None else engine.core.tables.dynamic[spec.name].absent,
            )
            for spec in engine.config.at_step(INT64_MAX).tables
        }
        self.report = StepReport(engine.global_step, 0, 0, engine.gate.num_accumulated)

    def __repr__(self) -> str:
        return f"Store({self.engine!r})"

    def _pull(self, ids: Mapping[str, Ids]) -> Pulled:
        engine = self.engine
        with engine.still():
            rows = {name: engine.lookup(name, table_ids, forward=True) for name, table_ids in ids.items()}
            return Pulled(rows, engine.version)

    def _push(self, blocks: Sequence[Block], step: int, rates: Mapping[int, float] | None) -> None:
        frame = {name: (ids, rows) for block in blocks for name, ids, rows in block.parts()}
        applied = self.engine.apply(frame, local_step=step, learning_rates=rates, contributor=self.contributor)
        self.frames += 1
        counts = (self.report.applied + applied, self.report.stale + (not applied))
        self.report = StepReport(self.engine.global_step, *counts, self.engine.gate.num_accumulated)

    def check_rates(self, tags: Collection[int]) -> None:
        """Do nothing: the engine knows the rates of its functions, and names those that are missing."""

    def seek(self, frames: int) -> None:
        self.frames = frames

    def make_durable(self) -> None:
        """Do nothing: the caller saves the engine."""

    def seen(self, table: str, rows: Float32) -> Float32:
        return self.engine.core.tables.seen(table, rows)

    def _contents(self, names: Sequence[str]) -> dict[str, TableContents]:
        engine, contents = self.engine, {}
        with engine.still():
            for name in names:
                num_rows = self.tables[name].num_rows
                keys = engine.keys(name).to_numpy() if num_rows is None else None
                ids = keys if num_rows is None else np.arange(num_rows)
                contents[name] = TableContents(engine.lookup(name, ids, forward=True), keys)
        return contents

    def reference(self) -> dict[str, str]:
        last = self.engine.session.last
        digest = "" if last is None or not last[0].files else last[0].files[-1].digest
        return {"version": str(self.engine.version), "digest": digest}

    def _difference(self, saved: Version, current: Version) -> str:
        if saved.step != current.step:
            return (
                f"expected tables at step {saved.step}, got step {current.step}; {_SAVE_BOTH}; after a rollback to "
                f"these rows, {ROWS_AS_THEY_ARE}"
            )
        return ""

    def _close(self) -> None:
        """Leave the engine open, which belongs to the caller."""
        self._end_prefetches()
