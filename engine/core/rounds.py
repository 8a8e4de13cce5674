"""Rounds: a step takes one frame of each worker, summed in the order of the workers, whatever order they arrive in.

``Rounds`` stands in front of the gate and decides whose turn it is; the gate counts turns. A worker's turn in step s is
its first frame that no step has taken. Its ``step`` is s, or it has none: taken. It is smaller: stale. It is larger:
the worker has nothing for s and counts as absent, and the frame waits. So the turn of a frame follows from the frames
of its worker before it alone, and is known when it arrives.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.base.errors import InputError, StateError, UsageError, listed
from penstock.base.events import report
from penstock.core.gate import Gate
from penstock.model.frames import Array, Frame, Rows
from penstock.model.gate_policy import GatePolicy
from penstock.model.workers import WorkerNames

# Memory of the frames that wait, where one source has those of several workers.
MOST_BYTES = 1 << 30
Rates = tuple[float, ...]
EarlyRecord = tuple[Mapping[str, Any], Mapping[str, Array]]  # a frame: its header, and the rows of its tables


@dataclass(eq=False)
class EarlyFrame:
    """A frame that waits for its turn. turn : the step that takes it"""

    turn: int
    frame: Frame
    nbytes: int


class Rounds:
    """The turns of workers. Call every method under the gate's lock.

    gate : counts turns, and is due when the step has had that of each worker
    ahead : frames of one worker that may wait; most_bytes : of all that wait

    num_taken : frames in the sums of the step; num_early, nbytes : frames that wait for their turn, and their bytes
    absent : by worker, how many steps it had no frame for
    """

    def __init__(self, policy: GatePolicy, gate: Gate) -> None:
        assert policy.workers is not None
        self._gate, self.ahead, self.most_bytes = gate, policy.ahead, MOST_BYTES
        self.names = WorkerNames(policy.workers)
        self._clear()
        self.absent: Counter[str] = Counter()
        self._warned = False
        self.skipped = 0  # steps that opened without a worker that was missing
        self._since_s = time.monotonic()  # when the last turn was taken, or the first frame came

    def _clear(self) -> None:
        self._early: dict[int, deque[EarlyFrame]] = {}  # by worker; without empty ones
        self._next: dict[int, int] = {}  # by worker, the step after the last one that a frame of it has a turn in
        self._rates: dict[int, tuple[Rates, str]] = {}  # by step, the rates of its frames, and whose are known
        self.num_taken = self.num_early = self.nbytes = 0

    # ---- a frame

    def place(self, frame: Frame) -> tuple[int, int, bool]:
        """Return the number of a frame's worker, its turn, and whether it is stale. Nothing changes.

        Raises InputError for a frame that no step can take: of somebody else, with other learning rates than the frames
        of its step, or of a later step than the present one if no worker has a frame for that.
        """
        worker, step = self.names.find(frame.contributor, frame.source), frame.local_step
        turn = max(self._next.get(worker, self._gate.global_step), self._gate.global_step)
        if step is not None and step < turn:
            return worker, turn, True
        turn = turn if step is None else step
        if frame.learning_rates is not None:
            self._check_rates(frame, worker, turn)
        if turn != self._gate.global_step:
            self._check_some_present(frame, worker, turn)
        if self.nbytes > self.most_bytes and len(self._early.get(worker, ())) >= self.ahead:
            raise InputError(
                f"worker '{self.names.name(worker)}' is too far ahead: {self.nbytes:,} bytes of frames wait for their "
                f"turn (--queued-memory), and step {self._gate.global_step} for {listed(self.missing())}",
                source=frame.source,
            )
        return worker, turn, False

    def is_next(self, worker: int, turn: int) -> bool:
        """Return whether a frame that arrives enters the sums at once: it is its worker's turn, in this step."""
        return worker == self._gate.num_accumulated and turn == self._gate.global_step and worker not in self._early

    def enter(self, worker: int, turn: int, frame: Frame) -> None:
        """Note that a frame is in the sums, or is about to be: it is its worker's turn."""
        self._note(worker, turn, frame)
        self._take(frame)

    def wait(self, worker: int, turn: int, frame: Frame) -> None:
        """Keep a frame, whose rows are valid, until its turn."""
        self._note(worker, turn, frame)
        self._append(worker, turn, frame)

    def warn_of_second(self, frame: Frame, turn: int) -> None:
        """Warn once of a frame of a step that has one of the same worker already."""
        worker = self.names.find(frame.contributor, frame.source)
        if not self._warned and frame.local_step == self._next.get(worker, turn) - 1:
            self._warned = True
            report("second_frame", contributor=frame.contributor, step=frame.local_step, expected=turn)

    def _note(self, worker: int, turn: int, frame: Frame) -> None:
        if not self.num_pending:
            self._since_s = time.monotonic()
        self.names.see(frame.contributor)
        self._next[worker] = turn + 1
        if frame.learning_rates is not None and turn not in self._rates:
            self._rates[turn] = frame.learning_rates, self.names.name(worker)

    def _append(self, worker: int, turn: int, frame: Frame) -> None:
        rows: dict[str, tuple[Rows, ...]] = {}
        nbytes = 0
        for table, blocks in frame.rows.items():
            rows[table] = copies = tuple([block.copied() for block in blocks])
            for block in copies:
                nbytes += block.ids.nbytes + block.grads.nbytes
        # Bad rows have been handled when it arrived. Its memory may be its sender's, and ``reject`` may hold a batch.
        kept = frame.with_(rows=rows, bad_rows=(), dropped={}, audit=None, reject=None)
        early = EarlyFrame(turn, kept, nbytes)
        self._early.setdefault(worker, deque()).append(early)
        self.num_early += 1
        self.nbytes += nbytes

    def _check_rates(self, frame: Frame, worker: int, turn: int) -> None:
        known = self._rates.get(turn)
        if known is not None and frame.learning_rates is not None and frame.learning_rates != known[0]:
            raise InputError(
                f"learning rates {list(frame.learning_rates)} of worker '{self.names.name(worker)}' for step {turn}, "
                f"where '{known[1]}' has {list(known[0])}: the frames of a step have the same",
                source=frame.source,
            )

    def _check_some_present(self, frame: Frame, worker: int, turn: int) -> None:
        """Raise InputError if with this frame all workers have one of a later step than the present one."""
        step = self._gate.global_step
        if self.num_taken or worker in self._early or len(self._early) < self.names.count - 1:
            return
        turns = [early[0].turn for early in self._early.values()]
        if min(turns, default=turn) > step:
            raise InputError(
                f"no worker has a frame of step {step}: the smallest step is {min(turn, *turns) if turns else turn}; "
                "send the frames before, or begin there (Engine.set_global_step, replay --flush)",
                source=frame.source,
            )

    # ---- turns

    def head(self) -> Frame | None:
        """Return the frame whose turn it is; None: there is none, because of a worker that is missing or absent."""
        early = self._early.get(self._gate.num_accumulated)
        if early is None or early[0].turn != self._gate.global_step:
            return None
        return early[0].frame

    @property
    def is_absent(self) -> bool:
        """Return whether the worker whose turn it is has nothing for this step."""
        early = self._early.get(self._gate.num_accumulated)
        return early is not None and early[0].turn > self._gate.global_step

    def enter_head(self) -> None:
        """Note that the frame whose turn it is has entered the sums."""
        self._take(self._pop())

    def _pop(self) -> Frame:
        worker = self._gate.num_accumulated
        early = self._early[worker].popleft()
        if not self._early[worker]:
            del self._early[worker]
        self.num_early -= 1
        self.nbytes -= early.nbytes
        return early.frame

    def problem(self, error: InputError) -> InputError:
        """Return the error of the frame whose turn it is, with its step and its worker."""
        name, step = self.names.name(self._gate.num_accumulated), self._gate.global_step
        text = f"step {step}, worker '{name}': {error.problem}"
        return InputError(text, source=error.source, row=error.row, column=error.column, reason=error.reason)

    def pass_over(self, counts: bool = True) -> None:
        """End the turn of a worker without a frame. counts : as absent"""
        if counts:
            self.absent[self.names.name(self._gate.num_accumulated)] += 1
        self._gate.num_accumulated += 1
        self._since_s = time.monotonic()

    def _take(self, frame: Frame) -> None:
        self._gate.count_contribution(frame.contributor)
        self.num_taken += 1
        self._since_s = time.monotonic()

    @property
    def rates(self) -> Rates | None:
        """The learning rates of the frames of this step, if any of them has some."""
        known = self._rates.get(self._gate.global_step)
        return None if known is None else known[0]

    def opened(self) -> None:
        """Note that the gate has opened."""
        self.num_taken, self._since_s = 0, time.monotonic()  # updates are nobody's wait
        self._rates.pop(self._gate.global_step - 1, None)

    @property
    def first_step(self) -> int | None:
        """The first step that has a frame; None: none waits."""
        turns = [early[0].turn for early in self._early.values()]
        return min([self._gate.global_step] * (self.num_taken > 0) + turns, default=None)

    def drop(self) -> None:
        """Drop all frames that wait."""
        self._clear()

    def set_step(self, step: int) -> None:
        """Check that the global step may become another one. Raises UsageError if frames would be lost."""
        first = self.first_step
        if first is not None and (self.num_taken or step > first):
            raise UsageError(
                f"set_global_step: {self.num_pending} frames wait in a round, the first for step {first}; flush them"
            )
        self._next = {worker: early[-1].turn + 1 for worker, early in self._early.items()}

    def drop_bad_rows(self, drops: bool) -> None:
        """Say anew whether the frames that wait drop rows at which a sum leaves the finite range: those of a commit."""
        for early in self._early.values():
            for each in early:
                each.frame = replace(each.frame, drops=drops)

    def refuse_head(self) -> None:
        """Drop the frame whose turn it is, whose sum is not finite: its worker is missing then."""
        worker = self._gate.num_accumulated
        self._pop()
        if worker not in self._early:
            self._next[worker] = self._gate.global_step

    # ---- who waits

    @property
    def num_pending(self) -> int:
        """Frames that the gate holds: in its sums, and before their turn."""
        return self.num_taken + self.num_early

    def early_frames(self) -> dict[str, int]:
        """Return how many frames of each worker wait for their turn."""
        return {self.names.name(worker): len(early) for worker, early in sorted(self._early.items())}

    def missing(self) -> list[str]:
        """Return the workers whose frames this step waits for."""
        begin = self._gate.num_accumulated
        return [self.names.name(worker) for worker in range(begin, self.names.count) if worker not in self._early]

    @property
    def waited_s(self) -> float:
        """Seconds since the last turn."""
        return time.monotonic() - self._since_s

    def measures(self) -> dict[str, Any]:
        """Return what metrics show."""
        waited_s = self.waited_s if self.num_pending else 0.0
        return {"absent": dict(self.absent), "early": self.early_frames(), "waited_s": waited_s}

    def is_full(self, worker: str) -> bool:
        """Return whether as many frames of a worker wait as may."""
        return self.num_early_of(worker) >= self.ahead

    def num_early_of(self, worker: str) -> int:
        """Return how many frames of a worker wait for their turn."""
        number = self.names.number_of(worker)
        return 0 if number is None else len(self._early.get(number, ()))

    def check_room(self, frame: Frame) -> None:
        """Raise UsageError if more frames of a worker would wait than may."""
        worker, turn, is_stale = self.place(frame)
        if is_stale or self.is_next(worker, turn) or len(self._early.get(worker, ())) < self.ahead:
            return
        raise UsageError(
            f"worker '{self.names.name(worker)}' has {self.ahead} frames that wait, and step {self._gate.global_step} "
            f"waits for {listed(self.missing())}: apply their frames first"
        )

    def explain(self) -> str:
        """Return what a step waits for, to be said after the gate's counts."""
        if not self.num_pending:
            return ""
        early = ", ".join(f"{name!r}: {count}" for name, count in self.early_frames().items())
        return f"; {self.waits}, for {self.waited_s:.0f} s" + (f"; early ({early})" if early else "")

    @property
    def waits(self) -> str:
        """What a step waits for."""
        return f"waits for {listed(self.missing())}"

    def note(self) -> str:
        """Return a sentence about the frames that no step has taken."""
        early = "".join(f"; {count} of '{name}' wait for their turn" for name, count in self.early_frames().items())
        return f"step {self._gate.global_step} {self.waits}{early}"

    # ---- state

    def get_state(self) -> dict[str, Any]:
        """Return the state besides the frames that wait, as plain data."""
        return {
            "spelling": self.names.spelling,
            "taken": self.num_taken,
            "early": self.num_early,
            "next": sorted(self._next.items()),
            "rates": [[step, list(rates), name] for step, (rates, name) in self._rates.items()],
            "absent": dict(self.absent),
            "skipped": self.skipped,
        }

    def records(self) -> Iterator[EarlyRecord]:
        """Yield the frames that wait: header and arrays of each, whose names begin with the number of a table."""
        for worker, early in sorted(self._early.items()):
            for each in early:
                frame = each.frame
                header = {
                    "worker": worker,
                    "turn": each.turn,
                    "step": frame.local_step,
                    "contributor": frame.contributor,
                    "rates": frame.learning_rates,
                    "time": frame.time,
                    "rows": frame.num_rows,
                    "source": frame.source,
                    "drops": frame.drops,
                    "tables": list(frame.rows),
                }
                arrays: dict[str, Array] = {}
                for number, blocks in enumerate(frame.rows.values()):
                    arrays[f"{number}.ids"] = np.concatenate([np.zeros(0, np.int64), *(b.ids for b in blocks)])
                    grads = [block.gradient(np.arange(len(block.ids))) for block in blocks]
                    arrays[f"{number}.grads"] = np.concatenate(grads)
                yield header, arrays

    def set_state(self, state: Mapping[str, Any], frames: Iterable[EarlyRecord]) -> None:
        """Restore the state and the frames that wait."""
        self._clear()
        self.names.spelling = state["spelling"]
        self.num_taken = int(state["taken"])
        self._next = {int(worker): int(step) for worker, step in state["next"]}
        self._rates = {int(step): (tuple(rates), str(name)) for step, rates, name in state["rates"]}
        self.absent = Counter({str(name): int(count) for name, count in state["absent"].items()})
        self.skipped, self._since_s = int(state["skipped"]), time.monotonic()
        for header, arrays in frames:
            self._append(int(header["worker"]), int(header["turn"]), _frame_of(header, arrays))
        if self.num_early != int(state["early"]) or any(worker >= self.names.count for worker in self._early):
            raise StateError("the frames before their turn are not of these workers")


def _frame_of(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> Frame:
    rows = {
        table: (Rows(arrays[f"{number}.ids"], arrays[f"{number}.grads"]),)
        for number, table in enumerate(header["tables"])
    }
    rates = header["rates"]
    return Frame(
        rows,
        int(header["rows"]),
        header["step"],
        header["contributor"],
        None if rates is None else tuple(rates),
        source=str(header["source"]),
        time=header["time"],
        drops=bool(header["drops"]),
    )
