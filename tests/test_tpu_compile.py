"""What TPU's real compiler makes of the steps; and the parts of the matrix that need no compiler."""

import importlib.util
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from penstock.bench.tpu import matrix as m
from penstock.bench.tpu.bundles import bundles_per_line
from penstock.bench.tpu.moved_bytes import dma_bytes, hbm_bytes
from penstock.bench.tpu.results_page import bundles_in

HLO = """HloModule jit_local
%fused (p: f32[8,2,128]) -> f32[8,2,128] {
  %inside = f32[8,2,128]{2,1,0:T(2,128)} add(%p, %p)
}
ENTRY %main (table: f32[1000,2,128], lines: s32[1,4096]) -> f32[1000,2,128] {
  %table = f32[1000,2,128]{2,1,0:T(2,128)} parameter(0)
  %lines = s32[1,4096]{1,0:T(1,128)} parameter(1)
  %near = s32[4096]{0:T(1024)S(1)} fusion(%lines), kind=kLoop, calls=%c
  %taken = f32[4096,2,128]{2,1,0:T(2,128)S(1)} fusion(%table, %near), kind=kCustom, calls=%g
  %sent-start = (f32[4096,128]{1,0:T(8,128)S(1)}, f32[4096,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%grads)
  %sent = f32[4096,128]{1,0:T(8,128)S(1)} copy-done(%sent-start)
  ROOT %new = f32[1000,2,128]{2,1,0:T(2,128)} fusion(%table, %near, %taken), kind=kCustom, calls=%s
}
"""


def test_bytes_moved_are_those_in_hbm_and_of_a_table_the_lines_touched():
    line = 2 * 128 * 4
    numbers, gradient = 4, 128 * 4
    assert hbm_bytes(HLO, {(1000, 2, 128): (4096, 2, 128)}) == 4096 * (3 * line + gradient + numbers)


def test_a_copy_of_a_table_is_found(monkeypatch):
    from penstock.bridge.sharding import Layout

    layout = Layout("t", 4_194_304, 128, 1, 4, False, 128)

    class Memory:
        alias_size_in_bytes, temp_size_in_bytes = layout.nbytes // 4, 0

    case = m.Case("v5e", "Adagrad", 128, "pallas")
    shape = (layout.lines_per_device, *layout.shapes[0][1:])
    copied = f"  %c = f32[{layout.lines_per_device},{shape[1]},128]{{2,1,0:T(2,128)}} copy(%table)"
    assert list(m.faults(case, layout, Memory, "")) == []
    assert list(m.faults(case, layout, Memory, copied)) == [f"copies a table of {shape}"]
    Memory.temp_size_in_bytes = 2 << 20
    assert "in addition to the table" in next(m.faults(case, layout, Memory, ""))


def test_the_kernel_moves_every_line_once_in_and_once_out(mesh_of):
    from penstock.bridge.device_tables import make_mesh
    from penstock.bridge.program_cache import jitted, shapes
    from penstock.bridge.sharding import Layout
    from penstock.updates import UpdateRule

    mesh, rule = make_mesh(mesh_of(1)), UpdateRule("adam", 2)
    layout = Layout("t", 5000, 128, 2, 1, False, 128)
    traced = jitted("apply", mesh, rule, layout.line, "pallas", layout.lines_per_device)
    jaxpr = traced.trace(*shapes("apply", mesh, layout.line, layout.lines_per_device, 128)).jaxpr
    assert dma_bytes(jaxpr) == 2 * 3 * 128 * 4


def test_the_written_table_replaces_an_earlier_one(tmp_path):
    case = m.Case("v5e", "Adam", 128, "pallas")
    page = tmp_path / "page.md"
    page.write_text("old")
    m.write(page, [m.Result(case, 0, 3588.0, 3588.0, 1794.0, 1.0)], {case: 34.04})
    head, _, last = page.read_text().rstrip("\n").rpartition("\n")
    assert "4,194,304 rows over all chips\nand, unless a row says otherwise, 4,096 lines per chip" in head
    assert last == "| v5e | Adam | 128 | pallas | 3,588 | 1.00 | 2.00 | 34.0 | 0.00 MB | 1.0 s |"


def test_the_kept_matrix_holds_every_case_within_its_bound():
    page = Path(__file__).parents[1] / "bench" / "results" / "tpu-matrix.md"
    rows = page.read_text().partition("|---")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept = [(generation, optimizer, int(dim), variant) for generation, optimizer, dim, variant, *_ in cells]
    names = [(c.generation, c.title, c.dim, c.variant) for c in m.cases(small=False)]
    assert sorted(kept) == sorted(names)
    for _, what, dim, variant, _, ratio, *_ in cells:
        by_xla = variant == "xla" or ", write" in what
        beyond = by_xla and (int(dim) > m.MOST_DIM_BY_XLA or " lines" in what)
        if ", compact" in what:  # its bytes depend on how many lines the rows are in
            assert ratio == ""
        elif not beyond:
            assert float(ratio) <= (m.MOST_BY_XLA if by_xla else m.MOST_BY_KERNEL)


def test_the_sample_is_a_part_of_the_grid_and_has_every_generation_and_form_of_rows():
    small, whole = set(m.cases(small=True)), list(m.cases(small=False))
    assert len(set(whole)) == len(whole)
    assert small < set(whole)
    assert {case.generation for case in small} == set(m.TOPOLOGIES)
    assert {(case.program, case.compact) for case in small} == set(product(("apply", "write"), (False, True)))


LISTING = """
     0   :  { %1 = smov 0 }
   0x1 LB: > { %2 = sadd 1 }
   0x2   : > { %3 = dma.hbm_to_vmem }
   0x3 LB: >> { %4 = dma.hbm_to_vmem }
   0x4   : > { %5 = sbr.rel (!%p) target = $region1 }
   0x5   : >> { %6 = dma.hbm_to_vmem }
   0x6 PF: > { %7 = vmul }
   0x7 LB: >> { %8 = dma.hbm_to_vmem }
   0x8 PF: > { %9 = vadd }
   0x9 LB: >> { %10 = dma.vmem_to_hbm ;;  %11 = dma.vmem_to_hbm }
   0xa PF: > { %12 = sbr.rel (!%p) target = $region9 }
   0xb LE:  { %13 = vsyncpa }
"""


def test_bundles_are_those_of_a_full_block():
    # 5 around the loops that copy; 3 for each two lines that arrive, 1 for each two that leave
    assert bundles_per_line(LISTING, block=8, unrolled=2) == (5 + 4 * 3 + 4 * 1) / 8
    with pytest.raises(ValueError, match=r"no loop starts 4 copies by dma\.hbm_to_vmem"):
        bundles_per_line(LISTING, block=8, unrolled=4)


def test_the_kernel_needs_at_most_24_bundles_per_line_of_adagrad(tmp_path):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'penstock[tpu-aot]', or make tpu-small")
    results = tmp_path / "results.jsonl"
    module = "penstock.bench.tpu.bundles"
    command = [sys.executable, "-m", module, str(results), "--only", "v5e Adagrad 128"]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    ((case, found),) = bundles_in(results).items()
    assert (case.generation, case.optimizer, case.dim) == ("v5e", "Adagrad", 128)
    assert 10 < found <= 24


@pytest.mark.parametrize("command", ["matrix --small", "functional_step --small", "exchanged_step", "cached_steps v5e"])
def test_a_sample_of_the_steps_compiles_for_every_generation_for_several_hosts_and_elsewhere(command):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'penstock[tpu-aot]', or make tpu-small")
    module, *words = command.split()
    command = [sys.executable, "-m", f"penstock.bench.tpu.{module}", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
