"""Training loops of other libraries and their features: closures, scaled losses, trainers, transforms, compilers."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_models import IDS, BagConfig, engine_of, value  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402


def test_a_scaler_unscales_rows_and_skips_a_step_that_overflows(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    opt = pt.Step(bag, torch.optim.SGD(dense.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor, step in ((float("inf"), 0), (1.0, 1)):
        opt.zero_grad()
        scaler.scale(bag(IDS).sum() * factor + dense.weight.sum()).backward()
        scaler.step(opt)
        scaler.update()
        assert engine.global_step == step
    assert value(engine, 3) == 0.5


@pytest.mark.parametrize("unscales", [False, True])
def test_scaled_losses_move_rows_exactly_also_over_micro_batches(unscales, bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    opt = pt.Step(bag, torch.optim.SGD(dense.parameters(), lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        loss = bag(IDS).sum() + dense.weight.sum()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.scale(bag(IDS).sum()).backward()
        if unscales:
            scaler.unscale_(opt)
            everything = [each for group in opt.param_groups for each in group["params"]]
            assert torch.nn.utils.clip_grad_norm_(everything, 1e9) < 20
        scaler.step(opt)
        scaler.update()
    assert [value(engine, number) for number in (5, 3, 7)] == [1.0 - 4.0, 1.0 - 2.0, 1.0]


def test_a_scaled_loss_that_is_not_unscaled_is_refused_at_the_first_step(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(dense.parameters(), lr=1.0)
    opt, scaler = pt.Step(bag), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(dense(bag(IDS)).sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(ps.UsageError, match=r"has scaled a loss by 1024, and .*call scaler.step\(opt\) with this Step"):
        opt.step()
    assert engine.global_step == 0
    scaler.step(opt)
    scaler.update()
    assert abs(value(engine, 3) - 1.0) < 1
    bag(IDS).sum().backward()
    opt.step()  # a loss that is not scaled, after the first step
    assert opt.report.applied == 2


def test_a_dense_optimizer_evaluates_the_closure_and_rows_get_the_last_evaluation(bag, engine):
    """LBFGS evaluates it several times, on the same rows; torch's own pair of optimizers does the same."""
    torch.manual_seed(0)
    ids, targets, rows = torch.randint(0, 50, (8, 3)), torch.rand(8, 1), torch.rand(50, 4)
    engine.load_parameters("user", rows.numpy())
    rows.requires_grad_()
    dense = torch.nn.Linear(4, 1)
    start = {name: tensor.clone() for name, tensor in dense.state_dict().items()}

    def train(pooled, optimizer, zero_grad, step):
        numbers = []

        def closure():
            zero_grad()
            loss = ((dense(pooled()) - targets) ** 2).mean()
            loss.backward()
            numbers.append(engine.global_step)
            return loss

        losses = [step(optimizer, closure).item() for _ in range(3)]
        assert len(numbers) > 6
        return losses, numbers

    theirs = torch.optim.LBFGS(dense.parameters(), max_iter=4)
    sgd = torch.optim.SGD([rows], lr=0.5)

    def zero_both():
        sgd.zero_grad()
        theirs.zero_grad()

    def step_both(optimizer, closure):
        loss = optimizer.step(closure)
        sgd.step()
        return loss

    expected, _ = train(lambda: torch.nn.functional.embedding_bag(ids, rows, mode="sum"), theirs, zero_both, step_both)
    dense.load_state_dict(start)
    opt = pt.Step(bag, torch.optim.LBFGS(dense.parameters(), max_iter=4))
    losses, numbers = train(lambda: bag(ids), opt, opt.dense_optimizer.zero_grad, pt.Step.step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert sorted(set(numbers)) == [0, 1, 2]
    torch.testing.assert_close(bag.materialize().weight, rows, rtol=1e-5, atol=1e-5)


def test_a_closure_of_a_gradient_that_is_not_finite_changes_nothing(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    opt, before = pt.Step(bag, torch.optim.Adam(dense.parameters())), dense.weight.detach().clone()

    def closure():
        opt.zero_grad()
        loss = dense(bag(IDS)).sum() * float("inf")
        loss.backward()
        return loss

    with pytest.raises(ps.InputError, match="expected a finite gradient"):
        opt.step(closure)
    assert engine.global_step == 0
    assert torch.equal(dense.weight, before)


def test_micro_batches_before_a_closure_are_in_its_frame(bag, opt, engine):
    """As Lightning accumulates: all but the last micro-batch before the step, the last one in its closure."""
    bag(IDS).sum().backward()

    def closure():
        loss = bag(IDS).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.report.applied == 1
    assert value(engine, 3) == 0.0


@pytest.mark.filterwarnings("error")
def test_a_closure_of_a_dense_optimizer_is_no_step_without_the_rows(bag):
    dense = torch.nn.Linear(4, 1)
    opt = pt.Step(bag, torch.optim.SGD(dense.parameters(), lr=0.1))

    def closure():
        loss = dense(bag(IDS)).sum()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.report.applied == 1


def test_an_optimizer_that_accelerate_prepared_accumulates_rows_too(bag, engine):
    class Prepared(torch.optim.SGD):
        gradient_state = SimpleNamespace(sync_gradients=False)

    dense = torch.nn.Linear(4, 1)
    opt = pt.Step(bag, Prepared(dense.parameters(), lr=0.1))
    for is_last in (False, True):
        Prepared.gradient_state.sync_gradients = is_last
        bag(IDS).sum().backward()
        opt.step()
        opt.zero_grad()
    assert opt.report == (1, 1, 0, 0)
    assert value(engine, 3) == 0.0


def test_a_step_has_what_lightning_asks_of_an_optimizer(bag):
    dense = torch.nn.Linear(4, 1)
    opt = pt.Step(bag, torch.optim.Adam(dense.parameters()))
    assert opt.defaults["lr"] == 0.001
    assert opt.state == {}
    alone = pt.Step(bag)
    assert (alone.state, alone.defaults) == ({}, {})


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_pass_pushes_its_gradients_once(reentrant, bag, opt, engine):
    from torch.utils.checkpoint import checkpoint

    factor = torch.ones(1, requires_grad=True)
    checkpoint(lambda ids, factor: bag(ids) * factor, IDS, factor, use_reentrant=reentrant).sum().backward()
    opt.step()
    assert opt.report.applied == 1
    assert value(engine, 3) == 0.5


def test_functional_calls_train_rows_and_transforms_are_refused(bag, engine):
    model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
    opt, parameters = pt.Step(model), dict(model.named_parameters())
    torch.func.functional_call(model, parameters, (IDS,)).sum().backward()
    opt.step()
    assert opt.report.applied == 1
    constants = {name: parameter.detach() for name, parameter in parameters.items()}
    for transformed in (
        lambda: torch.func.grad(lambda each: torch.func.functional_call(model, each, (IDS,)).sum())(constants),
        lambda: torch.func.vmap(bag)(IDS[:, None]),
    ):
        with pytest.raises(ps.UsageError, match=r"torch.func or .* transforms, .*look up the embeddings outside"):
            transformed()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_module_of_another_type_pushes_float32(dtype, bag, engine):
    opt = pt.Step(bag.to(dtype))
    pooled = bag(IDS)
    assert pooled.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (pooled @ torch.ones(4, 1, dtype=dtype)).sum().backward()
    opt.step()
    assert [value(engine, number) for number in (5, 3)] == [0.0, 0.5]


@pytest.mark.parametrize("is_collection", [False, True])
@pytest.mark.parametrize(("device", "dtype"), [("meta", "float32"), ("cpu", "bfloat16"), ("cpu", "float16")])
def test_defaults_of_torch_for_new_tensors_change_no_sum(device, dtype, is_collection, engine):
    """A device where nothing can be read stands for a GPU. In 16 bits, 1 would be lost next to 4096."""
    arguments = {"store": pt.store(engine), "device": "cpu", "dtype": torch.float32}
    module = pt.Embedding(50, 4, **arguments)
    batch = torch.tensor([5])
    if is_collection:
        module = pt.EmbeddingBagCollection([BagConfig("user", 50, 4, ["clicked"])], **arguments)
        batch = {"clicked": (batch, torch.tensor([0, 1]))}
    opt = pt.Step(module)
    before = engine.lookup("user", [5])
    default = torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        for factor in (4096.0, 1.0):
            rows = module(batch)
            (factor * (rows.values() if is_collection else rows)).sum().backward()
        opt.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(default)
    assert np.array_equal(engine.lookup("user", [5]), before - np.float32(0.5 * 4097))


def test_gradient_penalties_reach_rows(bag, opt, engine):
    pooled = bag(IDS)
    (gradient,) = torch.autograd.grad((pooled**2).sum(), pooled, create_graph=True)
    assert opt.param_groups[-1]["params"] == []
    (gradient**2).sum().backward()  # of 4 pooled², so 8 pooled
    opt.step()
    assert value(engine, 3) == 1.0 - 0.5 * 16


# ---- compiled


@pytest.mark.filterwarnings("ignore")  # torch deprecates its traces
def test_a_trace_of_rows_is_refused_and_one_of_a_copy_takes_other_ids(bag, engine):
    """A trace would contain the rows of its example, and return them whatever the ids are."""
    engine.load_parameters("user", np.arange(200, dtype=np.float32).reshape(50, 4))
    model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1)).eval()
    with pytest.raises(ps.UsageError, match=r"torch.jit.trace would record the rows .*penstock.torch.materialized"):
        torch.jit.trace(model, (IDS,))
    traced = torch.jit.trace(pt.materialized(model), (IDS,))
    assert torch.equal(traced(IDS - 2), model(IDS - 2))


def test_a_whole_graph_is_refused_with_the_reason(bag):
    reason = "penstock pulls rows outside of compiled graphs; compile without fullgraph=True"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reason):
        torch.compile(bag, fullgraph=True, backend="eager")(IDS)


def test_a_sum_over_backward_passes_that_is_not_finite_changes_nothing_and_stays_until_zero_grad(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    opt = pt.Step(torch.nn.ModuleList([bag, dense]), torch.optim.SGD(dense.parameters(), lr=0.1))
    before = engine.state_hash(), dense.weight.clone()
    for _ in range(2):
        (bag(torch.tensor([[3]])) * 3e38).sum().backward()
    for _ in range(2):
        with pytest.raises(ps.InputError, match=r"expected a finite gradient, got inf for id 3 of table 'user'"):
            opt.step()
    assert engine.state_hash() == before[0]
    assert torch.equal(dense.weight, before[1])
    opt.zero_grad()
    bag(torch.tensor([[3]])).sum().backward()
    opt.step()
    assert value(engine, 3) == 0.5


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_])
def test_clipping_sees_the_sum_of_a_row_over_several_backward_passes_and_modules(clip, bag, engine):
    other = pt.Embedding(50, 4, store=bag.store)
    weight = torch.nn.Parameter(torch.full((50, 4), 1.0))
    opt, dense = pt.Step(torch.nn.ModuleList([bag, other])), torch.optim.SGD([weight], lr=0.5)
    functional = torch.nn.functional
    for _ in range(2):
        opt.zero_grad()
        dense.zero_grad()
        for ids in (IDS, IDS - 2, IDS):  # ids in common, in another order
            (bag(ids).square().sum() + other(ids).sum()).backward()
            in_torch = functional.embedding_bag(ids, weight, mode="sum").square().sum()
            (in_torch + functional.embedding(ids, weight).sum()).backward()
        clip(opt.param_groups[-1]["params"], 0.5)
        clip([weight], 0.5)
        opt.step()
        dense.step()
    np.testing.assert_allclose(engine.lookup("user", range(50)), weight.detach().numpy(), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in torch._dynamo
def test_compiled_backward_passes_give_the_same_rows():
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(pt.EmbeddingBag(50, 4, mode="sum", store=pt.store(engine_of())))
        opt = pt.Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with torch._dynamo.config.patch(compiled_autograd=compiles):
            run = torch.compile(model, backend="aot_eager") if compiles else model
            for _ in range(2):
                loss = run(IDS).sum()
                opt.zero_grad()
                loss.backward()
                opt.step()
        results.append(model.bags.materialize().weight)
        assert opt.report.applied == 2
    torch.testing.assert_close(*results)


class Model(torch.nn.Module):
    def __init__(self, bags):
        super().__init__()
        self.bags = bags
        self.dense = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, features):
        pooled = self.bags(features)
        return self.dense(pooled if isinstance(pooled, torch.Tensor) else pooled.values())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # in torch._dynamo
@pytest.mark.parametrize("is_collection", [False, True])
def test_everything_between_pull_and_push_compiles(is_collection, bag):
    configs = [BagConfig("user", 50, 4, ["clicked"])]
    bags = pt.EmbeddingBagCollection(tables=configs, store=bag.store) if is_collection else bag
    torch.manual_seed(0)
    model = Model(bags)
    graphs = []

    def backend(graph, inputs):
        graphs.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    opt = pt.Step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rng = np.random.default_rng(0)
    for size in (4, 7, 5, 9):
        ids = torch.from_numpy(rng.integers(0, 50, (size, 3)))
        features = {"clicked": (ids.reshape(-1), torch.arange(size + 1) * 3)} if is_collection else ids
        expected = model(features).detach()
        opt.zero_grad()
        result = compiled(features)
        torch.testing.assert_close(result, expected)
        result.sum().backward()
        opt.step()
    assert opt.report == (4, 4, 0, 0)
    assert sum("embedding_bag" in graph for graph in graphs) == 2  # compiled again for other sizes, once
    assert sum("linear" in graph for graph in graphs) == 2
