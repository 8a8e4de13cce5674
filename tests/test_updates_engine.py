"""Every optimizer through the engine, on one and on four devices, against the equations in NumPy: bit for bit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import optimizers as o
from penstock.config.embedding import EmbeddingConfig
from penstock.config.tables import QuantizationConfig, TableConfig
from penstock.engine import Engine
from penstock.errors import ConfigError
from penstock.updates import Ops, update

# One row for each of the layout's shards, so that four devices share them evenly.
ROWS = 1024


def heavy_ball(gradient, weights, momenta):
    """A program whose result does not hang on its roundings: halves and doubles of small whole numbers."""
    momenta = 0.5 * momenta + gradient
    return weights - 2.0 * momenta, momenta


EVERY = [
    o.SGD(0.1),
    o.Adagrad(0.1),
    o.AdagradMomentum(0.1, momentum=0.9),
    o.AdagradMomentum(0.1, momentum=0.9, use_nesterov=True, beta2=0.9, epsilon=1e-3),
    o.FTRL(0.1),
    o.FTRL(0.1, l1_regularization_strength=0.05, l2_regularization_strength=0.1, beta=0.5),
    o.FTRL(0.1, l1_regularization_strength=0.05, multiply_linear_by_learning_rate=True),
    o.Adam(0.1),
    o.Adam(0.1, sum_inside_sqrt=False),
    o.Momentum(learning_rate=0.1, momentum=0.9),
    o.Momentum(learning_rate=0.1, momentum=0.9, use_nesterov=True),
    o.Lion(learning_rate=0.1),
    o.RMSProp(learning_rate=0.1, momentum=0.9),
    o.CenteredRMSProp(learning_rate=0.1, momentum=0.9),
    o.Adadelta(learning_rate=0.1),
    o.ProximalAdagrad(learning_rate=0.1, l1=0.05, l2=0.1),
    o.BoundedAdagrad(learning_rate=0.1, max_var_update=0.05, max_accumulator=1.0),
    o.OnlineYogi(learning_rate=0.1, l1=0.05, l2=0.1),
    o.ProximalYogi(learning_rate=0.1, l1=0.05, l2=0.1),
    o.FrequencyEstimator(learning_rate=17.0),
    o.Assign(),
    o.RowWiseAdagrad(learning_rate=0.1),
]
NON_LAZY = [o.Adam(0.1, lazy_adam=False), o.Lion(learning_rate=0.1, use_non_lazy_lion=True)]


def named(optimizers):
    return [f"{number}_{type(optimizer).__name__}" for number, optimizer in enumerate(optimizers)]


def changed(optimizer, **arguments):
    """The same optimizer with other switches."""
    copy = object.__new__(type(optimizer))
    vars(copy).update(vars(optimizer) | arguments)
    return copy


def engine_of(optimizer, dim=3, mesh=None, **arguments):
    return Engine(
        EmbeddingConfig.from_tables([TableConfig(ROWS, dim, name="t", optimizer=optimizer)]), mesh, **arguments
    )


def parts_of(engine, name="t"):
    return list(engine.retrieve_parameters(name).values())


def stepped(engine, parts, ids, grads, name="t"):
    """What NumPy makes of the table's parts with distinct ids."""
    spec = engine.config.table(name)
    if spec.rule.non_lazy:
        whole = np.zeros_like(parts[0])
        whole[ids] = grads
        ids, grads = np.arange(len(whole)), whole
    rows = [part[ids] for part in parts]
    weights, slots = update(Ops(np), spec.rule, np.float32(spec.learning_rate), grads, rows[0], tuple(rows[1:]))
    after = [part.copy() for part in parts]
    for part, new in zip(after, (weights, *slots), strict=True):
        part[ids] = new
    return after


def same(parts, wanted):
    return [part.tobytes() for part in parts] == [part.tobytes() for part in wanted]


def some(rng, count, dim):
    return rng.permutation(ROWS)[:count], rng.standard_normal((count, dim), np.float32)


# Nothing that makes subnormal numbers, which XLA flushes to zero.
limits = st.one_of(st.none(), st.just(0.0), st.floats(2**-10, 2, width=32), st.floats(-2, -(2**-10), width=32))


@st.composite
def switched(draw):
    optimizer = draw(st.sampled_from(EVERY + NON_LAZY))
    names = ("clip_gradient_min", "clip_gradient_max", "clip_weight_min", "clip_weight_max")
    switches = {name: draw(limits) for name in names}
    decay = draw(st.sampled_from([None, 0.01, 0.5]))
    times = draw(st.sampled_from([None, True]))
    return changed(
        optimizer, weight_decay_factor=decay, multiply_weight_decay_factor_by_learning_rate=times, **switches
    )


@given(switched(), st.sampled_from([1, 2, 3, 8, 17, 128]), st.sampled_from([1, 4]), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_the_engine_equals_the_equations_in_numpy_bit_for_bit(mesh_of_cached, optimizer, dim, devices, seed):
    engine = engine_of(optimizer, dim, mesh_of_cached(devices), reduction="sum")
    parts, rng = parts_of(engine), np.random.default_rng(seed)
    for _ in range(2):
        ids, grads = some(rng, 29, dim)
        parts = stepped(engine, parts, ids, grads)
        engine.apply({"t": (ids, grads)})
    assert same(parts_of(engine), parts)


@pytest.fixture(scope="module")
def mesh_of_cached():
    import jax
    from jax.sharding import Mesh

    return lambda n: Mesh(np.asarray(jax.devices()[:n]), ("shard",))


@pytest.mark.parametrize("optimizer", EVERY, ids=named(EVERY))
def test_without_accumulation_every_frame_is_coalesced_and_applied_by_itself_undivided(optimizer):
    engine = engine_of(changed(optimizer, use_gradient_accumulation=False), num_required=2, reduction="mean")
    parts, rng = parts_of(engine), np.random.default_rng(0)
    wanted = parts
    for start in (0, 10):  # rows 10 to 19 are in both frames
        ids = np.arange(start, start + 20)
        grads = rng.standard_normal((25, 3), np.float32)
        engine.apply({"t": (np.concatenate([ids, ids[:5]]), grads)})
        summed = grads[:20].copy()
        summed[:5] += grads[20:]
        wanted = stepped(engine, wanted, ids, summed)
        assert engine.global_step == (1 if start else 0)
    assert same(parts_of(engine), wanted)


def test_with_accumulation_the_same_frames_are_one_update_of_their_mean():
    engine = engine_of(o.Adagrad(0.1), num_required=2)
    parts, rng = parts_of(engine), np.random.default_rng(0)
    ids, grads = some(rng, 5, 3)
    for _ in range(2):
        engine.apply({"t": (ids, grads)})
    assert same(parts_of(engine), stepped(engine, parts, ids, (grads + grads) / np.float32(2)))


# ---- not lazy


def two_tables(optimizer, mesh):
    tables = [TableConfig(2000, 3, name="touched"), TableConfig(1003, 5, name="other")]
    return Engine(EmbeddingConfig.from_tables(tables, optimizer), mesh)


@pytest.mark.parametrize("devices", [1, 3, 4])
@pytest.mark.parametrize("optimizer", NON_LAZY, ids=named(NON_LAZY))
def test_a_step_moves_every_row_of_every_table_where_the_optimizer_is_not_lazy(optimizer, devices, mesh_of):
    engine, rng = two_tables(optimizer, mesh_of(devices)), np.random.default_rng(0)
    wanted = {name: parts_of(engine, name) for name in ("touched", "other")}
    grads = rng.standard_normal((1003, 5), np.float32)
    for step in range(3):
        # The other table has gradients once, then none.
        frame = {"touched": (np.arange(step, 900), rng.standard_normal((900 - step, 3), np.float32))}
        frame |= {"other": (np.arange(1003), grads)} if step == 0 else {}
        for name, parts in wanted.items():
            ids, rows = frame.get(name, (np.zeros(0, int), np.zeros((0, parts[0].shape[1]), np.float32)))
            wanted[name] = stepped(engine, parts, ids, rows, name)
        before = engine.lookup("other", [7])
        engine.apply(frame)
        assert engine.lookup("other", [7]).tolist() != before.tolist()
    assert all(same(parts_of(engine, name), parts) for name, parts in wanted.items())


@pytest.mark.parametrize("optimizer", EVERY, ids=named(EVERY))
def test_a_lazy_optimizer_leaves_untouched_rows_alone(optimizer):
    engine = engine_of(optimizer)
    before = parts_of(engine)
    engine.apply({"t": (np.array([5]), np.ones((1, 3), np.float32))})
    after = parts_of(engine)
    rest = np.delete(np.arange(ROWS), 5)
    assert all(b[rest].tobytes() == a[rest].tobytes() for b, a in zip(before, after, strict=True))
    assert after[0][5].tolist() != before[0][5].tolist()


# ---- what does not depend on anything


@pytest.mark.parametrize(
    "optimizer",
    [o.FTRL(0.1, learning_rate_power=-0.4), o.AdagradMomentum(0.1, exponent=3), o.RowWiseAdagrad(learning_rate=0.1)],
    ids=["ftrl with pow", "adagrad_momentum with pow", "row_wise_adagrad"],
)
def test_the_bits_depend_on_no_number_of_devices_and_no_neighbours(optimizer, mesh_of):
    ids, grads = some(np.random.default_rng(0), 300, 17)
    hashes = set()
    for devices, order in ((1, slice(None)), (4, slice(None)), (3, slice(None, None, -1))):
        engine = engine_of(optimizer, 17, mesh_of(devices))
        engine.apply({"t": (ids[order], grads[order])})
        hashes.add(engine.state_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("dim", [1, 4])
def test_low_dimensional_packing_changes_no_result(dim):
    ids, grads = some(np.random.default_rng(0), 40, dim)
    engines = [engine_of(o.Adam(0.1, low_dimensional_packing_status=packing), dim) for packing in (False, True)]
    for engine in engines:
        engine.apply({"t": (ids, grads)})
    assert engines[0].state_hash() == engines[1].state_hash()


# ---- slots in and out


@pytest.mark.parametrize("optimizer", [o.CenteredRMSProp(learning_rate=0.1, momentum=0.9), o.Adam(0.1)])
def test_any_number_of_slots_is_loaded_retrieved_hashed_and_written(optimizer, tmp_path, mesh_of):
    engine, other = engine_of(optimizer, mesh=mesh_of(1)), engine_of(optimizer, mesh=mesh_of(3), seed=1)
    engine.apply({"t": some(np.random.default_rng(0), 40, 3)})
    state = engine.retrieve_parameters("t")
    assert list(state) == ["parameters", *optimizer.slot_names]
    assert [np.asarray(slot).tobytes() for slot in engine.slots("t").values()] == [
        state[name].tobytes() for name in optimizer.slot_names
    ]
    engine.write_tables(tmp_path)
    other.read_tables(tmp_path)
    assert same(parts_of(other), list(state.values()))
    other.load_parameters("t", *[np.zeros((ROWS, 3))], **dict.fromkeys(optimizer.slot_names, np.ones((ROWS, 3))))
    assert not same(parts_of(other), list(state.values()))
    weights = state.pop("parameters")
    other.load_parameters("t", weights, **state)
    other.apply({"t": (np.array([0]), np.ones((1, 3)))})
    engine.apply({"t": (np.array([0]), np.ones((1, 3)))})
    assert same(parts_of(other), parts_of(engine))


def test_a_users_program_updates_weights_and_slots(mesh_of):
    engine = engine_of(o.UserDefinedProgram(program=heavy_ball, initial_slot_values=[2.0]), mesh=mesh_of(4))
    ids, weights = np.arange(0, ROWS, 7), np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)
    (slot,) = engine.slots("t")
    engine.load_parameters("t", weights, **{slot: np.full((ROWS, 3), 2.0)})
    engine.apply({"t": (ids, np.full((len(ids), 3), 3.0))})
    weights[ids] -= 8
    assert parts_of(engine)[0].tolist() == weights.tolist()
    assert parts_of(engine)[1][ids].tolist() == np.full((len(ids), 3), 4.0).tolist()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda g, w: w, r"TypeError: .* takes 2 positional arguments but 3 were given"),
        (lambda g, w, s: w, r"ValueError: program: expected 2 results \(weights, then slots\), got 1"),
        (lambda g, w, s: (w[:1], s), r"expected weights of shape \(8, 3\), got \(1, 3\)"),
        (lambda g, w, s: (w if g[0, 0] > 0 else g, s), r"TracerBoolConversionError"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_is_applied(program, reason):
    with pytest.raises(ConfigError, match=f"table 't': its program fails: .*{reason}|{reason}"):
        engine_of(o.UserDefinedProgram(program=program, initial_slot_values=[0.0]))


def test_the_frequency_estimator_counts_the_engines_steps():
    engine = engine_of(o.FrequencyEstimator(tau=0.5, max_delta=8.0), dim=1)
    for ids in ([3], [5], [3, 5], [5]):
        engine.apply({"t": (np.array(ids), np.ones((len(ids), 1)))})
    state = engine.retrieve_parameters("t")
    # The first hit of 3 is at step 0, 0 after the start: (8 + 0)/2; then 2 after that.
    assert state["last_hit_step"][[3, 5]].tolist() == [[2.0], [3.0]]
    assert state["parameters"][[3, 4, 5]].tolist() == [[3.0], [8.0], [1.875]]


# ---- the forward direction


def test_a_forward_lookup_sees_quantized_rows_and_the_table_stays_as_it_is():
    table = TableConfig(ROWS, 3, name="t", quantization_config=QuantizationConfig(5, -1.0, 1.0))
    engine = Engine(EmbeddingConfig.from_tables([table], o.SGD(1.0)))
    rows = np.float32([[-9, -0.25, -0.3], [0.2, 0.25, 0.75], [0.1, 9, -1]])
    engine.load_parameters("t", rows, ids=[3, 4, 5])
    assert engine.lookup("t", [3, 4, 5, 3], forward=True).tolist() == [
        [-1, 0, -0.5],
        [0, 0.5, 1],
        [0, 1, -1],
        [-1, 0, -0.5],
    ]
    assert engine.lookup("t", [3, 4, 5]).tolist() == rows.tolist()
    engine.apply({"t": (np.array([4]), np.ones((1, 3)))})  # straight through: of the stored row, not the seen one
    assert engine.lookup("t", [4]).tolist() == [(rows[1] - 1).tolist()]


def test_a_forward_lookup_without_quantization_is_the_row():
    engine = engine_of(o.SGD(0.1))
    assert engine.lookup("t", [3], forward=True).tolist() == engine.lookup("t", [3]).tolist()
