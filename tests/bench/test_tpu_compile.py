"""What TPU's real compiler makes of the steps; and the parts of the matrix that need no compiler."""

import importlib.util
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from penstock.bench.tpu import in_place, step_cases
from penstock.bench.tpu import matrix as m
from penstock.bench.tpu.bundles import bundles_per_line
from penstock.bench.tpu.moved_bytes import dma_bytes, hbm_bytes
from penstock.bench.tpu.results_page import bundles_in
from penstock.bridge import program_cache
from penstock.bridge.sharding import Layout

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


# A write of SGD's lines as XLA compiles it: in place, through a bitcast to a matrix.
WRITE = """HloModule jit_local, is_scheduled=true
%scattered (t: f32[8192,128], n: s32[64], v: f32[64,128]) -> f32[8192,128] {
  %t = f32[8192,128]{1,0:T(8,128)} parameter(0)
  ROOT %s = f32[8192,128]{1,0:T(8,128)} scatter(%t, %n, %v), unique_indices=true, to_apply=%region
}
%converted (t: f32[8192,1,128]) -> f32[8192,128] {
  %c = f32[8192,1,128]{2,0,1:T(8,128)} copy(%t)
  ROOT %b = f32[8192,128]{1,0:T(8,128)} bitcast(%c)
}
%body (carried: (f32[8192,1,128])) -> (f32[8192,1,128]) {
  %carried = (f32[8192,1,128]{2,1,0:T(1,128)}) parameter(0)
  ROOT %same = (f32[8192,1,128]{2,1,0:T(1,128)}) tuple(%carried)
}
%ends (tested: (f32[8192,1,128])) -> pred[] {
  ROOT %end = pred[] constant(true)
}
ENTRY %main (table: f32[8192,1,128], lines: s32[64]) -> f32[8192,1,128] {
  %table = f32[8192,1,128]{2,1,0:T(1,128)} parameter(0)
  %matrix = f32[8192,128]{1,0:T(8,128)} bitcast(%table)
  %new = f32[8192,128]{1,0:T(8,128)} fusion(%matrix, %lines, %values), kind=kCustom, calls=%scattered
  %by_kernel = (f32[8192,1,128]{2,1,0}) custom-call(%lines, %table), output_to_operand_aliasing={{0}: (1, {})}
  %looped = (f32[8192,1,128]{2,1,0:T(1,128)}) while(%by_kernel), condition=%ends, body=%body
  ROOT %out = f32[8192,1,128]{2,1,0:T(1,128)} bitcast(%new)
}
"""
MATRIX = "%matrix = f32[8192,128]{1,0:T(8,128)} bitcast(%table)"
ON_CHIP = "%matrix = f32[8192,128]{1,0:T(8,128)S(1)} copy-done(%started)"
HALF = "%half = f32[4096,128]{1,0} add(%table)\n  %matrix = f32[8192,128]{1,0} bitcast(%half)"
# Copy → the text that it replaces, the replacement, and the kind and the place that the fault then names.
COPIES = {
    "a fusion": ("bitcast(%table)", "fusion(%table), calls=%converted", "fusion %matrix puts", "into HBM"),
    "in a loop": ("tuple(%carried)", "copy(%carried)", "copy %same puts", "into HBM"),
    "a kernel": (", output_to_operand_aliasing={{0}: (1, {})}", "", "custom-call %by_kernel puts", "into HBM"),
    "to VMEM": (MATRIX, ON_CHIP, "copy-done %matrix puts", "into memory space 1"),
    "half a table": (MATRIX, HALF, "add %half puts", "2097152 bytes, into HBM"),
}


# The same, as a fusion in a fusion; and one that updates a matrix that the outer one computes.
NESTED = """%outer (t: f32[8192,128], n: s32[64], v: f32[64,128]) -> f32[8192,128] {
  %t = f32[8192,128]{1,0:T(8,128)} parameter(0)
  %n = s32[64]{0:T(128)} parameter(1)
  %v = f32[64,128]{1,0:T(8,128)} parameter(2)
  ROOT %inner = f32[8192,128]{1,0:T(8,128)} fusion(%t, %n, %v), kind=kCustom, calls=%scattered
}
ENTRY %main"""
OF_A_RESULT = NESTED.replace("fusion(%t", "fusion(%negated").replace(
    "  ROOT", "  %negated = f32[8192,128]{1,0:T(8,128)} negate(%t)\n  ROOT"
)


def checked(text, is_read=False, temporary=0):
    layout = Layout("t", 8192, 128, 0, 1, False, 128)
    memory = SimpleNamespace(alias_size_in_bytes=0 if is_read else layout.nbytes, temp_size_in_bytes=temporary)
    program = SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: text)
    return in_place.check(layout, program, 1 << 20, 64 * 512, is_read)


def test_a_write_in_place_has_no_faults_and_much_temporary_memory_is_one():
    assert checked(WRITE) == []
    assert checked(WRITE, temporary=2 << 20) == ["needs 2097152 bytes in addition to the table, more than 1048576"]


def test_an_update_in_place_may_be_a_fusion_in_a_fusion_but_not_of_a_result():
    program = WRITE.replace("%values), kind=kCustom, calls=%scattered", "%values), kind=kCustom, calls=%outer")
    nested, of_a_result = (program.replace("ENTRY %main", outer) for outer in (NESTED, OF_A_RESULT))
    assert checked(nested) == []
    assert len(checked(of_a_result)) == 1


@pytest.mark.parametrize("copy", COPIES)
def test_a_result_of_the_size_of_a_table_is_found_whatever_makes_it(copy):
    before, after, kind, place = COPIES[copy]
    assert WRITE.count(before) == 1
    for is_read in (False, True):
        (fault,) = checked(WRITE.replace(before, after), is_read)
        assert fault.startswith(f"copies a table: {kind} f32[")
        assert fault.endswith(place)


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
from penstock.bridge import sharding

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
    from penstock.bridge.mesh_selection import make_mesh
    from penstock.bridge.program_cache import jitted, shapes
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
    assert "that it pins: 1 programs." in head
    assert "a program has 4,194,304 rows over all chips and 4,096 lines per chip" in head
    assert last == "| v5e | Adam | 128 | pallas | 3,588 | 1.00 | 2.00 | 34.0 | 0.00 MB | 1.0 s |"


def test_the_kept_matrix_holds_every_case_within_its_bound():
    page = Path(__file__).parents[2] / "bench" / "results" / "tpu-matrix.md"
    rows = page.read_text().partition("|---")[2].splitlines()[1:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept = [(generation, optimizer, int(dim), variant) for generation, optimizer, dim, variant, *_ in cells]
    names = [(c.generation, c.title, c.dim, c.variant) for c in m.cases(small=False)]
    assert sorted(kept) == sorted(names)
    for _, name, dim, variant, moved, ratio, *_ in cells:
        by_xla = variant == "xla" or ", write" in name
        beyond = by_xla and (int(dim) > m.MOST_DIM_BY_XLA or " lines" in name)
        in_hbm = ", write" in name or step_cases.ROW_WISE in name
        if ", compact" in name or ", read" in name:  # its bytes depend on how many lines the rows are in
            assert (moved, ratio) == ("", "")
        elif not beyond:
            assert float(ratio) <= (m.MOST_IN_HBM if in_hbm else m.MOST_BY_XLA if by_xla else m.MOST_BY_KERNEL)


def test_the_sample_is_a_part_of_the_grid_and_has_every_generation_and_form_of_rows():
    small, whole = set(m.cases(small=True)), list(m.cases(small=False))
    assert len(set(whole)) == len(whole)
    assert small < set(whole)
    assert {case.generation for case in small} == set(m.TOPOLOGIES)
    forms = {("read", False), *product(("apply", "write"), (False, True))}
    assert {(case.program, case.compact) for case in small} == forms
    odd = {(case.program, case.chips) for case in small if case.rows != step_cases.ROWS}
    assert odd == set(product(("read", "write", "apply"), (1, 3, 8)))


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
