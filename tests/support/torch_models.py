"""Shared by the tests of penstock.torch: engines with torch's constants, training, stand-ins for torchrec's classes."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

import penstock as ps
import penstock.torch as pt

torch.set_num_threads(1)  # tests run in parallel
torch.sparse.check_sparse_tensor_invariants.disable()  # else torch warns where it creates a sparse gradient
RATE = 0.1
IDS = torch.tensor([[5, 3], [5, 49]])
# Two tables for ``bags_of``.
PAIRS = {"same dims": (("user", 200, 4), ("item", 100, 4)), "other dims": (("user", 200, 4), ("item", 100, 3))}
# penstock's optimizer, and torch's with the same constants.
OPTIMIZERS = {
    "sgd": (ps.SGD(RATE), lambda parameters: torch.optim.SGD(parameters, lr=RATE)),
    "adagrad": (
        ps.Adagrad(RATE, initial_accumulator_value=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=RATE, initial_accumulator_value=0.1, eps=0.0),
    ),
}


def config_of(*tables, optimizer=None):
    """A configuration of tables (name, rows, dim)."""
    configs = [
        ps.TableConfig(rows, dim, name=name, optimizer=optimizer or OPTIMIZERS["sgd"][0]) for name, rows, dim in tables
    ]
    return ps.EmbeddingConfig.from_tables(configs)


def engine_of(*tables, optimizer=None, **options):
    """An engine of tables (name, rows, dim); without any, of 50 rows ``user``."""
    return ps.Engine(config_of(*(tables or (("user", 50, 4),)), optimizer=optimizer), **options)


def value(engine, number):
    """The first number of a row of the table ``user``."""
    return engine.lookup("user", [number])[0, 0]


def store_of(*tables, **options):
    """The store of an engine, as ``engine_of`` makes it."""
    return pt.store(engine_of(*tables, **options))


@dataclass
class BagConfig:
    """As torchrec's EmbeddingBagConfig."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list = field(default_factory=list)
    pooling: str = "SUM"


class KeyedJagged:
    """As torchrec's KeyedJaggedTensor: the attributes that penstock uses."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cat([torch.zeros(1, dtype=torch.int64), self._lengths.cumsum(0)])

    def weights_or_none(self):
        return self._weights


def zipf_batch(rng, bags, vocabulary, most=6):
    """Ids and offsets (bags + 1) of bags of 0 to ``most`` ids, frequent ones often."""
    lengths = rng.integers(0, most + 1, bags)
    ids = np.minimum(rng.zipf(1.3, lengths.sum()) - 1, vocabulary - 1)
    return torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))


def bags_of(store):
    """Bags of all tables of a store, each with one feature."""
    configs = [BagConfig(name, info.num_rows, info.dim, [f"of_{name}"]) for name, info in store.tables.items()]
    return pt.EmbeddingBagCollection(tables=configs, store=store)


def batch_of(number):
    """A batch for the bags of a pair, the same whenever it is asked for."""
    rng = np.random.default_rng(number)
    return {f"of_{name}": zipf_batch(rng, 16, rows) for name, rows in (("user", 200), ("item", 100))}


def train(bags, opt, numbers, prefetches=False):
    """Train on batches by their numbers; the losses."""
    losses = []
    batches = [batch_of(number) for number in [*numbers, numbers[-1] + 1]]
    for batch, following in pairwise(batches):
        opt.zero_grad()
        loss = (bags(batch).values() ** 2).sum()
        if prefetches:
            bags.prefetch(following)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def synchronous(address, number):
    """A synchronous rank of two, without its data: its step, and its bag."""
    store = pt.store(address, contributor=f"rank-{number}")
    bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
    return pt.Step(bag, synchronous=True), bag


def trained(rank, opt, bag, numbers):
    """Train on batches, each as often as ``numbers`` has it; the report."""
    for number in numbers:
        opt.zero_grad()
        bag(torch.tensor([[number, 10 + rank]])).sum().backward()
        opt.step()
    return opt.report
