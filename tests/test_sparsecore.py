"""The kernel for a TPU's SparseCores, interpreted: XLA's bits, whatever the rule, the form of a line and the blocks."""

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.bridge import backends, program_cache
from penstock.bridge.device_tables import DeviceTable, make_mesh
from penstock.bridge.pallas import sparsecore
from penstock.bridge.pallas.software_sqrt import root
from penstock.bridge.sharding import Layout
from penstock.pyx.update import rules
from penstock.updates import UPDATES, UpdateRule

SLOTS = {**rules(), "stochastic_gradient_descent": 0}
HYPER = (("momentum", 0.5), ("beta1", 0.5), ("beta2", 0.75), ("rho", 0.5), ("epsilon", 0.25), ("l1", 0.125))
HYPER += (("l2", 0.25), ("exponent", 2.0), ("lr_power", -0.5), ("max_var_update", 0.5), ("max_delta", 8.0))
RULES = sorted(set(UPDATES) - {"row_wise_adagrad", "user_defined_program"})


def rule_of(name):
    return UpdateRule(name, SLOTS[name], HYPER)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few lines, so that a small table is many of them; what was compiled otherwise is forgotten."""
    monkeypatch.setattr(sparsecore, "BLOCK_BYTES", 1 << 14)
    for programs in (sparsecore.apply, program_cache.compiled):
        programs.cache_clear()
    yield
    for programs in (sparsecore.apply, program_cache.compiled):
        programs.cache_clear()


def updated(variant, name, dim, mesh_of, num_rows, vocabulary=600):
    """The bytes of all parts of a table after a step of that variant."""
    rule, rng = rule_of(name), np.random.default_rng(7)
    layout = Layout("t", vocabulary, dim, rule.num_slots, 1, False, 128)
    table = DeviceTable(make_mesh(mesh_of(1)), layout, rule, [0.5] * rule.num_slots, variant=variant)
    table.fill(lambda first, count: rng.standard_normal((count, dim), np.float32))
    grads = rng.standard_normal((num_rows, dim), np.float32)
    grads[::3] = 0  # a gradient of 0 is one
    table.apply(rng.permutation(vocabulary)[:num_rows], grads, 0.1)
    return [table.read(np.arange(vocabulary), part).tobytes() for part in range(table.num_parts)]


@pytest.mark.parametrize(("name", "dim"), [("adam", 30), ("adagrad", 64), *((name, 130) for name in RULES)])
def test_the_kernel_has_xlas_bits(name, dim, small_blocks, mesh_of):
    assert updated("sparsecore", name, dim, mesh_of, 70) == updated("xla", name, dim, mesh_of, 70)


@pytest.mark.parametrize("num_rows", [1, 4, 13, 100])  # some subcores without work; all; buffers used again
def test_every_block_is_done_once_however_many_there_are(num_rows, small_blocks, mesh_of):
    by_both = [updated(variant, "momentum", 130, mesh_of, num_rows) for variant in ("xla", "sparsecore")]
    assert by_both[0] == by_both[1]


def test_it_is_taken_only_where_it_is_asked_for(monkeypatch, mesh_of):
    mesh, tiled = make_mesh(mesh_of(1)), Layout("t", 100, 8, 1, 1, False, 128)
    assert backends.choose(mesh, tiled, rule_of("adagrad")) == "xla"
    monkeypatch.setenv("PENSTOCK_VARIANT", "sparsecore")
    assert backends.choose(mesh, tiled, rule_of("adagrad")) == "sparsecore"
    assert backends.lanes(mesh) == 128


def test_a_rule_that_needs_pow_gets_another_variant(monkeypatch, mesh_of):
    monkeypatch.setenv("PENSTOCK_VARIANT", "sparsecore")
    mesh, tiled = make_mesh(mesh_of(1)), Layout("t", 100, 8, 2, 1, False, 128)
    for name in ("ftrl", "adagrad_momentum"):
        assert backends.choose(mesh, tiled, rule_of(name)) == "sparsecore"
        assert backends.choose(mesh, tiled, UpdateRule(name, 2, (("lr_power", -0.25), ("exponent", 3.0)))) == "xla"


# ---- its root


@pytest.mark.parametrize("exponent", [127, 128])  # of 1 up to 2, and of 2 up to 4: others only shift the result's
def test_the_root_of_every_mantissa_is_rounded_correctly(exponent):
    values = (np.arange(1 << 23, dtype=np.int32) | exponent << 23).view(np.float32)
    assert np.asarray(jax.jit(root)(values)).tobytes() == np.sqrt(values).tobytes()


@given(st.lists(st.floats(0, width=32, allow_subnormal=False), min_size=1, max_size=50))
@example([0.0, float("inf"), 2.0**-126, 3.4e38])
@settings(max_examples=60, deadline=None)
def test_the_root_of_any_number_is_numpys(numbers):
    values = np.resize(np.array(numbers, np.float32), 64)
    assert np.asarray(jax.jit(root)(values)).tobytes() == np.sqrt(values).tobytes()


def test_there_is_no_root_of_what_is_no_number_or_below_zero_and_minus_zero_stays():
    found = np.asarray(jax.jit(root)(np.array([-1, np.nan, -np.inf, -0.0, 1e-45, -1e-45], np.float32)))
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [0, 0, 0]
    assert np.signbit(found[3:]).tolist() == [True, False, True]
