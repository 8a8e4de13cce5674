"""The tables of an engine, made all at once: those that one dispatch can update are updated by one.

Which those are stands in stacks.py. Where the host is the device (direct.py) each table is by itself: what a stack
would save there is small beside the step (ARCHITECTURE.md has the figure).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jax.sharding import Mesh

from penstock.bridge import variants
from penstock.bridge.layout import Layout
from penstock.bridge.stacks import Stack, stacked
from penstock.bridge.staged import Segments, StagedStack
from penstock.bridge.staging import Dispatcher
from penstock.bridge.tables import DeviceTable
from penstock.updates import UpdateRule


class Wanted(NamedTuple):
    """A table to be made. starts : of its slots; rate : says whose learning rate it has, equal for the same one's"""

    layout: Layout
    rule: UpdateRule
    starts: tuple[float, ...]
    rate: Hashable


class Together:
    """Tables that are updated together, by name. among : their arrays; None: one table that has its own"""

    def __init__(self, tables: Sequence[DeviceTable], among: StagedStack | None) -> None:
        self.tables = {table.layout.name: table for table in tables}
        self._among = among
        self._members = {name: member for member, name in enumerate(self.tables)}

    def apply(self, brought: Sequence[tuple[str, Segments]], learning_rate: float, step: int, turn: int) -> None:
        """One optimizer application to the rows of these tables; see ``DeviceTable.apply_segments``."""
        if self._among is None:
            for name, segments in brought:
                self.tables[name].apply_segments(segments, learning_rate, step, turn)
            return
        members = [(self._members[name], segments) for name, segments in brought if segments]
        if members:
            self._among.apply(members, learning_rate, step, turn)

    def warm(self) -> int:
        """See ``DeviceTable.warm``, which a stack does for all of its tables."""
        return next(iter(self.tables.values())).warm()


def make_tables(mesh: Mesh, wanted: Sequence[Wanted], outside: Mesh | None, threads: int) -> list[Together]:
    """Tables on the devices of a mesh; weights begin at 0. outside, threads : as for ``DeviceTable``"""
    chosen = [variants.choose(mesh, one.layout, one.rule) for one in wanted]
    alike: list[Hashable] = [
        number if variant == "ffi" else (variant, one.starts, one.rate)
        for number, (variant, one) in enumerate(zip(chosen, wanted, strict=True))
    ]
    formed = [variants.formed(one.layout, variant) for one, variant in zip(wanted, chosen, strict=True)]
    dispatcher = Dispatcher()  # one for all, so that they share its arenas
    made = []
    for members in stacked([(form, one.rule, key) for form, one, key in zip(formed, wanted, alike, strict=True)]):
        layouts, variant = [formed[member] for member in members], chosen[members[0]]
        _, rule, starts, _ = wanted[members[0]]
        among = None
        if variant != "ffi":
            among = StagedStack(mesh, Stack.of(layouts, rule), rule, starts, variant, dispatcher)
        tables = [
            DeviceTable(mesh, layout, rule, starts, outside, threads=threads, variant=variant, among=among)
            for layout in layouts
        ]
        made.append(Together(tables, among))
    return made
