"""The one time limit of the tests, and how to wait for what another thread or process brings about."""

import signal
import threading
import time
from pathlib import Path

# For what ends by itself on every machine, however slow: only a real hang takes as long.
HANG_S = 600.0


def until(holds):
    """Wait until ``holds()``."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def suspend(process):
    """Stop a process, and wait until no thread of it runs: until then it may answer."""

    def has_stopped():
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] in "Tt" for stat in threads)

    process.send_signal(signal.SIGSTOP)
    until(has_stopped)


def in_thread(work):
    """Run on a thread; call what this returns to join it and get the result, or what it raised."""
    outcome: list[tuple[object, BaseException | None]] = []

    def run():
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(HANG_S)
        assert outcome, "it did not end"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result
