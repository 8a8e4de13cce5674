"""What the commands print: people's text, one JSON object, progress on a terminal, one-line errors."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from penstock.gate import Gate
from penstock.stats import Counters

_REDRAWS_PER_S = 5.0


class Output:
    """Text for people goes to stdout, with ``--json`` to stderr; stdout then gets one JSON object."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def say(self, text: str = "") -> None:
        print(text, file=sys.stderr if self.as_json else sys.stdout)

    def result(self, values: Mapping[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(values, allow_nan=False, default=str))


def say_error(message: str) -> None:
    """One line on stderr, whatever the message was."""
    print("penstock: " + " ".join(message.split()), file=sys.stderr)


def count(number: float) -> str:
    """1234567 → '1,234,567'."""
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """61.0 → '1:01'."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ProgressLine:
    """One line on stderr, redrawn in place; nothing where stderr is not a terminal."""

    def __init__(self) -> None:
        self._on = sys.stderr.isatty()
        self._started = time.monotonic()
        self._drawn = 0.0
        self._width = 0

    def __call__(self, counters: Counters, gate: Gate, share: float | None) -> None:
        now = time.monotonic()
        if not self._on or now - self._drawn < 1 / _REDRAWS_PER_S:
            return
        self._drawn = now
        elapsed = now - self._started
        text = f"{count(counters.rows)} rows  {count(counters.rows / elapsed)}/s  step {count(gate.global_step)}"
        if counters.stale or counters.num_dropped:
            text += f"  {count(counters.stale)} stale frames  {count(counters.num_dropped)} rows dropped"
        if share is not None and 0 < share < 1:
            text += f"  {share:4.0%}  {duration(elapsed / share - elapsed)} left"
        self._draw(text)

    def clear(self) -> None:
        """Leave an empty line behind for what is printed next."""
        if self._on and self._width:
            self._draw("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _draw(self, text: str) -> None:
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)
