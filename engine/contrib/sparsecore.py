"""The optimizer step as a kernel for a TPU's SparseCores, whose subcores fetch rows by number, update them and write
them back.

A line of a table, f32[strips, 128], is one run of floats. So an array of lines is also one of pieces of rows,
f32[lines * strips * 128 / p, p], in the linear layout of SparseCores; XLA makes it a bitcast. A row has one piece where
its dim divides a line, else several (``piece_of``). Only the pieces of the rows of a step move, not whole lines, and
the gradients are rows, too. Rows are unique, so no two blocks share one; rows of one line may be in any blocks, because
a piece is a whole number of the granules that memory moves (``fits``).

A slot of one number per row is an array of floats, of which a copy moves that of each row.

Each subcore processes every n-th block of rows. While it computes a block, the next one is being fetched and the one
before written back. Numbers of pads are negative, and copies skip them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import Mesh

from penstock.model.updates import Ops, UpdateRule, update
from penstock.rows.bridge import tensorcore
from penstock.rows.bridge.line_arrays import Arrays
from penstock.rows.bridge.programs import Program, _fence, _rounded, sharded
from penstock.rows.bridge.row_format import Line

# Floats of a register of a subcore, by the kind of device. Only these have SparseCores that run such kernels, and on a
# CPU the kernel is interpreted.
LANES = {"TPU v5": 8, "TPU v6 lite": 8, "TPU7x": 16, "cpu": 8}
# Rows of a block: as many as an indirect copy takes, and as three buffers of a subcore have room for.
BLOCK, BUFFER_BYTES = 128, 192 << 10
NUM_BUFFERS = 3
# Subcores of a chip's core, at most.
SUBCORES = 32
# The number of a pad.
PAD = -1
# The first jax that lowers square roots on a subcore.
HAS_ROOT = (0, 11)


def fits(line: Line, device_kind: str) -> bool:
    """Return whether the kernel can update such lines on a kind of device: rows share lines and fill registers."""
    lanes = LANES.get(device_kind, 0)
    return lanes > 0 and line.dim <= line.lanes and line.dim % lanes == 0


def piece_of(line: Line) -> int:
    """Return the floats of a piece: the largest power of two that divides the dim, and so a line."""
    return line.dim & -line.dim


def num_lists(line: Line) -> int:
    """Return the lists of numbers of a block: one for each piece of a plane, and one for slots of rows."""
    return sum(line.groups) * (line.dim // piece_of(line)) + line.row_slots


def block_of(line: Line) -> int:
    """Return the rows of a block."""
    rows = BLOCK
    numbers = 2 * line.dim + line.num_slots * (1 if line.row_slots else line.dim) + num_lists(line)
    while NUM_BUFFERS * rows * 4 * numbers > BUFFER_BYTES:
        rows //= 2
    return rows


def canary_lines(line: Line) -> int:
    """Return the lines of a canary's step, half of whose rows are touched: several blocks for each subcore.

    Their rows fill lines, as those of any step do.
    """
    lines = -(-3 * NUM_BUFFERS * SUBCORES * block_of(line) // line.group)
    return -(-lines // line.lanes) * line.lanes


@lru_cache(maxsize=256)
def apply(mesh: Mesh, rule: UpdateRule, line: Line) -> Program:
    """Return the program of a step:

    (table, rows i32[n,K], words i32[n,K*dim/128,128], counts i32[n], lr f32[], zero i32[], key u32[]) → (table, fence)
    rows : numbers of rows on each device, unique; beyond ``counts`` pads
    """
    return sharded(mesh, local_apply(mesh, rule, line), num_row_args=4, num_scalars=3, donate=True)


def local_apply(mesh: Mesh, rule: UpdateRule, line: Line) -> Callable[..., Any]:
    """Return the function of ``apply`` for one device's part of its arguments."""
    device = mesh.devices.flat[0]
    run = _on_subcores if device.platform == "tpu" else _interpreted
    lanes = LANES[device.device_kind]

    def local(table: Arrays, rows: Any, words: Any, counts: Any, lr: Any, zero: Any, key: Any) -> Any:
        del key  # only bfloat16 tables use it, and this kernel does not update those
        size = rows.shape[1]
        numbers = jnp.where(jnp.arange(size) < counts[0], rows[0], PAD)
        scalars = [jnp.broadcast_to(number, (lanes,)) for number in (counts[0], lr, zero)]
        parts = [array.reshape(-1, piece_of(line)) if array.ndim > 1 else array for array in table]
        parts = run(rule, line, lanes, numbers, words[0].reshape(size, line.dim), *scalars, *parts)
        return tuple(part.reshape(array.shape) for part, array in zip(parts, table, strict=True)), _fence()

    return local


def _scratch(line: Line, lanes: int) -> list[Any]:
    """Return the scratch of a subcore, in the order in which ``_body`` takes it."""
    planes, block, piece = sum(line.groups), block_of(line), piece_of(line)
    words = pltpu.VMEM((NUM_BUFFERS, block, line.dim), jnp.int32)
    rows = pltpu.VMEM((NUM_BUFFERS, line.dim // piece, block, piece), jnp.float32)
    row_slots = [pltpu.VMEM((NUM_BUFFERS, block), jnp.float32)] * (1 + line.num_slots - planes)
    of_scalars = [pltpu.VMEM((lanes,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32)]
    numbers = pltpu.VMEM((NUM_BUFFERS * num_lists(line), block), jnp.int32)
    return [numbers, *of_scalars, words, *[rows] * planes, *row_slots, *[pltpu.SemaphoreType.DMA((NUM_BUFFERS,))] * 2]


def _on_subcores(rule: UpdateRule, line: Line, lanes: int, *arguments: Any) -> list[Any]:
    """Run the kernel on all subcores of the SparseCores of a chip's core. Returns the table."""
    subcores = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def body(*refs: Any) -> None:
        number = jax.lax.axis_index("subcore") * subcores.num_cores + jax.lax.axis_index("core")
        _body(rule, line, lanes, _indirect, number, subcores.size, refs)

    kernel = pl.kernel(
        body,
        mesh=subcores,
        out_type=(),
        scratch_types=_scratch(line, lanes),
        name=f"penstock_rows_{rule.algorithm}",
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=False, needs_layout_passes=False),
    )
    table = [jax.new_ref(part) for part in arguments[5:]]
    kernel(*arguments[:5], *table)
    return [jax.freeze(ref) for ref in table]


def _interpreted(rule: UpdateRule, line: Line, lanes: int, *arguments: Any) -> list[Any]:
    """Interpret the kernel as one subcore, which copies row by row. Returns the table."""
    parts = arguments[5:]
    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)

    def body(*refs: Any) -> None:
        _body(rule, line, lanes, _one_by_one, 0, 1, refs[:5] + refs[5 + len(parts) :])

    kernel = pl.pallas_call(
        body,
        in_specs=[anywhere] * len(arguments),
        out_specs=[anywhere] * len(parts),
        scratch_shapes=_scratch(line, lanes),
        out_shape=[jax.ShapeDtypeStruct(part.shape, part.dtype) for part in parts],
        input_output_aliases={5 + number: number for number in range(len(parts))},
        interpret=tensorcore.INTERPRET,
    )
    return list(kernel(*arguments))


def _body(
    rule: UpdateRule,
    line: Line,
    lanes: int,
    copy_rows: Callable[..., None],
    subcore: Any,
    num_subcores: int,
    refs: Sequence[Any],
) -> None:
    """Process every ``num_subcores``-th block of rows, from that of the number of the subcore on.

    copy_rows : ``_indirect`` or ``_one_by_one``
    """
    lists, block, piece = num_lists(line), block_of(line), piece_of(line)
    num_arrays, num_pieces = len(line.arrays(1)), line.dim // piece
    inputs, table, scratch = refs[:5], refs[5 : 5 + num_arrays], refs[5 + num_arrays :]
    numbers, words, *_ = inputs
    parts, *scalars = scratch[:4]
    words_here, *table_here = scratch[4:-2]
    arrived, gone = scratch[-2:]
    for source, target in zip(inputs[2:], scalars, strict=True):
        pltpu.sync_copy(source, target)
    count, lr, zero = (ref[...] for ref in scalars)
    ops = Ops(_namespace(), partial(_rounded, zero))
    # Of each plane: its array, and among the strips of a line there, its number and their count.
    strips = [(array, strip, size) for array, size in enumerate(line.groups) for strip in range(size)]
    # Of each list of numbers: the array that they are of, and where its pieces go: a plane's buffer, and a part of it.
    ends: list[tuple[int, int, tuple[int, ...]]] = [
        (array, plane, (piece_number,))
        for plane, (array, _, _) in enumerate(strips)
        for piece_number in range(num_pieces)
    ]
    ends += [(array, len(strips), ()) for array in range(len(line.groups), num_arrays)]
    num_blocks = jax.lax.div(count[0] + (block - 1), jnp.int32(block))
    num_turns = jax.lax.div(num_blocks + (num_subcores - 1), jnp.int32(num_subcores))

    def in_turn(turn: Any, work: Callable[[Any, Any], None]) -> None:
        """Call work with the subcore's block of a turn, and its buffer, if there is one."""
        number = turn * num_subcores + subcore
        pl.when((turn >= 0) & (number < num_blocks))(lambda: work(number, jax.lax.rem(turn, NUM_BUFFERS)))

    def copies(number: Any, buffer: Any, is_in: bool, act: Callable[[Any], None]) -> None:
        """Start the copies of a block, or wait for them: its gradients and rows on the way in, or its rows back."""
        if is_in:
            span = pl.ds(pl.multiple_of(number * block, block), block)
            act(pltpu.make_async_copy(words.at[span], words_here.at[buffer], arrived.at[buffer]))
        for list_number, (array, plane, place) in enumerate(ends):
            there, semaphore = parts.at[buffer * lists + list_number], (arrived if is_in else gone).at[buffer]
            copy_rows(table[array], there, table_here[plane].at[(buffer, *place)], semaphore, is_in, act)

    def fetch(number: Any, buffer: Any) -> None:
        span = pl.ds(pl.multiple_of(number * block, block), block)
        rows = buffer * lists + lists - 1  # the last list is that of the rows, until it is replaced
        pltpu.sync_copy(numbers.at[span], parts.at[rows])
        for first in range(0, block, lanes):
            few = pl.ds(first, lanes)
            row = parts[rows, few]
            of_line, inside = jax.lax.div(row, line.packed), jax.lax.rem(row, line.packed)
            for plane, (_, strip, size) in enumerate(strips):
                start = (of_line * size + strip) * (line.strip // piece) + inside * num_pieces
                for part in range(num_pieces):
                    parts[buffer * lists + plane * num_pieces + part, few] = jnp.where(row < 0, PAD, start + part)
        copies(number, buffer, True, lambda copy: copy.start())

    def compute(number: Any, buffer: Any) -> None:
        copies(number, buffer, True, lambda copy: copy.wait())

        def row(place: Any, _: None) -> None:
            firsts = range(0, line.dim, lanes)
            # Where a register of the row is, in the gradients and in the planes.
            registers = [(buffer, first // piece, place, pl.ds(first % piece, lanes)) for first in firsts]
            words_of_row = [words_here[buffer, place, pl.ds(first, lanes)] for first in firsts]
            grads = [jax.lax.bitcast_convert_type(word, jnp.float32) for word in words_of_row]
            if line.row_slots:
                whole_row(place, registers, grads)
                return
            for register, grad in zip(registers, grads, strict=True):
                weights, *slots = (rows[register] for rows in table_here)
                after, slots_after = update(ops, rule, lr, grad, weights, tuple(slots))
                for rows, new in zip(table_here, (after, *slots_after), strict=True):
                    rows[register] = new

        def whole_row(place: Any, registers: Sequence[Any], grads: Sequence[Any]) -> None:
            """Update a row whose slots are one number each, in a register with those of other rows."""
            rows, *slots_here = table_here
            lane = jax.lax.rem(place, lanes)
            beside = pl.ds(pl.multiple_of(place - lane, lanes), lanes)
            slots = tuple(_in_every_lane(slot[buffer, beside], lane) for slot in slots_here)
            row_ops = _RowOps(ops.xp, ops.rounded)
            for grad in grads:
                update(row_ops, rule, lr, grad, grad, slots)  # for the squares alone
            row_ops = row_ops.summed(line.dim, lanes)
            for register, grad in zip(registers, grads, strict=True):
                rows[register], slots_after = update(row_ops, rule, lr, grad, rows[register], slots)
            for slot, new in zip(slots_here, slots_after, strict=True):
                slot[buffer, beside] = jnp.where(jax.lax.iota(jnp.int32, lanes) == lane, new, slot[buffer, beside])

        jax.lax.fori_loop(0, block, row, None)
        copies(number, buffer, False, lambda copy: copy.start())

    def leave(number: Any, buffer: Any) -> None:
        copies(number, buffer, False, lambda copy: copy.wait())

    def one_turn(turn: Any, _: None) -> None:
        in_turn(turn - 2, leave)
        in_turn(turn + 1, fetch)
        in_turn(turn, compute)

    in_turn(jnp.int32(0), fetch)
    jax.lax.fori_loop(0, num_turns, one_turn, None)
    in_turn(num_turns - 2, leave)
    in_turn(num_turns - 1, leave)


def _indirect(table: Any, parts: Any, here: Any, semaphore: Any, is_in: bool, act: Callable[[Any], None]) -> None:
    """Copy pieces of a block's rows by their numbers, in one indirect copy that skips pads."""
    there = table.at[plsc.Indices(parts, ignored_value=PAD)]
    source, target = (there, here) if is_in else (here, there)
    act(pltpu.make_async_copy(source, target, semaphore))


def _one_by_one(table: Any, parts: Any, here: Any, semaphore: Any, is_in: bool, act: Callable[[Any], None]) -> None:
    """Copy pieces of a block's rows one by one: jax interprets no indirect copies."""

    def copy(place: Any, _: None) -> None:
        def row() -> None:
            there, buffered = table.at[pl.ds(parts[place], 1)], here.at[pl.ds(place, 1)]
            source, target = (there, buffered) if is_in else (buffered, there)
            act(pltpu.make_async_copy(source, target, semaphore))

        pl.when(parts[place] >= 0)(row)

    jax.lax.fori_loop(0, parts.shape[0], copy, None)


@dataclass(frozen=True)
class _RowOps(Ops):
    """Operations on a register of a row. The first pass over a row collects the squares of which a rule takes means.

    mean : of the whole row, in every lane; None in the first pass
    """

    squares: list[Any] = field(default_factory=list)
    mean: Any = None

    def row_mean(self, squares: Any) -> Any:
        if self.mean is not None:
            return self.mean
        self.squares.append(squares)
        return squares

    def summed(self, dim: int, lanes: int) -> _RowOps:
        """Return the operations of the second pass. Adds the same halves as ``Ops.row_mean``."""
        sums, width, fraction = self.squares, dim, np.float32(1) / np.float32(dim)
        while width > 1:
            half = (width + 1) // 2
            sums = [
                register + _upper(sums, first + half, width)
                for first, register in zip(range(0, half, lanes), sums, strict=False)
            ]
            width = half
        return replace(self, mean=self.rounded(_in_every_lane(sums[0], 0) * fraction))


def _upper(registers: Sequence[Any], first: int, width: int) -> Any:
    """Return the numbers of a row from ``first`` on as a register, with zeros beyond its width."""
    lanes = registers[0].shape[0]
    lane = jax.lax.iota(jnp.int32, lanes)
    number, start = divmod(first, lanes)
    upper = registers[number] if number < len(registers) else jnp.zeros(lanes, jnp.float32)
    if start > 0:
        beyond = registers[number + 1] if number + 1 < len(registers) else upper
        around = jax.lax.rem(lane + start, lanes)
        upper = jnp.where(lane < lanes - start, _permuted(upper, around), _permuted(beyond, around))
    return jnp.where(lane < width - first, upper, 0.0)


def _in_every_lane(register: Any, lane: Any) -> Any:
    return _permuted(register, jnp.full(register.shape, lane))


def _permuted(register: Any, lanes: Any) -> Any:
    """Return a register with these lanes of another: a subcore gathers within a register."""
    return register.at[lanes].get(mode="promise_in_bounds")


def _namespace() -> Any:
    """Return jax.numpy, with a square root that a subcore has."""
    if has_root():
        return jnp
    names = {name: getattr(jnp, name) for name in ("where", "abs", "isnan", "minimum", "maximum", "square")}
    return SimpleNamespace(**names, sqrt=software_root)


def has_root() -> bool:
    """Return whether this jax lowers square roots on a subcore."""
    return bool(jax.__version_info__ >= HAS_ROOT)


def software_root(values: Any) -> Any:
    """Return sqrt(values) to two units of the last place: Newton's method for its inverse, then for the root itself."""
    halved = 0.5 * values
    bits = 0x5F3759DF - jax.lax.shift_right_logical(jax.lax.bitcast_convert_type(values, jnp.int32), 1)
    inverse = jax.lax.bitcast_convert_type(bits, jnp.float32)
    for _ in range(3):
        inverse = inverse * (1.5 - halved * inverse * inverse)
    near = values * inverse
    root = near + 0.5 * inverse * (values - near * near)
    root = jnp.where((values == 0) | (values == jnp.inf), values, root)
    return jnp.where(values < 0, jnp.nan, root)
