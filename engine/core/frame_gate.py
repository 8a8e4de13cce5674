"""The gate of an engine as its producers see it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

from penstock.base.errors import StateError
from penstock.base.validation import whole
from penstock.core.engine_core import EngineCore
from penstock.model.stats import Stale


class FrameGate:
    """The gate of an engine as its producers see it: ``Engine.apply`` pushes frames, and takers are refused.

    Parameters
    ----------
    core : EngineCore
        The engine's core.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), num_required=2)
    >>> engine.apply({"user": ([5], [[1.0, 2.0]])}, local_step=0, contributor="worker-0")
    True
    >>> engine.gate
    FrameGate(1 of 2 frames in ('worker-0': 1); global step 0)
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._gate = core, core.gate

    def take(self, *_: Any, **__: Any) -> NoReturn:
        """Raise StateError: the gate's sums belong to the tables, and a take would count a step that they never saw.

        Raises
        ------
        StateError
            Always.
        """
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
        """Number of frames that were admitted and that no step has applied."""
        return self._core.num_pending

    @property
    def global_step(self) -> int:
        """Number of openings so far, counted on from the last ``set_global_step``."""
        return self._gate.global_step

    @property
    def late(self) -> dict[int, int]:
        """How many frames were applied although they were behind, by the number of steps (``max_staleness``)."""
        return self._gate.late

    @property
    def stale(self) -> Stale:
        """A copy of the counts of stale frames, by contributor and by steps behind."""
        return self._gate.stale

    def is_stale(self, local_step: int | None) -> bool:
        """Return whether a frame of this step is too far behind; one without a step never is.

        Parameters
        ----------
        local_step : int or None
            The frame's step.

        Returns
        -------
        bool

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), num_required=2)
        >>> engine.gate.set_global_step(5)
        >>> engine.gate.is_stale(4), engine.gate.is_stale(5), engine.gate.is_stale(None)
        (True, False, False)
        """
        return self._gate.is_stale(None if local_step is None else whole("local_step", local_step))

    def set_global_step(self, global_step: int) -> None:
        """Set the step to any int64, also a smaller one. Frames already admitted stay.

        Parameters
        ----------
        global_step : int
            Frames with a smaller step are stale from now on.

        Raises
        ------
        UsageError
            If frames of workers wait in a round for an earlier step.
        """
        with self._gate.still():
            if self._core.turns is not None:
                self._core.turns.set_step(whole("global_step", global_step))
                self._gate.num_accumulated = 0  # of absent workers
            self._gate.set_global_step(global_step)

    def still(self) -> AbstractContextManager[Any]:
        """Return a context manager during which no frame enters and the gate does not open.

        Returns
        -------
        context manager
        """
        return self._gate.still()

    def explain(self) -> str:
        """Return one line: how many frames the gate has and needs.

        Returns
        -------
        str

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.1), name="user")
        >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]), num_required=2)
        >>> engine.gate.explain()
        '0 of 2 frames in; global step 0'
        """
        return self._gate.explain()

    def get_state(self) -> dict[str, Any]:
        """Return counts and step as plain data.

        Returns
        -------
        dict
        """
        return self._gate.get_state()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.explain()})"
