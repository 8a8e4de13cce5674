"""Logs as the distinct rows of each step, for tests of cached tables."""

import numpy as np
import pyarrow as pa


def zipf(seed=0, num_steps=80, num_rows=4000, drift=0):
    """The distinct rows of steps of 300 rows, by popularity; drift : ranks that popularity moves on by, per step."""
    rng = np.random.default_rng(seed)
    shares = np.arange(1, num_rows + 1) ** -1.1
    for step in range(num_steps):
        ranks = rng.choice(num_rows, 300, p=shares / shares.sum())
        yield np.unique((ranks + drift * step) * 1733 % num_rows)


def words(shared):
    """The distinct rows of every step of a real log: words of Shakespeare, and their context."""
    log = pa.ipc.open_stream(shared("realdata/shakespeare_words.arrows")).read_all()
    log = log.filter(pa.compute.equal(log["table"].cast(pa.string()), "context"))
    steps, ids = log["step"].to_numpy(), log["id"].to_numpy()
    return [np.unique(ids[steps == step]) for step in np.unique(steps)]
