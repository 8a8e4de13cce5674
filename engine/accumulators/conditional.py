"""What the dense and the sparse conditional accumulator share: settings, a gate, takers, state.

What may enter and how it is summed is the classes' own (accumulators.py).
"""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Generic, Self, TypeVar

from penstock.accumulators.gradient_checks import (
    dtype_of,
    num_required_of,
    reduction_of,
    scalar_of,
    shape_of,
    timeout_of,
    told,
)
from penstock.errors import CancelledError, StateError, TakeTimeoutError
from penstock.gate import Gate
from penstock.stats import Stale

T = TypeVar("T")


class Conditional(ABC, Generic[T]):
    """What both have: settings, the gate, takers."""

    def __init__(self, dtype: Any, shape: Any, reduction: str) -> None:
        self.dtype = dtype_of(dtype)
        self.shape = shape_of(shape)
        self.reduction = reduction_of(reduction)
        self._mean = self.reduction == "MEAN"
        self._gate = Gate(counted="gradients")

    def take_gradient(self, num_required: int, timeout: float | None = None) -> T:
        """Wait until at least num_required gradients are in and it is this taker's turn; take all of them.

        timeout : seconds, 0 to only look; None: as long as it takes
        MEAN divides by what is there, not by num_required; the global step counts up. Raises TakeTimeoutError
        (which consumed nothing and says what it waited for), CancelledError where the accumulator is
        or gets closed, UsageError. Source: AccumulatorTakeGradient.
        """
        wait_s = timeout_of(timeout)
        return self._result(self.take_gradient_async(num_required), wait_s)

    def take_gradient_async(self, num_required: int) -> Future[T]:
        """Queue for a take now and get its result later. Cancelling the Future gives the turn to the next."""
        return self._gate.take(num_required_of(num_required), self._produce)

    def num_accumulated(self) -> int:
        """Gradients in since the last take. Source: AccumulatorNumAccumulated."""
        return self._gate.num_accumulated

    @property
    def global_step(self) -> int:
        """A gradient with a smaller local_step is stale. Counted up by every take."""
        return self._gate.global_step

    def set_global_step(self, global_step: int) -> None:
        """Backwards too; what is in stays in, and nobody wakes. Source: AccumulatorSetGlobalStep."""
        self._gate.set_global_step(scalar_of("global_step", global_step))

    @property
    def stale(self) -> Stale:
        """The gradients that came too late: how many, by contributor and by lateness. A copy."""
        return self._gate.stale

    def explain(self) -> str:
        """What a take waits for: how many are in and from whom, who waits since when, the last stale drop."""
        return self._gate.explain()

    def close(self) -> None:
        """Cancel every taker that waits and refuse what comes (CancelledError). What is in can still be saved."""
        self._gate.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dtype}, {told(self.shape)}, {self.reduction}: {self.explain()})"

    def get_state(self) -> dict[str, Any]:
        """Settings, counts and what is accumulated, as plain data (str, int, lists, NumPy arrays); not the queue."""
        with self._gate.still():
            return {"settings": self._settings(), "gate": self._gate.get_state(), "held": self._held()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``get_state`` gave; what was in is dropped, who waits goes on waiting.

        Raises StateError, and nothing has changed, where the state is another accumulator's.
        """
        try:
            settings, gate, held = dict(state["settings"]), state["gate"], dict(state["held"])
            if settings != self._settings():
                raise StateError(f"the state is of {settings}, this accumulator is {self._settings()}")
            put = self._checked(int(gate["num_accumulated"]), held)
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
            # The reason first: once cancelled, this taker is no longer among those that wait.
            reason = self.explain()
            if not future.cancel():
                return future.result()  # its turn came in this moment
            raise TakeTimeoutError(f"nothing taken in {wait_s:g} s: {reason}") from None
        except BaseException:  # Ctrl-C: a taker that nobody waits for must not swallow what comes
            future.cancel()
            raise

    @abstractmethod
    def _produce(self, num: int) -> T:
        """The result of a take of num gradients; the store is then empty. Under the gate's lock."""

    @abstractmethod
    def _held(self) -> dict[str, Any]:
        """The store's part of the state: copies."""

    @abstractmethod
    def _checked(self, num: int, held: dict[str, Any]) -> Callable[[], None]:
        """A callable that puts the store's part of a state, valid for num gradients, in place."""
