"""The CPU's own update: NumPy's bits for every rule, whatever the devices, threads, instruction set and pieces."""

import gc

import numpy as np
import pytest
from device_table import TEAM, bits, device_table, host_table, parts_of, rate_of, rule_of, some_rows, stepped
from evidence import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.base.threads import ThreadTeam
from penstock.model.updates import UPDATES, UpdateRule
from penstock.pyx.accumulator import targets
from penstock.pyx.update import rules
from penstock.rows.bridge import host_tables
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.sharding import Layout, TableDefinition

NUM_SLOTS = {**rules(), "stochastic_gradient_descent": 0}
NAMES = sorted(set(UPDATES) - {"user_defined_program"})
ADAM = UpdateRule("adam", 2, (("beta1", 0.5), ("beta2", 0.75), ("epsilon", 0.25)))
ADAGRAD = UpdateRule("adagrad", 1)


# ---- every rule

# From the smallest subnormal to beyond float32's square root: products underflow and overflow.
scales = st.sampled_from([0.0, 1e-45, 1e-38, 1e-20, 1e-3, 1.0, 1e10, 1e20])
share = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32))
positive = st.one_of(st.just(0.0), st.floats(0, 16, width=32))
VALUES = dict.fromkeys(["momentum", "beta1", "beta2", "rho", "tau"], share)
VALUES |= dict.fromkeys(
    ["l1", "l2", "beta", "epsilon", "max_var_update", "max_accumulator", "max_delta", "outlier_threshold"], positive
)
VALUES |= {"lr_power": st.just(-0.5), "exponent": st.just(2.0)}
FLAGS = ["use_nesterov", "use_sum_inside_sqrt", "update_accumulator_first", "multiply_linear_by_lr"]
VALUES |= dict.fromkeys(FLAGS, st.booleans())
limits = st.one_of(st.none(), st.floats(-4, 4, width=32))


@st.composite
def any_rule(draw):
    name = draw(st.sampled_from(NAMES))
    hyper = tuple((key, draw(values)) for key, values in VALUES.items())
    switches = {key: draw(limits) for key in ("gradient_min", "gradient_max", "weight_min", "weight_max")}
    switches |= {key: draw(st.booleans()) for key in ("decay_times_learning_rate", "non_lazy")}
    return UpdateRule(name, NUM_SLOTS[name], hyper, weight_decay=draw(share), **switches)


def any_floats(rng, shape, scale):
    values = (rng.standard_normal(shape) * scale).astype(np.float32)
    special = rng.integers(0, 40, shape)
    values[special == 0], values[special == 1] = 0.0, -0.0
    return values


@given(
    rule=any_rule(),
    dim=st.integers(1, 200),
    rows=st.sampled_from([1, 700, 1024, 2500]),
    devices=st.sampled_from([1, 2, 3, 8]),
    mod=st.booleans(),
    target=st.sampled_from(targets()),
    scale=st.tuples(scales, scales, scales),
    lr=st.one_of(st.floats(0, 2, width=32), scales),
    seed=st.integers(0, 2**32 - 1),
)
@examples(150, 30)
def test_numpys_bits_whatever_the_rule_and_the_numbers(rule, dim, rows, devices, mod, target, scale, lr, seed, mesh_of):
    rng = np.random.default_rng(seed)
    table = host_table(mesh_of, rule, rows, dim, devices, mod, target=target)
    parts = [any_floats(rng, (rows, dim), scale[0])]
    parts += [np.abs(any_floats(rng, (rows, n), scale[1])) for n in table.part_dims[1:]]
    for part, values in enumerate(parts):
        table.write(np.arange(rows), values, part)
    for _ in range(2):
        ids = rng.permutation(rows)[: rng.integers(0, rows + 1)]
        grads = any_floats(rng, (len(ids), dim), scale[2])
        table.apply(ids, grads, rate_of(rule, lr))
        if len(ids) or rule.non_lazy:
            parts = stepped(rule, rate_of(rule, lr), parts, ids, grads)
    for got, wanted in zip(parts_of(table), parts, strict=True):
        assert bits(got) == bits(wanted)


@pytest.mark.parametrize("algorithm", ["ftrl", "adagrad_momentum"])
def test_with_pow_an_update_is_within_the_stated_bound(algorithm, ulp):
    with_pow = [rule for rule in ulp.rules(algorithm, [{}]) if ulp.bound(rule) == ulp.WITH_POW]
    assert len(with_pow) >= 8 - 4 * (algorithm == "adagrad_momentum")
    for rule in with_pow:
        assert ulp.error_on_device(rule, 17, 4, variant="host") <= ulp.WITH_POW


@pytest.mark.parametrize(
    ("rule", "num_rows", "dim"),
    [
        (UpdateRule("ftrl", 2, (("lr_power", -1.0), ("l2", 0.5))), 2000, 7),
        (UpdateRule("row_wise_adagrad", 1), 5, host_tables.MAX_SUMMED_DIM),
        (rule_of("partial_row_wise_adam"), 5, host_tables.MAX_SUMMED_DIM),
    ],
    ids=["a power of one", "the widest row-wise row", "the widest row of partially row-wise Adam"],
)
def test_numpys_bits_at_the_limits_of_a_rule(rule, num_rows, dim, mesh_of):
    table, (ids, grads) = host_table(mesh_of, rule, num_rows, dim), some_rows(0, num_rows, num_rows, dim)
    wanted = stepped(rule, rate_of(rule, 0.1), parts_of(table), ids, grads)
    table.apply(ids, grads, rate_of(rule, 0.1))
    assert [bits(part) for part in parts_of(table)] == [bits(part) for part in wanted]


# ---- what the bits do not depend on


@pytest.mark.parametrize("rule", [ADAM, UpdateRule("adam", 2, ADAM.hyper, non_lazy=True)], ids=["lazy", "not lazy"])
@pytest.mark.promise("The bits depend on no record batches, threads or number of devices")
def test_the_bits_depend_on_no_threads_and_no_instruction_set(rule, mesh_of):
    tables = [host_table(mesh_of, rule, 30_011, 9, team=ThreadTeam(threads)) for threads in (1, 2, 5)]
    tables += [host_table(mesh_of, rule, 30_011, 9, target=target) for target in targets()]
    for step in range(3):
        ids, grads = some_rows(step, 10_000 * step + 1, 30_011, 9)
        for table in tables:
            table.apply(ids, grads, 0.1)
    first, *others = [[bits(part) for part in parts_of(table)] for table in tables]
    assert all(other == first for other in others)


@pytest.mark.parametrize("rule", [ADAGRAD, UpdateRule("adam", 2, ADAM.hyper, non_lazy=True)], ids=["lazy", "not lazy"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("variant", ["host", "xla"])
def test_segments_are_one_step(rule, devices, variant, mesh_of):
    layout = Layout("t", 5000, 8, rule.num_slots, devices, False)
    whole, cut = (
        device_table(mesh_of(devices), layout, rule, (1.0,) * rule.num_slots, variant=variant) for _ in range(2)
    )
    for step in range(7):
        ids, grads = some_rows(step, 4500, 5000, 8)
        position = sorted(np.random.default_rng(step).integers(0, 4500, step))
        whole.apply(ids, grads, 0.1)
        cut.backend.apply([(0, list(zip(np.split(ids, position), np.split(grads, position), strict=True)), 0.1)])
    assert [bits(part) for part in parts_of(cut)] == [bits(part) for part in parts_of(whole)]


@given(
    tables=st.lists(st.tuples(any_rule(), st.integers(1, 40), st.sampled_from([1, 900, 2500])), min_size=1, max_size=6),
    devices=st.sampled_from([1, 3]),
    mod=st.booleans(),
    threads=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None)
def test_a_step_of_many_tables_is_a_step_of_each(tables, devices, mod, threads, seed, mesh_of):
    rng, mesh = np.random.default_rng(seed), make_mesh(mesh_of(devices))
    layouts = [
        Layout(f"t{n}", rows, dim, r.num_slots, devices, mod, row_slots=r.row_slots)
        for n, (r, dim, rows) in enumerate(tables)
    ]
    definitions = [
        TableDefinition(layout, r, (0.5,) * r.num_slots) for layout, (r, _, _) in zip(layouts, tables, strict=True)
    ]
    together = host_tables.HostTables(mesh, definitions, ThreadTeam(threads))
    alone = [host_tables.HostTables(mesh, [definition], TEAM) for definition in definitions]
    for _ in range(2):
        updates = []
        for number in rng.permutation(len(tables))[: rng.integers(1, len(tables) + 1)].tolist():
            ids = rng.permutation(layouts[number].vocabulary_size)[: rng.integers(0, 2000)]
            offset = rng.integers(0, len(ids) + 1)
            grads = rng.standard_normal((len(ids), layouts[number].dim), np.float32)
            segments = [(ids[:offset], grads[:offset]), (ids[offset:], grads[offset:])]
            updates.append((number, segments, 0.1 * number))
            alone[number].apply([(0, segments, 0.1 * number)])
        together.apply(updates)
    for number, own in enumerate(alone):
        ours, theirs = DeviceTable(together, number), DeviceTable(own)
        assert [bits(part) for part in parts_of(ours)] == [bits(part) for part in parts_of(theirs)]


@pytest.mark.parametrize("devices", [1, 8])
def test_the_arrays_are_the_callers_again_when_a_call_returns(devices, mesh_of):
    table = host_table(mesh_of, ADAGRAD, 20_000, 16, devices)
    parts = parts_of(table)
    for step in range(10):
        ids, grads = some_rows(step, 15_000, 20_000, 16)
        parts = stepped(ADAGRAD, 0.1, parts, ids, grads)
        table.apply(ids, grads, 0.1)
        ids[:], grads[:] = -1, np.nan
    assert [bits(part) for part in parts_of(table)] == [bits(part) for part in parts]


def test_tables_that_are_dropped_right_after_a_step_leave_nothing_behind(mesh_of):
    for number in range(60):
        table = host_table(mesh_of, ADAGRAD, 10, 2, 8, mod=False)
        table.apply(np.arange(10), np.ones((10, 2), np.float32), 0.1)
        table.itself = table  # a cycle: the collector takes many at once
        if number % 20 == 0:
            gc.collect()
    assert (table.read(np.arange(10), 1) == 1.5).all()
