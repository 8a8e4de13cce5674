"""What TPU's real compiler makes of the steps."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from penstock.bench.tpu.moved_bytes import dma_bytes
from penstock.bench.tpu.results_page import bundles_in
from penstock.rows.bridge import program_cache
from penstock.rows.bridge.sharding import Layout


@pytest.mark.parametrize("dim", [8, 32, 128])
def test_only_programs_that_xla_could_move_a_table_for_leave_their_rows_in_hbm(dim):
    mesh = SimpleNamespace(size=2, devices=np.array([SimpleNamespace(platform="tpu")]))

    def options(name, rows, row_slots=False, mesh=mesh):
        line = Layout("t", rows, dim, 1, 2, False, 128, row_slots=row_slots).line
        arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in line.arrays(-(-rows // line.group))]
        return program_cache.options(name, mesh, line, [arrays])

    fits, too_large = (256 << 20) // (8 * dim), (257 << 20) // (8 * dim)  # weights and slots on two devices
    for name in ("read", "write"):
        assert options(name, fits) == {"xla_msa_enable": False}
        assert options(name, too_large) == {}
    assert options("apply", fits) == {}
    assert options("apply", 10**6, row_slots=True) == {"xla_msa_enable": False}
    on_gpu = SimpleNamespace(size=2, devices=np.array([SimpleNamespace(platform="gpu")]))
    assert options("read", fits, mesh=on_gpu) == {}


WITHOUT_ROUNDING = """
from penstock.bench.tpu import matrix
from penstock.rows.bridge import sharding

matrix.prepare()
sharding.TILE_LINES = {tile_lines}
for optimizer, dim, rows, program, lines in [
    ("SGD", 24, 8_000_003, "read", 4096), ("SGD", 24, 8_000_003, "write", 4096), ("Adam", 24, 20_000_003, "read", 512)
]:
    case = matrix.Case("v5e", optimizer, dim, "pallas", program=program, lines=lines, rows=rows, chips=1)
    print(*matrix.Compiler().compile(case).failed, sep="; ")
"""


@pytest.mark.parametrize("tile_lines", [1, 8])
def test_tables_whose_lines_fill_no_tile_are_copied_and_the_check_finds_it(tile_lines):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'penstock[tpu-aot]', or make tpu-small")
    command = [sys.executable, "-c", WITHOUT_ROUNDING.format(tile_lines=tile_lines)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for line, num_bytes in zip(lines, (819_252_736, 819_252_736, 2_048_078_848), strict=True):
        assert (f"fusion %copy_bitcast_fusion puts f32[{num_bytes // 512},128], {num_bytes} bytes" in line) == (
            tile_lines == 1
        )
        assert ("in addition to the table" in line) == (tile_lines == 1)
        assert (line == "") == (tile_lines == 8)


def test_the_kernel_moves_every_line_once_in_and_once_out(mesh_of):
    from penstock.model.updates import UpdateRule
    from penstock.rows.bridge.mesh_selection import make_mesh
    from penstock.rows.bridge.program_cache import jitted, shapes

    mesh, rule = make_mesh(mesh_of(1)), UpdateRule("adam", 2)
    layout = Layout("t", 5000, 128, 2, 1, False, 128)
    traced = jitted("apply", mesh, rule, layout.line, "pallas", layout.lines_per_device)
    jaxpr = traced.trace(*shapes("apply", mesh, layout.line, layout.lines_per_device, 128)).jaxpr
    assert dma_bytes(jaxpr) == 2 * 3 * 128 * 4


def test_the_kernel_needs_at_most_24_bundles_per_line_of_adagrad(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'penstock[tpu-aot]', or make tpu-small")
    results = tmp_path / "results.jsonl"
    module = "penstock.bench.tpu.bundles"
    command = [sys.executable, "-m", module, str(results), "--only", "v5e Adagrad 128"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    ((case, actual),) = bundles_in(results).items()
    assert (case.generation, case.optimizer, case.dim) == ("v5e", "Adagrad", 128)
    assert 10 < actual <= 24


@pytest.mark.evidence
@pytest.mark.parametrize(
    "command", ["matrix --small", "functional_step --small", "row_steps --small", "exchanged_step", "cached_steps v5e"]
)
def test_a_sample_of_the_steps_compiles_for_every_generation_for_several_hosts_and_elsewhere(command):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'penstock[tpu-aot]', or make tpu-small")
    module, *words = command.split()
    command = [sys.executable, "-m", f"penstock.bench.tpu.{module}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
