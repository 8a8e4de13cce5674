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

# Event → its level, and when it is logged. docs/reference/events.md shows them.
EVENTS: Mapping[str, tuple[int, str]] = {
    "listening": (logging.INFO, "a service or a replica serves: with its address and step"),
    "ending": (logging.INFO, "it accepts no more: with the step, and the frames in the gate"),
    "learning_rate_missing": (
        logging.WARNING,
        "at the start: tags whose learning rate neither the configuration nor `--learning-rate` gives, so that frames "
        "without a column `learning_rates` are refused",
    ),
    "producer_connected": (logging.INFO, "a stream of frames, or a partition of a topic, begins"),
    "producer_left": (
        logging.INFO,
        "it ends: with its position, and its counts of applied and stale frames and dropped rows",
    ),
    "put_failed": (
        logging.WARNING,
        "a stream of frames ended with an error: a refused frame, a gap, a limit, a lost connection",
    ),
    "stale_frame": (logging.WARNING, "the gate dropped a frame: with its step and the service's"),
    "second_frame": (
        logging.WARNING,
        "in rounds, a worker's second frame for a step, which is stale: once per run",
    ),
    "round_waits": (logging.WARNING, "in rounds, the workers that a step has waited for, each minute"),
    "round_skipped": (logging.WARNING, "a step was applied without these workers (`--on-missing skip`)"),
    "call_refused": (logging.WARNING, "a missing or wrong token, a role, `--max-calls`"),
    "not_finite": (logging.WARNING, "an update made a row infinite or NaN: table and id of the first one of a run"),
    "wrote_not_finite": (logging.WARNING, "`--out` wrote such rows: table, id of the first one, and how many"),
    "commit_began": (logging.DEBUG, "with the step"),
    "committed": (logging.INFO, "with the step"),
    "rolled_back": (
        logging.WARNING,
        "with the new step, that of the commit it went back to, and the frames dropped from the gate",
    ),
    "reloaded": (logging.INFO, "after SIGHUP: tokens and certificates were read again"),
    "reload_failed": (logging.WARNING, "after SIGHUP: the reason why everything stays as it was"),
    "topic_has_grown": (logging.WARNING, "partitions of a topic that only the next start reads"),
    "filled": (logging.INFO, "a follower has written all tables"),
    "applied": (logging.DEBUG, "a follower has applied deltas"),
    "target_set_back": (logging.WARNING, "a follower has found its target in an earlier state"),
    "retrying": (
        logging.WARNING,
        "a service, a broker or a target does not answer: the first failure, and after each minute the last one, with "
        "`retried_s` and `patience`; commands without a log print the line, too",
    ),
    "reachable_again": (logging.WARNING, "it answers again"),
    "waiting": (logging.WARNING, "a producer or trainer waits for a service or for other workers, each minute"),
}

# The minimum time between two records of a FrequentEvent.
MIN_INTERVAL_S = 1.0


def report(event: str, **fields: Any) -> None:
    """Log one of EVENTS. fields : those that are None are omitted"""
    level, _ = EVENTS[event]
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

    def __init__(self, event: str) -> None:
        self._event = event
        self._lock = threading.Lock()
        self._due_s, self._num_omitted = -float("inf"), 0

    def report(self, **fields: Any) -> None:
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._due_s:
                self._num_omitted += 1
                return
            self._due_s, num_omitted, self._num_omitted = now_s + MIN_INTERVAL_S, self._num_omitted, 0
        report(self._event, **fields, omitted=num_omitted or None)
