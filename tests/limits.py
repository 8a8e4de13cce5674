"""The one time limit of the tests, and how to wait for what another thread or process brings about."""

import time

# For what ends by itself on every machine, however slow: only a real hang takes as long.
HANG_S = 600.0


def until(holds):
    """Wait until ``holds()``."""
    end = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
