"""Tables whose lines several rows share, kernels that fetch lines, weights of 16 bits: the same rows as anywhere."""

import jax
import numpy as np
import pytest
from device_table import device_table
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from penstock.bridge import backends, program_cache
from penstock.bridge.device_tables import make_mesh
from penstock.bridge.pallas import tensorcore
from penstock.bridge.row_format import UNTOUCHED
from penstock.bridge.sharding import Layout
from penstock.bridge.stochastic_rounding import key_of, nearest, stochastic
from penstock.config import optimizers as o
from penstock.config.embedding import EmbeddingConfig
from penstock.config.tables import TableConfig
from penstock.engine import Engine
from penstock.errors import ConfigError, StateError
from penstock.pyx.update import rules
from penstock.updates import UPDATES, UpdateRule

SLOTS = {**rules(), "stochastic_gradient_descent": 0, "user_defined_program": 0}
HYPER = (("momentum", 0.5), ("beta1", 0.5), ("beta2", 0.75), ("rho", 0.5), ("epsilon", 0.25), ("l1", 0.125))
HYPER += (("l2", 0.25), ("exponent", 2.0), ("lr_power", -0.5), ("max_var_update", 0.5), ("max_delta", 8.0))


def rule_of(name, **switches):
    program = (lambda g, w: w - g * w) if name == "user_defined_program" else None
    return UpdateRule(name, SLOTS[name], HYPER, program=program, **switches)


def table_of(mesh_of, rule, rows, dim, devices=1, variant="xla", mod=False, lanes=128, bfloat16=False):
    layout = Layout("t", rows, dim, rule.num_slots, devices, mod, lanes, bfloat16)
    return device_table(mesh_of(devices), layout, rule, variant=variant)


def some_rows(seed, num_rows, vocabulary, dim):
    rng = np.random.default_rng(seed)
    grads = rng.standard_normal((num_rows, dim), np.float32)
    grads[::3] = 0  # a gradient of 0 is one
    return rng.permutation(vocabulary)[:num_rows], grads


def parts_of(table):
    return [table.read(np.arange(table.layout.vocabulary_size), part).tobytes() for part in range(table.num_parts)]


def started(table):
    rng = np.random.default_rng(7)
    table.fill(lambda first, count: rng.standard_normal((count, table.layout.dim), np.float32))
    return table


# ---- arrays


def test_for_xla_an_array_of_one_strip_is_kept_as_halves_of_words_in_as_many_bytes(mesh_of):
    for num_slots, by_xla, by_kernel in ((0, ["int16"], ["float32"]), (2, ["float32", "int16"], ["float32"] * 2)):
        rule = rule_of("adam" if num_slots else "stochastic_gradient_descent")
        tables = [table_of(mesh_of, rule, 300, 128, variant=variant) for variant in ("xla", "pallas")]
        assert [[str(a.dtype) for a in t.arrays] for t in tables] == [by_xla, by_kernel]
        assert len({sum(a.nbytes for a in t.arrays) for t in tables} | {t.layout.nbytes for t in tables}) == 1


@pytest.mark.parametrize("dim", [8, 128])
def test_halves_of_words_keep_every_bit(dim, mesh_of):
    values = np.random.default_rng(3).integers(0, 2**32, (300, dim), np.uint32)
    values[values == UNTOUCHED] = 0
    table = table_of(mesh_of, rule_of("stochastic_gradient_descent"), 300, dim)
    table.write(np.arange(300), values.view(np.float32), 0)
    assert table.read(np.arange(300), 0).tobytes() == values.tobytes()


# ---- lines that rows share


@pytest.mark.parametrize("name", sorted(UPDATES))
@pytest.mark.parametrize("dim", [3, 32, 200])
def test_packed_lines_hold_the_bits_of_rows_by_themselves(name, dim, mesh_of):
    rule = rule_of(name)
    plain, tiled = (started(table_of(mesh_of, rule, 700, dim, lanes=lanes)) for lanes in (1, 128))
    for step in range(2):
        for table in (plain, tiled):
            table.apply(*some_rows(step, 90, 700, dim), 0.1)
    assert parts_of(tiled) == parts_of(plain)


@given(
    dim=st.sampled_from([1, 3, 31, 64, 65, 128, 300]),
    rows=st.sampled_from([1, 9, 1024, 3000]),
    devices=st.sampled_from([1, 2, 3, 8]),
    mod=st.booleans(),
    bfloat16=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=12, deadline=None)
def test_any_form_of_a_table_holds_the_same_rows(dim, rows, devices, mod, bfloat16, seed, mesh_of):
    rule = rule_of("adagrad")
    forms = [(1, 1, False), (devices, 128, mod)]
    first, second = (
        started(table_of(mesh_of, rule, rows, dim, n, mod=m, lanes=lanes, bfloat16=bfloat16)) for n, lanes, m in forms
    )
    ids, grads = some_rows(seed, np.random.default_rng(seed).integers(0, rows + 1), rows, dim)
    for table in (first, second):
        table.apply(ids, grads, 0.1)
        table.apply(ids[: len(ids) // 2], grads[: len(ids) // 2], 0.1)
    assert parts_of(first) == parts_of(second)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_an_update_of_every_row_finds_the_rows_in_their_lines(bfloat16, mesh_of):
    rule = rule_of("adam", non_lazy=True)
    plain, tiled = (
        started(table_of(mesh_of, rule, 3001, 5, devices, lanes=lanes, bfloat16=bfloat16))
        for devices, lanes in ((1, 1), (3, 128))
    )
    for step in range(3):
        for table in (plain, tiled):
            table.apply(*some_rows(step, [700, 0, 3001][step], 3001, 5), 0.1)
    assert parts_of(tiled) == parts_of(plain)


def test_an_update_of_lines_moves_no_table(mesh_of):
    table = started(table_of(mesh_of, rule_of("adam"), 3000, 8, 2))
    pointers = table.pointers()
    assert len(pointers) == 4  # three planes are two arrays, on two devices
    for step in range(5):
        table.apply(*some_rows(step, 50, 3000, 8), 0.1)
        table.copy_rows(np.arange(40), np.empty((3, 40, 8), np.float32))()
    assert table.pointers() == pointers


def test_the_bits_that_mark_untouched_rows_are_never_stored(mesh_of):
    table = table_of(mesh_of, rule_of("assign"), 100, 8)
    values = np.full((100, 8), UNTOUCHED, np.int32).view(np.float32)
    table.write(np.arange(100), values)
    assert np.isnan(table.read(np.arange(100))).all()


def test_copies_for_a_checkpoint_are_the_rows_of_every_part(mesh_of):
    for bfloat16 in (False, True):
        table = started(table_of(mesh_of, rule_of("adam"), 500, 3, 3, bfloat16=bfloat16))
        table.apply(*some_rows(0, 400, 500, 3), 0.1)
        ids = np.random.default_rng(1).permutation(500)[:77]
        copied = np.empty((3, 77, 3), np.float32)
        table.copy_rows(ids, copied)()
        for part in range(3):
            assert copied[part].tobytes() == table.read(ids, part).tobytes()


# ---- the kernel


KERNELS = sorted(set(UPDATES) - {"row_wise_adagrad", "user_defined_program"})


@pytest.fixture
def interpreted(monkeypatch):
    """interpreted(how): kernels run that way, a few lines at a time; what was compiled otherwise is forgotten."""

    def set_up(how):
        monkeypatch.setattr(tensorcore, "INTERPRET", how)
        monkeypatch.setattr(tensorcore, "BLOCK", 8)

    for programs in (tensorcore.apply, program_cache.compiled):
        programs.cache_clear()
    yield set_up
    for programs in (tensorcore.apply, program_cache.compiled):
        programs.cache_clear()


def by_both(name, dim, mesh_of):
    """The parts of a table after a step of four blocks, so that buffers are used again: by XLA and by the kernel."""
    tables = [started(table_of(mesh_of, rule_of(name), 600, dim, variant=v)) for v in ("xla", "pallas")]
    for table in tables:
        table.apply(*some_rows(0, 27, 600, dim), 0.1)
    return [parts_of(table) for table in tables]


@pytest.mark.parametrize(("name", "dim"), [("adam", 30), *((name, 130) for name in KERNELS)])
def test_the_kernel_has_xlas_bits(name, dim, interpreted, mesh_of):
    interpreted(True)
    by_xla, by_kernel = by_both(name, dim, mesh_of)
    assert by_kernel == by_xla


@pytest.mark.parametrize("name", ["adagrad", "adam"])  # one array, two arrays: the rule has no part in what is moved
def test_the_kernel_has_no_race(name, interpreted, mesh_of):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    interpreted(pltpu.InterpretParams(detect_races=True))
    by_xla, by_kernel = by_both(name, 130, mesh_of)
    assert by_kernel == by_xla
    assert interpreter.races is not None
    assert not interpreter.races.races_found


# ---- 16 bits


def test_rounding_at_random_gives_one_of_two_neighbours_and_the_right_mean():
    values = np.full(40_000, np.float32(1.0) + np.float32(0.3 / 128))  # 0.3 of the way from 1 to the next
    bits, ids = values.view(np.uint32), np.arange(len(values), dtype=np.uint32)
    rounded = stochastic(np, bits, key_of("t", 5, 0), ids, ids % np.uint32(7)).view(np.float32)
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert abs((rounded > 1).mean() - 0.3) < 0.01


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rounding_at_random_is_the_same_on_a_device_and_keeps_what_numbers_are(patterns, seed):
    bits = np.array(patterns, np.uint32)
    ids = np.random.default_rng(seed).integers(0, 2**32, len(bits), np.uint32)
    key = key_of("t", seed, 1)
    host = stochastic(np, bits, key, ids, ids >> np.uint32(3))
    device = jax.jit(lambda *a: stochastic(jax.numpy, *a))(bits, key, ids, ids >> np.uint32(3))
    assert np.asarray(device).tobytes() == host.tobytes()
    before, after = bits.view(np.float32), host.view(np.float32)
    assert not (host & np.uint32(0xFFFF)).any()
    assert (np.isnan(before) == np.isnan(after)).all()
    assert (np.isinf(before) == np.isinf(after)).all()
    assert (np.signbit(before) == np.signbit(after)).all()


def test_rounding_to_the_nearest_is_that_of_ml_dtypes():
    import ml_dtypes  # jax needs it

    rng = np.random.default_rng(0)
    bits = np.concatenate(
        [rng.integers(0, 2**32, 50_000, np.uint32), np.arange(0x3F7F0000, 0x3F820000, 0x800, np.uint32)]
    )
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        wanted = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    numbers = ~np.isnan(values)
    assert nearest(values)[numbers].tobytes() == wanted[numbers].tobytes()
    assert np.isnan(nearest(values)[~numbers]).all()


def engine_of(text="storage_dtype: BFLOAT16", mesh=None, sharding="DIV", rows=700, optimizer=None, **arguments):
    config = EmbeddingConfig.from_tables([TableConfig(rows, 24, name="t")], optimizer or o.Adagrad(0.1))
    message = config.to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = 1 if sharding == "MOD" else 0
    settings_ = next((t for t in message.table if t.name == "t"), None) or message.table.add(name="t")
    if text:
        settings_.storage_dtype = 2 if "BFLOAT16" in text else 1
    return Engine(EmbeddingConfig.from_proto(message), mesh, **arguments)


def trained(engine, steps=4):
    for step in range(steps):
        engine.apply({"t": some_rows(step, 200, 700, 24)})
    return engine


def test_16_bits_change_neither_with_the_devices_nor_with_the_sharding_nor_the_form(mesh_of, monkeypatch):
    hashes = {trained(engine_of(mesh=mesh_of(n), sharding=s)).state_hash() for n in (1, 3) for s in ("DIV", "MOD")}
    monkeypatch.setenv("PENSTOCK_LAYOUT", "tiled")
    hashes.add(trained(engine_of(mesh=mesh_of(2))).state_hash())
    assert len(hashes) == 1
    assert trained(engine_of("")).state_hash() not in hashes


def test_rows_of_16_bits_are_such_everywhere(tmp_path):
    engine = trained(engine_of())
    rows = engine.lookup("t", range(700))
    assert not (rows.view(np.uint32) & np.uint32(0xFFFF)).any()
    assert (engine.retrieve_parameters("t")["accumulators"].view(np.uint32) & np.uint32(0xFFFF)).any()
    # Close to what 32 bits hold, though not it.
    exact = trained(engine_of("")).lookup("t", range(700))
    assert 0 < np.abs(exact - rows).max() < 0.02
    engine.write_tables(tmp_path)
    again = engine_of(seed=1)
    again.read_tables(tmp_path)
    assert again.lookup("t", range(700)).tobytes() == rows.tobytes()


def test_many_small_updates_move_a_weight_of_16_bits():
    engine = engine_of(optimizer=o.SGD(1.0), seed=3)
    engine.load_parameters("t", np.ones((700, 24), np.float32))
    for _ in range(64):  # each an eighth of the distance to the next value below 1, which is 2**-8
        engine.apply({"t": (np.arange(700), np.full((700, 24), 2.0**-11, np.float32))})
    assert abs(engine.lookup("t", range(700)).mean() - (1 - 64 * 2.0**-11)) < 1e-3


def test_a_checkpoint_of_16_bits_continues_with_the_same_bits(tmp_path):
    engine = trained(engine_of(), 2)
    engine.save(tmp_path / "c")
    restored = Engine.restore(tmp_path / "c")
    assert restored.state_hash() == engine.state_hash()
    for one in (engine, restored):
        one.apply({"t": some_rows(9, 100, 700, 24)})
    assert restored.state_hash() == engine.state_hash()
    with pytest.raises(StateError, match="table 't' has storage_dtype bfloat16 in the checkpoint and float32 in"):
        Engine.restore(tmp_path / "c", config=engine_of("").config)


# ---- what may be asked for


def test_the_layout_and_the_kernel_for_a_tpu_run_anywhere_and_give_the_same_state(mesh_of, monkeypatch):
    wanted = trained(engine_of("", mesh=mesh_of(1)), 2)
    for devices, settings_ in ((1, {"VARIANT": "xla"}), (3, {"LAYOUT": "tiled"}), (1, {"VARIANT": "pallas"})):
        with monkeypatch.context() as patch:
            for name, value in settings_.items():
                patch.setenv(f"PENSTOCK_{name}", value)
            engine = trained(engine_of("", mesh=mesh_of(devices)), 2)
        assert engine.state_hash() == wanted.state_hash(), settings_
        assert engine.core.tables.table("t").variant == settings_.get("VARIANT", "xla")


@pytest.mark.parametrize(
    ("variant", "problem"),
    [
        ("cuda", "expected one of ffi, xla, pallas, got 'cuda'"),
        ("sparsecore", "'sparsecore' is an experiment in bench/experiments/sparsecore .* use 'pallas'"),
    ],
)
def test_an_unknown_variant_is_refused_by_name(variant, problem, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    with pytest.raises(ConfigError, match=f"PENSTOCK_VARIANT: {problem}"):
        engine_of("")


def test_a_rule_that_the_kernel_cannot_do_gets_xla(mesh_of):
    mesh = make_mesh(mesh_of(1))
    tiled = Layout("t", 100, 8, 1, 1, False, 128)
    assert backends.possible("pallas", mesh, tiled, rule_of("adagrad"))
    assert not backends.possible("pallas", mesh, tiled, rule_of("row_wise_adagrad"))
    assert not backends.possible("pallas", mesh, Layout("t", 100, 8, 1, 1, False, 128, True), rule_of("adagrad"))
    assert not backends.possible("ffi", mesh, tiled, rule_of("adagrad"))
