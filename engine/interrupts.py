"""SIGINT and SIGTERM of a command: a handler sets a flag, and loops look at it between two whole pieces of work.

A handler runs at any bytecode of the main thread: while an extension module initializes, in a callback of the garbage
collector, in ``__del__``. An exception out of it crashes the first and is dropped by the others, so it raises none.
Only the command line installs the handlers. In a program that imports penstock ``check`` does nothing, and Ctrl-C does
what Python or the program makes of it.

The entry point installs the handlers before it imports anything else: this module imports nothing but os and signal.
"""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
# A second signal before that is the first one again: from the terminal, and from whoever started the command.
AT_ONCE_AFTER_S = 1.0
_AT_ONCE = b"penstock: interrupted twice, ended at once; what was committed before stays\n"


class _State:
    """Of this process.

    before : the handlers that were replaced, by signal; empty where none is installed
    arrived : a signal has; first_s : when the first one did; again : a second one has, AT_ONCE_AFTER_S later or more
    raises : ``check`` raises; at_once : another signal ends the process
    wake_up : both ends of the pipe that a signal writes to before Python runs its handler
    """

    def __init__(self) -> None:
        self.before: dict[signal.Signals, Any] = {}
        self.arrived, self.first_s, self.again = False, 0.0, False
        self.raises = self.at_once = False
        self.wake_up = (-1, -1)
        self.woken_before = -1


_state = _State()


def install(own_process: bool = False) -> None:
    """From here on signals set the flag. Where they do already, and in other threads than the main one: nothing.

    own_process : the process is a command and nothing else: a second signal may end it
    """
    if _state.before:
        return
    try:
        for number in SIGNALS:
            _state.before[number] = signal.signal(number, _handle)
    except ValueError:  # Python hears signals in the main thread only
        return
    _state.wake_up = os.pipe()
    for end in _state.wake_up:
        os.set_blocking(end, False)
    _state.woken_before = signal.set_wakeup_fd(_state.wake_up[1], warn_on_full_buffer=False)
    _state.raises, _state.at_once = True, own_process


def remove() -> None:
    """Signals do again what they did before ``install``."""
    global _state
    if not _state.before:
        return
    for number, handler in _state.before.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(_state.woken_before)
    for end in _state.wake_up:
        os.close(end)
    _state = _State()


def ignore() -> None:
    """The process is ending with its result, and no signal changes that."""
    for number in _state.before:
        signal.signal(number, signal.SIG_IGN)


def leave_to_caller(at_once: bool) -> None:
    """From here on the caller looks at ``arrived``, and ``check`` raises nothing.

    at_once : a second signal still ends the process
    """
    _state.raises, _state.at_once = False, _state.at_once and at_once


def arrived() -> bool:
    """Whether a signal asks for the end."""
    return _state.arrived


def arrived_again() -> bool:
    """Whether a second one asks for it at once."""
    return _state.again


def check() -> None:
    """Raise KeyboardInterrupt where a signal has arrived. Threads other than the main one go on until it ends them."""
    if _state.arrived and _state.raises and _in_main_thread():
        _state.at_once = False  # it is heard: what is whole is committed now
        raise KeyboardInterrupt


def wait_readable(fd: int) -> None:
    """Until there is something to read, or the end. Raises KeyboardInterrupt where a signal arrives before."""
    import select

    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    woken = _state.wake_up[0] if _state.raises and _in_main_thread() else -1
    if woken >= 0:
        waiting.register(woken, select.POLLIN)
    check()
    while fd not in (ready := [each for each, _ in waiting.poll()]):
        if woken in ready:
            os.read(woken, 1 << 10)
        check()
    check()  # Ctrl-C also ends who writes into the pipe: that is no truncated input


def pause(seconds: float) -> None:
    """Sleep. Raises KeyboardInterrupt where a signal has arrived."""
    import time

    check()
    time.sleep(seconds)
    check()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _handle(number: int, frame: object) -> None:
    now = os.times().elapsed
    if not _state.arrived:
        _state.arrived, _state.first_s = True, now
    elif now - _state.first_s >= AT_ONCE_AFTER_S:
        _state.again = True
        if _state.at_once:
            try:
                os.write(2, _AT_ONCE)
            finally:
                os._exit(INTERRUPTED)
