"""``penstock validate`` with dynamic tables: the keys of the sources, as a replay would admit and remove them.

A directory without rows decides, so that a table that is too small for the sources is found before a replay is.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from penstock.api.planning.choices import Choice
from penstock.api.planning.forecast import Forecast, Opening, Openings
from penstock.cli.output import Output, count, keys_texts
from penstock.core.pipeline import Pipeline, TableStore
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.specs import TableSpec
from penstock.model.stats import TableReport
from penstock.rows.key_directory import bytes_of_directories, key_report, keys_of_opening

SEED = 0  # of replay, if it is given none: it decides which keys share a virtual shard


class KeyChecks:
    """The keys of all dynamic tables. config : None: check none"""

    def __init__(self, config: EmbeddingConfig | None) -> None:
        specs = () if config is None else config.tables
        dynamic = [spec for spec in specs if spec.dynamic is not None]
        bytes_of_directories([(spec, 0) for spec in dynamic])
        self._tables = {spec.name: _TableKeys(spec) for spec in dynamic}

    def open(self, step: int, pipeline: Pipeline) -> None:
        """Take an opening of the gate. pipeline : sums what it opens, and counts the rows and frames of keys"""
        for name, table in self._tables.items():
            table.open(step, pipeline.stores[name], pipeline.time)

    def say(self, out: Output) -> dict[str, Any]:
        """Print the keys and the findings about them. Return both, as plain data; nothing without dynamic tables."""
        if not self._tables:
            return {}
        reports = {name: TableReport(0, None, key_report(table.directory)) for name, table in self._tables.items()}
        out.say_tables("keys      ", keys_texts(reports))
        findings = [{"table": name, **finding} for name, table in self._tables.items() for finding in table.findings()]
        for finding in findings:
            out.say(f"{finding['severity']:8}  table '{finding['table']}': {finding['problem']}")
        keys = {
            name: {**asdict(report.keys), "most_in_a_step": self._tables[name].most}
            for name, report in reports.items()
            if report.keys is not None
        }
        return {"keys": keys, "key_findings": findings}


class _TableKeys:
    """The keys of one table.

    most : different keys of the step that has the most
    """

    def __init__(self, spec: TableSpec) -> None:
        self._spec, self._forecast = spec, Forecast(Choice(), {spec.name: spec}, {spec.name: 0}, SEED)
        self.directory = self._forecast.directories[spec.name]
        self.most = 0

    def open(self, step: int, store: TableStore, time: int | None) -> None:
        """Take an opening; the first one for which there is no room is the last."""
        opening = Opening(*keys_of_opening(*store.look(), self.directory.array))
        self.most = max(self.most, len(opening.keys))
        self._forecast.step(Openings({self._spec.name: opening}, step, time))

    def findings(self) -> list[dict[str, str]]:
        """Return the findings, each with ``severity`` and ``problem``."""
        directory, dynamic = self.directory, self._spec.dynamic
        assert dynamic is not None
        if (problem := self._forecast.shortage) is not None:
            severity = "error" if dynamic.on_full == "error" else "warning"
            return [{"severity": severity, "problem": f"{problem}; set a larger vocabulary_size"}]
        # Shards fill unevenly: the fullest of so many has about 4 standard deviations more keys than the mean.
        usable = 1 - 4 / math.sqrt(directory.capacity / directory.num_shards) if directory.num_shards > 1 else 1.0
        if dynamic.evict is None and len(directory) > usable * directory.capacity:
            problem = (
                f"{count(len(directory))} keys leave too little room in {count(directory.capacity)} rows, because "
                f"virtual shards fill unevenly; set vocabulary_size to at least "
                f"{count(math.ceil(len(directory) / usable))}, or evict"
            )
            return [{"severity": "warning", "problem": problem}]
        return []
