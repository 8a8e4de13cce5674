"""What a child that this process forks may not use: descriptors of locks and of files being written.

A lock by ``flock`` belongs to an open file, which both processes have: a child would keep it after its parent was
killed. In a child, these descriptors lead to /dev/null from the fork on. Whatever writes to a path or waits for a
thread notes ``this_process`` when it is created, and compares.
"""

from __future__ import annotations

import os

from penstock.base.errors import StateError

this_process = os.getpid()
_descriptors = set[int]()


def keep(file: int) -> int:
    """Keep a descriptor for this process until ``close``, and return it."""
    _descriptors.add(file)
    return file


def close(file: int) -> None:
    """Close a descriptor that ``keep`` may have got."""
    _descriptors.discard(file)
    os.close(file)


def check(process: int, owned: str) -> None:
    """Raise StateError unless this process is the one given. owned : what belongs to that one, for the message"""
    if process != this_process:
        problem = f"belongs to process {process}, and this process is a fork of it; open another one here"
        raise StateError(f"{owned} {problem}")


def _leave() -> None:
    global this_process
    this_process = os.getpid()
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    while _descriptors:
        os.dup2(nowhere, _descriptors.pop(), inheritable=False)
    os.close(nowhere)


os.register_at_fork(after_in_child=_leave)
