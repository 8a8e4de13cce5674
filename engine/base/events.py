"""Events of services and followers, as records of the logger ``penstock``: a name, a level, and fields of plain data.

A record's message is the event with its fields. It is always one line: control characters in fields are escaped. Its
attribute ``penstock`` has the event and the fields as a dictionary, for handlers that write JSON.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("penstock")

# The minimum time between two records of a FrequentEvent.
MIN_INTERVAL_S = 1.0


def report(level: int, event: str, **fields: Any) -> None:
    """Log an event. fields : those that are None are omitted"""
    if log.isEnabledFor(level):
        values = {name: value for name, value in fields.items() if value is not None}
        log.log(level, "%s", " ".join([event, *fields_text(values)]), extra={"penstock": {"event": event, **values}})


def fields_text(fields: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` of every field, with strings as in JSON."""
    return [printable(f"{name}={json.dumps(value, ensure_ascii=False, default=str)}") for name, value in fields.items()]


def printable(text: str) -> str:
    """Return a text on one line: control characters, also those that change the direction of text, are escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class FrequentEvent:
    """An event that callers can cause at any rate: logged at most once per MIN_INTERVAL_S. Thread-safe.

    A record has the number of events that were omitted since the last one.
    """

    def __init__(self, level: int, event: str) -> None:
        self._level, self._event = level, event
        self._lock = threading.Lock()
        self._due_s, self._num_omitted = -float("inf"), 0

    def report(self, **fields: Any) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._due_s:
                self._num_omitted += 1
                return
            self._due_s, num_omitted, self._num_omitted = now_s + MIN_INTERVAL_S, self._num_omitted, 0
        report(self._level, self._event, **fields, omitted=num_omitted or None)
