"""The values that flow: Frame → Coalesced. Never changed once built, and valid then; numpy only.

A frame that exists has been validated to its end: ids lie inside their tables, gradients are
finite and as long as their table is wide. Of one that has an ``audit`` the first two are yet to be
seen: who sums its rows looks at every value anyway, and takes them back where one is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Nobody assigns to their fields, but they are not ``frozen``: there are thousands a second, and a frozen Frame takes
# six times as long to make.


@dataclass(eq=False)
class Rows:
    """Gradient rows of one table in arrival order.

    ids : int64, shape (n,)
    grads : float32, shape (m, dim), rows contiguous; may be a view of Arrow's memory
    which : int64, shape (n,), the rows of grads that are meant; None: all, m is n
    gains : float32, shape (n,), what each row is multiplied by when it is summed; None: nothing
    """

    ids: Int64
    grads: Float32
    which: Int64 | None = None
    gains: Float32 | None = None

    def gradient(self, row: int) -> Float32:
        """float32, shape (dim,)."""
        gradient: Float32 = self.grads[row if self.which is None else self.which[row]]
        if self.gains is None:
            return gradient
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is told by who sums it
            gained: Float32 = gradient * self.gains[row]
        return gained

    def copied(self) -> Rows:
        """The same in memory of its own: what it looks into need not stay for it."""
        grads = self.grads.copy() if self.which is None else np.take(self.grads, self.which, axis=0)
        return Rows(self.ids.copy(), grads, None if self.gains is None else np.arange(len(self.ids)), self.gains)


@dataclass(eq=False)
class Frame:
    """What one producer sent for one of its steps.

    rows : by table, the blocks of its contribution in arrival order; only tables that occur
    num_rows : gradient rows read for it, the dropped ones included
    local_step : the producer's step, or None: never stale
    contributor : who sent it, or None
    learning_rates : one value per dynamic tag, or None where the stream carries none
    dropped : rows left out, by reason
    source : where it came from, for messages
    bad_rows : the rows left out, as Arrow record batches, where they are to be put into a quarantine
    audit : the same frame after a look at every value, which raises InputError or leaves rows out; None: it was had
    truncated : ids that sequences were too short for, left out; they are no rows
    fingerprint : what a position is to know of the whole frame, where these rows are a share of it; None: they are all
    """

    rows: Mapping[str, tuple[Rows, ...]]
    num_rows: int
    local_step: int | None = None
    contributor: int | str | None = None
    learning_rates: tuple[float, ...] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    source: str = ""
    bad_rows: tuple[Any, ...] = ()
    audit: Callable[[], Frame] | None = None
    truncated: int = 0
    fingerprint: str | None = None

    def audited(self) -> Frame:
        """This frame, valid for certain. Raises InputError."""
        return self if self.audit is None else self.audit()


class Summed(Protocol):
    """Some ids and the sum of each, which make arrays when they are asked for: ``pyx.memory.Sums``."""

    @property
    def num_ids(self) -> int: ...
    @property
    def ids(self) -> Int64: ...
    @property
    def sums(self) -> Float32: ...
    @property
    def nbytes(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...


class SummedArrays(NamedTuple):
    """The same of arrays that are there."""

    ids: Int64
    sums: Float32

    @property
    def num_ids(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.sums.nbytes


class Coalesced:
    """One table's gradients of one opening.

    summed : ids int64 (u,) and rows float32 (u, dim), summed, and divided where the reduction is mean; an id is in
        one of them, once
    """

    __slots__ = ("num_ids", "summed")

    def __init__(self, summed: tuple[Summed, ...]) -> None:
        self.summed = summed
        self.num_ids = sum([one.num_ids for one in summed])

    @property
    def parts(self) -> tuple[tuple[Int64, Float32], ...]:
        """The same as arrays."""
        return tuple([(one.ids, one.sums) for one in self.summed])
