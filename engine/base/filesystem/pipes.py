"""Pipes that a command reads from and writes to: a signal ends the wait for the other side."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from pathlib import Path
from typing import Any

import penstock.base.interrupts as interrupts

# On other systems, poll reports a pipe without a writer as ended.
_DO_NOT_WAIT = os.O_NONBLOCK if sys.platform == "linux" else 0
_LOOK_AGAIN_S = 0.05


class PipeReader(io.FileIO):
    """A pipe, a terminal or a device, read as data arrives."""

    def readinto(self, buffer: Any) -> int | None:
        interrupts.wait_readable(self.fileno())
        return super().readinto(buffer)


def open_reader(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a source that can be read only once. The first read waits for a writer."""
    reader = PipeReader(path, opener=lambda name, flags: os.open(name, flags | _DO_NOT_WAIT))
    os.set_blocking(reader.fileno(), True)
    return io.BufferedReader(reader)


def reader_of(fd: int, close: bool = True) -> io.BufferedReader:
    """Return a reader of an open descriptor."""
    return io.BufferedReader(PipeReader(fd, closefd=close))


def open_writer(path: Path) -> io.FileIO:
    """Open a target that is written once. A pipe waits here for a reader."""
    if not stat.S_ISFIFO(path.stat().st_mode):
        return io.FileIO(path, "wb")
    while True:
        try:
            writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # raised if there is no reader
                raise
            interrupts.pause(_LOOK_AGAIN_S)
        else:
            os.set_blocking(writer, True)
            return io.FileIO(writer, "wb")
