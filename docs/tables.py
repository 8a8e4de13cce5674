"""Tables of the pages that list what registers itself in the code. ``python docs/tables.py`` writes them.

A table stands between ``<!-- docs/tables.py NAME: begin -->`` and ``<!-- docs/tables.py NAME: end -->``.
tests/repository/test_docs_tables.py checks that every page is up to date.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import penstock as ps
import penstock.base.errors as error_classes
import penstock.io.decoding.bad_rows as bad_rows_file
import penstock.io.delta_format as delta_format
from penstock.base.events import EVENTS
from penstock.cli.main import FAILED, INPUT, judged
from penstock.io.error_tables import FILES, OBJECT_STORES, UNREACHABLE, ErrorRow, ErrorTable
from penstock.io.registry import UriKind
from penstock.io.sources.source_kinds import source_kinds
from penstock.io.table_formats.tensor_names import OPTAX_NAMES, OTHER_NAMES
from penstock.serving.followers.target_kinds import target_kinds

DOCS = Path(__file__).resolve().parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources() -> str:
    """Return all kinds of sources, with an example of each."""
    rows = [
        (f"[{kind.title}]({kind.page})", f"`{kind.example}`", kind.unit, _install_line(kind)) for kind in source_kinds()
    ]
    return table(("gradients from", "for example", "counted by", "library"), rows)


def targets() -> str:
    """Return all kinds of targets, what they hold, and an example of each."""
    rows = [
        (
            f"[{kind.title}]({kind.page})",
            f"`{kind.example}`",
            kind.holds,
            kind.transaction,
            f"{kind.interval_s:g} s",
            _install_line(kind),
        )
        for kind in target_kinds()
    ]
    return table(("rows to", "for example", "holds", "a transaction", "every", "library"), rows)


# Class of base/errors.py → what to do. What raises it is in its docstring.
ERRORS = {
    "UsageError": "correct the call, or the flag",
    "UsageTypeError": "correct the call",
    "InputError": "repair the input, or [drop](../bad_rows.md) rows; nothing of its frame counts",
    "TruncatedInputError": "send the rest; `--allow-missing-end` if there never was a marker",
    "StaleInputError": "name the workers of a step, or `--merge` their logs ([gates](../explanation/gates.md))",
    "ConfigError": "`penstock validate` lists every place",
    "StateError": "restore another commit; start a failed engine again from its last",
    "CommitGoneError": "read again, or [tag](../versions.md#tags) the commit first",
    "DeltasGoneError": "see [what a reader does](../deltas.md#missing-repeated-or-damaged-deltas)",
    "CapacityError": "resume with a larger `vocabulary_size` ([a step](../dynamic.md#a-step)), or more passes",
    "PeerError": "start the job again",
    "ListenError": "end what listens there, or choose another port",
    "TargetError": "repair the store, and start the follower again",
    "ServiceError": "correct the address, token or certificate, if it names one",
    "ServiceTimeoutError": "retry, or set a larger limit",
    "ReadTimeoutError": "request fewer rows at a time; look at the writer",
    "TakeTimeoutError": "the message names who is missing",
    "CancelledError": "create another accumulator, if it should continue",
}


def errors() -> str:
    """Return every class of errors: what it also is, the exit code of a command, what raises it, and what to do."""
    classes = {
        name: kind
        for name, kind in vars(error_classes).items()
        if isinstance(kind, type) and issubclass(kind, ps.PenstockError) and kind is not ps.PenstockError
    }
    assert set(ERRORS) == set(classes)
    items = []
    for name, advice in ERRORS.items():
        kind = classes[name]
        bases = ", ".join(
            base.__name__ if base.__name__ != name else f"that of {base.__module__.partition('._')[0]}"
            for base in kind.__bases__
            if base is not ps.PenstockError
        )
        code = INPUT if issubclass(kind, ps.ServiceError) else judged(kind("…"))[0]  # commands convert this one
        notes = [bases, *([f"exit code {code}"] if code != FAILED else [])]
        if kind is ps.ServiceError:
            notes[-1] += ", of a token or certificate 2"
        if name not in error_classes.__all__:
            notes.append("not exported: catch what it also is")
        raised = (kind.__doc__ or "").partition("\n\n")[0].strip().rstrip(".")
        items.append(f"- `{name}` ({'; '.join(notes)}): {raised}. **Do**: {advice}")
    return "\n".join(items)


def connector_errors() -> str:
    """Return the errors of all connectors, and what each of them leads to."""
    shared = {"Object stores": (*OBJECT_STORES, UNREACHABLE), "Files": FILES}
    users: dict[ErrorTable, list[tuple[str, str]]] = {}
    for role, kinds in (("source", source_kinds()), ("target", target_kinds())):
        for kind in kinds:
            users.setdefault(kind.errors, []).append((kind.title, role))
    sections = []
    for declared, pairs in users.items():
        taken = {title: rows for title, rows in shared.items() if set(rows) <= set(declared.rows)}
        own = [row for row in declared.rows if not any(row in rows for rows in taken.values())]
        more = " and ".join(f"[{title.lower()}](#{_anchor(title)})" for title in taken)
        titles, roles = (", ".join(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
        parts = [f"## {titles[0].upper()}{titles[1:]} ({roles})"]
        parts += [_rows(own)] if own else []
        parts += [f"{'In addition, those' if own else 'Those'} of {more}."] if more else []
        sections.append("\n\n".join(parts))
    sections += [f"## {title}\n\n{_rows(rows)}" for title, rows in shared.items()]
    return "\n" + "\n\n".join(sections) + "\n"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _rows(errors: Sequence[ErrorRow]) -> str:
    return table(
        ("error", "then", "what to do"), [(row.meaning, _end(row), _linked(row.advice) or "–") for row in errors]
    )


def _linked(text: str) -> str:
    """Return a text of the product with its names of pages as links of a page of the reference."""
    return re.sub(r"docs/(\w+)\.md", r"[\1](../\1.md)", text)


def _end(row: ErrorRow) -> str:
    return "is retried" if row.code is None else f"ends with {row.code}"


def slots() -> str:
    """Return the names that other libraries give to the slots of optimizers."""
    rows = []
    for optimizer in sorted({*OTHER_NAMES, *OPTAX_NAMES}):
        others, optax = OTHER_NAMES.get(optimizer, {}), OPTAX_NAMES.get(optimizer, {})
        for slot in {**others, **optax}:
            names = ", ".join(f"`{name}`" for name in others.get(slot, ()))
            rows.append((optimizer, f"`{slot}`", names, f"`{optax[slot]}`" if slot in optax else ""))
    return table(("optimizer", "slot", "elsewhere", "in optax"), rows)


def events() -> str:
    """Return the events of logs, by level and meaning."""
    rows = [(f"`{name}`", logging.getLevelName(level).lower(), meaning) for name, (level, meaning) in EVENTS.items()]
    return table(("event", "level", "when"), rows)


def bad_rows() -> str:
    """Return the columns of a file of bad rows."""
    rows = [(f"`{name}`", str(kind), meaning) for name, kind, meaning in bad_rows_file.COLUMNS]
    return table(("column", "type", ""), rows)


def deltas() -> str:
    """Return the columns of deltas."""
    rows = [(f"`{name}`", kind, condition, meaning) for name, kind, condition, meaning in delta_format.COLUMNS]
    return table(("column", "type", "with", ""), rows)


def _install_line(kind: UriKind) -> str:
    return f"`{kind.library.install_line}`" if kind.library else "–"


# Metric → when to look. "none" and a reason, where no alert of its own would help.
ALERTS = {
    "rows_total": "its rate falls below half of that of the same hour a week ago",
    "frames_total": "its rate is 0 while producers run",
    "stale_frames_total": "its rate ÷ that of `penstock_frames_total` exceeds the share of your backup workers",
    "stale_rows_total": "its rate ÷ that of `penstock_rows_total` exceeds what you would give as `--max-stale`",
    "stale_lateness_frames_total": "any increase at 4 and more: a worker hangs",
    "dropped_rows_total": "any increase, but of `frozen:TABLE`, which are gradients of a frozen table",
    "truncated_ids_total": "its rate ÷ that of `penstock_rows_total` grows: sequences are longer than configured",
    "rolled_back_frames_total": "any increase that no one has ordered",
    "not_finite_rows_total": "above 0",
    "clipped_steps_total": "its rate ÷ that of `penstock_steps_total` grows: gradients explode",
    "table_gradient_norm": "several times that of yesterday",
    "table_update_norm": "several times that of yesterday, or 0",
    "contributor_norm": "far from those of the others",
    "limited_frames_total": "any increase: look at that contributor",
    "clipped_rows_total": "its rate ÷ that of the updated rows grows: gradients explode",
    "skipped_frames_total": "none: it grows once, when a run resumes",
    "steps_total": "`rate(penstock_steps_total[10m]) == 0` while producers run",
    "run_seconds": "it falls to 0 more than once an hour: the process restarts",
    "rows_per_second": "none: alert on the rate of `penstock_rows_total`",
    "held_bytes": "above a tenth of the memory of the machine: the gate waits too long",
    "input_read_ratio": "no increase in an hour, of a replay of files",
    "global_steps": "of a replica: far behind its service",
    "pending_frames": "at `penstock_required_frames` − 1 for longer than a step takes: a worker is missing",
    "required_frames": "a change that no one has ordered",
    "late_frames_total": "its rate ÷ that of `penstock_frames_total` grows: a worker is slow",
    "absent_steps_total": "any increase, if every worker has rows in every step",
    "early_frames": "at `ahead` for one worker: it waits for the others",
    "round_wait_seconds": "above several times the time of a step: a worker is missing",
    "learning_rate_ratio": "not that of your schedule",
    "table_rows_total": "no increase in an hour, of a table that always gets rows",
    "table_distinct_ids": "above what you planned: the ids of a feature have changed",
    "table_updated_rows_total": "no increase in an hour, of a table that always gets rows",
    "table_unique_ratio": "far from that of yesterday: the ids of a feature have changed",
    "table_keys": "it falls by a tenth within an hour",
    "table_keys_ratio": "above 0.9 with `on_full: ERROR`",
    "table_waiting_keys": "near the rows of the table: waiting keys are forgotten",
    "table_expired_waiting_keys": "above a tenth of the keys: steps have stopped, so nothing is swept",
    "table_directory_bytes": "above what `penstock plan` says",
    "table_admitted_keys_total": "its rate is several times that of yesterday: ids are no longer stable",
    "table_returned_keys_total": "a growing share of the admitted ones: the table is too small",
    "table_expired_keys_total": "its rate is several times that of yesterday: a feature has gone",
    "table_evicted_keys_total": "its rate is above what `penstock plan` says",
    "table_rejected_keys_total": "any increase",
    "table_rolled_back_keys": "none: look at it after a rollback",
    "table_unadmitted_rows_total": "its share of `penstock_table_rows_total` is above what `penstock plan` says",
    "table_cache_rows": "none: it is what the configuration says",
    "table_cache_hits_total": "its share of the updated rows is far below that of `penstock plan`",
    "table_cache_up_rows_total": "its share of the updated rows is far above that of `penstock plan`",
    "table_cache_down_rows_total": "none: it follows the rows that move up",
    "table_cache_moved_bytes_total": "its rate nears the bandwidth of the bus",
    "table_cache_waited_seconds_total": "its rate is above 0.2: steps wait for rows",
    "step_seconds": "the 0.99 quantile exceeds the time between two steps of your producers",
    "freshness_seconds": 'the 0.99 quantile of `until="row"` exceeds how old your model may be',
    "stage_seconds_total": "the rate of `save` is above 0.5: commits are too frequent for the disk",
    "device_problems_total": "above 0",
    "compiles_total": "growing in a steady state",
    "checkpoint_age_seconds": "above several times the usual interval",
    "checkpoint_bytes": "above a third of the disk that it is on",
    "checkpoint_steps": "further behind `penstock_global_steps` than `--every`, for several commits",
    "build_info": "more than one version for an hour: an upgrade has stopped half way",
    "queued_rows": "near `--max-queued-rows`",
    "queued_bytes": "near `--queued-memory`",
    "producers": "growing: names of producers are not stable",
    "producer_streams": "below the number of your workers",
    "connections": "near `--max-connections`",
    "calls": "near `--max-calls`",
    "refused_calls_total": "any increase",
    "lookups_total": "its rate is 0 while serving systems run",
    "looked_up_rows_total": "none: rows per lookup, with the one above",
}


def metrics() -> str:
    """Return the list of all metrics, with types, labels, their own text, and when to look."""
    from penstock.contrib.pages.metrics import SERVICE_METRICS, Metrics, metrics_of
    from penstock.core.freshness import Ages

    cached = ps.TableConfig(9, 2, name="cached", placement=ps.Placement("cached", device_bytes=80))
    tables = [cached, ps.TableConfig(9, 2, name="dynamic", dynamic=ps.Dynamic())]
    snapshot = Metrics(ps.Engine(ps.EmbeddingConfig.from_tables(tables, ps.SGD(0.1)))).snapshot()
    measured = {"commit": (0, 0, 0.0), "of_service": dict.fromkeys(SERVICE_METRICS, 0)}
    snapshot = dataclasses.replace(snapshot, ages={"row": Ages(1, 0.0, deque([(0.0, 1)]))}, **measured)
    items = []
    for family in metrics_of(snapshot):
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        kind = ["gauge" if family.type == "info" else family.type]
        named = [", ".join(f"`{label}`" for label in labels or getattr(family, "_labelnames", ()))]
        text = _linked(family.documentation)
        alert = ALERTS[name.removeprefix("penstock_")]
        items.append(f"- `{name}` ({'; '.join([*kind, *filter(None, named)])}): {text}. **Alert**: {alert}")
    assert len(items) == len(ALERTS)
    return "\n".join(items)


# Page → name → function that returns the table.
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "deltas.md": {"columns": deltas},
    "formats.md": {"bad rows": bad_rows, "slots": slots},
    "sources.md": {"sources": sources},
    "targets.md": {"targets": targets},
    "reference/errors.md": {"errors": errors},
    "reference/events.md": {"events": events},
    "reference/connector_errors.md": {"errors": connector_errors},
    "reference/metrics.md": {"metrics": metrics},
}


def current(page: str) -> str:
    """Return the text of a page with all its tables up to date."""
    text = (DOCS / page).read_text()
    for name, create in TABLES[page].items():
        begin, end = (f"<!-- docs/tables.py {name}: {side} -->" for side in ("begin", "end"))
        before, _, rest = text.partition(f"{begin}\n")
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{create()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(current(page))
