"""Drives an accumulator as the engine does, through ``pyx.intake``; neither jax nor pyarrow is loaded."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from penstock.model.frames import Rows
from penstock.pyx.frame_accumulate import Intake

POOL = ThreadPoolExecutor(3)


def int64(values):
    """An array of ids."""
    return np.array(values, np.int64)


def blocks_of(*blocks):
    """(ids, grads[, which[, gains]]) each, as an intake takes them."""
    return [Rows(*block) for block in blocks]


def work(intake, threads=1):
    """Work on an intake's tasks with so many threads. False where a row is bad."""
    others = [POOL.submit(intake.work) for _ in range(threads - 1)]
    return all([intake.work(), *[other.result() for other in others]])


def is_valid(accumulator, blocks, number=0, parts=1, shares=3):
    """Whether every row passes the validation that comes before sums which are held are added to."""
    intake = Intake()
    intake.begin([accumulator], [blocks_of(*blocks)], number, [parts])
    intake.check(shares)
    valid = intake.work()
    intake.cancel()
    return valid


def add(accumulator, blocks, number, parts=1, threads=1, strict=True):
    """Add one frame; where a row is bad, undo it and return False."""
    intake = Intake()
    intake.begin([accumulator], [blocks_of(*blocks)], number, [parts])
    intake.add(strict)
    good = work(intake, threads)
    (intake.end if good else intake.undo)()
    return good


def drain(accumulator, mean=False, ascending=False):
    """Drain as ids (u,), sums (u, dim), counts (u,), by ascending id or part by part; of one part not copied."""
    counts = accumulator.counts()
    drained = accumulator.drain(mean)
    if len(drained) == 1 and not ascending:
        return drained[0].ids, drained[0].sums, counts
    ids, sums = np.concatenate([part.ids for part in drained]), np.concatenate([part.sums for part in drained])
    order = np.argsort(ids) if ascending else slice(None)
    return ids[order], sums[order], counts[order]
