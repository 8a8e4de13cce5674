"""The common base of the dense and the sparse conditional accumulator: settings, a gate, takers, state.

The subclasses decide which gradients to accept and how to sum them.
"""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Self, TypeVar

from penstock.base.errors import CancelledError, StateError, TakeTimeoutError
from penstock.base.validation import whole
from penstock.contrib.accumulators.taker_gate import TakerGate
from penstock.core.gradient_checks import dtype_of, reduction_of, shape_of, shape_text, timeout_of
from penstock.model.stats import Stale

T = TypeVar("T")


class Conditional(ABC, Generic[T]):
    """Base class of both accumulators: settings, the gate, takers."""

    def __init__(self, dtype: Any, shape: Any, reduction: str) -> None:
        self.dtype = dtype_of(dtype)
        self.shape = shape_of(shape)
        self.reduction = reduction_of(reduction)
        self._mean = self.reduction == "MEAN"
        self._gate = TakerGate()

    def take_gradient(self, num_required: int, timeout: float | None = None) -> T:
        """Wait until enough gradients are accumulated and it is this taker's turn; take all of them.

        Parameters
        ----------
        num_required : int
            Gradients that the take waits for, at least 1.
        timeout : float or None
            Seconds; 0 does not wait; None: no limit.

        Returns
        -------
        numpy.ndarray or SparseGradient
            The sum, or with "MEAN" the sum divided by the number accumulated, not by ``num_required``. The take
            increments the global step.

        Raises
        ------
        TakeTimeoutError
            Nothing is consumed; the message says what the take waited for.
        CancelledError
            If the accumulator is closed before or during the wait.
        UsageError
            If an argument is out of range.

        References
        ----------
        TensorFlow's ``AccumulatorTakeGradient``

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
        >>> accumulator.apply_gradient([1.0, 2.0])
        True
        >>> accumulator.take_gradient(1)
        array([1., 2.], dtype=float32)
        >>> accumulator.take_gradient(1, timeout=0)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        penstock.base.errors.TakeTimeoutError: nothing taken in 0 s: 0 of 1 gradients in; global step 1; ...
        """
        wait_s = timeout_of(timeout)
        return self._result(self.take_gradient_async(num_required), wait_s)

    def take_gradient_async(self, num_required: int) -> Future[T]:
        """Queue a take and return its result as a Future. Cancelling the Future passes the turn to the next taker.

        Parameters
        ----------
        num_required : int
            Gradients that the take waits for, at least 1.

        Returns
        -------
        concurrent.futures.Future
            Of what ``take_gradient`` returns.

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
        >>> future = accumulator.take_gradient_async(2)
        >>> accumulator.apply_gradient([1.0, 2.0]), future.done()
        (True, False)
        >>> accumulator.apply_gradient([3.0, 6.0]), future.result()
        (True, array([2., 4.], dtype=float32))
        """
        return self._gate.take(whole("num_required", num_required), self._produce)

    def num_accumulated(self) -> int:
        """Return the number of gradients accumulated since the last take.

        Returns
        -------
        int

        References
        ----------
        TensorFlow's ``AccumulatorNumAccumulated``
        """
        return self._gate.num_accumulated

    @property
    def global_step(self) -> int:
        """The current step, incremented by every take. A gradient with a smaller local_step is stale."""
        return self._gate.global_step

    def set_global_step(self, global_step: int) -> None:
        """Set the global step, also backwards. Accumulated gradients stay; no taker wakes.

        Parameters
        ----------
        global_step : int
            Gradients with a smaller ``local_step`` are stale from now on.

        References
        ----------
        TensorFlow's ``AccumulatorSetGlobalStep``

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
        >>> accumulator.set_global_step(5)
        >>> accumulator.apply_gradient([1.0, 2.0], local_step=4), accumulator.stale.total
        (False, 1)
        """
        self._gate.set_global_step(global_step)

    @property
    def stale(self) -> Stale:
        """A copy of the counts of stale gradients: in total, by contributor and by lateness."""
        return self._gate.stale

    def explain(self) -> str:
        """Return why a take waits: gradients so far, by contributor; waiting takers and since when; last stale drop.

        Returns
        -------
        str

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
        >>> accumulator.apply_gradient([1.0, 2.0], contributor="worker-0")
        True
        >>> accumulator.explain()
        "1 gradients in ('worker-0': 1); global step 0; no taker is waiting"
        """
        return self._gate.explain()

    def close(self) -> None:
        """Cancel waiting takers and refuse later gradients and takes (CancelledError). ``get_state`` still works."""
        self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {shape_text(self.shape)}, {self.reduction}: {self.explain()})"

    def get_state(self) -> dict[str, Any]:
        """Return settings, counts and sums, without queued takers.

        Returns
        -------
        dict
            Plain data: str, int, lists, NumPy arrays.

        Examples
        --------
        >>> import penstock as ps
        >>> accumulator = ps.ConditionalAccumulator(shape=(2,))
        >>> accumulator.apply_gradient([1.0, 2.0])
        True
        >>> restored = ps.ConditionalAccumulator(shape=(2,))
        >>> restored.set_state(accumulator.get_state())
        >>> restored.take_gradient(1)
        array([1., 2.], dtype=float32)
        """
        with self._gate.still():
            return {"settings": self._settings(), "gate": self._gate.get_state(), "held": self._sum_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from ``get_state``. Accumulated gradients are dropped; waiting takers keep waiting.

        Parameters
        ----------
        state : mapping
            What ``get_state`` of an accumulator with equal settings returned.

        Raises
        ------
        StateError
            If the state belongs to another accumulator; nothing has changed then.
        """
        try:
            settings, gate, sums = dict(state["settings"]), state["gate"], dict(state["held"])
            if settings != self._settings():
                raise StateError(f"the state is of {settings}, this accumulator is {self._settings()}")
            put = self._checked(int(gate["num_accumulated"]), sums)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"not the state of an accumulator: {type(error).__name__}: {error}") from None
        self._gate.set_state(gate, put)

    def _settings(self) -> dict[str, Any]:
        shape = None if self.shape is None else [-1 if dim is None else dim for dim in self.shape]
        return {"class": type(self).__name__, "dtype": self.dtype.name, "shape": shape, "reduction": self.reduction}

    def _result(self, future: Future[T], wait_s: float | None) -> T:
        if wait_s is not None and wait_s >= threading.TIMEOUT_MAX:
            wait_s = None
        try:
            return future.result(wait_s)
        except CancelledError:
            raise
        except concurrent.futures.CancelledError:
            raise CancelledError(f"closed while a take waited: {self.explain()}") from None
        except TimeoutError:
            # Build the reason before cancelling, while this taker is still listed as waiting.
            reason = self.explain()
            if not future.cancel():
                return future.result()  # its turn came just now
            raise TakeTimeoutError(f"nothing taken in {wait_s:g} s: {reason}") from None
        except BaseException:  # Ctrl-C: an abandoned taker must not consume later gradients
            future.cancel()
            raise

    @abstractmethod
    def _produce(self, num: int) -> T:
        """Return the result of a take of num gradients and empty the store. Called under the gate's lock."""

    @abstractmethod
    def _sum_state(self) -> dict[str, Any]:
        """Return copies of the store's part of the state."""

    @abstractmethod
    def _checked(self, num: int, state: dict[str, Any]) -> Callable[[], None]:
        """Validate the store's part of a state of num gradients; return a callable that installs it."""
