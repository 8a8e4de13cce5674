"""Tables whose lines several rows share, and kernels that fetch lines: the same rows as anywhere."""

from functools import lru_cache
from itertools import product

import numpy as np
import pytest
from device_table import bytes_of, rate_of, rule_of, some_rows, started, table_of
from engines import engine_of
from evidence import IS_EVIDENCE, examples
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from penstock.base.errors import ConfigError
from penstock.model.updates import UPDATES
from penstock.rows.bridge import backends, program_cache, tensorcore
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.programs import BY_ROW
from penstock.rows.bridge.row_format import UNTOUCHED
from penstock.rows.bridge.sharding import Layout

# ---- arrays


@pytest.mark.parametrize("dim", [8, 128])
def test_halves_of_words_keep_every_bit(dim, mesh_of):
    values = np.random.default_rng(3).integers(0, 2**32, (300, dim), np.uint32)
    values[values == UNTOUCHED] = 0
    table = table_of(mesh_of, rule_of("stochastic_gradient_descent"), 300, dim)
    table.write(np.arange(300), values.view(np.float32), 0)
    assert table.read(np.arange(300), 0).tobytes() == values.tobytes()


# ---- lines that rows share


# 4 rows of dim 32 share a line, and 42 of dim 3, of which element-wise rules do not notice.
FORMS = [
    *((name, dim) for name in sorted(UPDATES) for dim in (32, 200)),
    ("adam", 3),
    *((name, 3) for name in sorted(BY_ROW)),
]


@pytest.mark.sampled("adagrad-32", "stochastic_gradient_descent-32")
@pytest.mark.parametrize(("name", "dim"), FORMS)
def test_packed_lines_hold_the_bits_of_rows_by_themselves(name, dim, mesh_of):
    rule = rule_of(name)
    plain, tiled = (started(table_of(mesh_of, rule, 700, dim, lanes=lanes)) for lanes in (1, 128))
    for step in range(2):
        for table in (plain, tiled):
            table.apply(*some_rows(step, 90, 700, dim), rate_of(rule, 0.1))
    assert bytes_of(tiled) == bytes_of(plain)


@given(
    dim=st.sampled_from([1, 3, 31, 64, 65, 128, 300]),
    rows=st.sampled_from([1, 9, 1024, 3000]),
    devices=st.sampled_from([1, 2, 3, 8]),
    mod=st.booleans(),
    bfloat16=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@example(dim=31, rows=1024, devices=3, mod=True, bfloat16=True, seed=5)
@examples(8, 1, phases=[Phase.generate] if IS_EVIDENCE else [Phase.explicit])
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
    assert bytes_of(first) == bytes_of(second)


@pytest.mark.sampled("False")
@pytest.mark.parametrize("bfloat16", [False, True])
def test_an_update_of_every_row_finds_the_rows_in_their_lines(bfloat16, mesh_of):
    rule = rule_of("adam", non_lazy=True)
    plain, tiled = (
        started(table_of(mesh_of, rule, 301, 5, devices, lanes=lanes, bfloat16=bfloat16))
        for devices, lanes in ((1, 1), (3, 128))
    )
    for step in range(3):
        for table in (plain, tiled):
            table.apply(*some_rows(step, [70, 0, 301][step], 301, 5), 0.1)
    assert bytes_of(tiled) == bytes_of(plain)


def test_the_bits_that_mark_untouched_rows_are_never_stored(mesh_of):
    table = table_of(mesh_of, rule_of("assign"), 100, 8)
    values = np.full((100, 8), UNTOUCHED, np.int32).view(np.float32)
    table.write(np.arange(100), values)
    assert np.isnan(table.read(np.arange(100))).all()


@pytest.mark.sampled("partial_row_wise_adam-True")
@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("name", ["adam", "row_wise_adagrad", "partial_row_wise_adam"])
def test_copies_for_a_checkpoint_are_the_rows_of_every_part(name, bfloat16, mesh_of):
    rule = rule_of(name)
    table = started(table_of(mesh_of, rule, 500, 3, 3, bfloat16=bfloat16))
    table.apply(*some_rows(0, 400, 500, 3), rate_of(rule, 0.1))
    ids = np.random.default_rng(1).permutation(500)[:77]
    copied = np.empty((77, sum(table.part_dims)), np.float32)
    table.copy_rows(ids, copied)()
    parts = [table.read(ids, part) for part in range(len(table.part_dims))]
    assert copied.tobytes() == np.concatenate(parts, axis=1).tobytes()


# ---- the kernel


KERNELS = sorted(set(UPDATES) - BY_ROW)


@pytest.fixture
def interpreted(monkeypatch):
    """interpreted(how): kernels run that way, a few lines at a time; they are compiled anew, other programs are not."""

    def set_up(how):
        monkeypatch.setattr(tensorcore, "INTERPRET", how)
        monkeypatch.setattr(tensorcore, "BLOCK", 8)
        monkeypatch.setattr(tensorcore, "UNROLLED", 2)
        shared = program_cache.compiled
        kernels = lru_cache(shared.__wrapped__)
        monkeypatch.setattr(tensorcore, "apply", tensorcore.apply.__wrapped__)
        monkeypatch.setattr(program_cache, "compiled", lambda *key: (kernels if "pallas" in key else shared)(*key))

    return set_up


def by_both(name, dim, mesh_of):
    """The parts of a table after a step of four blocks, so that buffers are used again: by XLA and by the kernel."""
    tables = [started(table_of(mesh_of, rule_of(name), 600, dim, variant=v)) for v in ("xla", "pallas")]
    for table in tables:
        table.apply(*some_rows(0, 27, 600, dim), 0.1)
    return [bytes_of(table) for table in tables]


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("name", "dim"),
    [*((name, 130) for name in KERNELS), *product(("stochastic_gradient_descent", "adagrad", "adam"), (30, 128, 300))],
)
def test_the_kernel_has_xlas_bits_and_no_race(name, dim, interpreted, mesh_of):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    interpreted(pltpu.InterpretParams(detect_races=True))
    by_xla, by_kernel = by_both(name, dim, mesh_of)
    assert by_kernel == by_xla
    assert interpreter.races is not None
    assert not interpreter.races.races_found


@pytest.mark.sampled("0")
@pytest.mark.parametrize("rows", [0, 5, 600])
def test_the_kernel_updates_tables_smaller_than_a_block_and_steps_without_rows(rows, interpreted, mesh_of):
    interpreted(True)
    tables = [started(table_of(mesh_of, rule_of("adam"), rows or 600, 130, variant=v)) for v in ("xla", "pallas")]
    for table in tables:
        table.apply(*some_rows(0, min(rows, 8), rows or 600, 130), 0.1)
    assert bytes_of(tables[0]) == bytes_of(tables[1])


# ---- what may be asked for


def test_an_unknown_variant_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "cuda")
    with pytest.raises(
        ConfigError, match="PENSTOCK_VARIANT: expected one of auto, xla, pallas, sparsecore, host, got 'cuda'"
    ):
        engine_of()


def test_a_rule_that_the_kernel_cannot_do_gets_xla(mesh_of):
    mesh = make_mesh(mesh_of(1))
    tiled = Layout("t", 100, 8, 1, 1, False, 128)
    assert backends.possible("pallas", mesh, tiled, rule_of("adagrad"))
    assert not backends.possible("pallas", mesh, tiled, rule_of("row_wise_adagrad"))
    assert not backends.possible("pallas", mesh, Layout("t", 100, 8, 1, 1, False, 128, True), rule_of("adagrad"))
    assert not backends.possible("host", mesh, tiled, rule_of("adagrad"))
