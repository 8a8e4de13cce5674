"""Signals that end a command: a handler sets a flag, which loops check between two units of work.

A handler runs at any bytecode of the main thread: while an extension module initializes, in a callback of the garbage
collector, in ``__del__``. An exception crashes the first and is ignored by the others, so the handler raises none.
Only the command line installs the handlers. In a program that imports penstock, ``check`` does nothing, and Python or
the program handles Ctrl-C.

The entry point installs the handlers before it imports anything else: this module imports only os and signal.
"""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Handled in any case. Of the others, those with their default: ``nohup`` ignores SIGHUP, and a timer of the program
# that runs the command has a handler.
ALWAYS = (signal.SIGINT, signal.SIGTERM)
# Not handled: the system stops or continues the process by them, they end no process, or a crash is their cause.
_NOT_HANDLED = "KILL STOP TSTP TTIN TTOU CONT CHLD URG WINCH INFO PIPE XFSZ SEGV BUS FPE ILL ABRT TRAP SYS EMT"
# The system repeats it every second.
_REPEATED = getattr(signal, "SIGXCPU", None)
INTERRUPTED = 130
# A second signal before that is the first one repeated: the terminal and the parent process may both send it.
AT_ONCE_AFTER_S = 1.0
_AT_ONCE = b"penstock: interrupted twice, ended at once; what was committed before stays\n"


class _State:
    """The signal state of this process.

    before : the replaced handlers by signal; empty if none is installed
    first : the first signal that has arrived; first_s : when
    raises : whether ``check`` raises; at_once : whether another signal ends the process
    reserved : signals that do not end the command; requests : those of them that have arrived
    wake_up : both ends of the pipe that a signal writes to before Python runs its handler
    woken_before : the wake-up file descriptor that was replaced
    """

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self.first: int | None = None
        self.first_s = 0.0
        self.raises = self.at_once = False
        self.reserved, self.requests = set[int](), set[int]()
        self.wake_up = (-1, -1)
        self.woken_before = -1


_state = _State()


def install(own_process: bool = False) -> None:
    """Install the handlers. Does nothing if they are installed already, or outside the main thread.

    own_process : the process runs only this command, so that a second signal may end it
    """
    if _state.before:
        return
    try:
        for number in (*ALWAYS, *_others()):
            _state.before[number] = signal.signal(number, _handle)
    except ValueError:  # Python handles signals in the main thread only
        return
    _state.wake_up = os.pipe()
    for end in _state.wake_up:
        os.set_blocking(end, False)
    _state.woken_before = signal.set_wakeup_fd(_state.wake_up[1], warn_on_full_buffer=False)
    _state.raises, _state.at_once = True, own_process


def reinstall() -> None:
    """Install the handlers again if a library has replaced them. Does nothing if ``install`` has not been called."""
    if _state.before:
        for number in _state.before:
            signal.signal(number, _handle)


def reserve(number: int) -> None:
    """Let a signal end the command no longer: ``requested`` reports it, also if it has arrived already."""
    if number not in _state.before:
        return
    _state.reserved.add(number)
    if _state.first == number:
        _state.first = None
        _state.requests.add(number)


def requested(number: int) -> bool:
    """Return whether a reserved signal has arrived since the last call."""
    has_arrived = number in _state.requests
    _state.requests.discard(number)
    return has_arrived


def remove() -> None:
    """Restore the handlers that ``install`` replaced."""
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
    """Ignore further signals, while the command ends with its result."""
    _state.raises = False
    for number in _state.before:
        signal.signal(number, signal.SIG_IGN)


def check() -> None:
    """Raise KeyboardInterrupt if a signal has arrived. Other threads continue until the main thread ends them."""
    if _state.first is not None and _state.raises and _in_main_thread():
        _state.at_once = False  # the signal is handled: the run commits what is complete
        raise KeyboardInterrupt


def is_terminated() -> bool:
    """Return whether the signal that ends the command is SIGTERM, by which service managers end services in order."""
    return _state.first == signal.SIGTERM


def wait_readable(fd: int) -> None:
    """Wait until fd has data or is at its end. Raises KeyboardInterrupt if a signal arrives before."""
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
    check()  # Ctrl-C also ends the writer of the pipe: do not report truncated input


def pause(seconds: float) -> None:
    """Sleep. Raises KeyboardInterrupt if a signal has arrived."""
    import time

    check()
    time.sleep(seconds)
    check()


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()


def _others() -> list[int]:
    """Return the other signals whose default ends the process, and that have it."""
    not_handled = {getattr(signal, f"SIG{name}", None) for name in _NOT_HANDLED.split()}
    others = sorted(signal.valid_signals() - not_handled - {*ALWAYS})
    return [number for number in others if signal.getsignal(number) == signal.SIG_DFL]


def _handle(number: int, frame: object) -> None:
    if number in _state.reserved:
        _state.requests.add(number)
        return
    now = os.times().elapsed
    if _state.first is None:
        _state.first, _state.first_s = number, now
    elif _state.at_once and number != _REPEATED and now - _state.first_s >= AT_ONCE_AFTER_S:
        try:
            os.write(2, _AT_ONCE)
        finally:
            os._exit(INTERRUPTED)
