"""``--metrics``, ``--metrics-file``, ``--ui`` and ``--report``: the monitoring of a command's engine."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api.engine import Engine
from penstock.base.validation import is_loopback
from penstock.cli.output import writing
from penstock.cli.watching import page_addresses
from penstock.contrib.pages.svg import SCHEME
from penstock.core.sampling import thinned
from penstock.model.config.id_ranges import id_text
from penstock.model.stats import Report

if TYPE_CHECKING:
    from penstock.contrib.pages.http_server import PageAccess, Server
    from penstock.contrib.pages.metrics import StepCollector
    from penstock.contrib.ray import Job
    from penstock.serving.service.replica import ReplicaService

LINE_EVERY_S = 1.0
MAX_SHOWN_MOMENTS, MAX_SHOWN_TABLES = 60, 8


class Watching:
    """A context that monitors an engine, a job or a replica as the flags request; without flags it costs nothing.

    access : to the pages that other machines reach; None: they answer everybody
    """

    def __init__(
        self, args: argparse.Namespace, watched: Engine | Job | ReplicaService, access: PageAccess | None = None
    ) -> None:
        self._addresses, self._access = page_addresses(args), access
        self._path: Path | None = args.metrics_file
        self.servers: list[Server] = []
        self._written_s = 0.0
        # A service has no sources, and a replica no configuration.
        arguments = getattr(args, "sources", None) or [getattr(args, "replica", None) or getattr(args, "config", "")]
        self.title = " ".join(map(str, ["penstock", args.command, *arguments]))
        self._report: Path | None = args.report
        self._is_on = bool(self._addresses or self._path or self._report)
        if self._is_on:
            # Loads prometheus-client, which two threads must not load at once.
            from penstock.contrib.pages.metrics import Metrics, MetricsCollector, ReplicaMetrics

            if isinstance(watched, Engine):
                self._metrics: StepCollector = Metrics(watched)
            else:
                self._metrics = watched.metrics() if hasattr(watched, "metrics") else ReplicaMetrics(watched.status)
            if isinstance(self._metrics, MetricsCollector) and (args.report or args.ui):
                self._metrics.look_closer()

    def __enter__(self) -> Watching:
        if not self._is_on:
            return self
        from penstock.contrib.pages.http_server import HTML, JSON, PLAIN, TEXT, Server

        metrics: dict[str, tuple[str, Callable[[], str]]] = {
            "/metrics": (TEXT, self._metrics.text),
            "/health": (PLAIN, self.health),
        }
        page = {"/": (HTML, page_text), "/live.json": (JSON, lambda: json.dumps(self.live(), allow_nan=False))}
        for flag, address in self._addresses.items():
            access = None if is_loopback(address[0]) else self._access
            server = Server(address, metrics | (page if flag == "ui" else {}), access)
            self.servers.append(server)
            warning = " (its token travels in clear text: the service has no certificate)"
            shown = f"{flag:9} {server.url}{'/' if flag == 'ui' else '/metrics'}"
            # Flushed to stderr, where the parent process reads the port.
            print(shown + (warning if access and access.tls is None else ""), file=sys.stderr, flush=True)
        if self._path is not None:
            self._write()  # a file that cannot be written raises before the work starts
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.close()
        if self._path is not None:
            self._write()

    def tick(self) -> None:
        """Write a line of metrics if the last one is at least LINE_EVERY_S seconds old."""
        if self._path is not None and time.monotonic() - self._written_s >= LINE_EVERY_S:
            self._write()

    def health(self) -> str:
        """Return one line if the engine is healthy, without blocking. Raise StateError after a failed step."""
        return f"ok, step {self._metrics.checked_step()}\n"

    def live(self) -> dict[str, Any]:
        """Return a consistent snapshot of the values that the live page shows."""
        from penstock.contrib.pages.metrics import MetricsCollector

        if not isinstance(self._metrics, MetricsCollector):  # of a replica, which takes no frames
            return {"title": self.title, "metrics": self._metrics.plain()}
        config = self._metrics.config
        snapshot = self._metrics.snapshot()
        errors = [f"{reason}: {first}" for reason, first in snapshot.first_bad.items()]
        errors += [f"stale: {snapshot.stale.last}"] if snapshot.stale.last else []
        shown = list(config.sizes)[:MAX_SHOWN_TABLES]
        return {
            "title": self.title,
            "metrics": self._metrics.plain(snapshot),
            "hot": [
                (table, id_text(config.id_ranges[table][0], row_id), fraction)
                for table, row_id, fraction in snapshot.hot
            ],
            "errors": errors,
            "tables": shown,
            "moments": [
                asdict(m) | {"norms": {name: m.norms[name] for name in shown if name in m.norms}}
                for m in thinned(snapshot.moments, MAX_SHOWN_MOMENTS)
            ],
        }

    def report(self, report: Report, engine: Engine) -> list[Path]:
        """Write the page that ``--report`` requests. Return the paths written. engine : that is watched"""
        if self._report is None or engine.watch.probe is None:
            return []
        watch, probe, numbers = engine.watch, engine.watch.probe, {"report": report.to_dict(), "live": self.live()}
        from penstock.contrib.pages.html_report import run_sections, write_page

        sections = run_sections(report, engine.config, watch, probe)
        return [write_page(self._report, self.title, sections, numbers)]

    def _write(self) -> None:
        assert self._path is not None
        self._written_s = time.monotonic()
        with writing(self._path), open(self._path, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": time.time(), **self._metrics.plain()}, allow_nan=False) + "\n")


def page_text() -> str:
    """Return the page, with the colours of all pages."""
    page = files("penstock.contrib.pages").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("/* colours */", SCHEME)
