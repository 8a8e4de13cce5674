"""The interpreted kernel has the bits of XLA's step, whatever the rule, the line format and the number of blocks."""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.bench.experiments.sparsecore import compile_steps, kernel
from penstock.bench.experiments.sparsecore.software_sqrt import root
from penstock.bench.tpu import matrix
from penstock.bridge import programs
from penstock.bridge.device_tables import make_mesh
from penstock.bridge.feeding.dispatcher import LayoutTeam
from penstock.bridge.feeding.packing import Packer
from penstock.bridge.program_cache import shapes
from penstock.bridge.sharding import Layout
from penstock.bridge.stacking import Stack, TableRows
from penstock.pyx.update import rules
from penstock.updates import UPDATES, UpdateRule

SLOTS = {**rules(), "stochastic_gradient_descent": 0}
HYPER = (("momentum", 0.5), ("beta1", 0.5), ("beta2", 0.75), ("rho", 0.5), ("epsilon", 0.25), ("l1", 0.125))
HYPER += (("l2", 0.25), ("exponent", 2.0), ("lr_power", -0.5), ("max_var_update", 0.5), ("max_delta", 8.0))
RULES = sorted(set(UPDATES) - {"row_wise_adagrad", "user_defined_program"})


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of a few lines, so that a small table has many of them."""
    monkeypatch.setattr(kernel, "BLOCK_BYTES", 1 << 14)
    kernel.apply.cache_clear()
    yield
    kernel.apply.cache_clear()


def updated(apply, name, dim, num_rows, vocabulary=600):
    """Return the bytes of all arrays of a table after one step by that program."""
    rule, rng = UpdateRule(name, SLOTS[name], HYPER), np.random.default_rng(7)
    mesh = make_mesh(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("shard",)))
    stack = Stack.of([Layout("t", vocabulary, dim, rule.num_slots, 1, False, 128)], rule, compact=False)
    packer = Packer(stack, LayoutTeam(1))
    table = programs.create(mesh, stack.line, stack.lines_per_device, (0.5,) * rule.num_slots)()
    for step in range(2):  # the first one gives the rows different weights
        num_ids = num_rows if step else vocabulary
        grads = rng.standard_normal((num_ids, dim), np.float32)
        grads[::3] = 0  # a gradient of 0 is one
        routed = packer.route([TableRows(0, rng.permutation(vocabulary)[:num_ids], grads)])
        packed = packer.pack(routed, routed.by_device)
        step_ = (programs if step == 0 else apply).apply(mesh, rule, stack.line)
        numbers = np.float32(0.1), np.int32(0), np.uint32(0)
        table, _ = step_(table, packed.lines, packed.words, packed.counts, *numbers)
    return [np.asarray(array).tobytes() for array in table]


@pytest.mark.parametrize(("name", "dim"), [("adam", 30), ("adagrad", 64), *((name, 130) for name in RULES)])
def test_the_kernel_has_xlas_bits(name, dim, small_blocks):
    assert updated(kernel, name, dim, 70) == updated(programs, name, dim, 70)


@pytest.mark.parametrize("num_rows", [1, 4, 13, 100])  # some subcores without work; all; buffers used again
def test_every_block_is_processed_once_however_many_there_are(num_rows, small_blocks):
    assert updated(kernel, "momentum", 130, num_rows) == updated(programs, "momentum", 130, num_rows)


def test_rules_that_need_pow_are_not_possible():
    for name in ("ftrl", "adagrad_momentum"):
        assert kernel.possible(UpdateRule(name, 2, HYPER))
        assert not kernel.possible(UpdateRule(name, 2, (("lr_power", -0.25), ("exponent", 3.0))))


def test_every_line_is_moved_once_in_and_once_out():
    mesh, rule = make_mesh(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("shard",))), UpdateRule("adam", 2)
    layout = Layout("t", 5000, 128, 2, 1, False, 128)
    traced = kernel.apply(mesh, rule, layout.line)
    jaxpr = traced.trace(*shapes("apply", mesh, layout.line, layout.lines_per_device, 128)).jaxpr
    number, gradient = 4, 128 * 4
    assert matrix.dma_bytes(jaxpr, kernel.block_of(layout.line)) == 2 * 3 * 128 * 4 + gradient + number


def test_the_kept_results_hold_every_case_within_its_bound():
    rows = (Path(__file__).parent / "compiled.md").read_text().partition("|---")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept = [(generation, optimizer, int(dim), variant) for generation, optimizer, dim, variant, *_ in cells]
    cases = compile_steps.cases(small=False)
    assert sorted(kept) == sorted((case.generation, case.optimizer, case.dim, case.variant) for case in cases)
    assert all(float(ratio) <= matrix.MOST_BY_KERNEL for *_, ratio, _, _ in cells)


# ---- its square root


@pytest.mark.parametrize("exponent", [127, 128])  # 1 up to 2, and 2 up to 4: other exponents only shift the result's
def test_the_root_of_every_mantissa_is_rounded_correctly(exponent):
    values = (np.arange(1 << 23, dtype=np.int32) | exponent << 23).view(np.float32)
    assert np.asarray(jax.jit(root)(values)).tobytes() == np.sqrt(values).tobytes()


@given(st.lists(st.floats(0, width=32, allow_subnormal=False), min_size=1, max_size=50))
@example([0.0, float("inf"), 2.0**-126, 3.4e38])
@settings(max_examples=60, deadline=None)
def test_the_root_of_any_number_equals_numpys(numbers):
    values = np.resize(np.array(numbers, np.float32), 64)
    assert np.asarray(jax.jit(root)(values)).tobytes() == np.sqrt(values).tobytes()


def test_nan_and_negative_numbers_have_no_root_and_minus_zero_keeps_its_sign():
    found = np.asarray(jax.jit(root)(np.array([-1, np.nan, -np.inf, -0.0, 1e-45, -1e-45], np.float32)))
    assert np.isnan(found[:3]).all()
    assert found[3:].tolist() == [0, 0, 0]
    assert np.signbit(found[3:]).tolist() == [True, False, True]
