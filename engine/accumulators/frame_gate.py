"""The gate of an engine as its producers see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from penstock.errors import StateError
from penstock.frames import Contributor
from penstock.gate import Gate
from penstock.stats import Stale


class FrameGate:
    """The gate of an engine as its producers see it: they push frames, and takers are refused.

    push : ``Engine.apply``
    """

    def __init__(self, gate: Gate, push: Callable[..., bool]) -> None:
        self._gate, self._push = gate, push

    def push(
        self,
        gradients: Mapping[str, tuple[Any, Any]],
        local_step: int | None = None,
        contributor: Contributor = None,
        learning_rates: Any = None,
        time: int | None = None,
    ) -> bool:
        """Push one frame, from any thread, also while the engine runs: ``Engine.apply``. Returns False if it was stale.

        Validation runs before the gate's lock is acquired. Admission, sums and the step run under the lock, so that the
        frames of all threads have one order.
        """
        return self._push(gradients, local_step, learning_rates, contributor, time)

    def take(self, *_: Any, **__: Any) -> NoReturn:
        """Raise StateError: the gate's sums belong to the tables, and a take would count a step that they never saw."""
        raise StateError(
            "an engine's gate opens into its own tables only: Engine.flush opens it early, and a "
            "SparseConditionalAccumulator is for takers"
        )

    @property
    def num_required(self) -> int | None:
        """Number of frames that open the gate."""
        return self._gate.num_required

    @property
    def num_accumulated(self) -> int:
        """Number of frames admitted since the gate last opened."""
        return self._gate.num_accumulated

    @property
    def global_step(self) -> int:
        """Number of openings so far, counted on from the last ``set_global_step``."""
        return self._gate.global_step

    @property
    def stale(self) -> Stale:
        """A copy of the counts of stale frames, by contributor and by steps behind."""
        return self._gate.stale

    def is_stale(self, local_step: int | None) -> bool:
        """Return whether a frame of this step would be dropped as stale; one without a step never is."""
        return self._gate.is_stale(local_step)

    def set_global_step(self, global_step: int) -> None:
        """Set the step to any int64, also a smaller one. Frames already admitted stay."""
        self._gate.set_global_step(global_step)

    def still(self) -> AbstractContextManager[Any]:
        """Return a context manager during which no frame enters and the gate does not open."""
        return self._gate.still()

    def explain(self) -> str:
        """Return one line: how many frames the gate has and needs."""
        return self._gate.explain()

    def get_state(self) -> dict[str, Any]:
        """Return counts and step as plain data."""
        return self._gate.get_state()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.explain()})"
