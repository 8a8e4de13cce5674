"""The output of commands: text, one JSON object, progress on a terminal, one-line errors."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.base.errors import MOST_LISTED, PenstockError
from penstock.base.filesystem.file_stores import place_of
from penstock.base.filesystem.pipes import reader_of

if TYPE_CHECKING:  # ``penstock --help`` must not load NumPy for a progress line
    from penstock.model.stats import Counters, GateProgress, Report, TableReport

ERROR_PREFIX = "penstock: "
_REDRAWS_PER_S = 5.0
_LINES_PER_S = 0.2  # on a terminal that cannot redraw a line

# Advice for operating system errors, by their name in errno.
_ADVICE = {
    "ENOENT": "give a folder that exists",
    "EEXIST": "give another name",
    "EACCES": "give a place that you may write to",
    "EROFS": "give a place that can be written to",
    "ENOTDIR": "give another directory",
    "EISDIR": "give another name",
    "ENOSPC": "free some space",
    "EDQUOT": "free some space",
    "EPIPE": "its reader has closed it",
    "EFBIG": "raise the limit on file sizes (ulimit -f)",
}


class Output:
    """The output of one command: text to stdout; with ``--json``, text to stderr and one JSON object to stdout.

    aside : stdout carries something else, so text goes to stderr
    """

    def __init__(self, as_json: bool, aside: bool = False) -> None:
        self.as_json, self._aside = as_json, aside

    def say(self, text: str = "", flush: bool = False) -> None:
        print(text, file=sys.stderr if self.as_json or self._aside else sys.stdout, flush=flush)

    def say_all(self, prefix: str, texts: Iterable[object]) -> None:
        """Print texts, one per line."""
        for text in texts:
            self.say(f"{prefix}{text}")

    def say_tables(self, prefix: str, texts: Sequence[str]) -> None:
        """Print the first MOST_LISTED texts, one per line, then the number of those omitted."""
        self.say_all(prefix, texts[:MOST_LISTED])
        self.say_more(prefix, len(texts))

    def say_more(self, prefix: str, number: int) -> None:
        """Print by how much ``number`` exceeds MOST_LISTED, if it does."""
        if number > MOST_LISTED:
            self.say(f"{prefix}… {count(number - MOST_LISTED)} more")

    def result(self, values: Mapping[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(values, allow_nan=False, default=str))


def say_error(message: str) -> None:
    """Print the message to stderr as one line."""
    with contextlib.suppress(OSError):
        print(ERROR_PREFIX + " ".join(message.split()), file=sys.stderr, flush=True)


def own_process() -> None:
    """Prepare the standard streams: no warnings of libraries, no unprintable names, no uninterruptible reads."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it (>&-)
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (lives as long as the process)
    if sys.stdin is sys.__stdin__ and not stat.S_ISREG(os.fstat(0).st_mode):
        sys.stdin = io.TextIOWrapper(reader_of(0, close=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.getLogger("jax").setLevel(logging.ERROR)
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA: errors only


def drop_dead_streams() -> None:
    """Flush stdout and stderr; redirect one that fails to /dev/null, so that Python prints no error at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Add advice to an OSError raised in this context, and ``path`` if it names no file. Errors of penstock pass."""
    try:
        yield
    except PenstockError:
        raise
    except OSError as error:
        advice = _ADVICE.get(errno.errorcode.get(error.errno or 0, ""), "")
        problem = f"cannot write: {(error.strerror or str(error)).lower()}" + (f"; {advice}" if advice else "")
        raise OSError(error.errno, problem, str(error.filename or place_text(path))) from error


def place_text(place: Path | str) -> str:
    """Return a folder or URI for a message, without the secrets that a URI may contain."""
    return place_of(str(place))


def check_writable(directory: Path | str | None) -> None:
    """Raise OSError if ``directory`` cannot be created or written, before the work instead of after it.

    A URI is not examined: only writing to a store shows whether it accepts files. None: there is nothing to write
    """
    if not isinstance(directory, Path):
        return
    with writing(directory):
        existing = nearest(directory)
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied", str(existing))


def nearest(path: Path) -> Path:
    """Return the path if it exists, else its nearest existing ancestor."""
    path = path.absolute()
    return next(p for p in (path, *path.parents) if p.exists())


def count(number: float) -> str:
    """Return 1234567 as '1,234,567'."""
    return f"{number:,.0f}"


def several(number: int, noun: str) -> str:
    """Return '1 table', '2 tables'."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def size_text(num_bytes: int) -> str:
    """Return 1234567 bytes as '1.2 MB'."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:,.1f} {unit}"
    return several(num_bytes, "byte")


def frames_text(frames: int, steps: int, stale: int, pending: int) -> str:
    """Return text such as '61: 20 steps, 1 stale'."""
    text = f"{count(frames)}: {several(steps, 'step')}"
    text += f", {count(stale)} stale" if stale else ""
    return text + (f", {count(pending)} pending (--flush would apply them)" if pending else "")


def keys_texts(tables: Mapping[str, TableReport]) -> list[str]:
    """Return the lines about the keys of every dynamic table."""
    texts = []
    for name, table in tables.items():
        report = table.keys
        if report is None:
            continue
        sizes = f"{several(report.keys, 'key')} ({report.load:.0%} of the rows)"
        sizes += f", directory {size_text(report.directory_bytes)}"
        texts.append(f"{name}: {sizes}, {count(report.expired_waiting)} expired waiting")
        changes = ("admitted", "returned", "expired", "evicted", "rejected")
        counts = ", ".join(f"{count(getattr(report, change))} {change}" for change in changes)
        texts.append(
            f"{name}: {counts}; {count(report.waiting)} waiting, {several(report.unadmitted_rows, 'row')} not admitted"
        )
    return texts


def cache_texts(tables: Mapping[str, TableReport]) -> list[str]:
    """Return a line about the moved rows of every cached table."""
    return [
        f"{name}: {cache.hits / max(1, cache.hits + cache.up):.1%} of {several(cache.hits + cache.up, 'update')} hit "
        f"{several(cache.places, 'cached row')}; {count(cache.up)} up, {count(cache.down)} down, "
        f"{size_text(cache.bytes)}, waited {count(cache.waited_ms)} ms"
        for name, table in tables.items()
        if (cache := table.cache) is not None
    ]


def input_text(report: Report) -> str:
    """Return whether checksums verified the input, as text."""
    return "verified: every checksum fits" if report.verified else f"unverified: {report.unverified}"


def duration(seconds: float) -> str:
    """Return 61.0 seconds as '1:01'."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ProgressLine:
    """A progress line on stderr, redrawn in place; nothing if stderr is not a terminal.

    A terminal that cannot redraw a line (TERM=dumb) gets a new line every few seconds. There are no colours, so
    NO_COLOR needs no support.

    also : called with each progress, whatever stderr is
    """

    def __init__(self, also: Callable[[], object] = lambda: None) -> None:
        self._also = also
        self._on = sys.stderr.isatty()
        self._plain = os.environ.get("TERM") == "dumb"
        self._started = time.monotonic()
        self._drawn = 0.0
        self._width = 0

    def __call__(self, counters: Counters, gate: GateProgress, fraction: float | None) -> None:
        self._also()
        now = time.monotonic()
        if not self._on or now - self._drawn < 1 / (_LINES_PER_S if self._plain else _REDRAWS_PER_S):
            return
        self._drawn = now
        text = progress_text(counters, gate, fraction, now - self._started)
        if self._plain:
            print(text, file=sys.stderr, flush=True)
        else:
            self._draw(text)

    def clear(self) -> None:
        """Clear the line, so that the next output starts on an empty one."""
        if self._on and self._width:
            self._draw("")
            sys.stderr.write("\r")
            sys.stderr.flush()

    def _draw(self, text: str) -> None:
        text = text[: _columns() - 1]  # a line that wraps cannot be redrawn
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)


def _columns() -> int:
    """Return the width of the terminal on stderr, 80 if unknown."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def progress_text(counters: Counters, gate: GateProgress, fraction: float | None, elapsed_s: float) -> str:
    """Return the text of the progress line. fraction : of the input that is read; None if its length is unknown"""
    per_s = counters.rows / elapsed_s if elapsed_s > 0 else 0.0
    text = f"{count(counters.rows)} rows  {count(per_s)} rows/s  step {count(gate.global_step)}"
    if gate.num_required is not None and gate.num_required > 1:
        text += f"  gate {gate.num_accumulated}/{gate.num_required}"
    if counters.stale or counters.num_dropped:
        text += f"  {count(counters.stale)} stale frames  {count(counters.num_dropped)} rows dropped"
    if fraction is not None and 0 < fraction < 1:
        text += f"  {fraction:4.0%}  {duration(elapsed_s / fraction - elapsed_s)} left"
    return text
