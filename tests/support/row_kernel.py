"""What the kernel for SparseCores does, as a program of XLA: rows by their numbers, in the arrays of lines.

It compiles faster than the kernel can be interpreted, and stands for it in tests of what uses the kernel.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from penstock.model.updates import Ops, update
from penstock.rows.bridge.programs import _fence, _rounded, sharded


def apply(mesh, rule, line, **faults):
    """As sparsecore.apply. faults : of ``local_apply``"""
    return sharded(mesh, local_apply(mesh, rule, line, **faults), num_row_args=4, num_scalars=3, donate=True)


def local_apply(mesh, rule, line, loses_neighbours=False):
    """As sparsecore.local_apply.

    loses_neighbours : of rows that share a line only the first is written, as by copies of lines that overlap
    """
    strips = [(array, strip, size) for array, size in enumerate(line.groups) for strip in range(size)]

    def local(table, rows, words, counts, lr, zero, key):
        lines = [array.reshape(-1, 1 if array.ndim == 1 else line.lanes) for array in table]
        rows_of_lines = [part[:, : line.packed * line.dim] for part in lines]
        parts = [part.reshape(-1, min(part.shape[1], line.dim)) for part in rows_of_lines]
        of_line, inside = rows[0] // line.packed, rows[0] % line.packed
        written = jnp.arange(rows.shape[1]) < counts[0]
        if loses_neighbours:
            first = jnp.argmax((of_line[:, None] == of_line) & written, axis=1)
            written &= first == jnp.arange(rows.shape[1])
        places = [jnp.where(written, (of_line * size + n) * line.packed + inside, 1 << 30) for _, n, size in strips]
        arrays = [array for array, _, _ in strips]
        if line.row_slots:
            arrays += range(len(line.groups), len(table))
            places *= len(table)
        planes = [parts[array].at[place].get(mode="clip") for array, place in zip(arrays, places, strict=True)]
        grads = jax.lax.bitcast_convert_type(words[0], jnp.float32).reshape(-1, line.dim)
        weights, slots = update(Ops(jnp, partial(_rounded, zero)), rule, lr, grads, planes[0], tuple(planes[1:]))
        for array, place, new in zip(arrays, places, (weights, *slots), strict=True):
            parts[array] = parts[array].at[place].set(new, mode="drop")
        for number, (of_rows, part) in enumerate(zip(rows_of_lines, parts, strict=True)):
            lines[number] = lines[number].at[:, : of_rows.shape[1]].set(part.reshape(of_rows.shape))
        return tuple(part.reshape(array.shape) for part, array in zip(lines, table, strict=True)), _fence()

    return local


def some_steps(tables, num_steps=3, share=0.5):
    """Yield steps for an engine: gradients of a share of the rows of each table. tables : name → (rows, dim)"""
    rng = np.random.default_rng(0)
    for _ in range(num_steps):
        yield {
            name: (
                rng.permutation(rows)[: int(share * rows)],
                rng.standard_normal((int(share * rows), dim), np.float32),
            )
            for name, (rows, dim) in tables.items()
        }
