"""A run of torch's that penstock continues is the same run: its weights, its slots, and the step of its rates."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from engines import config_of  # noqa: E402

import penstock as ps  # noqa: E402

ROWS, DIM, BEFORE, AFTER = 300, 8, 20, 100
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


def gradients(step):
    """The rows of a step, of which few are in many steps, and their gradients of any size."""
    rng = np.random.default_rng(step)
    ids = np.unique(np.minimum(rng.geometric(0.02, 64), ROWS) - 1)
    grads = rng.standard_normal((len(ids), DIM)) * rng.choice([1e-6, 1e-3, 1.0], (len(ids), 1))
    grads[::9] = 0
    return ids, grads.astype(np.float32)


def train(optimizer, parameter, steps, sparse=True):
    for step in steps:
        ids, grads = map(torch.from_numpy, gradients(step))
        gradient = torch.sparse_coo_tensor(ids[None], grads, (ROWS, DIM))
        parameter.grad = gradient if sparse else gradient.to_dense()
        optimizer.step()


def trained(optimizer, sparse=True):
    """A bag and its optimizer after some steps."""
    torch.manual_seed(0)
    bag = torch.nn.EmbeddingBag(ROWS, DIM, sparse=sparse)
    created = optimizer(bag.parameters())
    train(created, bag.weight, range(BEFORE), sparse)
    return bag, created


def saved(bag, created, path):
    torch.save({"model": {"user": bag.state_dict()}, "optim": created.state_dict()}, path / "m.pt")


@pytest.fixture
def imported(tmp_path, call):
    """imported(optimizer, words…) → the engine of an import of m.pt, and what --json prints."""

    def run(optimizer, *words):
        config = config_of(optimizer, ("user",), DIM, ROWS)
        config.save(tmp_path / "t.pbtxt")
        text, result = call(0, "import", tmp_path / "m.pt", tmp_path / "c", "--config", tmp_path / "t.pbtxt", *words)
        return ps.Engine.restore(tmp_path / "c", config=config), {**result, "text": text}

    return run


def slots_by_number(optimizer):
    return [word for slot in optimizer.slot_names for word in ("--map", f"optim.state.0.{slot}=user/{slot}")]


def continued(engine):
    for step in range(BEFORE, BEFORE + AFTER):
        engine.apply({"user": gradients(step)})
    return engine.retrieve_parameters("user")


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("lr_decay", [0.0, 0.01])
def test_a_run_of_adagrad_continues(tmp_path, imported, lr_decay, sparse):
    bag, created = trained(lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=lr_decay), sparse)
    saved(bag, created, tmp_path)
    optimizer = ps.TorchAdagrad(0.05, lr_decay)
    engine, result = imported(optimizer, *slots_by_number(optimizer))
    assert (engine.global_step, result["step"]) == (BEFORE * (lr_decay > 0),) * 2
    assert result["notes"] == []
    parts = continued(engine)
    train(created, bag.weight, range(BEFORE, BEFORE + AFTER), sparse)
    sums = created.state_dict()["state"][0]["sum"].numpy()
    np.testing.assert_allclose(parts["parameters"], bag.weight.detach().numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(parts["sum"], sums, rtol=1e-6)  # torch adds a dense gradient's square without rounding
    assert not sparse or parts["sum"].tobytes() == sums.tobytes()


ADAM_BY_NUMBER = [
    *("--map", "optim.state.0.exp_avg=user/momenta"),
    *("--map", "optim.state.0.exp_avg_sq=user/velocities"),
]


def test_a_run_of_sparse_adam_continues_with_a_corrected_rate(tmp_path, imported):
    def corrected(step, lr=0.001):
        return lr * (1 - 0.999 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1))

    bag, created = trained(lambda p: torch.optim.SparseAdam(list(p), lr=0.001))
    saved(bag, created, tmp_path)
    optimizer = ps.Adam(corrected, epsilon=1e-8, sum_inside_sqrt=False)
    engine, result = imported(optimizer, *ADAM_BY_NUMBER, "--step", BEFORE)
    assert (engine.global_step, result["notes"]) == (BEFORE, [])
    weights = continued(engine)["parameters"]
    train(created, bag.weight, range(BEFORE, BEFORE + AFTER))
    np.testing.assert_allclose(weights, bag.weight.detach().numpy(), rtol=0, atol=1e-6)


class Fbgemm:
    """The steps of FBGEMM's kernels, in torch: only touched rows, and ``iter`` counts them for all rows."""

    def __init__(self, weights, slots, rate, eps=1e-8):
        self.weights, self.slots, self.rate, self.eps, self.iter = weights, slots, rate, eps, 0
        self.betas = float(np.float32(0.9)), float(np.float32(0.999))  # the kernels take float32

    def step(self, ids, grads):
        ids, g = torch.from_numpy(ids), torch.from_numpy(grads)
        self.iter += 1
        mean = (g * g).mean(1)
        if len(self.slots) == 1:  # EXACT_ROWWISE_ADAGRAD
            (sums,) = self.slots
            sums[ids] += mean
            self.weights[ids] -= (self.rate / (sums[ids].sqrt() + self.eps))[:, None] * g
            return
        (m, v), (beta1, beta2) = self.slots, self.betas  # PARTIAL_ROWWISE_ADAM
        m[ids] = m[ids] * beta1 + g * (1 - beta1)
        v[ids] = v[ids] * beta2 + mean * (1 - beta2)
        divisor = (v[ids] / (1 - beta2**self.iter)).sqrt() + self.eps
        self.weights[ids] -= self.rate * (m[ids] / (1 - beta1**self.iter) / divisor[:, None])


def trained_by_fbgemm(*shapes):
    torch.manual_seed(0)
    trainer = Fbgemm(torch.randn(ROWS, DIM), [torch.zeros(shape) for shape in shapes], 0.02)
    for step in range(BEFORE):
        trainer.step(*gradients(step))
    return trainer


def saved_by_torchrec(trainer, path):
    """Names of a sharded collection and of its fused optimizer."""
    names = [f"momentum{number}" for number in (1, 2)]
    state = {f"user.{name}": slot.clone() for name, slot in zip(names, trainer.slots, strict=False)}
    optim = {"state": {"ebc.user.weight": state}, "param_groups": [{"params": ["ebc.user.weight"], "lr": 0.02}]}
    torch.save({"ebc": {"user": {"weight": trainer.weights.clone()}}, "optim": optim}, path / "m.pt")


@pytest.mark.parametrize(
    ("optimizer", "shapes", "step"),
    [
        (ps.RowWiseAdagrad(0.02, 0.0, epsilon=1e-8), [ROWS], 0),
        (ps.PartialRowWiseAdam(0.02), [(ROWS, DIM), ROWS], BEFORE),
    ],
    ids=["EXACT_ROWWISE_ADAGRAD", "PARTIAL_ROWWISE_ADAM"],
)
def test_a_run_of_torchrec_continues(tmp_path, imported, optimizer, shapes, step):
    trainer = trained_by_fbgemm(*shapes)
    saved_by_torchrec(trainer, tmp_path)
    engine, result = imported(optimizer, *(("--step", step) if step else ()))
    assert (result["initial"], result["raised"], engine.global_step) == ({}, {}, step)
    parts = continued(engine)
    for number in range(BEFORE, BEFORE + AFTER):
        trainer.step(*gradients(number))
    for part, wanted in zip(parts.values(), [trainer.weights, *trainer.slots], strict=True):
        np.testing.assert_allclose(part, wanted.numpy().reshape(part.shape), rtol=1e-5, atol=1e-6)


# ---- what differs


def test_another_optimizer_and_other_numbers_are_noted(tmp_path, imported):
    saved(*trained(lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.25), sparse=False), tmp_path)
    sums = "--map", "optim.state.0.sum=user/accumulators"
    _, result = imported(ps.Adagrad(0.05), *sums)
    adagrad = "torch's Adagrad is not Adagrad; TorchAdagrad(learning_rate=0.05, lr_decay=0, epsilon=1e-10)"
    decay = "user: torch's weight_decay adds the weights to the gradients, which no optimizer here does"
    assert result["notes"] == [f"user: {adagrad} continues the run"]
    (tmp_path / "c").rename(tmp_path / "before")
    optimizer = ps.TorchAdagrad(0.1, epsilon=1e-8)
    _, result = imported(optimizer, *slots_by_number(optimizer))
    rate = "user: learning_rate is 0.1 in the configuration, and was 0.05 in torch"
    assert result["notes"] == [rate, "user: epsilon is 1e-08 in the configuration, and was 1e-10 in torch", decay]
    assert f"note      {rate}\n" in result["text"]


def test_what_adam_lacks_of_torchs_is_noted(tmp_path, imported):
    saved(*trained(lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True), sparse=False), tmp_path)
    _, result = imported(ps.Adam(0.05), *ADAM_BY_NUMBER)
    assert result["notes"] == [
        "user: epsilon is 1e-07 in the configuration, and was 1e-08 in torch",
        "user: torch's Adam adds epsilon to the root, as Adam does with sum_inside_sqrt=False",
        "user: torch's Adam corrects its moments, as a rate of lr*sqrt(1-beta_2^t)/(1-beta_1^t) does",
        "user: torch's amsgrad divides by the largest second moments, which no optimizer here does",
    ]


@pytest.mark.parametrize("number", [10**400, -(10**400), float("nan"), -1.0, "many", None, [], 1 + 2j])
def test_numbers_of_a_state_that_mean_nothing_are_no_traceback(tmp_path, imported, number):
    bag, created = trained(lambda p: torch.optim.Adagrad(p, lr=0.05))
    state = created.state_dict()
    state["state"][0]["step"] = number
    state["param_groups"][0] |= dict.fromkeys(("lr", "eps", "lr_decay"), number)
    torch.save({"user": bag.state_dict(), "optim": state}, tmp_path / "m.pt")
    optimizer = ps.TorchAdagrad(0.05, 0.5)
    engine, _ = imported(optimizer, *slots_by_number(optimizer))
    assert engine.global_step == 0


def test_a_state_of_another_optimizer_is_skipped_by_its_name(tmp_path, imported):
    torch.save({"user.weight": torch.ones(ROWS, DIM), "user.exp_avg": torch.ones(ROWS, DIM)}, tmp_path / "m.pt")
    _, result = imported(ps.TorchAdagrad(0.1))
    assert result["skipped"] == {"user.exp_avg": "table 'user' (TorchAdagrad) has no such slot"}
    assert result["initial"] == {"user": ["sum"]}


def test_a_rate_by_steps_that_the_source_does_not_have_is_noted(tmp_path, imported):
    saved_by_torchrec(trained_by_fbgemm((ROWS, DIM), ROWS), tmp_path)
    _, result = imported(ps.PartialRowWiseAdam(0.02))
    assert result["notes"] == ["user: the rate of its updates depends on the step, which the source does not have"]
    assert result["step"] == 0


# ---- the optimizers of the states


BARE = """
table_descriptor { name: "user" vocabulary_size: 300 dimension: 8 %s }
mode: TRAINING
"""
CLIPPED = "optimization_parameters { adagrad { } clipping_limits { upper { value: 2 } } %s }"


@pytest.fixture
def chosen(tmp_path, call, refused):
    """chosen(text, words…) → the configuration and the engine of an import, and what --json prints, or its error."""

    def run(text, *words, code=0):
        (tmp_path / "t.pbtxt").write_text(BARE % text)
        files = "--config", tmp_path / "t.pbtxt", "--new-config", tmp_path / "new.pbtxt"
        words = "import", tmp_path / "m.pt", tmp_path / "c", *files, *words
        if code:
            line = refused(code, *words)
            assert not (tmp_path / "c").exists()
            assert not (tmp_path / "new.pbtxt").exists()
            return line
        text, result = call(0, *words)
        config = ps.EmbeddingConfig.load(tmp_path / "new.pbtxt")
        return config, ps.Engine.restore(tmp_path / "c", config=config), {**result, "text": text}

    return run


def test_an_import_chooses_torchs_adagrad_and_its_run_continues(tmp_path, chosen):
    bag, created = trained(lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, eps=1e-6))
    saved(bag, created, tmp_path)
    config, engine, result = chosen("", "--map", "optim.state.0.sum=user/sum")
    text = "user: TorchAdagrad(learning_rate=0.05, epsilon=1e-06, lr_decay=0.01)"
    assert f"chose     {text}\n" in result["text"]
    assert (result["notes"], result["step"]) == ([], BEFORE)
    assert config.optimizer("user").lr_decay == np.float32(0.01)
    weights = continued(engine)["parameters"]
    train(created, bag.weight, range(BEFORE, BEFORE + AFTER))
    np.testing.assert_allclose(weights, bag.weight.detach().numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shapes", "optimizer"),
    [
        ([(ROWS, DIM)], ps.TorchAdagrad(0.02, epsilon=1e-8, clip_weight_max=2.0)),
        ([ROWS], ps.RowWiseAdagrad(0.02, 0.0, epsilon=1e-8, clip_weight_max=2.0)),
        ([(ROWS, 1)], ps.RowWiseAdagrad(0.02, 0.0, epsilon=1e-8, clip_weight_max=2.0)),
        ([(ROWS, DIM), ROWS], ps.PartialRowWiseAdam(0.02, clip_weight_max=2.0)),
    ],
    ids=["EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "a column", "PARTIAL_ROWWISE_ADAM"],
)
def test_the_shapes_of_torchrecs_states_choose_and_other_settings_stay(tmp_path, chosen, shapes, optimizer):
    trainer = Fbgemm(
        torch.ones(ROWS, DIM), [torch.full((shape,) if shape == ROWS else shape, 0.25) for shape in shapes], 0
    )
    saved_by_torchrec(trainer, tmp_path)
    config, engine, result = chosen(CLIPPED % "learning_rate { constant: 7 }")
    wanted = config_of(optimizer, ("user",), DIM, ROWS).table("user")
    assert (config.table("user").rule, config.table("user").slots) == (wanted.rule, wanted.slots)
    assert config.table("user").learning_rate == np.float32(0.02)
    assert result["initial"] == {}
    assert [part.mean() for part in engine.retrieve_parameters("user").values()] == [1.0, *[0.25] * len(shapes)]


def test_a_dynamic_rate_stays_and_a_missing_one_is_an_error(tmp_path, chosen):
    torch.save({"user.weight": torch.ones(ROWS, DIM), "user.sum": torch.ones(ROWS, DIM)}, tmp_path / "m.pt")
    line = chosen("", code=4)
    assert "table 'user': the source has no learning rate; set learning_rate { constant: … } or { dynamic { } }" in line
    config, *_ = chosen("optimization_parameters { learning_rate { dynamic { } } }")
    assert config.table("user").tag == 0
    assert config.optimizer("user").epsilon == 1e-10


def test_states_of_an_adam_that_is_not_row_wise_choose_nothing(tmp_path, chosen):
    torch.save(
        {f"user.{name}": torch.ones(ROWS, DIM) for name in ("weight", "exp_avg", "exp_avg_sq")}, tmp_path / "m.pt"
    )
    assert "table 'user': no optimizer; set one in optimization_parameters" in chosen("", code=4)
    adam = "adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-8 } learning_rate { constant: 1 }"
    config, _, result = chosen(f"optimization_parameters {{ {adam} }}")
    assert (result["chosen"], result["initial"]) == ({}, {})
    assert isinstance(config.optimizer("user"), ps.Adam)


def test_a_number_of_torchs_that_no_optimizer_here_takes_is_an_error(tmp_path, chosen):
    saved(*trained(lambda p: torch.optim.Adagrad(p, eps=0.0, initial_accumulator_value=1.0)), tmp_path)
    line = chosen("", "--map", "optim.state.0.sum=user/sum", code=4)
    assert "table 'user': epsilon must be > 0, got 0.0" in line
