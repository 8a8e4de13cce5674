"""File operations that fail or end the process at the n-th call: replacements for ``atomic_files.operations``."""

import errno
import itertools
import os
import signal

from penstock.base.filesystem import atomic_files

NAMES = ("make_folder", "create", "open_lock", "resume", "write", "sync", "sync_folder", "rename", "remove")
NAMES += ("link", "remove_folder")


class Watched(atomic_files.Operations):
    """Counts the calls, from 1, and does what ``at(number, name, args)`` wants before each.

    calls : their names so far
    seen_by : a descriptor to which they are written too, for a process that outlives this one
    """

    def __init__(self, hook=lambda number, name, args: None):
        self.calls = []
        self.seen_by = None
        self._at = hook


def _watched(name):
    def call(self, *args):
        self.calls.append(name)
        if self.seen_by is not None:
            os.write(self.seen_by, name.encode() + b"\n")
        instead = self._at(len(self.calls), name, args)
        return instead(*args) if instead else getattr(atomic_files.Operations, name)(self, *args)

    return call


for _name in NAMES:
    setattr(Watched, _name, _watched(_name))


def failing(number, code, also_after=False):
    """The n-th call raises OSError(code); with ``also_after`` all behind it do too, as on a full disk."""

    def at(n, name, args):
        if n == number or (also_after and n > number and name in ("create", "open_lock", "write", "make_folder")):
            raise OSError(code, os.strerror(code))

    return Watched(at)


def full_disk(num_writes=0, with_bytes=b""):
    """Writes that hold these bytes fail after so many, for lack of space."""
    seen = itertools.count()

    def at(n, name, args):
        if name == "write" and with_bytes in bytes(args[1]) and next(seen) >= num_writes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return Watched(at)


def short_write(number):
    """The n-th call, where it is a write, takes half of what it is given; the next one has no room."""

    def at(n, name, args):
        if n == number and name == "write":
            return lambda file, data: os.write(file, memoryview(data)[: max(1, len(data) // 2)])
        if n == number + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return None

    return Watched(at)


def killing(number, half=False):
    """The process is gone before the n-th call, or where it is a write and ``half``, in the middle of it."""

    def at(n, name, args):
        if n == number:
            if half and name == "write":
                os.write(args[0], memoryview(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return Watched(at)
