"""Slots that determine the weights, for weights that come without them: from another library, or with new slots."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from penstock.model.config.specs import TableSpec
from penstock.model.frames import Int64
from penstock.rows.table_set import TableSet

log = logging.getLogger("penstock")

_ROWS_AT_ONCE = 1 << 16


class DerivedSlots:
    """Derives the slots of loaded rows, and counts them.

    rates : the learning rate of each tag at the next step; NaN: unknown

    num_rows : "TABLE/SLOT" → the rows whose slot was derived
    notes : what ``warn`` has logged
    """

    def __init__(self, tables: TableSet, rates: Sequence[float]) -> None:
        self._tables, self._rates = tables, rates
        self.num_rows: Counter[str] = Counter()
        self._undetermined: Counter[str] = Counter()
        self.notes: list[str] = []

    def slot(self, name: str) -> str | None:
        """Return the slot that determines the weights of a table; None: it has none."""
        spec = self._tables.specs[name]
        return spec.optimizer.derived_slot if spec.trainable else None

    def derive(self, name: str, rows: Int64) -> None:
        """Set the slot of local rows, whose weights and other slots are set: a gradient of 0 keeps the weights."""
        tables, spec = self._tables, self._tables.specs[name]
        slot, optimizer = self.slot(name), spec.optimizer
        assert slot is not None
        number, start = tables.parts(name)[slot], dict(spec.slots)[slot]
        weights, *slots = (tables.read_rows(name, part, rows) for part in range(1 + len(spec.slots)))
        rate = np.float32(tables.rate_of(name, self._rates))
        with np.errstate(divide="ignore", invalid="ignore"):  # a rate of 0
            values, determined = optimizer.derived(spec.rule, rate, weights, tuple(slots))
        values = np.where(np.isfinite(values), values, np.float32(start))
        tables.set_stored_rows(name, rows, {number: values})
        rows_determined = int(determined.all(axis=1).sum())
        self.num_rows[f"{name}/{slot}"] += rows_determined
        self._undetermined[name] += len(rows) - rows_determined

    def derive_all(self, name: str) -> None:
        """Set the slot of all rows of a table."""
        if name in self._tables.dynamic:
            rows = self._tables.dynamic[name].directory.state()["row"].astype(np.int64)
        else:
            rows = np.arange(self._tables.held.specs[name].vocabulary_size)
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            self.derive(name, rows[first : first + _ROWS_AT_ONCE])

    def warn(self) -> None:
        """Log a line for each table with rows whose weights do not determine the slot; reports of runs have it, too."""
        for name, count in self._undetermined.items():
            if count:
                self.notes.append(f"table '{name}': {self._problem(self._tables.specs[name], count)}")
        for note in self.notes:
            log.warning(note)
        self._tables.notes.extend(self.notes)

    def _problem(self, spec: TableSpec, count: int) -> str:
        slot, (first, *_) = spec.optimizer.derived_slot, spec.optimizer.slot_names
        rate = self._tables.rate_of(spec.name, self._rates)
        if np.isnan(rate):
            return (
                f"its '{slot}' depend on the learning rate of tag {spec.tag}, which is unknown here, and keep their "
                f"initial values in {count} rows, whose weights the first step replaces; give learning_rates= "
                f"(--learning-rate {spec.tag}=VALUE), or load '{slot}' too"
            )
        if rate == 0:
            return f"its '{slot}' divide by the learning rate, which is 0, so {count} rows keep their initial ones"
        return (
            f"nothing determines the '{slot}' of {count} rows, whose '{first}' are 0, without beta and l2: their first "
            f"step is as large as the rate allows, however small the gradient; load '{first}' above 0"
        )
