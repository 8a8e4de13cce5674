"""Learning rates of rows that a Step gives: in process and over a service, next to torch's schedulers."""

from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from services import Process, service_of  # noqa: E402
from torch_models import IDS, BagConfig, zipf_batch  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

ROWS, DIM, STEPS = 50, 4, 12
RULES = {
    "sgd": (ps.SGD, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "adagrad": (
        lambda rate: ps.Adagrad(rate, initial_accumulator_value=0.1),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1, eps=0.0),
    ),
}


def config_of(rule=ps.SGD, user=None, item=None):
    """A configuration of two tables of ones. user, item : their rates; None: dynamic, tags 0 and 1"""
    rates = {"user": user or ps.DynamicLearningRate(0), "item": item or ps.DynamicLearningRate(1 - (user is not None))}
    return ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(ROWS, DIM, ps.Constant(1.0), rule(rate), name=name) for name, rate in rates.items()]
    )


@contextmanager
def store_over(kind, config, **arguments):
    """The store of an engine with this configuration, in process or behind a service, and the engine."""
    engine = ps.Engine(config)
    if kind == "local":
        yield pt.store(engine), engine
        return
    with service_of(engine, **arguments) as service, pt.store(service.address.uri) as store:
        yield store, engine


@pytest.fixture(params=["local", "service"])
def kind(request):
    return request.param


def bags_of(store):
    configs = [BagConfig(name, ROWS, DIM, [f"of_{name}"]) for name in ("user", "item")]
    return pt.EmbeddingBagCollection(tables=configs, store=store)


def batch_of(number):
    rng = np.random.default_rng(number)
    return {f"of_{name}": zipf_batch(rng, 8, ROWS) for name in ("user", "item")}


def train(bags, opt, numbers=range(STEPS), stepped=lambda: None):
    for number in numbers:
        opt.zero_grad()
        (bags(batch_of(number)).values() ** 2).sum().backward()
        opt.step()
        stepped()


def halved(step):
    return 0.25 * 0.5 ** (step // 3)


# ---- next to torch


@pytest.mark.parametrize("rule", RULES)
def test_a_scheduler_gives_rows_the_rates_that_it_gives_torchs_optimizer(rule, kind):
    with store_over(kind, config_of(RULES[rule][0])) as (store, _):
        bags = bags_of(store)
        twins = bags.materialize()
        dense = [torch.nn.Parameter(torch.ones(DIM)) for _ in range(2)]
        ours = RULES[rule][1](dense[:1])
        theirs = RULES[rule][1]([*twins.parameters(), dense[1]])
        schedulers = [torch.optim.lr_scheduler.StepLR(each, step_size=3, gamma=0.5) for each in (ours, theirs)]
        opt = pt.Step(bags, ours, learning_rates=dict.fromkeys(("user", "item"), schedulers[0]))
        for number in range(STEPS):
            opt.zero_grad()
            theirs.zero_grad()
            batch = batch_of(number)
            pooled = torch.cat([twins[name](*batch[f"of_{name}"]) for name in ("user", "item")], 1)
            for result, weight in ((bags(batch).values(), dense[0]), (pooled, dense[1])):
                ((result * torch.cat([weight, weight])) ** 2).mean().backward()
            opt.step()
            theirs.step()
            for scheduler in schedulers:
                scheduler.step()
        assert schedulers[0].get_last_lr() == [pytest.approx(0.1 * 0.5**4)]
        torch.testing.assert_close(dense[0], dense[1], rtol=1e-5, atol=1e-6)
        for name, twin in twins.items():
            torch.testing.assert_close(
                torch.tensor(store.contents([name])[name].rows), twin.weight, rtol=1e-5, atol=1e-6
            )


# ---- functions of the step, and precedence


def trained_by_schedule(**rates):
    """An engine whose configuration has these functions."""
    engine = ps.Engine(config_of(ps.Adagrad, **rates))
    bags = bags_of(pt.store(engine))
    train(bags, pt.Step(bags))
    return engine


@pytest.mark.parametrize("keys", [("user", "item"), (0, 1), ("user", 1)])
def test_a_function_of_the_step_gives_the_bits_of_one_in_the_configuration(keys, kind):
    def constant(step):
        return 0.125

    expected = trained_by_schedule(user=halved, item=constant)
    with store_over(kind, config_of(ps.Adagrad)) as (store, engine):
        bags = bags_of(store)
        opt = pt.Step(bags, learning_rates=dict(zip(keys, (halved, constant), strict=True)))
        train(bags, opt)
        assert opt.report == (STEPS, STEPS, 0, 0)
        assert engine.core.last_rates == (halved(STEPS - 1), 0.125)
        assert engine.state_hash() == expected.state_hash()


def test_a_table_without_an_entry_keeps_the_function_of_its_configuration():
    engine = ps.Engine(config_of(user=lambda step: 100.0, item=halved))
    bags = bags_of(pt.store(engine))
    train(bags, pt.Step(bags, learning_rates={"user": lambda step: 0.5}), range(5))
    assert engine.core.last_rates == (0.5, halved(4))


def test_a_table_without_an_entry_keeps_the_rate_of_the_services_flags():
    expected = trained_by_schedule(user=halved, item=lambda step: 0.1)
    with store_over("service", config_of(ps.Adagrad), learning_rates={1: 0.1}) as (store, engine):
        bags = bags_of(store)
        train(bags, pt.Step(bags, learning_rates={"user": halved}))
        assert engine.state_hash() == expected.state_hash()


def test_a_table_without_an_entry_or_another_rate_is_named(kind):
    with store_over(kind, config_of()) as (store, _):
        bags = bags_of(store)
        if kind == "service":
            with pytest.raises(ps.UsageError, match=r"that of table 'item' is missing; .* --learning-rate 1=VALUE"):
                pt.Step(bags, learning_rates={"user": halved})
            return
        opt = pt.Step(bags, learning_rates={"user": halved})
        with pytest.raises(ps.ConfigError, match="dynamic learning rates"):
            train(bags, opt, range(1))


def test_a_step_without_rates_leaves_them_to_the_service():
    with store_over("service", config_of(), learning_rates={0: 0.5, 1: 0.1}) as (store, engine):
        bags = bags_of(store)
        train(bags, pt.Step(bags), range(2))
        assert engine.core.last_rates == (0.5, 0.1)


def test_one_parameter_group_of_a_scheduler_is_named_by_its_number(kind):
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (1.0, 0.25)]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(torch.optim.SGD(groups), 0.5)
    with store_over(kind, config_of()) as (store, engine):
        bags = bags_of(store)
        opt = pt.Step(bags, scheduler.optimizer, learning_rates={"user": (scheduler, 1), "item": (scheduler, 0)})
        train(bags, opt, range(3), scheduler.step)
        assert engine.core.last_rates == (0.0625, 0.25)
        for group in (2, -1, "second"):
            with pytest.raises(ps.UsageError, match=f"the scheduler of table 'user' has groups 0 to 1, got {group!r}"):
                pt.Step(bags, learning_rates={"user": (scheduler, group), "item": halved})
        with pytest.raises(ps.UsageError, match=r"has 2 parameter groups; give \(scheduler, NUMBER\), from 0"):
            pt.Step(bags, learning_rates={"user": scheduler, "item": halved})


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
            [2],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # of SequentialLR itself
def test_every_kind_of_scheduler_gives_its_last_rate(make):
    engine = ps.Engine(config_of(item=0.5))
    bags, optimizer = bags_of(pt.store(engine)), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = make(optimizer)
    opt = pt.Step(bags, optimizer, learning_rates={"user": scheduler})
    is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    for number in range(4):
        rate = optimizer.param_groups[0]["lr"]
        train(bags, opt, [number])
        assert engine.core.last_rates == (pytest.approx(rate),)
        scheduler.step(*[1.0] * is_plateau)


def test_a_newer_step_continues_with_other_rates(kind):
    with store_over(kind, config_of(item=0.5)) as (store, engine):
        bags = bags_of(store)
        train(bags, pt.Step(bags, learning_rates={"user": halved}), range(2))
        opt = pt.Step(bags, learning_rates={0: lambda step: 0.01 * step})
        train(bags, opt, range(2))
        assert opt.report == (4, 4, 0, 0)
        assert engine.core.last_rates == (pytest.approx(0.03),)


def test_a_step_with_rates_follows_one_whose_frame_was_refused_without_them(kind):
    with store_over(kind, config_of()) as (store, engine):
        bags = bags_of(store)
        with pytest.raises(ps.ConfigError, match="the configuration has dynamic learning rates"):
            train(bags, pt.Step(bags), range(1))
        opt = pt.Step(bags, learning_rates={"user": halved, "item": halved})
        train(bags, opt, range(3))
        assert opt.report == (3, 3, 0, 0)
        assert engine.core.last_rates == (0.25, 0.25)


# ---- what is refused


def test_entries_that_fit_no_table_are_refused_with_one_line():
    engine = ps.Engine(config_of(item=0.5))
    bags = bags_of(pt.store(engine))
    static = bags_of(pt.store(ps.Engine(config_of(user=0.5, item=0.5))))
    for module, entries, words in (
        (bags, {"usr": halved}, "no table 'usr'; did you mean 'user'?"),
        (bags, {"zzz": halved}, "no table 'zzz'; expected one of user, item"),
        (bags, {1.5: halved}, "no table 1.5; expected one of user, item"),
        (
            bags,
            {"item": halved},
            "the learning rate of table 'item' is a constant of the configuration; make it dynamic",
        ),
        (bags, {1: halved}, "no tag 1; the configuration has tags 0 to 0"),
        (static, {0: halved}, "no tag 0; the configuration has no dynamic tags"),
        (bags, {"user": halved, 0: lambda step: 0.1}, "table 'user' and tag 0 have one tag, 0; give it one rate"),
        (
            bags,
            {"user": 0.1},
            "expected a function of the step or a scheduler of torch.optim for table 'user', got float",
        ),
        (bags, {"user": torch.optim.SGD([torch.ones(1)])}, "scheduler of torch.optim for table 'user', got SGD"),
        (bags, {"user": torch.optim.lr_scheduler.StepLR}, "scheduler of torch.optim for table 'user', got type"),
        (bags, ["user"], "expected a dict of table or tag → a function of the step or a scheduler, got list"),
    ):
        with pytest.raises(ps.UsageError) as raised:
            pt.Step(module, learning_rates=entries)
        assert str(raised.value).startswith("learning_rates: ")
        assert words in str(raised.value)
        assert "\n" not in str(raised.value)
    pt.Step(bags, learning_rates={"user": halved, 0: halved})  # one rate


def test_a_rate_that_the_services_flags_would_override_is_refused():
    with (
        store_over("service", config_of(), learning_rates={0: 0.1}) as (store, _),
        pytest.raises(ps.UsageError, match=r"the service's --learning-rate 0=0.1 takes precedence for table 'user'"),
    ):
        pt.Step(bags_of(store), learning_rates={"user": halved, "item": halved})


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 1e39, "fast", None])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_rate_that_is_not_finite_sends_nothing_and_keeps_the_gradients(rate, by_closure, kind):
    rates = [rate]
    with store_over(kind, config_of(item=0.5)) as (store, engine):
        bags, dense = bags_of(store), torch.nn.Parameter(torch.ones(1))
        opt = pt.Step(bags, torch.optim.SGD([dense], lr=0.5), learning_rates={"user": lambda step: rates[-1]})

        def closure():
            opt.zero_grad()
            loss = (bags(batch_of(0)).values() ** 2).sum() + dense.sum()
            loss.backward()
            return loss

        closure()
        with pytest.raises(ps.UsageError) as raised:
            opt.step(*[closure] * by_closure)
        words = f"the rate of table 'user' at step 0 is {rate!r}; expected a finite number that fits float32"
        assert str(raised.value) == f"learning_rates: {words}; nothing was sent"
        assert (engine.global_step, dense.item()) == (0, 1.0)
        rates.append(0.25)
        opt.step()
        assert (engine.global_step, dense.item()) == (1, 0.5)
        assert opt.report.applied == 1


def test_a_batch_without_rows_asks_for_no_rate():
    bags = bags_of(pt.store(ps.Engine(config_of(item=0.5))))
    opt = pt.Step(bags, learning_rates={"user": lambda step: float("nan")})
    opt.step()
    assert opt.report.applied == 0


# ---- the command


def test_penstock_serve_takes_the_rates_of_a_step(tmp_path):
    expected = trained_by_schedule(user=halved, item=lambda step: 0.1)
    config_of(ps.Adagrad).save(tmp_path / "tables.pbtxt")
    flags = ("--listen", "grpc://127.0.0.1:0", "--learning-rate", "1=0.1", "--checkpoint", tmp_path / "run")
    with Process(tmp_path / "tables.pbtxt", *flags) as process, pt.store(process.uri) as store:
        bags = bags_of(store)
        opt = pt.Step(bags, learning_rates={"user": halved})
        train(bags, opt)
        opt.state_dict()  # durable now
    assert ps.Engine.restore(tmp_path / "run").state_hash() == expected.state_hash()


def test_several_ranks_use_the_rate_of_the_frame_that_opens_the_gate():
    engine = ps.Engine(config_of(item=0.5), num_required=2, reduction="sum")
    for rank, rate in enumerate((0.5, 0.25)):
        bag = pt.EmbeddingBag(ROWS, DIM, table="user", store=pt.store(engine, contributor=f"rank-{rank}"))
        opt = pt.Step(bag, synchronous=False, learning_rates={"user": lambda step, rate=rate: rate})
        bag(IDS).sum().backward()
        opt.step()
    assert engine.core.last_rates == (0.25,)
