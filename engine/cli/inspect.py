"""``penstock inspect``: report the contents of a configuration, a stream, a log, tables or a checkpoint."""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import penstock.base.interrupts as interrupts
from penstock.base.errors import ConfigError, InputError, StateError, UsageError
from penstock.base.filesystem.file_stores import place_of
from penstock.base.flag_values import local_path
from penstock.checkpoint.manifests import VECTORS, num_pending, trusting
from penstock.checkpoint.parts import directories_of
from penstock.checkpoint.table_changes import changes_in
from penstock.checkpoint.versions import NamedCommit
from penstock.cli.command_line import Parser, add_flag
from penstock.cli.output import Output, check_writable, count, several
from penstock.cli.watching import pages
from penstock.io.decoding.bad_rows import is_quarantine, reasons_of
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.role_types import check_columns, is_list
from penstock.io.decoding.row_columns import decode_rows
from penstock.io.decoding.schema import Roles, resolve
from penstock.io.sources.opening import Part, expanded, looks_like_arrow, open_source
from penstock.io.sources.source_kinds import source_kind
from penstock.io.table_formats.table_format import TableFormat, inner_formats, tensor_format
from penstock.io.table_formats.tensor_names import guessed_part
from penstock.io.table_formats.unread_formats import other_format
from penstock.model.config.dynamic import settings_text
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import FromFile
from penstock.pyx.id_table import IdTable

EXAMPLE = "penstock inspect monday.arrows"
UNNAMED = "(unnamed)"
Uses = dict[str, Any]  # table → pages("id_statistics").IdUses
OTHER_KINDS: dict[str | None, str] = {
    "table": "a table, as --out writes it: the weights in 'row', then the optimizer's slots",
    "deltas": "deltas, as --deltas writes them: rows that changed, with their values after 'step'",
}


def add(command: Parser) -> None:
    command.add_argument(
        "path",
        metavar="PATH",
        help="a configuration, an Arrow or Parquet file, a directory, a checkpoint, tables, DIR@VERSION, a URI, or -",
    )
    for name in ("columns", "allow_missing_end"):
        add_flag(command, name)
    command.add_argument(
        "--report", type=local_path, metavar="DIR", help="of a stream: write a page with plots of its ids to DIR"
    )


def run(args: argparse.Namespace, out: Output) -> None:
    check_columns(args.columns)
    check_writable(args.report)
    if source_kind(args.path) is None and is_checkpoint(args.path):
        check_is_stream(args, "checkpoint")
        with trusting(place_of(args.path)):
            inspect_checkpoint(args.path, out)
            return
    if "://" not in args.path and (tables := tensors_at(Path(args.path))) is not None:
        check_is_stream(args, "file of tables")
        inspect_tensors(args.path, tables, out)
        return
    if is_other_file(args.path):
        check_is_stream(args, "configuration")
        try:
            inspect_config(args.path, out)
            return
        except ConfigError as error:
            reason = str(error).removeprefix(f"{args.path}:").strip()
            problem = f"neither Arrow, nor Parquet, nor a configuration (read as one: {reason})"
            raise InputError(other_format(Path(args.path)) or problem, source=args.path) from None
    sources = [open_source(each, args.allow_missing_end, as_files=True) for each in expanded(args.path)]
    uses: Uses | None = None if args.report is None else defaultdict(pages("id_statistics").IdUses)
    parts = [inspect_part(part, args.columns, out, uses) for source in sources for part in source.parts()]
    result = {"path": place_of(args.path), "kind": "stream", "parts": parts}
    if uses is not None:
        sections = pages("id_statistics").use_sections(uses)
        index = pages("html_report").write_page(args.report, f"penstock inspect {args.path}", sections, result)
        out.say(f"report    {index}")
    out.result(result)


def tensors_at(path: Path) -> TableFormat | None:
    """Return the format of tensors of another library at a path; None: it has none, or streams. Raise InputError."""
    try:
        if path.is_dir() and any(each.is_file() and looks_like_arrow(each) for each in path.iterdir()):
            return None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=str(path)) from error
    if (kind := tensor_format(path)) is None and path.is_dir() and (problem := inner_formats(path)) is not None:
        raise InputError(problem, source=str(path))
    return kind


def inspect_tensors(path: str, tables: TableFormat, out: Output) -> None:
    """Report the tensors of another library, and the tables and slots that an import would take them for."""
    assert tables.contents is not None
    with ExitStack() as stack:
        contents = tables.contents(Path(path), stack)
    tensors, texts = [], []
    for name, tensor in contents.tensors.items():
        table, part = guessed_part(name) if len(tensor.shape) == 2 else ("", "")
        texts.append(f"{name}: {tensor}" + (f", {part} of a table '{table}'" if table else ""))
        tensors.append({"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "table": table, "part": part})
    out.say(f"{path}: {tables.title}, {several(len(tensors), 'tensor')}")
    out.say_all("  ", [*texts, *(f"{name}: {kind}" for name, kind in contents.others.items())])
    out.result({"path": path, "kind": tables.name, "tensors": tensors, "skipped": contents.others})


def check_is_stream(args: argparse.Namespace, kind: str) -> None:
    """Raise UsageError for ``--report`` with anything but a gradient stream."""
    if args.report is not None:
        raise UsageError(f"--report: pages are of gradient streams, and {args.path} is no stream but a {kind}")


def is_checkpoint(path: str) -> bool:
    """Return whether ``path`` is a folder with commits, or a version in one. A URI that cannot be opened is none."""
    try:
        return bool(NamedCommit.of(path).folder.numbers())
    except (StateError, UsageError, OSError):
        if "://" in path:
            return False
        raise


def is_other_file(path: str) -> bool:
    """Return whether ``path`` is a local file that does not begin like Arrow or Parquet. Raise InputError."""
    try:
        return Path(path).is_file() and os.path.getsize(path) > 0 and not looks_like_arrow(path)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", source=path) from error


def inspect_checkpoint(path: str, out: Output) -> None:
    """Report a commit of a checkpoint, the last one or DIR@VERSION, after verifying every digest."""
    version = NamedCommit.of(path)
    folder = version.folder
    commit = version.read(folder.checked)
    contents, num_bytes = commit.contents, commit.num_bytes
    sources = [{"source": name, "frames": frames} for name, frames, *_ in contents["positions"]["sources"]]
    step, pending = contents["global_step"], num_pending(contents)
    listed = f"commits {', '.join(map(str, folder.numbers()))}, every digest of the last one fits"
    out.say(f"{place_of(path)}: checkpoint, {f'commit {commit.number}, every digest fits' if version.name else listed}")
    out.say(f"  step {count(step)}, {count(pending)} of {contents['num_required']} frames in the gate")
    bases = sum(file.parent is None for file in commit.files)  # one per process that committed
    out.say(f"  {several(bases, 'base')}, {several(len(commit.files) - bases, 'delta')}, {count(num_bytes)} bytes")
    directories = directories_of(folder, commit)
    tables, texts = [], []
    for table in contents["tables"]:
        slots = ", ".join(table["slots"]) or "no slots"
        text = f"{table['name']}: {count(table['vocabulary_size'])} × {table['dim']}, "
        text += f"{table['optimizer']}, {slots}" if table.get("trainable", True) else "frozen"
        text += ", starts from vectors" if table["name"] in contents.get(VECTORS, {}) else ""
        text += f", drawn as {table['drawn_as']}" if "drawn_as" in table else ""
        if (directory := directories.get(table["name"])) is not None:
            table = {**table, "keys": len(directory["key"]), "waiting": len(directory["waiting.key"])}
            text += f", dynamic: {several(table['keys'], 'key')}, {count(table['waiting'])} waiting; "
            text = (text + settings_text(table["dynamic"])).removesuffix("; ")
        tables.append(table)
        texts.append(text)
    out.say_tables("  table ", texts)
    changes = changes_in(contents)
    out.say_all("  ", changes)
    for source in sources:
        out.say(f"  source {source['source']}: {count(source['frames'])} frames")
    state = {key: contents[key] for key in ("global_step", "num_required", "reduction", "seed", "counters")}
    result = {"commit": commit.number, "bytes": num_bytes, "pending": pending, "sources": sources, "tables": tables}
    result["changes"] = [change.get_state() for change in changes]
    out.result({"path": place_of(path), "kind": "checkpoint", **result, **state})


def inspect_config(path: str, out: Output) -> None:
    config = EmbeddingConfig.load(path)
    out.say(f"{path}: configuration, mode {config.mode}, {config.sharding_strategy} sharding, {config.num_tags} tags")
    tables, texts = [], []
    for name, (rows, dim) in config.sizes.items():
        table: dict[str, Any] = {"name": name, "vocabulary_size": rows, "dim": dim}
        try:
            spec = config.table(name)
        except ConfigError as error:
            table["optimizer"] = str(error)
        else:
            table |= {"optimizer": type(spec.optimizer).__name__, "placement": spec.placement.where}
            if not spec.trainable:
                table |= {"trainable": False, "until_step": spec.until_step}
            if isinstance(spec.initializer, FromFile):
                table["initial"] = spec.initializer.path
            if spec.dynamic is not None:
                table["dynamic"] = asdict(spec.dynamic)
        text = f"{name}: {count(rows)} × {dim}, {table['optimizer']}"
        if "trainable" in table:
            until = table["until_step"]
            text += ", frozen" + ("" if until is None else f" until step {count(until)}")
        text += f", starts from {table['initial']}" if "initial" in table else ""
        if "dynamic" in table:
            text += f", dynamic: {settings_text(table['dynamic'])}".removesuffix(": ")
        text += {"host": ", on the host", "cached": ", on the host, cached"}.get(table.get("placement", ""), "")
        tables.append(table)
        texts.append(text)
    out.say_tables("  table ", texts)
    out.result({"path": path, "kind": "config", "mode": config.mode, "tags": config.num_tags, "tables": tables})


@dataclass
class _TableCounts:
    """Counts of one table's rows."""

    rows: int = 0
    nulls: int = 0  # rows whose id is null
    smallest: int | None = None
    largest: int | None = None
    distinct: IdTable = field(default_factory=IdTable)
    distinct_per_frame: int = 0
    frame: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def add(self, ids: npt.NDArray[np.int64], raw: npt.NDArray[Any], null: npt.NDArray[np.bool_] | None) -> None:
        """Add rows of one frame.

        ids : int64
        raw : the same ids before narrowing, possibly uint64
        null : true for rows whose id is null; None if there are none
        """
        self.rows += len(ids)
        if null is not None and null.any():
            self.nulls += int(null.sum())
            ids, raw = ids[~null], raw[~null]
        if not len(ids):
            return
        low, high = int(raw.min()), int(raw.max())
        self.smallest = low if self.smallest is None else min(self.smallest, low)
        self.largest = high if self.largest is None else max(self.largest, high)
        self.distinct.insert(np.ascontiguousarray(ids))
        self.frame.append(ids)

    def end_frame(self) -> None:
        if self.frame:
            self.distinct_per_frame += len(np.unique(np.concatenate(self.frame)))
            self.frame = []

    def to_text(self) -> str:
        numbers = self.to_dict()
        text = f"{count(self.rows)} rows"
        if self.nulls:
            text += f", {count(self.nulls)} without an id"
        if self.smallest is not None:
            text += f", ids {self.smallest} to {self.largest}, {count(numbers['distinct'])} distinct"
            text += f", each {numbers['reuse']:.1f} times per frame"
        return text

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "id_nulls": self.nulls,
            "distinct": len(self.distinct),
            "id_min": self.smallest,
            "id_max": self.largest,
            "reuse": round((self.rows - self.nulls) / max(1, self.distinct_per_frame), 3),
        }


def inspect_part(part: Part, columns: Any, out: Output, uses: Uses | None = None) -> dict[str, Any]:
    """Report the batches of one schema: counts for a row stream, else the schema. uses : id statistics to add to"""
    out.say(f"{part.name}: {part.container}")
    summary: dict[str, Any] = {"name": part.name, "container": part.container, "batches": 0, "rows": 0}
    try:
        summary["schema"] = {f.name: str(f.type) for f in part.schema}
    except UnicodeDecodeError as error:  # Arrow decodes names lazily
        raise InputError(f"corrupt Arrow schema: {error}", source=part.name) from error
    for f in part.schema:
        out.say(f"  {f.name}: {f.type}{'' if f.nullable else ' not null'}")
    try:
        roles = resolve(part.schema, part.name, ReadOptions({}, columns=columns or {}))
    except InputError as error:
        if columns:
            raise
        summary["holds"] = other_kind(part.schema)
        out.say(f"  {OTHER_KINDS.get(summary['holds']) or f'not a row stream: {error.problem}'}")
        for batch in part.batches(part.schema.names):
            interrupts.check()
            summary["batches"] += 1
            summary["rows"] += batch.data.num_rows
        out.say(f"  {count(summary['rows'])} rows in {count(summary['batches'])} batches")
    else:
        summary |= _count_rows(part, roles, out, uses)
    summary["verified"] = part.verified
    if part.verified:
        out.say("  verified: every checksum fits")
    return summary


def other_kind(schema: pa.Schema) -> str | None:
    """Return "table" or "deltas" for the schema of such a file that penstock writes, None for another schema."""
    names = set(schema.names)
    if not {"id", "row"} <= names or not is_list(schema.field("row").type):
        return None
    return "deltas" if {"table", "step"} <= names else "table"


def _count_rows(part: Part, roles: Roles, out: Output, uses: Uses | None) -> dict[str, Any]:
    tables: dict[str, _TableCounts] = {}
    steps: list[int] = []
    frames = rows = batches = 0
    last: Any = None
    reasons: Counter[str] = Counter()
    extra = ["reason"] if is_quarantine(part.schema) else []
    for batch in part.batches([*roles.names, *extra]):
        interrupts.check()
        batches += 1
        if not batch.data.num_rows:
            continue
        if extra:
            reasons.update(reasons_of(batch.data, part.name))
        content = decode_rows(batch, roles, roles.default_table or UNNAMED, None)
        (decoded,) = content.row_batches
        rows += decoded.num_rows
        for start, stop, key in content.frame_columns.runs(batch):
            if key != last or content.frame_columns.steps is None:
                for counts in tables.values():
                    counts.end_frame()
                frames, last = frames + 1, key
            if key[0] is not None:
                steps = [min([*steps, key[0]]), max([*steps, key[0]])]
            codes = np.zeros(stop - start, np.int64) if decoded.codes is None else decoded.codes[start:stop]
            for code in np.unique(codes).tolist():
                name = str(decoded.tables[code]) if code >= 0 else "(null)"
                table_rows = start + np.flatnonzero(codes == code)
                null = None if decoded.ids_null is None else decoded.ids_null[table_rows]
                tables.setdefault(name, _TableCounts()).add(decoded.ids[table_rows], decoded.raw_ids[table_rows], null)
                if uses is not None:
                    uses[name].add(decoded.ids[table_rows] if null is None else decoded.ids[table_rows][~null])
    for counts in tables.values():
        counts.end_frame()
    span = f", steps {steps[0]} to {steps[1]}" if steps else ""
    out.say(f"  {count(rows)} rows in {count(batches)} batches, {count(frames)} frames{span}")
    if extra:
        text = ", ".join(f"{reason} {count(number)}" for reason, number in sorted(reasons.items()))
        out.say(f"  quarantine of bad rows: {text or 'none'}")
    out.say_tables("  table ", [f"{' '.join(name.split())}: {counts.to_text()}" for name, counts in tables.items()])
    return {
        "batches": batches,
        "rows": rows,
        "frames": frames,
        "step_min": steps[0] if steps else None,
        "step_max": steps[1] if steps else None,
        "tables": {name: counts.to_dict() for name, counts in tables.items()},
        **({"reasons": dict(reasons)} if extra else {}),
    }
