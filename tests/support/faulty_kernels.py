"""Kernels that do something wrong, in the place of ours, for tests of what follows."""

import jax

from penstock.rows.bridge import programs

CANARY_LINES = 24  # of a step of the canary, with blocks of 8
BY_XLA = programs.apply


class Kernel:
    """XLA's program in the place of our kernel.

    spoil : (arrays, lines) → arrays, what it does wrong; moves : whether it copies the table
    of_the_canary : whether it also does so in the canary's steps
    """

    def __init__(
        self, mesh, rule, line, compact=False, spoil=lambda arrays, lines: arrays, moves=False, of_the_canary=True
    ):
        right = BY_XLA(mesh, rule, line, compact)

        def wrong(table, lines, *others):
            arrays, fence = right(table, lines, *others)
            return spoil(arrays, lines[0]), fence

        self._right, self._wrong = right, jax.jit(wrong, donate_argnums=() if moves else 0)
        self._of_the_canary = of_the_canary

    def lower(self, *shapes):
        in_canary = shapes[1].shape[1] == CANARY_LINES
        return (self._wrong if self._of_the_canary or not in_canary else self._right).lower(*shapes)


def off_in_one_line(arrays, lines):
    """A wrong bit."""
    return (arrays[0].at[lines[3], 0, 5].add(0.001), *arrays[1:])


def writes_an_untouched_line(arrays, lines):
    """A line that no row of the step is in."""
    return (arrays[0].at[1].set(0.0), *arrays[1:])


def does_not_compile(arrays, lines):
    """An error of the compiler, of two lines."""
    raise RuntimeError("scoped vmem: 16.03 MB of 16.00 MB\nmore of it")
