"""What the check of programs compiled for a GPU finds. The compiler itself runs in `make gpu-aot`."""

from types import SimpleNamespace

import pytest

from penstock.bench.gpu import compiled_steps as steps
from penstock.rows.bridge.sharding import Layout

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
def test_each_fault_of_a_step_is_found_and_no_other(compiled, ptx, fault):
    assert list(steps.faults(STEP_OF, LAYOUT, program(), PTX)) == []
    (only,) = steps.faults(STEP_OF, LAYOUT, compiled, ptx)
    assert only.startswith(fault)
