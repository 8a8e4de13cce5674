"""Run a command of penstock in this process, and print the most private memory that it used, in bytes.

python tests/support/peak_memory.py WORDS… loads torch and jax before, so that only the command's data count.
"""

import sys
import threading

import jax
import torch

from penstock.cli import main

jax.numpy.zeros(1).block_until_ready()
torch.zeros(1)


def private_bytes():
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Sampler(threading.Thread):
    """Reads the use of memory all the time."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stop, self.most = threading.Event(), 0

    def run(self):
        while not self.stop.wait(0.001):
            self.most = max(self.most, private_bytes())


if __name__ == "__main__":
    before, sampler = private_bytes(), Sampler()
    sampler.start()
    code = main(sys.argv[1:])
    sampler.stop.set()
    sampler.join()
    print("peak", sampler.most - before)
    sys.exit(code)
