"""A table in the host's memory, and the way of runs of small frames into it. Neither jax nor pyarrow is loaded."""

import threading

import numpy as np

from penstock.pyx import update
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_steps import FrameSteps
from penstock.pyx.gate_counts import GateCounts
from penstock.pyx.gradient_blocks import GradientBlocks

VOCABULARY, DIM = 12, 3
MOST = 2**63 - 1


class Way:
    """A table of SGD in the host's memory, and what leads to it. known : whether ids are looked up in a map"""

    def __init__(self, num_required=1, mean=False, devices=1, known=True, vocabulary=VOCABULARY):
        self.gate = GateCounts(num_required)
        size = vocabulary if known else (1 << 27) + 1
        self.sums = Accumulator(DIM, vocabulary_size=size, count=mean)
        shards = 4 * devices
        layout = {"dim": DIM, "vocabulary_size": vocabulary, "num_shards": shards, "mod": False}
        layout |= {"rows_per_shard": -(-vocabulary // shards), "shards_per_device": shards // devices}
        numbers = {"gradient_min": -np.inf, "gradient_max": np.inf, "weight_min": -np.inf, "weight_max": np.inf}
        rule = update.TableRule("sgd", numbers, **layout)
        floats = [np.zeros(rule.end, np.float32) for _ in range(devices)]
        self.step = update.Step([rule], floats)
        self.steps = FrameSteps(self.gate, self.sums, self.step, threading.Lock(), 0, mean)
        self.vocabulary, self.number = vocabulary, 1

    def take(
        self, ids, grads, bounds, steps, first=0, most=MOST, most_steps=MOST, most_changes=MOST, rate=0.5, cuts=()
    ):
        """cuts : rows, at which the frames are cut into blocks"""
        blocks = GradientBlocks.of_arrays(list(zip(np.split(ids, cuts), np.split(grads, cuts), strict=True)))
        limits = first, most, most_steps, most_changes
        num = self.steps.take(blocks, bounds, steps, *limits, rate, self.number)
        self.number += num
        return num

    def table(self):
        out = np.empty((self.vocabulary, DIM), np.float32)
        self.step.copy(0, 0, out, 0, False)
        self.step.run(lambda tasks: [task() for task in tasks], 1)
        return out


def frames_of(sizes, seed=0, vocabulary=VOCABULARY):
    """Rows of frames of these sizes: ids, gradients, bounds."""
    rng, bounds = np.random.default_rng(seed), np.cumsum([0, *sizes])
    return rng.integers(0, vocabulary, bounds[-1]), rng.standard_normal((bounds[-1], DIM), np.float32), bounds
