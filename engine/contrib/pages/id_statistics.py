"""Statistics of a stream's ids for ``inspect --report``: rows per id, and the growth of the number of distinct ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from penstock.base.html_tables import html_table
from penstock.cli.output import count
from penstock.contrib.pages.html_report import covered, frequencies
from penstock.contrib.pages.svg import MAX_LEGEND, Points, lines
from penstock.pyx.id_table import IdTable

MAX_POINTS = 400


class IdUses:
    """Statistics of one table's ids. They take 8 bytes per distinct id in addition to the id table.

    growth : (rows, distinct ids among them), thinned
    """

    def __init__(self) -> None:
        self._ids, self._times, self._rows, self._every = IdTable(), np.zeros(1024, np.int64), 0, 1
        self.growth: list[tuple[float, float]] = []
        self._added = 0

    @property
    def times(self) -> npt.NDArray[np.int64]:
        """The number of rows of each distinct id, int64."""
        return self._times[: len(self._ids)]

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        slots = self._ids.insert(np.ascontiguousarray(ids))
        if len(self._ids) > len(self._times):
            self._times = np.concatenate([self._times, np.zeros(len(self._ids), np.int64)])
        np.add.at(self._times, slots, 1)
        self._rows += len(ids)
        self._added += 1
        if self._added % self._every == 0:
            self.growth.append((float(self._rows), float(len(self._ids))))
        if len(self.growth) > MAX_POINTS:
            self.growth, self._every = self.growth[1::2], 2 * self._every


Uses = dict[str, IdUses]


def use_sections(uses: Mapping[str, IdUses]) -> Iterator[tuple[str, str, str]]:
    """Yield the sections of the page: heading, note, content."""
    names = sorted(uses, key=lambda name: -int(uses[name].times.sum()))
    shown = {name: uses[name] for name in names[:MAX_LEGEND]}

    ranks = {name: frequencies(id_uses.times) for name, id_uses in shown.items()}
    yield (
        "How often ids come",
        "share of the table's rows by the id's rank, both logarithmic: a straight line is a power law",
        lines(ranks, "rank", "share of rows", log_x=True, log_y=True),
    )
    yield (
        "What the hottest ids make up",
        "the share of all rows that the most frequent ids have together",
        lines({name: covered(id_uses.times) for name, id_uses in shown.items()}, "hottest ids, %", "of rows, %"),
    )
    growth: dict[str, Points] = {name: [(0.0, 0.0), *id_uses.growth] for name, id_uses in shown.items()}
    yield (
        "How many new ids keep coming",
        "distinct ids over rows read: where it bends, what comes has mostly been seen",
        lines(growth, "rows read", "distinct ids"),
    )
    yield (
        "Tables",
        "uses: rows for each distinct id",
        html_table(("table", "rows", "ids", "uses", "hottest"), _rows(uses, names)),
    )


def _rows(uses: Mapping[str, IdUses], names: list[str]) -> Iterator[tuple[str, ...]]:
    for name in names:
        times = uses[name].times
        rows = int(times.sum())
        if rows:
            hottest = f"{100 * times.max() / rows:.2g} %"
            yield name, count(rows), count(len(times)), f"{rows / len(times):.2f}", hottest
