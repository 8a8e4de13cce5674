"""Tables that the CPU's own update keeps: reading, writing and copying them, and what is refused."""

import re
from pathlib import Path

import jax
import jaxlib
import numpy as np
import pytest
from device_table import cpu_table, device_table

from penstock.bridge import cpu_ffi
from penstock.bridge.device_tables import make_mesh
from penstock.bridge.sharding import Layout
from penstock.updates import UpdateRule

ADAM = UpdateRule("adam", 2, (("beta1", 0.5), ("beta2", 0.75), ("epsilon", 0.25)))
ADAGRAD = UpdateRule("adagrad", 1)


@pytest.mark.parametrize("devices", [1, 3])
def test_reads_take_any_ids_and_writes_touch_one_part(devices, mesh_of):
    table = cpu_table(mesh_of, ADAM, 5000, 6, devices, mod=False)
    rng = np.random.default_rng(0)
    wanted = rng.standard_normal((5000, 6), np.float32)
    order = rng.permutation(5000)
    table.write(order, wanted[order], part=1)
    ids = rng.integers(0, 5000, 9000)
    assert table.read(ids, 1).tobytes() == wanted[ids].tobytes()
    assert (table.read(ids, 0) == 0).all()
    assert (table.read(ids, 2) == 0.5).all()
    assert np.concatenate(list(table.stream(1))).tobytes() == wanted.tobytes()
    assert table.read(np.zeros(0, np.int64)).shape == (0, 6)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("dim", [1, 6, 40])
def test_a_copy_of_all_parts_is_what_reading_each_gives(devices, dim, mesh_of):
    table = cpu_table(mesh_of, ADAM, 5000, dim, devices)
    rng = np.random.default_rng(0)
    for part in range(3):
        table.write(np.arange(5000), rng.standard_normal((5000, dim), np.float32), part)
    for ids in (rng.permutation(5000)[:3000], np.arange(7), np.zeros(0, np.int64)):
        copied = np.empty((len(ids), 3 * dim), np.float32)
        table.copy_rows(ids, copied)()
        assert copied.tobytes() == np.concatenate([table.read(ids, part) for part in range(3)], axis=1).tobytes()


@pytest.mark.parametrize("bad", [-1, 3000, 2**40, -(2**63), 2**63 - 1])
def test_an_id_outside_the_table_is_an_error_and_no_crash(bad, mesh_of):
    table = cpu_table(mesh_of, ADAGRAD, 3000, 4)

    def apply_and_wait():
        table.apply(np.array([5, bad, 7]), np.ones((3, 4), np.float32), 0.1)
        table.wait()

    # JAX raises a step that ran on the calling thread at once, and as ValueError.
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="penstock: an id outside the table 't'; all"):
        apply_and_wait()


def test_arrays_of_other_shapes_are_refused_before_anything_runs(mesh_of):
    table = cpu_table(mesh_of, ADAGRAD, 3000, 4)
    with pytest.raises(ValueError, match="expected rows of 4 floats, got 5"):
        table.apply(np.arange(3), np.ones((3, 5), np.float32), 0.1)
    with pytest.raises(ValueError, match="expected 2 rows for as many ids, got 3"):
        table.apply(np.arange(2), np.ones((3, 4), np.float32), 0.1)
    with pytest.raises(ValueError, match="expected 0 <= part < 2, got 2"):
        table.write(np.arange(2), np.ones((2, 4), np.float32), 2)
    table.apply(np.arange(3), np.ones((3, 4), np.float32), 0.1)
    assert (table.read(np.arange(3)) != 0).all()


def test_where_jaxlib_does_not_take_the_handlers_xla_updates_the_table(monkeypatch, mesh_of):
    def refuse(*args, **kwargs):
        raise RuntimeError("Unsupported API version: 0.3")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    cpu_ffi.registered.cache_clear()
    try:
        table = device_table(mesh_of(1), Layout("t", 100, 4, 1, 1, True), ADAGRAD)
    finally:
        cpu_ffi.registered.cache_clear()
    assert table.variant == "xla"


def test_rules_without_a_handler_are_updated_by_xla(mesh_of):
    mesh = make_mesh(mesh_of(1))
    program = UpdateRule("user_defined_program", 0, program=lambda g, w: w - g)
    assert not cpu_ffi.possible(mesh, program, 4)
    assert cpu_ffi.possible(mesh, UpdateRule("row_wise_adagrad", 1), cpu_ffi.MAX_SUMMED_DIM)
    assert not cpu_ffi.possible(mesh, UpdateRule("row_wise_adagrad", 1), cpu_ffi.MAX_SUMMED_DIM + 1)


def test_the_vendored_header_is_that_of_the_tested_jaxlib():
    root = Path(__file__).resolve().parents[2]
    (tested,) = re.findall(r"^jaxlib==(\S+)$", (root / ".ci" / "constraints.txt").read_text(), re.MULTILINE)
    assert f"jaxlib {tested} " in (root / "pyx" / "vendor" / "README.md").read_text()
    if jaxlib.__version__ != tested:
        pytest.skip(f"jaxlib {jaxlib.__version__} is installed, the vendored header is that of {tested}")
    header = "xla/ffi/api/c_api.h"
    assert (root / "pyx" / "vendor" / header).read_bytes() == (Path(jax.ffi.include_dir()) / header).read_bytes()
