"""Steps: what is pushed and when, in the orders that users happen to call things in."""

import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_models import IDS, BagConfig, engine_of, value, zipf_batch  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402


def test_several_forwards_before_a_step_are_one_frame(bag, opt, engine):
    bag(IDS).sum().backward()
    bag(torch.tensor([[5, 7]])).sum().backward()
    opt.step()
    assert opt.report == (1, 1, 0, 0)
    assert [value(engine, number) for number in (5, 3, 49, 7, 8)] == [-0.5, 0.5, 0.5, 0.5, 1.0]


def test_modules_of_one_table_share_a_frame(engine, bag):
    other = pt.Embedding(50, 4, store=bag.store)
    opt = pt.Step(torch.nn.ModuleList([bag, other]))
    (bag(IDS).sum() + other(torch.tensor([5])).sum()).backward()
    opt.step()
    assert opt.report.applied == 1
    assert value(engine, 5) == -0.5


def test_two_backward_passes_add_up_as_in_torch(bag, opt, engine):
    loss = bag(IDS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    opt.step()
    assert value(engine, 3) == 0.0


def test_a_step_without_forward_or_gradient_sends_nothing(bag, opt, engine):
    opt.step()
    bag(IDS)
    opt.step()
    torch.ones(1, requires_grad=True).sum().backward()
    opt.step()
    assert opt.report == (0, 0, 0, 0)
    bag(IDS).sum().backward()
    opt.step()
    opt.step()
    assert opt.report == (1, 1, 0, 0)
    assert value(engine, 3) == 0.5


@pytest.mark.parametrize("order", ["before", "between", "closure"])
def test_zero_grad_between_forward_and_backward_drops_nothing(order, bag, opt, engine):
    def compute():
        if order == "before":
            opt.zero_grad()
        loss = bag(torch.tensor([[5, 3]])).sum()
        if order != "before":
            opt.zero_grad()
        loss.backward()
        return loss

    for number in range(3):
        if order == "closure":
            assert opt.step(compute) == 4 * (2 - number)
        else:
            compute()
            opt.step()
    assert opt.report == (3, 3, 0, 0)
    assert value(engine, 5) == 1.0 - 1.5


def leaf_of(pooled):
    """A weak reference to the rows that an embedding was computed from."""
    return weakref.ref(pooled.grad_fn.next_functions[0][0].variable)


def test_forward_passes_without_a_step_hold_nothing(bag, opt):
    leaves = [leaf_of(bag(IDS)) for _ in range(400)]
    assert not any(leaf() is not None for leaf in leaves)
    losses = [bag(IDS).sum() for _ in range(3)]
    for loss in losses:
        loss.backward()
    assert len(opt.param_groups[-1]["params"]) == 3
    opt.step()
    assert opt.param_groups[-1]["params"] == []


def test_gradients_of_an_earlier_step_are_not_added_to_a_later_one(bag, opt, engine):
    loss = bag(IDS).sum()
    loss.backward(retain_graph=True)
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
    assert value(engine, 3) == 0.5
    loss.backward()
    with pytest.warns(UserWarning, match="dropped as stale"):
        opt.step()
    assert value(engine, 3) == 0.5


def test_gradients_of_several_forwards_are_summed_in_their_order(bag, opt, engine):
    """Whatever order the backward passes have: it decides whether the middle one is lost in rounding."""
    losses = [bag(torch.tensor([[5]])).sum() * factor for factor in (2.0**25, 2.0, -(2.0**25))]
    for loss in reversed(losses):
        loss.backward()
    opt.step()
    assert value(engine, 5) == 1.0 - np.float32(0.5) * (np.float32(2.0**25) + np.float32(2.0) - np.float32(2.0**25))


@pytest.mark.parametrize("is_collection", [False, True])
@pytest.mark.parametrize(("key_type", "other"), [("uint64", 2**63 + 1), ("int64", -9)])
def test_ids_of_a_table_may_be_signed_in_one_column_and_unsigned_in_another(key_type, other, is_collection):
    """NumPy would join them as float64."""
    keys = ps.Dynamic(key_type=key_type)
    table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), name="user", dynamic=keys)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    signed, unsigned = torch.tensor([5, min(other, 7)]), torch.tensor([5, max(other, 7)], dtype=torch.uint64)
    if is_collection:
        configs, offsets = [BagConfig("user", 8, 2, ["clicked", "bought"])], torch.tensor([0, 1, 2])
        model = pt.EmbeddingBagCollection(tables=configs, store=pt.store(engine))
        total = model({"clicked": (signed, offsets), "bought": (unsigned, offsets)}).values().sum()
    else:
        model = pt.Embedding(8, 2, store=pt.store(engine))
        total = model(signed).sum() + model(unsigned).sum()
    opt = pt.Step(model)
    total.backward()
    opt.step()
    assert engine.keys("user").to_pylist() == sorted([5, 7, other])
    assert engine.lookup("user", np.array([5, 7, other], key_type))[:, 0].tolist() == [0.0, 0.5, 0.5]


def test_zero_grad_drops_what_an_exception_left(bag, opt, engine):
    bag(IDS).sum().backward()
    bag(IDS)  # an exception before its backward pass
    opt.zero_grad()
    bag(torch.tensor([[3]])).sum().backward()
    opt.step()
    assert [value(engine, number) for number in (5, 3)] == [1.0, 0.5]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_names_table_and_id_and_sends_nothing(bag, opt, engine, number):
    loss = bag(IDS)[1, 2] * number + bag(torch.tensor([[7]])).sum()
    loss.backward()
    with pytest.raises(
        ps.InputError, match=r"expected a finite gradient, got (nan|inf) for id 5 of table 'user'"
    ) as error:
        opt.step()
    assert error.value.reason == "gradient_not_finite"
    assert engine.global_step == 0
    opt.zero_grad()
    bag(IDS).sum().backward()
    opt.step()
    assert value(engine, 5) == 0.0


def test_a_finite_gradient_whose_sum_overflows_is_sent(bag, opt, engine):
    (bag(IDS) * torch.tensor(2e38)).sum().backward()
    (rows,) = opt.param_groups[-1]["params"]
    rows.grad[rows.grad > 3e38] = 3e38
    opt.step()
    assert engine.global_step == 1


def test_a_stale_frame_is_reported_and_not_raised(bag, opt, engine):
    bag(IDS).sum().backward()
    engine.apply({"user": ([9], np.ones((1, 4), np.float32))})  # another contributor
    with pytest.warns(
        UserWarning,
        match=r"dropped as stale.* read at step 0, .*the global step is 1\); 1 of 1 frames of this store so far",
    ) as warned:
        opt.step()
    assert warned[0].filename == __file__
    assert opt.report == (1, 0, 1, 0)
    assert value(engine, 5) == 1.0
    bag(IDS).sum().backward()
    opt.step()
    assert opt.report == (2, 1, 1, 0)
    bag(IDS).sum().backward()
    engine.apply({"user": ([9], np.ones((1, 4), np.float32))})
    opt.step()  # the first stale frame alone is a warning
    assert opt.report == (3, 1, 2, 0)


def test_the_oldest_forward_decides_the_step_of_a_frame(bag, opt, engine):
    bag(IDS).sum().backward()
    engine.apply({"user": ([9], np.ones((1, 4), np.float32))})
    bag(IDS).sum().backward()
    with pytest.warns(UserWarning, match="stale"):
        opt.step()
    assert opt.report.stale == 1


def test_frames_wait_in_the_gate(bag, engine):
    waiting = engine_of(optimizer=ps.SGD(0.5), num_required=2, reduction="sum")
    bag = pt.EmbeddingBag(50, 4, mode="sum", store=pt.store(waiting))
    opt = pt.Step(bag)
    before = value(waiting, 3)
    for pending in (1, 0):
        bag(IDS).sum().backward()
        opt.step()
        assert opt.report.pending == pending
    assert opt.report == (1, 2, 0, 0)
    np.testing.assert_allclose(value(waiting, 3), before - 1.0, rtol=1e-5)


def test_a_mean_over_frames_is_pointed_out():
    store = pt.store(engine_of(num_required=2))
    with pytest.warns(UserWarning, match="the gate takes 2 frames .* with reduction='sum'"):
        pt.Step(pt.Embedding(50, 4, store=store))


def test_divided_gradients_of_ranks_are_those_of_a_mean_over_the_whole_batch():
    engine, whole = engine_of(num_required=2, reduction="sum"), engine_of()
    ids = torch.tensor([[5, 3], [5, 49], [3, 7], [9, 9]])
    bags = [pt.EmbeddingBag(50, 4, store=pt.store(engine, contributor=rank)) for rank in ("rank-0", "rank-1")]
    for bag, part in zip(bags, ids.split(2), strict=True):
        opt = pt.Step(bag, synchronous=False)
        (bag(part) ** 2).mean().backward()
        for rows in opt.param_groups[-1]["params"]:
            rows.grad /= 2
        opt.step()
    single = pt.EmbeddingBag(50, 4, store=pt.store(whole))
    opt = pt.Step(single)
    (single(ids) ** 2).mean().backward()
    opt.step()
    assert engine.global_step == 1
    torch.testing.assert_close(bags[0].materialize().weight, single.materialize().weight)


def test_only_the_newest_step_of_a_store_pushes(bag, opt):
    newer = pt.Step(torch.nn.Sequential(bag))
    bag(IDS).sum().backward()
    with pytest.raises(ps.UsageError, match="a newer Step pushes the gradients of this store"):
        opt.step()
    newer.step()
    assert newer.report.applied == 1


def test_a_step_needs_modules_of_one_store(bag):
    other = pt.Embedding(50, 4, store=pt.store(engine_of()))
    for modules, count in ((torch.nn.Linear(2, 2), 0), (torch.nn.ModuleList([bag, other]), 2)):
        with pytest.raises(ps.UsageError, match=f"expected modules of one store, got modules of {count}"):
            pt.Step(modules)


def test_a_step_takes_no_parameters(bag):
    model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
    for modules, kind in ((model.parameters(), "generator"), ([bag], "list")):
        with pytest.raises(TypeError, match=f"expected the model, a torch.nn.Module, got {kind}; give parameters to"):
            pt.Step(modules)
    for dense in (model.parameters(), torch.optim.Adam):
        with pytest.raises(TypeError, match=r"expected dense_optimizer as a torch.optim.Optimizer, .*, got <"):
            pt.Step(model, dense)


@pytest.mark.filterwarnings("error")
def test_a_step_of_the_dense_optimizer_alone_is_pointed_out(bag, engine):
    model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
    dense = torch.optim.SGD(model.parameters(), lr=1.0)
    opt = pt.Step(model, dense)
    model(IDS).sum().backward()
    opt.step()
    dense.step()  # no gradient of a row waits
    model(IDS).sum().backward()
    with pytest.warns(
        UserWarning, match=r"stepped without the rows.*call step\(\) and zero_grad\(\) of penstock"
    ) as warned:
        dense.step()
    assert warned[0].filename == __file__
    assert engine.global_step == 1
    newer = pt.Step(model)
    model(IDS).sum().backward()
    dense.step()  # the newer Step has no dense optimizer: it steps before or after
    newer.step()
    assert engine.global_step == 2


def test_gradients_without_a_step_are_pointed_out(bag):
    bag(IDS).sum()  # a forward pass alone may come before the Step
    bag(IDS).sum().backward()
    with pytest.warns(UserWarning, match=r"no Step pushes them.*create penstock.torch.Step\(model, optimizer\)"):
        bag(IDS)
    opt = pt.Step(bag)
    bag(IDS).sum().backward()
    bag(IDS).sum().backward()
    opt.step()
    assert opt.report.applied == 1


def test_the_dense_optimizer_steps_after_the_frame(bag, engine):
    dense = torch.nn.Linear(4, 1, bias=False)
    opt = pt.Step(bag, torch.optim.SGD(dense.parameters(), lr=1.0))
    before = dense.weight.detach().clone()
    (dense(bag(IDS)).sum() * float("nan")).backward()
    with pytest.raises(ps.InputError):
        opt.step()
    assert torch.equal(dense.weight, before)
    opt.zero_grad()
    assert dense.weight.grad is None

    def closure():
        opt.zero_grad()
        loss = dense(bag(IDS)).sum()
        loss.backward()
        return loss

    assert opt.step(closure).requires_grad
    assert not torch.equal(dense.weight, before)
    assert engine.global_step == 1
    state = opt.state_dict()
    assert state["frames"] == 1
    opt.load_state_dict(state)


def test_states_of_other_optimizers_are_refused(bag):
    dense = torch.nn.Linear(4, 1)
    adam = torch.optim.Adam(dense.parameters())
    state = pt.Step(bag).state_dict()
    opt = pt.Step(bag, adam)
    with pytest.raises(ps.UsageError, match=r"expected what Step.state_dict returned, got state, param_groups; load"):
        opt.load_state_dict(adam.state_dict())
    with pytest.raises(ps.UsageError, match="the state is of a Step without a dense optimizer"):
        opt.load_state_dict(state)


def test_an_interrupted_step_is_not_applied_twice(bag, opt, engine, monkeypatch):
    def interrupted(*arguments, **keywords):
        apply(*arguments, **keywords)
        raise KeyboardInterrupt

    apply = engine.apply
    monkeypatch.setattr(engine, "apply", interrupted)
    bag(IDS).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        opt.step()
    monkeypatch.undo()
    opt.step()
    assert engine.global_step == 1
    assert value(engine, 3) == 0.5


def test_a_closed_store_refuses_forwards_and_steps(bag, opt):
    with bag.store:
        bag(IDS).sum().backward()
    for use in (lambda: bag(IDS), opt.step, lambda: bag.prefetch(IDS)):
        with pytest.raises(ps.UsageError, match="this store is closed"):
            use()
    bag.store.close()


# ---- prefetch


def train(steps, prefetches, optimizer):
    """The hash of tables trained with or without prefetches."""
    engine = engine_of(("user", 1000, 4), ("item", 1000, 4), optimizer=optimizer)
    configs = [BagConfig("user", 1000, 4, ["clicked"]), BagConfig("item", 1000, 4, ["seen"])]
    bags = pt.EmbeddingBagCollection(tables=configs, store=pt.store(engine))
    opt, rng = pt.Step(bags), np.random.default_rng(2)
    batches = [{name: zipf_batch(rng, 32, 1000) for name in ("clicked", "seen")} for _ in range(steps)]
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        pooled = bags(batch).values()
        if prefetches and following is not None:
            bags.prefetch(following)
        (pooled**2).sum().backward()
        opt.step()
    assert opt.report == (steps, steps, 0, 0)
    bags.store.close()
    return engine.state_hash()


@pytest.mark.parametrize("optimizer", [ps.Adagrad(0.1), ps.Adam(0.1, lazy_adam=False)], ids=["lazy", "non-lazy"])
def test_prefetches_change_no_bit(optimizer):
    assert train(30, True, optimizer) == train(30, False, optimizer)


def test_a_prefetch_of_rows_that_others_changed_is_pulled_again(bag, opt, engine, monkeypatch):
    following = torch.tensor([[5, 9, 11]])
    bag.prefetch(following)
    bag._prefetched[1].result()
    engine.apply({"user": ([9], np.ones((1, 4), np.float32))})
    pooled = bag(following)
    assert pooled[0, 0] == 2.0 + 0.5
    pooled.sum().backward()
    opt.step()
    assert opt.report.stale == 0


def test_another_batch_than_the_prefetched_one_is_looked_up(bag):
    bag.prefetch(IDS)
    assert bag(torch.tensor([[5]]))[0, 0] == 1.0
    assert bag._prefetched is None


def test_an_error_of_a_prefetch_is_raised_by_the_forward_pass(bag):
    wrong = torch.tensor([[50]])
    bag.prefetch(wrong)
    with pytest.raises(ps.UsageError, match="user"):
        bag(wrong)
    assert bag(IDS)[0, 0] == 2.0


@pytest.mark.filterwarnings("ignore:a frame was dropped as stale")
def test_threads_of_other_contributors_only_make_frames_stale(bag, opt, engine):
    stop = threading.Event()

    def push():
        while not stop.is_set():
            engine.apply({"user": ([9], np.ones((1, 4), np.float32))})

    thread = threading.Thread(target=push)
    thread.start()
    try:
        for _ in range(50):
            bag(IDS).sum().backward()
            opt.step()
    finally:
        stop.set()
        thread.join()
    assert opt.report.applied + opt.report.stale == 50
    np.testing.assert_allclose(value(engine, 3), 1.0 - 0.5 * opt.report.applied)


def test_gradients_stay_if_the_dense_optimizer_fails_after_a_closure(bag, engine):
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            loss = super().step(closure)
            if self.fails:
                raise RuntimeError("no memory")
            return loss

    dense = torch.nn.Linear(4, 1)
    optimizer = Failing(dense.parameters(), lr=0.1)
    opt = pt.Step(bag, optimizer)

    def closure():
        loss = bag(IDS).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="no memory"):
        opt.step(closure)
    assert engine.global_step == 0
    optimizer.fails = False
    opt.step()
    assert opt.report == (1, 1, 0, 0)
    assert value(engine, 3) == 0.5
