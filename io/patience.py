"""How long the clients of services, brokers and stores retry, with which pauses, and what they log meanwhile.

Every retry of a connector goes through ``Patience``: libraries are set to retry as little as they can.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

import penstock.base.interrupts as interrupts
from penstock.base.errors import PenstockError
from penstock.base.events import report

T = TypeVar("T")
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# Between two lines of the log about the same failure.
REPEAT_S = 60.0


class Patience:
    """Limits the retries of an unreachable service, with growing pauses. Starts over after a success.

    starts_over : also after a time without failures, for a caller that does not report every success
    """

    def __init__(self, patience_s: float, starts_over: bool = True) -> None:
        self._patience_s, self._starts_over = patience_s, starts_over
        self._failed_s = -math.inf
        self._first: str | None = None
        self.good()

    def good(self) -> None:
        """Record a success."""
        if self._first is not None:
            report("reachable_again", after=self._first)
        self._since_s, self._pause_s = math.inf, _FIRST_PAUSE_S
        self._reported_s = -math.inf
        self._first = None

    def wait(self, error: PenstockError) -> None:
        """Pause before the next attempt. Raises the error, ``explained`` and with the time, if patience is over.

        Logs the first failure, and after each minute the last one and for how long they have been retried.
        """
        now = time.monotonic()
        if self._starts_over and now - self._failed_s > self._patience_s:
            self.good()
        self._since_s = min(self._since_s, now)
        if self._first is None:
            self._first = str(error)
        if now + self._pause_s > self._since_s + self._patience_s:
            error = self.explained(error)
            if self._patience_s > 0:
                error.args = (f"{error}; retried for {self._patience_s:g} s (patience)",)
            raise error
        if now - self._reported_s >= REPEAT_S:
            self._reported_s = now
            self._report(error, now - self._since_s)
        interrupts.pause(self._pause_s)
        self._failed_s, self._pause_s = time.monotonic(), min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def call(
        self,
        call: Callable[[], T],
        error_of: Callable[[Exception], PenstockError],
        kinds: tuple[type[Exception], ...] = (OSError,),
    ) -> T:
        """Call until it raises no error of these kinds. Raises that of the last one, if patience is over."""
        while True:
            try:
                result = call()
            except kinds as error:
                self.wait(error_of(error))
            else:
                self.good()
                return result

    def _report(self, error: PenstockError, retried_s: float) -> None:
        limit = "no limit" if self._patience_s == math.inf else f"{self._patience_s:g} s"
        report("retrying", error=str(error), retried_s=round(retried_s), patience=limit)

    def explained(self, error: PenstockError) -> PenstockError:
        """Return an error together with the first one since the last success, which says why the service is gone."""
        if self._first is None or self._first == str(error):
            return error
        return type(error)(f"{self._first}; since then: {error}")
