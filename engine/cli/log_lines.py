"""``--log-level`` and ``--log-format``: the log of a service or a follower, on standard error."""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any, TextIO

from penstock.base.events import fields_text
from penstock.cli.output import ERROR_PREFIX

# Records that wait while standard error accepts none. Those beyond are counted and dropped: no step waits for a log.
MOST_WAITING = 10_000


@contextmanager
def logged(args: argparse.Namespace) -> Iterator[None]:
    """Write the log of the block to standard error, as the flags request.

    As JSON, every line is an object: also the other lines that the command prints there.
    """
    logger, stderr = logging.getLogger("penstock"), sys.stderr
    level_before, writer = logger.level, _Writer(stderr)
    writer.setFormatter(_Json() if args.log_format == "json" else _Text())
    waiting: SimpleQueue[Any] = SimpleQueue()
    handler, listener = _Waiting(waiting), QueueListener(waiting, writer)
    logger.addHandler(handler)
    logger.setLevel(args.log_level.upper())
    listener.start()
    if args.log_format == "json":
        sys.stderr = _JsonLines(stderr)
    try:
        yield
    finally:
        sys.stderr = stderr
        logger.removeHandler(handler)
        logger.setLevel(level_before)
        listener.stop()


class _Waiting(QueueHandler):
    """Passes records to the thread that writes them, and drops them if too many wait."""

    def __init__(self, waiting: SimpleQueue[Any]) -> None:
        super().__init__(waiting)
        self._waiting, self._num_dropped = waiting, 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._waiting.qsize() >= MOST_WAITING:
            self._num_dropped += 1
            return
        record.num_dropped, self._num_dropped = self._num_dropped, 0
        self._waiting.put(record)


class _Writer(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the name in logging)
        """Continue: standard error is closed or its disk is full, and there is nowhere else to report that."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        words = [_time(record.created), record.levelname.lower(), fields.pop("event"), *fields_text(fields)]
        return " ".join(words)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values = {"time": _time(record.created), "level": record.levelname.lower()}
        return json.dumps(values | _fields(record), default=str)


class _JsonLines(io.TextIOBase):
    """A text stream that writes each line as a JSON object."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._part = stream, ""

    def write(self, text: str) -> int:
        *lines, self._part = (self._part + text).split("\n")
        for line in lines:
            kind = ("error", "error") if line.startswith(ERROR_PREFIX) else ("info", "output")
            values = {"time": _time(time.time()), "level": kind[0], "event": kind[1], "message": line}
            self._stream.write(json.dumps(values) + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the event of a record, and its fields."""
    fields = dict(getattr(record, "penstock", {}))
    if "event" not in fields:  # of the library
        fields = {"event": "message", "message": record.getMessage(), **fields}
    if number := getattr(record, "num_dropped", 0):
        fields["log_lines_dropped"] = number
    return fields


def _time(seconds: float) -> str:
    """Return ``2026-11-23T23:22:15.123Z``."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
