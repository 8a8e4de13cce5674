"""What the check of programs compiled for a GPU finds. The compiler itself runs in `make gpu-aot`."""

from types import SimpleNamespace

import pytest

from penstock.bench.gpu import compiled_steps as steps
from penstock.bridge.sharding import Layout

STEP_OF = steps.GpuCase("SGD", 32)
LAYOUT = Layout("t", 10_000, 32, 1, 1, False)
ROWS = LAYOUT.lines_per_device
STEP = f"""HloModule jit_local
%inside (p: f32[8,2,32]) -> f32[8,2,32] {{
  ROOT %c = f32[8,2,32]{{2,1,0}} copy(%p)
}}
%scatter (t: f32[{ROWS},2,32], new: f32[8,2,32]) -> f32[{ROWS},2,32] {{
  %t = f32[{ROWS},2,32]{{2,1,0}} parameter(0)
  %new = f32[8,2,32]{{2,1,0}} parameter(1)
  ROOT %u = f32[{ROWS},2,32]{{2,1,0}} scatter(%t, %lines, %new), to_apply=%region
}}
ENTRY %main (table: f32[{ROWS},2,32], words: s32[8,32]) -> f32[{ROWS},2,32] {{
  %table = f32[{ROWS},2,32]{{2,1,0}} parameter(0)
  %words = s32[8,32]{{1,0}} parameter(1)
  %new = f32[8,2,32]{{2,1,0}} fusion(%table, %words), kind=kLoop, calls=%inside
  %table_after = f32[{ROWS},2,32]{{2,1,0}} fusion(%table, %new), kind=kInput, calls=%scatter
  %fence = s32[1]{{0}} copy(%zero)
  ROOT %both = (f32[{ROWS},2,32]{{2,1,0}}, s32[1]{{0}}) tuple(%table_after, %fence)
}}
"""
PTX = "ld.global.nc.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];\nst.global.v4.f32 [%rd2], {%f1, %f2, %f3, %f4};\n"


def program(text=STEP, alias=LAYOUT.nbytes, temporary=0):
    memory = SimpleNamespace(alias_size_in_bytes=alias, temp_size_in_bytes=temporary)
    return SimpleNamespace(memory_analysis=lambda: memory, as_text=lambda: text)


def test_a_step_of_two_kernels_in_place_without_atomics_has_no_faults():
    assert steps.kernels(STEP) == ["fusion", "fusion"]
    assert list(steps.faults(STEP_OF, LAYOUT, program(), PTX)) == []


@pytest.mark.parametrize(
    ("compiled", "ptx", "fault"),
    [
        (program(alias=4), PTX, f"aliases 4 bytes of a table of {LAYOUT.nbytes}"),
        (program(temporary=1 << 40), PTX, "needs 1099511627776 bytes in addition to the table, more than"),
        (
            program(STEP.replace("calls=%scatter", "calls=%inside")),
            PTX,
            "copies a table: fusion %table_after puts",
        ),
        (program(STEP.replace("  %fence", 2 * "  %x = s32[2]{0} copy(%y)\n" + "  %fence")), PTX, "launches 4 kernels"),
        (program(), PTX + "@%p1 red.global.add.f32 [%rd1], %f1;\n", "has an atomic operation, red.global.add.f32"),
        (program(), PTX + "  atom.global.cas.b32 %r1, [%rd1];\n", "has an atomic operation, atom.global.cas.b32"),
        (program(), "", "has no PTX"),
    ],
)
def test_each_fault_is_found(compiled, ptx, fault):
    (only,) = steps.faults(STEP_OF, LAYOUT, compiled, ptx)
    assert only.startswith(fault)


def test_the_sample_and_the_whole_cover_the_optimizers_and_writes():
    small, whole = set(steps.cases(small=True)), set(steps.cases(small=False))
    assert small < whole
    assert {case.optimizer for case in whole} == set(steps.optimizers())
    assert {case.program for case in small} == {"apply", "write", "read", steps.OWN}
    assert {case.program for case in small if case.rows == steps.PLACES} == {"apply", "write", "read"}


OWN_STEP = steps.GpuCase("SGD", 32, steps.OWN)
GATHERED = f"""HloModule jit_trained
%read (param_0.1: f32[{ROWS},2,32], param_1.2: s32[8]) -> f32[8,32] {{
  %param_0.1 = f32[{ROWS},2,32]{{2,1,0}} parameter(0)
  %param_1.2 = s32[8]{{0}} parameter(1)
  %gather.1 = f32[8,2,32]{{2,1,0}} gather(%param_0.1, %param_1.2), slice_sizes={{1,2,32}}
  ROOT %s = f32[8,1,32]{{2,1,0}} slice(%gather.1), slice={{[0:8], [0:1], [0:32]}}
}}
%scatter (t: f32[{ROWS},2,32], new: f32[8,2,32]) -> f32[{ROWS},2,32] {{
  %t = f32[{ROWS},2,32]{{2,1,0}} parameter(0)
  %new = f32[8,2,32]{{2,1,0}} parameter(1)
  ROOT %u = f32[{ROWS},2,32]{{2,1,0}} scatter(%t, %lines, %new), to_apply=%region
}}
ENTRY %main (table: f32[{ROWS},2,32], lines: s32[8]) -> f32[{ROWS},2,32] {{
  %table = f32[{ROWS},2,32]{{2,1,0}} parameter(0)
  %lines = s32[8]{{0}} parameter(1)
  %weights = f32[8,1,32]{{2,1,0}} fusion(%table, %lines), kind=kLoop, calls=%read
  ROOT %after = f32[{ROWS},2,32]{{2,1,0}} fusion(%table, %weights), kind=kInput, calls=%scatter
}}
"""


def test_the_bytes_of_a_users_step_are_those_of_touched_lines_and_of_the_slices_that_kernels_read():
    lines, row, numbers = 6, 128, 8 * 4
    gathered = lines * row + numbers + 8 * row
    scattered = 8 * row + lines * 2 * row
    assert steps.moved_bytes(LAYOUT, GATHERED, lines) == gathered + scattered


def test_a_users_step_of_too_many_kernels_or_bytes_is_a_fault():
    more = "  %x = s32[2]{0} copy(%lines)\n"
    large = "  %y = f32[8000000]{0} copy(%lines)\n"
    assert list(steps.faults(OWN_STEP, LAYOUT, program(GATHERED), PTX)) == []
    (kernels,) = steps.faults(
        OWN_STEP, LAYOUT, program(GATHERED.replace("  ROOT %after", 11 * more + "  ROOT %after")), PTX
    )
    assert kernels.startswith("launches 13 kernels")
    faults = list(
        steps.faults(OWN_STEP, LAYOUT, program(GATHERED.replace("  ROOT %after", large + "  ROOT %after")), PTX)
    )
    assert any("times the least bytes, more than 4.0" in fault for fault in faults)
