"""The programs that update an engine's tables: their variants, the commit's record of them, and their problems."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.base.errors import UsageError, listed
from penstock.rows.bridge.variants import VARIANTS

if TYPE_CHECKING:
    from penstock.rows.bridge.device_tables import DeviceTable

log = logging.getLogger("penstock")

Programs = Mapping[str, Mapping[str, str]]
Variant = str | Mapping[str, str]  # as ``Engine`` takes it


class TablePrograms:
    """The programs of tables. tables : by name, on the devices of this process"""

    def __init__(self, tables: Mapping[str, DeviceTable]) -> None:
        self._tables = tables
        self._resumed: list[str] = []
        for problem in self.problems:
            log.warning(problem)

    @property
    def variants(self) -> dict[str, str]:
        """The variant of each table."""
        return {name: table.backend.variant for name, table in self._tables.items()}

    @property
    def problems(self) -> list[str]:
        """Problems of the programs on these devices, a sentence each; the tables are whole."""
        several = [problem for table in self._tables.values() for problem in table.backend.problems]
        return [*self._resumed, *dict.fromkeys(several)]  # those of a stack once

    def get_state(self) -> Programs:
        """Return table → variant and compiler, for a commit."""
        backends = {name: table.backend for name, table in self._tables.items()}
        return {name: {"variant": each.variant, "compiler": each.compiler} for name, each in backends.items()}

    def resume(self, before: Programs) -> None:
        """Report the tables that other programs updated before a commit: only equal ones give equal bits."""
        now = self.get_state()
        # No compiler takes part in the results of penstock's own kernels.
        compared = {
            name: ("variant",) if program["variant"] == "host" else program.keys() for name, program in before.items()
        }
        changed = [name for name, keys in compared.items() if any(before[name][key] != now[name][key] for key in keys)]
        if changed:
            old, new = (f"'{side[changed[0]]['variant']}' ({side[changed[0]]['compiler']})" for side in (before, now))
            problem = f"tables updated by {old} before the commit and by {new} now ({listed(changed)})"
            self._resumed = [f"{problem}: bits agree only to the bound between variants (docs/devices.md)"]
            log.warning(self._resumed[0])


def preferred(tables: Iterable[str], variant: Variant) -> dict[str, str]:
    """Return table → the variant that is preferred for it. Raises UsageError for an unknown variant or table.

    variant : of all tables, or of those that it names; "auto": none is preferred
    """
    names: Sequence[str] = list(tables)
    by_table = variant if isinstance(variant, Mapping) else dict.fromkeys(names, variant)
    for name, table_variant in by_table.items():
        if name not in names:
            raise UsageError(f"variant: no table '{name}' in the configuration ({listed(names)})")
        if table_variant not in VARIANTS:
            raise UsageError(f"variant: expected one of {', '.join(VARIANTS)}, got {table_variant!r}")
    return {name: table_variant for name, table_variant in by_table.items() if table_variant != "auto"}
