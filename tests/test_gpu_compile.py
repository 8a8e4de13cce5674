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


def memory(alias=LAYOUT.nbytes, temporary=0):
    return SimpleNamespace(alias_size_in_bytes=alias, temp_size_in_bytes=temporary)


def test_a_step_of_two_kernels_in_place_without_atomics_has_no_faults():
    assert steps.kernels(STEP) == ["fusion", "fusion"]
    assert list(steps.faults(STEP_OF, LAYOUT, memory(), STEP, PTX)) == []


@pytest.mark.parametrize(
    ("found", "text", "ptx", "fault"),
    [
        (memory(alias=4), STEP, PTX, f"aliases 4 bytes of a table of {LAYOUT.nbytes}"),
        (memory(temporary=1 << 40), STEP, PTX, "needs 1099511627776 bytes in addition to the table, more than"),
        (memory(), STEP.replace("copy(%zero)", f"x(%z), f32[{ROWS},2,32]{{2,1,0}} copy(%t)"), PTX, "copies a table of"),
        (memory(), STEP.replace("  %fence", 2 * "  %x = s32[2]{0} copy(%y)\n" + "  %fence"), PTX, "launches 4 kernels"),
        (memory(), STEP, PTX + "@%p1 red.global.add.f32 [%rd1], %f1;\n", "has an atomic operation, red.global.add.f32"),
        (memory(), STEP, PTX + "  atom.global.cas.b32 %r1, [%rd1];\n", "has an atomic operation, atom.global.cas.b32"),
        (memory(), STEP, "", "has no PTX"),
    ],
)
def test_each_fault_is_found(found, text, ptx, fault):
    (only,) = steps.faults(STEP_OF, LAYOUT, found, text, ptx)
    assert only.startswith(fault)


def test_the_sample_and_the_whole_cover_the_optimizers_and_writes():
    small, whole = set(steps.cases(small=True)), set(steps.cases(small=False))
    assert small < whole
    assert {case.optimizer for case in whole} == set(steps.optimizers())
    assert {case.program for case in small} == {"apply", "write", "read", steps.OWN}
    assert {case.program for case in small if case.rows == steps.PLACES} == {"apply", "write", "read"}
