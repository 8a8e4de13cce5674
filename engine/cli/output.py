"""What the commands print: people's text, one JSON object, progress on a terminal, one-line errors."""

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import MOST_LISTED
from penstock.io.storage.pipes import reader_of

if TYPE_CHECKING:  # what only shows progress must not load NumPy for ``penstock --help``
    from penstock.pipeline import FrameGate
    from penstock.stats import Counters, Report

_REDRAWS_PER_S = 5.0
_LINES_PER_S = 0.2  # where a line cannot be redrawn

# What to do about an error of the system, by its name in errno.
_ADVICE = {
    "ENOENT": "give a folder that exists",
    "EEXIST": "give another name",
    "EACCES": "give a place that you may write to",
    "EROFS": "give a place that can be written to",
    "ENOTDIR": "give another directory",
    "EISDIR": "give another name",
    "ENOSPC": "free some space",
    "EDQUOT": "free some space",
    "EPIPE": "whoever read it has gone",
    "EFBIG": "raise the limit on file sizes (ulimit -f)",
}


class Output:
    """Text for people goes to stdout, with ``--json`` to stderr; stdout then gets one JSON object.

    aside : stdout belongs to something else; text goes to stderr
    """

    def __init__(self, as_json: bool, aside: bool = False) -> None:
        self.as_json, self._aside = as_json, aside

    def say(self, text: str = "") -> None:
        print(text, file=sys.stderr if self.as_json or self._aside else sys.stdout)

    def say_tables(self, prefix: str, texts: Sequence[str]) -> None:
        """A line for each of the first ten, and one for how many more there are."""
        for text in texts[:MOST_LISTED]:
            self.say(prefix + text)
        self.say_more(prefix, len(texts))

    def say_more(self, prefix: str, number: int) -> None:
        """How many more than ten there are, where there are more."""
        if number > MOST_LISTED:
            self.say(f"{prefix}… {count(number - MOST_LISTED)} more")

    def result(self, values: Mapping[str, Any]) -> None:
        if self.as_json:
            print(json.dumps(values, allow_nan=False, default=str))


def say_error(message: str) -> None:
    """One line on stderr, whatever the message was."""
    with contextlib.suppress(OSError):
        print("penstock: " + " ".join(message.split()), file=sys.stderr, flush=True)


def own_process() -> None:
    """Make the streams of this process ours: nobody's warnings, no name that cannot be printed, no wait for ever."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us (>&-)
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
    """Flush stdout and stderr; what nobody can take any more must not be complained about at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """An OSError in here names ``path`` where it names nothing, and says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(errno.errorcode.get(error.errno or 0, ""), "")
        problem = f"cannot write: {(error.strerror or str(error)).lower()}" + (f"; {advice}" if advice else "")
        raise OSError(error.errno, problem, str(error.filename or path)) from error


def check_writable(directory: Path) -> None:
    """Raise OSError now rather than after the work."""
    with writing(directory):
        existing = directory.absolute()
        while not existing.exists():
            existing = existing.parent
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "is not a directory", str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied", str(existing))


def count(number: float) -> str:
    """1234567 → '1,234,567'."""
    return f"{number:,.0f}"


def several(number: int, what: str) -> str:
    """'1 table', '2 tables'."""
    return f"{count(number)} {what}" + ("" if number == 1 else "s")


def size_text(num_bytes: int) -> str:
    """1234567 → '1.2 MB'."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:,.1f} {unit}"
    return several(num_bytes, "byte")


def frames_text(frames: int, steps: int, stale: int, pending: int) -> str:
    """'61: 20 steps, 1 stale'."""
    text = f"{count(frames)}: {several(steps, 'step')}"
    text += f", {count(stale)} stale" if stale else ""
    return text + (f", {count(pending)} pending (--flush would apply them)" if pending else "")


def input_text(report: Report) -> str:
    """Whether checksums say that the input is what was written."""
    return "verified: every checksum fits" if report.verified else f"unverified: {report.unverified}"


def duration(seconds: float) -> str:
    """61.0 → '1:01'."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ProgressLine:
    """One line on stderr, redrawn in place; nothing where stderr is not a terminal.

    On a terminal that cannot go back in a line (TERM=dumb) it is a line of its own every few seconds. There are no
    colours, so NO_COLOR is obeyed without being asked for.
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on and sys.stderr.isatty()
        self._plain = os.environ.get("TERM") == "dumb"
        self._started = time.monotonic()
        self._drawn = 0.0
        self._width = 0

    def __call__(self, counters: Counters, gate: FrameGate, share: float | None) -> None:
        now = time.monotonic()
        if not self._on or now - self._drawn < 1 / (_LINES_PER_S if self._plain else _REDRAWS_PER_S):
            return
        self._drawn = now
        text = progress_text(counters, gate, share, now - self._started)
        if self._plain:
            print(text, file=sys.stderr, flush=True)
        else:
            self._draw(text)

    def clear(self) -> None:
        """Leave an empty line behind for what is printed next."""
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
    """Width of the terminal on stderr; one that does not say has 80."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def progress_text(counters: Counters, gate: FrameGate, share: float | None, elapsed_s: float) -> str:
    """What the progress line says. share : of the input, where its length is known."""
    per_s = counters.rows / elapsed_s if elapsed_s > 0 else 0.0
    text = f"{count(counters.rows)} rows  {count(per_s)} rows/s  step {count(gate.global_step)}"
    if gate.num_required is not None and gate.num_required > 1:
        text += f"  gate {gate.num_accumulated}/{gate.num_required}"
    if counters.stale or counters.num_dropped:
        text += f"  {count(counters.stale)} stale frames  {count(counters.num_dropped)} rows dropped"
    if share is not None and 0 < share < 1:
        text += f"  {share:4.0%}  {duration(elapsed_s / share - elapsed_s)} left"
    return text
