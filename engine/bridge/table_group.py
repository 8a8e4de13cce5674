"""The tables of an engine, created together, so that one dispatch updates as many of them as possible.

stacking.py decides which tables share a dispatch; on a CPU (cpu_ffi.py) all of them do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh

from penstock.bridge import backends
from penstock.bridge.cpu_ffi import DirectStack
from penstock.bridge.device_tables import DeviceTable
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.sharding import Layout
from penstock.bridge.stacking import Stack, stacked, stacks_wanted
from penstock.bridge.xla_tables import Segments, StagedStack
from penstock.updates import UpdateRule


class Wanted(NamedTuple):
    """A table to create. starts : of its slots; rate : identifies its learning rate, equal if shared"""

    layout: Layout
    rule: UpdateRule
    starts: tuple[float, ...]
    rate: Hashable


class Coalesced(Protocol):
    """``frames.Coalesced``: one table's rows of a step, as arrays and in the form of the kernels."""

    @property
    def parts(self) -> Segments: ...
    @property
    def summed(self) -> Sequence[Any]: ...


class Together:
    """Tables that are updated together, by name. among : the stack with their arrays"""

    def __init__(self, tables: Sequence[DeviceTable], among: DirectStack | StagedStack) -> None:
        self.tables = {table.layout.name: table for table in tables}
        self._among = among
        self._members = {name: member for member, name in enumerate(self.tables)}

    def apply(self, brought: Sequence[tuple[str, Coalesced, float]], step: int, turn: int) -> None:
        """Apply the optimizer once to rows of these tables. brought : (name, rows, learning rate) of each

        step, turn : as for ``DeviceTable.apply_segments``
        """
        member = self._members
        if isinstance(self._among, DirectStack):
            self._among.apply([(member[name], rows.summed, rate) for name, rows, rate in brought])
        elif brought:  # stacked tables share one rate
            self._among.apply([(member[name], rows.parts) for name, rows, _ in brought], brought[0][2], step, turn)

    def warm(self) -> int:
        """Compile the programs of all tables, as ``DeviceTable.warm`` does for the whole stack; return their number."""
        return next(iter(self.tables.values())).warm()


def make_tables(mesh: Mesh, wanted: Sequence[Wanted], outside: Mesh | None, threads: int) -> list[Together]:
    """Create tables on the devices of a mesh, with weights of 0. outside, threads : as for ``DeviceTable``"""
    chosen = [backends.choose(mesh, one.layout, one.rule) for one in wanted]
    dispatcher = Dispatcher()  # shared by all tables, as are its arenas
    made = []
    for members in _groups(wanted, chosen):
        variant, of = chosen[members[0]], [wanted[member] for member in members]
        layouts = [backends.formed(one.layout, variant) for one in of]
        _, rule, starts, _ = of[0]
        among: DirectStack | StagedStack
        if variant == "ffi":
            among = DirectStack(mesh, layouts, [one.rule for one in of], [one.starts for one in of], threads)
        else:
            among = StagedStack(mesh, Stack.of(layouts, rule), rule, starts, variant, dispatcher)
        tables = [
            DeviceTable(mesh, layout, one.rule, one.starts, outside, variant=variant, among=among)
            for layout, one in zip(layouts, of, strict=True)
        ]
        made.append(Together(tables, among))
    return made


def _groups(wanted: Sequence[Wanted], chosen: Sequence[str]) -> list[list[int]]:
    """Return the groups of tables that share arrays, as lists of indices."""
    direct = [number for number, variant in enumerate(chosen) if variant == "ffi"]
    staged = [number for number, variant in enumerate(chosen) if variant != "ffi"]
    alike: list[tuple[Layout, UpdateRule, Hashable]] = []
    for number in staged:
        one, variant = wanted[number], chosen[number]
        alike.append((backends.formed(one.layout, variant), one.rule, (variant, one.starts, one.rate)))
    groups = [[staged[member] for member in members] for members in stacked(alike)]
    if not stacks_wanted():
        return [[number] for number in direct] + groups
    return [direct, *groups] if direct else groups
