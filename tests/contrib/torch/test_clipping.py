"""``Step.clip_grad_norm_`` next to ``torch.nn.utils.clip_grad_norm_`` over an equal model with whole weights."""

import warnings
from itertools import chain

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch_models import IDS, BagConfig, engine_of, value  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

ROWS, PADDING = 6, 3
DIMS = {"user": 2, "item": 2, "shop": 3}  # two share a tensor
NORMS = [2.0, 1.0, float("inf"), "inf", 3.0]
functional = torch.nn.functional


class Twins:
    """A model over tables of zeros that move by their gradients, and torch's with the same weights.

    A module with a padding row reads ``user``, too. The loss does not use ``item``, and ``shop`` not always.
    """

    def __init__(self, sparse, with_dense):
        tables = [ps.TableConfig(ROWS, dim, ps.Constant(0.0), ps.SGD(1.0), name=name) for name, dim in DIMS.items()]
        store = pt.store(ps.Engine(ps.EmbeddingConfig.from_tables(tables)))
        configs = [BagConfig(name, ROWS, DIMS[name], [name]) for name in ("user", "item")]
        self.bags = pt.EmbeddingBagCollection(tables=configs, store=store)
        self.shop = pt.EmbeddingBag(ROWS, DIMS["shop"], mode="sum", table="shop", store=store)
        self.padded = pt.Embedding(ROWS, DIMS["user"], padding_idx=PADDING, table="user", store=store)
        self.weights = {name: torch.nn.Parameter(torch.zeros(ROWS, dim)) for name, dim in DIMS.items()}
        self.sparse = sparse
        self.dense = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        modules = torch.nn.ModuleList([self.bags, self.shop, self.padded])
        self.opt = pt.Step(modules, torch.optim.SGD(self.dense[:1], lr=1.0) if with_dense else None)
        self.with_dense = with_dense

    def add_gradients(self, bags, padded, shop, factor):
        """Run one backward pass. bags : ids of every sample; shop : None: the loss does not use that table"""
        ids, offsets = torch.tensor([*chain(*bags)], dtype=torch.int64), np.cumsum([0, *map(len, bags)])
        pair, padded = (ids, torch.from_numpy(offsets)), torch.tensor(padded, dtype=torch.int64)
        pooled, single = self.bags({"user": pair, "item": pair}), self.padded(padded)
        loss = (pooled["user"] * factor).sum() + (single * factor**2).sum()
        user = self._bags("user", ids, pair[1])
        in_torch = functional.embedding(padded, self.weights["user"], PADDING, sparse=self.sparse)
        other = (user * factor).sum() + (in_torch * factor**2).sum()
        if shop is not None:
            shop_ids = torch.tensor(shop, dtype=torch.int64)
            shop_offsets = torch.zeros(1, dtype=torch.int64)
            loss = loss + self.shop(shop_ids, shop_offsets).sum()
            other = other + self._bags("shop", shop_ids, torch.tensor([0, len(shop)])).sum()
        (loss + (self.dense[0] * factor).sum()).backward()
        (other + (self.dense[1] * factor).sum()).backward()

    def _bags(self, name, ids, offsets):
        return functional.embedding_bag(
            ids, self.weights[name], offsets, mode="sum", sparse=self.sparse, include_last_offset=True
        )

    def clip_in_torch(self, *arguments):
        """Clip all weights in torch, which takes no sparse gradients: their values in their place."""
        parameters = [*self.weights.values(), *(self.dense[1:] if self.with_dense else [])]
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        clipped = [values for values in map(_values_of, parameters) if values.grad is None or len(values.grad)]
        return torch.nn.utils.clip_grad_norm_(clipped, *arguments)

    def check_rows(self):
        """Check that a step moves all rows by the gradients in torch."""
        self.opt.step()
        for name, weight in self.weights.items():
            grad = torch.zeros(ROWS, DIMS[name]) if weight.grad is None else weight.grad.to_dense()
            rows = self.opt.store.contents([name])[name].rows
            np.testing.assert_allclose(rows, -grad, rtol=1e-6, atol=1e-6 * float(grad.abs().max()))


def _values_of(parameter):
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    values = torch.nn.Parameter(torch.zeros_like(parameter.grad._values()))
    values.grad = parameter.grad._values()
    return values


IDS_OF_TABLE = st.lists(st.integers(0, ROWS - 1), max_size=6)
PASSES = st.lists(
    st.tuples(
        st.lists(IDS_OF_TABLE, max_size=3),
        IDS_OF_TABLE,
        st.none() | IDS_OF_TABLE,
        st.floats(0.0009765625, 1000, width=32),
    ),
    max_size=3,
)


@given(PASSES, st.sampled_from([1e-3, 0.5, 10.0, 1e6]), st.sampled_from(NORMS), st.booleans(), st.booleans())
def test_rows_and_dense_parameters_are_clipped_as_torch_clips_whole_weights(
    passes, max_norm, norm_type, sparse, with_dense
):
    twins = Twins(sparse, with_dense)
    for each in passes:
        twins.add_gradients(*each)
    norm = twins.opt.clip_grad_norm_(max_norm, norm_type)
    expected = twins.clip_in_torch(max_norm, norm_type)
    assert norm.shape == expected.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    if with_dense and passes:
        torch.testing.assert_close(twins.dense[0].grad, twins.dense[1].grad, rtol=1e-6, atol=0)
    twins.check_rows()


def test_without_any_gradient_the_norm_is_zero():
    opt = Twins(False, True).opt
    assert opt.clip_grad_norm_(1.0) == 0.0
    opt.step()
    assert opt.report.applied == 0


def test_a_batch_without_ids_has_a_norm_of_any_type():
    twins = Twins(False, False)
    twins.add_gradients([[], []], [], [], 1.0)
    for norm_type in NORMS:
        assert twins.opt.clip_grad_norm_(1.0, norm_type) == 0.0


def test_a_norm_that_is_not_finite_is_torchs_error_before_a_gradient_changes(bag, opt, engine):
    bag(IDS).sum().backward()
    (rows,) = opt.param_groups[-1]["params"]
    rows.grad[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
    rows.grad[0, 0] = 2.0
    assert opt.clip_grad_norm_(1.0, 1, error_if_nonfinite=True) == 16.0
    opt.step()
    assert value(engine, 3) == pytest.approx(1 - 0.5 / 16)


@pytest.mark.parametrize("norm_type", [0, -1.0, float("-inf")])
def test_a_norm_that_would_count_rows_without_ids_is_refused(norm_type, opt):
    with pytest.raises(ps.UsageError, match=f"clip_grad_norm_: expected norm_type above 0, got {norm_type}"):
        opt.clip_grad_norm_(1.0, norm_type)


def test_a_scaler_unscales_rows_before_they_are_clipped(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(dense.weight)
    opt = pt.Step(torch.nn.ModuleList([bag, dense]), torch.optim.SGD(dense.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(dense(bag(IDS)).sum()).backward()
    scaler.unscale_(opt)
    norm = opt.clip_grad_norm_(1.0)
    # Rows: 2 for id 5, 1 for 3 and 49, in four columns each; the weight: the sum of four rows of ones.
    assert norm == pytest.approx(np.sqrt(4 * (4 + 1 + 1) + 4 * 16))
    scaler.step(opt)
    scaler.update()
    assert value(engine, 5) == pytest.approx(1 - 0.5 * 2 / float(norm))
    assert dense.weight[0, 0].item() == pytest.approx(1 - 4 / float(norm))


def test_a_padding_row_of_one_module_keeps_the_gradient_of_another_one():
    engine = engine_of(optimizer=ps.SGD(1.0))
    engine.load_parameters("user", np.ones((50, 4), np.float32))
    store = pt.store(engine)
    padded, other = pt.Embedding(50, 4, padding_idx=3, store=store), pt.Embedding(50, 4, store=store)
    opt = pt.Step(torch.nn.ModuleList([padded, other]))
    ids = torch.tensor([3, 5])
    (padded(ids).sum() + other(ids).sum()).backward()
    assert len(opt.param_groups[-1]["params"]) == 2  # as a scaler reads them
    opt.step()
    assert [value(engine, number) for number in (3, 5)] == [0.0, -1.0]


def test_each_rank_clips_its_own_gradients():
    engine = engine_of(optimizer=ps.SGD(1.0), num_required=2, reduction="sum")
    engine.load_parameters("user", np.ones((50, 4), np.float32))
    for rank, factor in enumerate((2.0, 0.25)):
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=pt.store(engine, contributor=f"rank-{rank}"))
        opt = pt.Step(bag, synchronous=False)
        (bag(torch.tensor([[5]])) * factor).sum().backward()
        assert opt.clip_grad_norm_(1.0) == 2 * factor
        opt.step()
    assert value(engine, 5) == pytest.approx(1 - 0.5 - 0.25, rel=1e-5)


def test_ranks_whose_dense_parts_would_drift_apart_are_pointed_out(bag, monkeypatch):
    """The processes are not started: what counts is that torch.distributed says there are two."""
    dense = torch.nn.Linear(4, 1)
    opts = [pt.Step(bag, torch.optim.SGD(dense.parameters(), lr=1.0)), pt.Step(bag)]
    monkeypatch.setattr("penstock.contrib.torch.step.is_distributed", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match=r"each rank .* its own norm, .* dense parameters drift apart") as warned:
        opts[0].clip_grad_norm_(1.0)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opts[1].clip_grad_norm_(1.0)  # rows alone
