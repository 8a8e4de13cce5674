"""The most private memory that this process uses at a time, in bytes, above that at the start.

python tests/support/peak_memory.py WORDS… runs a command of penstock and prints it. torch and jax are loaded before, so
that only the command's data count.
"""

import sys
import threading
from pathlib import Path


def private_bytes():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class PeakMemory(threading.Thread):
    """Reads the use of memory all the time, in its context. growth : the most, above that at the start"""

    def __enter__(self):
        self.daemon, self._ended, self._start, self.growth = True, threading.Event(), private_bytes(), 0
        self.start()
        return self

    def run(self):
        while not self._ended.wait(0.0005):
            self.growth = max(self.growth, private_bytes() - self._start)

    def __exit__(self, *_):
        self._ended.set()
        self.join()


if __name__ == "__main__":
    import jax
    import torch

    from penstock.cli import main

    jax.numpy.zeros(1).block_until_ready()
    torch.zeros(1)
    with PeakMemory() as peak:
        code = main(sys.argv[1:])
    print("peak", peak.growth)
    sys.exit(code)
