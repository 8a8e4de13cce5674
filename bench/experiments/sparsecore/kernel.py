"""The optimizer step as a kernel for a TPU's SparseCores. An experiment outside the package: no hardware has run it.

SparseCores are built for this: one instruction copies all lines of a list of numbers. Each of the n vector subcores
takes every n-th block of lines. While it computes block i, a few lanes at a time, the lines of block i + 1 are being
fetched and those of block i - 1 written back. Line numbers are unique, so no two blocks share a line. All pads have one
number, which the copies ignore; blocks of pads alone are skipped.

The vector units have neither ``pow`` (``possible``) nor a square root (software_sqrt.py). jax 0.10.2 knows SparseCores
of v5p, v6e and tpu7x. The tests compare the interpreted kernel with XLA's step, bit for bit; the interpreter runs the
subcores in sequence and copies at once, so it finds wrong indices but no races. Untested: that the hardware's indirect
copy skips the numbers that it should ignore, that waiting for such a copy ends, and that concurrent copies do not
collide. Once hardware has run it, ``apply`` can join ``penstock.bridge`` as a variant: it has the arguments of
``programs.apply`` there.

    python -m pytest -n0 bench/experiments/sparsecore       the kernel, interpreted, and its square root
    PYTHONPATH=build/tree build/tpu/bin/python bench/experiments/sparsecore/compile_steps.py
                                                            its steps, compiled by libtpu (make build/tpu/installed)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import Mesh

from penstock.bench.experiments.sparsecore.software_sqrt import root
from penstock.bridge.programs import Program, _fence, _rounded, sharded
from penstock.bridge.row_format import UNTOUCHED, Arrays, Line
from penstock.bridge.sharding import LINES
from penstock.updates import Ops, UpdateRule, update

# Blocks buffered per subcore: one being fetched, one being computed, one being written back.
BUFFERS = 3
# Bytes per block: three fit into the smallest memory of a subcore (v6e's 256 KiB) and leave a quarter free.
BLOCK_BYTES = 1 << 16
# The numbers of subcores and lanes that the interpreter simulates off a SparseCore; the subcores run in turn.
WORKERS, LANES = 3, 16
# The functions of jax.numpy that updates use; the units have neither sqrt nor pow (``possible``).
LANE_WISE: Any = SimpleNamespace(abs=jnp.abs, sqrt=root, where=jnp.where, zeros_like=jnp.zeros_like)
Rows = Callable[[Any, Any], Any]


def possible(rule: UpdateRule) -> bool:
    """Return whether the vector units support a rule: two rules need pow, except for one exponent each."""
    given = dict(rule.hyper)
    if rule.algorithm == "ftrl":
        return given.get("lr_power") == -0.5
    return rule.algorithm != "adagrad_momentum" or given.get("exponent") == 2


@lru_cache(maxsize=256)
def apply(mesh: Mesh, rule: UpdateRule, line: Line) -> Program:
    """Return a program with the arguments of ``programs.apply`` and, if interpreted, bit-identical results."""
    make = _on_sparsecores if mesh.devices.flat[0].platform == "tpu" else _interpreted

    def local(table: Arrays, lines: Any, words: Any, counts: Any, lr: Any, zero: Any, key: Any) -> Any:
        del key  # only bfloat16 tables use it, and this kernel does not update those
        pad = table[0].shape[0]
        scalars = jnp.stack([jax.lax.bitcast_convert_type(lr, jnp.int32), zero, counts[0]])
        step = make(_Work(rule, line), table, pad)
        return step(jnp.minimum(lines[0], pad), scalars, words[0]), _fence()

    return sharded(mesh, local, num_row_args=4, num_scalars=3, donate=True)


def block_of(line: Line) -> int:
    """Return how many lines a subcore processes at a time: a power of 2, so that it divides every bucket size."""
    line_bytes = 4 * (sum(line.groups) * line.strip + line.width)
    return min(LINES, 1 << (max(1, BLOCK_BYTES // line_bytes).bit_length() - 1))


def _on_sparsecores(work: _Work, table: Arrays, pad: int) -> Callable[..., Arrays]:
    """Return the kernel's step: (numbers i32[K], scalars i32[3], words i32[K,width]) → table."""
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes

    def rows(array: Any, numbers: Any) -> Any:
        return array.at[plsc.Indices(numbers, ignored_value=pad)]

    def body(*refs: Any) -> None:
        me = jax.lax.axis_index("subcore") * mesh.num_cores + jax.lax.axis_index("core")
        work.run(me, mesh.size, lanes, rows, *refs)

    def step(numbers: Any, scalars: Any, words: Any) -> Arrays:
        refs = [jax.new_ref(array) for array in table]
        kernel(numbers, jnp.repeat(scalars, lanes), words, *refs)
        return tuple(jax.freeze(ref) for ref in refs)

    kernel = pl.kernel(
        body,
        mesh=mesh,
        scratch_types=work.scratch(lanes),
        # All vectors are as long as the units' registers, so they need no layout pass.
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        name=f"penstock_sparse_{work.rule.algorithm}",
    )
    return step


def _interpreted(work: _Work, table: Arrays, pad: int) -> Callable[..., Arrays]:
    """Return the same step, interpreted. Pads lie beyond the table, where XLA's copies write nothing."""
    del pad
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)

    def body(numbers: Any, scalars: Any, words: Any, *refs: Any) -> None:
        inside = refs[len(table) :]  # the results, which the arguments are aliased to
        work.run(
            pl.program_id(0),
            WORKERS,
            LANES,
            lambda array, which: array.at[which[...]],
            *(numbers, scalars, words),
            *inside,
        )

    kernel = pl.pallas_call(
        body,
        grid_spec=pl.GridSpec(
            grid=(WORKERS,),
            in_specs=[anywhere] * (3 + len(table)),
            out_specs=[anywhere] * len(table),
            scratch_shapes=work.scratch(LANES),
        ),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in table],
        input_output_aliases={3 + number: number for number in range(len(table))},
        interpret=True,
    )
    return lambda numbers, scalars, words: tuple(kernel(numbers, jnp.repeat(scalars, LANES), words, *table))


class _Work:
    """The work of one subcore on a table of a given line format, by one rule."""

    def __init__(self, rule: UpdateRule, line: Line) -> None:
        self.rule, self.line, self.block = rule, line, block_of(line)
        ends = accumulate(line.groups, initial=0)
        # For every strip of a line: its array, and its index there.
        self.strips = [(array, at) for array, (a, b) in enumerate(pairwise(ends)) for at in range(b - a)]

    def scratch(self, lanes: int) -> list[Any]:
        line, blocks = self.line, (BUFFERS, self.block)
        held = [pltpu.VMEM((*blocks, strips, line.strip), jnp.float32) for strips in line.groups]
        sent = [pltpu.VMEM(blocks, jnp.int32), pltpu.VMEM((*blocks, line.width), jnp.int32)]
        return [pltpu.VMEM((3 * lanes,), jnp.int32), *sent, *held, *[pltpu.SemaphoreType.DMA((BUFFERS,))] * 2]

    def run(
        self, me: Any, num_workers: int, lanes: int, rows: Rows, numbers: Any, scalars: Any, words: Any, *refs: Any
    ) -> None:
        """Process every block of the subcore ``me``, in turn.

        rows : (array, numbers in a buffer) → those lines of the array, as an operand of a copy
        refs : the arrays of the table, then ``scratch``
        """
        table, (mine, *scratch) = refs[: len(self.line.groups)], refs[len(self.line.groups) :]
        pltpu.sync_copy(scalars, mine)
        lr, zero, counts = (mine[pl.ds(part * lanes, lanes)] for part in range(3))
        ops, rate = Ops(LANE_WISE, partial(_rounded, zero)), jax.lax.bitcast_convert_type(lr, jnp.float32)
        num_blocks = jax.lax.div(counts[0] + (self.block - 1), jnp.int32(self.block))
        turns = jax.lax.div(num_blocks - me + (num_workers - 1), jnp.int32(num_workers))
        copies = _Copies(self.block, me, num_workers, rows, numbers, words, table, scratch)

        def one(turn: Any, _: None) -> None:
            # The next fetch reuses the buffer of the block before the last, whose write-back must have finished.
            pl.when(turn >= BUFFERS - 1)(partial(wait, copies.out, turn - (BUFFERS - 1)))
            pl.when(turn + 1 < turns)(lambda: copies.fetch(turn + 1))
            wait(copies.into, turn)
            self.update(ops, rate, lanes, copies.sent, copies.held, copies.buffer(turn))
            for copy in copies.out(turn):
                copy.start()

        pl.when(turns > 0)(lambda: copies.fetch(0))
        jax.lax.fori_loop(0, turns, one, None)
        for back in range(BUFFERS - 1, 0, -1):
            pl.when(turns >= back)(partial(wait, copies.out, turns - back))

    def update(self, ops: Ops, rate: Any, lanes: int, sent: Any, held: Sequence[Any], buffer: Any) -> None:
        """Update all lines of a buffer in place, one register at a time."""
        each, pieces = self.line.width // self.line.strip, self.line.strip // lanes

        def one(number: Any, _: None) -> None:
            place, piece = jax.lax.div(number, pieces), jax.lax.rem(number, pieces)
            at = pl.ds(pl.multiple_of(piece * lanes, lanes), lanes)
            for strip in range(each):
                words = sent[buffer, place, pl.ds(strip * self.line.strip + piece * lanes, lanes)]
                touched = words != UNTOUCHED
                grads = jax.lax.bitcast_convert_type(jnp.where(touched, words, 0), jnp.float32)
                where = self.strips[strip::each]
                before = [held[array][buffer, place, inside, at] for array, inside in where]
                weights, slots = update(ops, self.rule, rate, grads, before[0], tuple(before[1:]))
                for (array, inside), old, new in zip(where, before, (weights, *slots), strict=True):
                    held[array][buffer, place, inside, at] = jnp.where(touched, new, old)

        jax.lax.fori_loop(0, self.block * pieces, one, None)


class _Copies:
    """The copies of one subcore: turn t processes block ``t * num_workers + me`` in buffer ``t % BUFFERS``."""

    def __init__(
        self,
        block: int,
        me: Any,
        num_workers: int,
        rows: Rows,
        numbers: Any,
        words: Any,
        table: Sequence[Any],
        scratch: Sequence[Any],
    ) -> None:
        self.block, self.me, self.num_workers, self.rows = block, me, num_workers, rows
        self.numbers, self.words, self.table = numbers, words, table
        self.which, self.sent, *self.held, self.arrived, self.gone = scratch

    def buffer(self, turn: Any) -> Any:
        return jax.lax.rem(turn, BUFFERS)

    def at(self, turn: Any) -> Any:
        """Return the slice of a turn's block in the numbers and the words."""
        start = (turn * self.num_workers + self.me) * self.block
        return pl.ds(pl.multiple_of(start, self.block), self.block)

    def fetch(self, turn: Any) -> None:
        pltpu.sync_copy(self.numbers.at[self.at(turn)], self.which.at[self.buffer(turn)])
        for copy in self.into(turn):
            copy.start()

    def into(self, turn: Any) -> list[Any]:
        buffer = self.buffer(turn)
        pairs = [(self.words.at[self.at(turn)], self.sent.at[buffer])]
        pairs += [(lines, held) for held, lines in self.lines(buffer)]
        return [pltpu.make_async_copy(source, target, self.arrived.at[buffer]) for source, target in pairs]

    def out(self, turn: Any) -> list[Any]:
        buffer = self.buffer(turn)
        return [pltpu.make_async_copy(held, lines, self.gone.at[buffer]) for held, lines in self.lines(buffer)]

    def lines(self, buffer: Any) -> list[tuple[Any, Any]]:
        """Return pairs of a buffer's part for each array and the corresponding lines of the array."""
        pairs = zip(self.held, self.table, strict=True)
        return [(held.at[buffer], self.rows(array, self.which.at[buffer])) for held, array in pairs]


def wait(copies: Callable[[Any], list[Any]], turn: Any) -> None:
    for copy in copies(turn):
        copy.wait()
