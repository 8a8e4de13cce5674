"""The one time limit of the tests, and how to wait for what another thread or process brings about."""

import threading
import time

# For what ends by itself on every machine, however slow: only a real hang takes as long.
HANG_S = 600.0


def until(holds):
    """Wait until ``holds()``."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


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
