"""Training with penstock's tables next to torch's own sparse embeddings: the same loss in every step."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_models import OPTIMIZERS, engine_of  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

WORDS, DIM, BAGS = 1083, 8, 64
STEPS = 1000
KINDS = ("sum", "mean", "weights", "padding")


def batches(shared_words, kind):
    """Bags of the words of a real text, empty ones among them: do they have two words of odd numbers?"""
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        lengths = rng.integers(0, 7, BAGS)
        begins = rng.integers(0, len(shared_words) - 7, BAGS)
        ids = [shared_words[begin : begin + length] for begin, length in zip(begins, lengths, strict=True)]
        offsets = np.concatenate([[0], lengths.cumsum()])
        weights = torch.from_numpy(rng.random(lengths.sum(), np.float32) * 2) if kind == "weights" else None
        labels = torch.tensor([float((words % 2).sum() > 1) for words in ids])
        yield torch.from_numpy(np.concatenate(ids).astype(np.int64)), torch.from_numpy(offsets), weights, labels


def permuted(batch, rng):
    """The same samples in another order."""
    ids, offsets, weights, labels = batch
    order = rng.permutation(BAGS)
    places = torch.cat([torch.arange(offsets[bag], offsets[bag + 1]) for bag in order.tolist()])
    lengths = offsets.diff()[order]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids[places], offsets, None if weights is None else weights[places], labels[order]


def losses(bag, step, zero_grad, dense, batches):
    result = []
    for ids, offsets, weights, labels in batches:
        zero_grad()
        logits = dense(bag(ids, offsets, weights)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="mean")
        loss.backward()
        step()
        result.append(loss.item())
    return np.array(result)


def dense_part():
    torch.manual_seed(3)
    dense = torch.nn.Linear(DIM, 1)
    return dense, torch.optim.SGD(dense.parameters(), lr=0.05)


def arguments_of(kind):
    padding = {"padding_idx": 4} if kind == "padding" else {}
    return {"mode": "mean" if kind == "mean" else "sum", "include_last_offset": True, **padding}


def test_adam_with_a_corrected_rate_is_torchs_sparse_adam():
    def corrected(step, lr=0.01):
        return lr * (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))

    adam = ps.Adam(corrected, epsilon=1e-8, sum_inside_sqrt=False)
    bag = pt.EmbeddingBag(50, 4, store=pt.store(engine_of(optimizer=adam)))
    twin = bag.materialize().requires_grad_(True)
    twin.sparse = True
    opt, theirs = pt.Step(bag), torch.optim.SparseAdam(twin.parameters(), lr=0.01)
    rng = np.random.default_rng(5)
    for _ in range(20):
        ids = torch.from_numpy(rng.integers(0, 50, (8, 3)))
        theirs.zero_grad()
        for module in (bag, twin):
            (module(ids) ** 2).sum().backward()
        opt.step()
        theirs.step()
    torch.testing.assert_close(bag.materialize().weight, twin.weight, rtol=1e-5, atol=1e-6)


def torchs_losses(kind, name, start, batches):
    dense, optimizer = dense_part()
    bag = torch.nn.EmbeddingBag(WORDS, DIM, sparse=True, _weight=start.clone(), **arguments_of(kind))
    sparse = OPTIMIZERS[name][1](bag.parameters())

    def step():
        sparse.step()
        optimizer.step()

    def zero_grad():
        sparse.zero_grad()
        optimizer.zero_grad()

    return losses(bag, step, zero_grad, dense, batches)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_every_step_is_that_of_torchs_sparse_embedding_bag(kind, name, shakespeare):
    log = list(batches(shakespeare, kind))
    hashes = []
    for _ in range(2):
        engine = engine_of(("user", WORDS, DIM), optimizer=OPTIMIZERS[name][0])
        start = torch.tensor(engine.retrieve_parameters("user")["parameters"])
        bag = pt.EmbeddingBag(WORDS, DIM, store=pt.store(engine), **arguments_of(kind))
        dense, optimizer = dense_part()
        opt = pt.Step(bag, optimizer)
        ours = losses(bag, opt.step, opt.zero_grad, dense, log)
        hashes.append(engine.state_hash())
    assert hashes[0] == hashes[1]
    assert opt.report == (STEPS, STEPS, 0, 0)
    theirs = torchs_losses(kind, name, start, log)
    rng = np.random.default_rng(1)
    others = torchs_losses(kind, name, start, [permuted(batch, rng) for batch in log])
    assert theirs[-100:].mean() < 0.99 * theirs[:100].mean()
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert np.abs(ours - theirs).max() <= 4 * np.abs(others - theirs).max()


@pytest.fixture
def shakespeare():
    from scripts import ROOT

    return np.load(ROOT / "examples" / "data" / "shakespeare_words.npy")
