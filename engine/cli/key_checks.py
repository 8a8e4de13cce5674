"""``penstock validate`` with dynamic tables: the keys of the sources, as a replay would admit and remove them.

A directory without rows decides, so that a table that is too small for the sources is found before a replay is.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from penstock.api.planning.choices import Choice
from penstock.api.planning.forecast import Forecast, Opening, Openings
from penstock.cli.output import Output, count, keys_texts
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame, Int64
from penstock.model.stats import TableReport
from penstock.rows.key_directory import bytes_of_directories, key_report

SEED = 0  # of replay, if it is given none: it decides which keys share a virtual shard


class KeyChecks:
    """The keys of all dynamic tables. config : None: check none"""

    def __init__(self, config: EmbeddingConfig | None) -> None:
        specs = () if config is None else config.tables
        dynamic = [spec for spec in specs if spec.dynamic is not None]
        bytes_of_directories([(spec, 0) for spec in dynamic])
        self._tables = {spec.name: _TableKeys(spec) for spec in dynamic}

    def add(self, frame: Frame) -> None:
        """Take a frame that the gate admits."""
        for table in self._tables.values():
            table.add(frame)

    def open(self, step: int) -> None:
        """Take an opening of the gate."""
        for table in self._tables.values():
            table.open(step)

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
        self._frames: list[Int64] = []  # of the next opening: the ids of each
        self._time: int | None = None
        self.most = 0

    def add(self, frame: Frame) -> None:
        blocks = [rows.ids for rows in frame.rows.get(self._spec.name, ())]
        if blocks:
            self._frames.append(np.concatenate(blocks))
        if frame.time is not None:
            self._time = max(frame.time, self._time or 0)

    def open(self, step: int) -> None:
        """Take an opening; the first one for which there is no room is the last."""
        frames, self._frames = self._frames, []
        keys, rows = np.unique(np.concatenate([np.zeros(0, np.int64), *frames]), return_counts=True)
        num_frames = np.unique(np.concatenate([keys[:0], *map(np.unique, frames)]), return_counts=True)[1]
        self.most = max(self.most, len(keys))
        if self._forecast.full is not None:
            return
        self._forecast.step(Openings({self._spec.name: Opening(keys, rows, num_frames)}, step, self._time))

    def findings(self) -> list[dict[str, str]]:
        """Return the findings, each with ``severity`` and ``problem``."""
        directory, dynamic = self.directory, self._spec.dynamic
        assert dynamic is not None
        if (problem := self._forecast.shortage) is not None:
            severity = "error" if dynamic.on_full == "error" else "warning"
            return [{"severity": severity, "problem": f"{problem}; set a larger vocabulary_size"}]
        # Shards fill unevenly: the fullest of so many has about 4 standard deviations more keys than the mean.
        share = 1 - 4 / math.sqrt(directory.capacity / directory.num_shards) if directory.num_shards > 1 else 1.0
        if dynamic.evict is None and len(directory) > share * directory.capacity:
            problem = (
                f"{count(len(directory))} keys leave too little room in {count(directory.capacity)} rows, because "
                f"virtual shards fill unevenly; set vocabulary_size to at least "
                f"{count(math.ceil(len(directory) / share))}, or evict"
            )
            return [{"severity": "warning", "problem": problem}]
        return []
