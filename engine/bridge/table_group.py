"""The tables of an engine, made all at once: those that one dispatch can update are updated by one.

Which those are stands in stacks.py; where the host is the device (direct.py), all of them are.
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
    """A table to be made. starts : of its slots; rate : says whose learning rate it has, equal for the same one's"""

    layout: Layout
    rule: UpdateRule
    starts: tuple[float, ...]
    rate: Hashable


class Coalesced(Protocol):
    """``frames.Coalesced``: one table's rows of a step, as arrays and as the kernels hand them over."""

    @property
    def parts(self) -> Segments: ...
    @property
    def summed(self) -> Sequence[Any]: ...


class Together:
    """Tables that are updated together, by name. among : their arrays"""

    def __init__(self, tables: Sequence[DeviceTable], among: DirectStack | StagedStack) -> None:
        self.tables = {table.layout.name: table for table in tables}
        self._among = among
        self._members = {name: member for member, name in enumerate(self.tables)}

    def apply(self, brought: Sequence[tuple[str, Coalesced, float]], step: int, turn: int) -> None:
        """One optimizer application to the rows of these tables, each with its learning rate.

        step, turn : as for ``DeviceTable.apply_segments``
        """
        member = self._members
        if isinstance(self._among, DirectStack):
            self._among.apply([(member[name], rows.summed, rate) for name, rows, rate in brought])
        elif brought:  # whose tables have one rate
            self._among.apply([(member[name], rows.parts) for name, rows, _ in brought], brought[0][2], step, turn)

    def warm(self) -> int:
        """See ``DeviceTable.warm``, which a stack does for all of its tables."""
        return next(iter(self.tables.values())).warm()


def make_tables(mesh: Mesh, wanted: Sequence[Wanted], outside: Mesh | None, threads: int) -> list[Together]:
    """Tables on the devices of a mesh; weights begin at 0. outside, threads : as for ``DeviceTable``"""
    chosen = [backends.choose(mesh, one.layout, one.rule) for one in wanted]
    dispatcher = Dispatcher()  # one for all, so that they share its arenas
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
    """Which tables share arrays: lists of their indices."""
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
