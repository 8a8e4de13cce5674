"""The optimizer step as a kernel for a TPU's TensorCore, which fetches lines by DMA, updates them and writes them back.

XLA's gather and scatter stage all lines of a step; this kernel has a few hundred on chip at a time. While block i is
computed, the lines of block i + 1 are being fetched and those of block i - 1 written back. Line numbers are unique, so
no two blocks share a line. Pads are never fetched: the number of other lines is read at run time.

Issuing copies takes longer than their bytes. So the loop that starts those of a full block is unrolled, and
one wait counts the bytes of all of them. The compiler adds no bounds checks: ``partition.destinations`` has checked the
ids.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from penstock.model.updates import Ops, UpdateRule
from penstock.rows.bridge import line_arrays
from penstock.rows.bridge.line_arrays import Arrays
from penstock.rows.bridge.programs import Program, _fence, _rounded, sharded, spreading, updated
from penstock.rows.bridge.row_format import Line
from penstock.rows.bridge.sharding import LINES

Copies = list[Any]

# Lines per block; three blocks are on chip at a time. Tests set fewer: an interpreted DMA takes milliseconds.
BLOCK = LINES
# Lines whose copies one iteration starts.
UNROLLED = 8
# The interpret mode of kernels off a TPU. Tests set pltpu.InterpretParams(detect_races=True).
INTERPRET: Any = True
# Bytes of VMEM that the compiler gives a kernel, by the start of the kind of device; elsewhere as on the smallest.
VMEM_BYTES = {"TPU v6": 32 << 20, "TPU7": 32 << 20, "": 16 << 20}


def fits(line: Line, device_kind: str) -> bool:
    """Return whether the kernel's blocks of lines fit into VMEM, with a sixteenth of it to spare.

    Two blocks of lines are being fetched and two written back, two of gradients arrive, and the update's own values
    take the size of two planes. The compiler's count for Adam at dim 2048 on a v4 is 0.03 MiB larger.
    """
    strips, plane = sum(line.groups), line.width // line.strip
    needed = BLOCK * line.strip * 4 * (4 * strips + 4 * plane)
    limit = next(limit for kind, limit in VMEM_BYTES.items() if device_kind.startswith(kind))
    return needed <= limit * 15 // 16


def canary_lines(line: Line) -> int:
    """Return the lines of a canary's step: three blocks."""
    return 3 * BLOCK


@lru_cache(maxsize=256)
def apply(mesh: Mesh, rule: UpdateRule, line: Line, compact: bool = False) -> Program:
    """Return a program with the arguments of ``programs.apply`` and bit-identical results."""
    local = local_apply(mesh, rule, line)
    step = spreading(line, local) if compact else local
    return sharded(mesh, step, num_row_args=4 + compact, num_scalars=3, donate=True)


def local_apply(mesh: Mesh, rule: UpdateRule, line: Line) -> Callable[..., Any]:
    """Return the function of ``apply`` for one device's part of its arguments."""
    interpret = False if mesh.devices.flat[0].platform == "tpu" else INTERPRET

    def local(table: Arrays, lines: Any, words: Any, counts: Any, lr: Any, zero: Any, key: Any) -> Any:
        del key  # only bfloat16 tables use it, and this kernel does not update those
        step = _kernel(rule, line, table, lines.shape[1], interpret)
        numbers = jnp.stack([jax.lax.bitcast_convert_type(lr, jnp.int32), zero])
        if not interpret:  # else XLA parks a small array in VMEM around a kernel in a user's step: two copies of it
            table = tuple(pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in table)
        return tuple(step(lines[0], counts, numbers, words[0], *table)), _fence()

    return local


def _kernel(rule: UpdateRule, line: Line, table: Arrays, num_lines: int, interpret: Any) -> Callable[..., Any]:
    """Return the kernel: (lines i32[K], count i32[1], (lr, zero) i32[2], words i32[K,width], *table) → table."""
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    buffers = [pltpu.VMEM((2, BLOCK, strips, line.strip), jnp.float32) for strips in line.groups]
    return pl.pallas_call(
        partial(_body, rule, line),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_lines // BLOCK,),
            in_specs=[pl.BlockSpec((BLOCK, line.width), lambda block, *_: (block, 0)), *[anywhere] * len(table)],
            out_specs=[anywhere] * len(table),
            scratch_shapes=[*buffers, *buffers, *[pltpu.SemaphoreType.DMA((2,))] * 2],
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in table],
        input_output_aliases={4 + number: number for number in range(len(table))},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        interpret=interpret,
        name=f"penstock_{rule.algorithm}",
    )


def _body(rule: UpdateRule, line: Line, lines: Any, count: Any, numbers: Any, words: Any, *refs: Any) -> None:
    num_arrays = len(line.groups)
    rest = iter(refs)
    _, table, fetched, updated_ = (tuple(islice(rest, num_arrays)) for _ in range(4))
    arrived, gone = rest
    block, last = pl.program_id(0), pl.num_programs(0) - 1
    here, there = jax.lax.rem(block, 2), jax.lax.rem(block + 1, 2)

    def copies_in(buffer: Any, number: Any, place: Any) -> Copies:
        """Return the copies of a line, or of a block of them, to a place in a buffer."""
        pairs = zip(table, fetched, strict=True)
        return [pltpu.make_async_copy(src.at[number], dst.at[buffer, place], arrived.at[buffer]) for src, dst in pairs]

    def copies_out(buffer: Any, number: Any, place: Any) -> Copies:
        pairs = zip(updated_, table, strict=True)
        return [pltpu.make_async_copy(src.at[buffer, place], dst.at[number], gone.at[buffer]) for src, dst in pairs]

    def by_fill(block: Any, full: Callable[[], None], each: Callable[[Any, None], None]) -> None:
        """Call ``full`` for a block without pads; else ``each`` with the place of every line that is not one."""
        num_lines = count[0] - block * BLOCK
        if table[0].shape[0] >= BLOCK:  # a smaller table fills no block
            pl.when(num_lines >= BLOCK)(full)
            num_lines = jnp.where(num_lines >= BLOCK, 0, num_lines)
        jax.lax.fori_loop(0, jnp.maximum(num_lines, 0), each, None)

    def start(block: Any, buffer: Any, copies: Callable[..., Copies]) -> None:
        def start_line(place: Any, _: None) -> None:
            for copy in copies(buffer, lines[block * BLOCK + place], place):
                copy.start()

        by_fill(block, lambda: jax.lax.fori_loop(0, BLOCK, start_line, None, unroll=UNROLLED), start_line)

    def wait(block: Any, buffer: Any, copies: Callable[..., Copies]) -> None:
        def wait_for_line(place: Any, _: None) -> None:
            for copy in copies(buffer, 0, place):  # a wait counts bytes, whatever the line
                copy.wait()

        def full() -> None:
            for copy in copies(buffer, pl.ds(0, BLOCK), pl.ds(0, BLOCK)):
                copy.wait()

        by_fill(block, full, wait_for_line)

    pl.when(block == 0)(lambda: start(block, here, copies_in))
    pl.when(block < last)(lambda: start(block + 1, there, copies_in))
    wait(block, here, copies_in)
    pl.when(block > 1)(lambda: wait(block - 2, here, copies_out))
    planes = line_arrays.join_strips(line, [rows[here, :, strip] for rows in fetched for strip in range(rows.shape[2])])
    ops = Ops(jnp, partial(_rounded, numbers[1]))
    lr = jax.lax.bitcast_convert_type(numbers[0], jnp.float32)
    new = iter(
        line_arrays.strips_of(line, updated(ops, rule, line, lr, line_arrays.received(line, words[...]), planes))
    )
    for rows in updated_:
        for strip in range(rows.shape[2]):
            rows[here, :, strip] = next(new)
    start(block, here, copies_out)
    pl.when((block == last) & (block > 0))(lambda: wait(block - 1, there, copies_out))
    pl.when(block == last)(lambda: wait(block, here, copies_out))
