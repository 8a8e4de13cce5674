"""Every option of a run, in a frozen dataclass per concern: its type, default, text, flag and modes.

Keywords, signatures and docstrings (keywords.py), the flags of commands, and the site's page of every help are derived
from them. A new option is a new field here. command_options.py has what a run, a job and other commands take of these.

Modes: "run", one engine (``Engine.run``, ``penstock replay``); "stage", ``Engine.stage``; "serve", the service; "job",
a job on a Ray cluster (``penstock job``); "passes", a replay in passes (``penstock passes``); "restore",
``Engine.restore``; "check", commands that read a log without tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.base.flag_values import (
    MOST_PARALLEL,
    Flag,
    all_or_names,
    folder_or_uri,
    local_path,
    megabytes,
    number,
    option,
    rows_of_a_frame,
    whole,
    workers_of_rounds,
)

if TYPE_CHECKING:
    from penstock.model.learning_rates import Rates
    from penstock.model.stats import Counters, GateProgress

    Progress = Callable[[Counters, GateProgress, float | None], None]

AnyPath = str | os.PathLike[str]

# Commits that stay in a checkpoint.
KEEP = 3


# ---- modes

ONE_ENGINE, JOB, PASSES = frozenset({"run", "stage"}), frozenset({"job"}), frozenset({"passes"})
RUNS = ONE_ENGINE | JOB | PASSES
READS = RUNS | {"check"}
ENGINES = RUNS | {"serve"}
EVERYWHERE = READS | {"serve"}
COMMANDS = ENGINES - {"stage"}
RESTORES = frozenset({"run", "serve", "passes", "restore"})


# ---- the concerns


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What a command writes at its end."""

    out: str | os.PathLike[str] | None = option(
        "write ``DIR/<table>.parquet`` at the end", flag=Flag("DIR", local_path)
    )
    state_hash: bool = option(
        "compute the state hash at the end", True, flag=Flag(name="no-hash", help="do not compute the state hash")
    )


@dataclass(frozen=True, kw_only=True)
class InitialOptions:
    """The rows that a start begins with."""

    init: str | os.PathLike[str] | None = option(
        "start from the tables of a folder that --out wrote, or of another format of ``penstock import``",
        flag=Flag("PATH", local_path),
    )
    seed: int = option("of the tables' initial values", 0, flag=Flag("N", whole()))


@dataclass(frozen=True)
class Options:
    """Base of options that are taken from a mapping of more."""

    @classmethod
    def among(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Return the options that ``values`` has among others. others : fields that are set"""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values} | others)


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Options):
    """How sources are read."""

    table: str | None = option("table of the rows that name none (never a filter)", None, EVERYWHERE, Flag("T"))
    columns: Mapping[str, str] | None = option(
        "role → name, where the stream's columns have other names",
        None,
        EVERYWHERE,
        Flag(
            "ROLE=NAME",
            name="column",
            help="the stream's name of a column; roles: id, gradient, table, step, contributor, learning_rates, time",
            repeated=True,
        ),
    )
    gradient_dtype: str | None = option(
        "of the gradient column's values; needed for bfloat16, which Arrow holds as uint16",
        None,
        EVERYWHERE,
        Flag(choices=("bfloat16", "float16", "float32", "float64")),
    )
    contribution_rows: int | str | None = option(
        "a frame is N rows, or N examples; batch: a record batch. Needed without a 'step' column where batches are "
        "arbitrary: those of Parquet files, Arrow IPC files and queries",
        flag=Flag("N|batch", rows_of_a_frame),
    )
    hash_ids: bool = option(
        "take strings as ids: keys of dynamic tables are their hashes, ``penstock.hash_ids``",
        False,
        EVERYWHERE,
        Flag(pages=("dynamic.md#ids-that-are-strings",)),
    )
    on_bad_row: str = option(
        "error (default): stop before the frame; drop: skip the row and count it; quarantine=FILE: also write it "
        "to a new Arrow file, complete when the run ends, to be repaired and replayed",
        "error",
        flag=Flag("error|drop|quarantine=FILE", pages=("bad_rows.md",)),
    )
    allow_missing_end: bool = option("accept streams without an end marker", False, flag=Flag())


@dataclass(frozen=True, kw_only=True)
class OneReaderOptions(Options):
    """How one process reads sources; a job has many readers, and a fixed order."""

    merge: str | None = option(
        "step: merge sources that are sorted by step, one per worker; round: a frame of each source in turn",
        flag=Flag(
            choices=("step", "round"),
            details="Frames of equal steps stay in the order of their sources. `round` skips sources that have ended; "
            "it is the order of jobs",
            pages=("ray.md",),
        ),
    )
    follow: bool = option(
        "read topics and tables with versions on, beyond their current end, until a signal",
        False,
        ONE_ENGINE,
        Flag(pages=("sources.md#replay-a-topic",)),
    )
    patience: float = option(
        "seconds to retry while a broker, or the server of a table, is gone",
        60.0,
        EVERYWHERE - JOB - PASSES,
        Flag("S", number("seconds, at least 0", 0, 86_400)),
    )
    max_message: int = option(
        "bytes of the largest message of a broker",
        64 << 20,
        EVERYWHERE - JOB - PASSES,
        Flag("MB", megabytes, help="largest message of a broker; for serve also largest record batch", unit=1 << 20),
    )
    as_files: bool = option("read all files of a directory that is a Delta, Lance or Iceberg table", False, flag=Flag())


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """When the gate opens, and how sums become gradients."""

    num_required: int | None = option(
        "frames that make a step (default: the configuration's, or 1)", flag=Flag("N", whole(1))
    )
    reduction: str | None = option(
        "mean: divide a row's sum by the frames that contain it; sum: do not (default: the configuration's or mean)",
        flag=Flag(choices=("mean", "sum")),
    )


@dataclass(frozen=True, kw_only=True)
class RoundOptions:
    """Which frames the gate of one engine takes."""

    workers: int | tuple[str, ...] | None = option(
        "in place of num_required, rounds: a step takes one frame of each worker, in their order: N for the "
        "contributors rank-0 … or 0 …, or their names",
        flag=Flag("N|NAME,NAME", workers_of_rounds, pages=("explanation/gates.md",)),
    )
    max_staleness: int | None = option(
        "steps that a frame may be behind (default: the configuration's, or 0)", flag=Flag("N", whole())
    )
    queued_memory: int = option(
        "memory of the frames of workers that wait for those of others",
        1 << 30,
        frozenset({"run"}),
        Flag("MB", megabytes, unit=1 << 20),
    )


@dataclass(frozen=True, kw_only=True)
class SteppingOptions:
    """The rates of the steps, and where a run ends."""

    learning_rates: Rates = option(
        "by tag, a mapping or a sequence; take precedence over the column and the schedules",
        None,
        EVERYWHERE,
        Flag(
            "TAG=VALUE",
            name="learning-rate",
            help="value of a dynamic learning rate, once per tag; takes precedence over the column",
            repeated=True,
        ),
    )
    flush: bool = option("open the gate once more at the end, for the frames that wait in it", False, flag=Flag())
    limit: int | None = option(
        "stop after that many frames, including stale ones and those that a resumed run skips",
        flag=Flag("FRAMES", whole(0)),
    )
    max_stale: float | None = option(
        "0 to 1, a share of the rows read, including those that a resumed run skips: if stale frames contain more, "
        "raise InputError at the end, which undoes nothing: steps, commits and deltas stay",
        flag=Flag(
            "SHARE",
            number("a share from 0 to 1", 0, 1),
            help="exit 3 and do not write --out if stale frames contain more than this share, 0 to 1 (default: 1)",
            details="Rows that `--resume` skips count. Checked at the end: the last commit and the deltas stay",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class CommittingOptions:
    """Where the state is committed."""

    checkpoint: str | os.PathLike[str] | None = option(
        "a folder or URI to commit the state with its position to, at the end, whatever ends the run",
        flag=Flag("DIR", folder_or_uri, pages=("checkpoints.md",)),
    )
    every: int | None = option(
        "also commit after every N steps, in the background (default: at the end only; a service: when a producer "
        "waits for it)",
        flag=Flag("N", whole(1)),
    )
    keep: int = option("number of commits that stay", KEEP, RUNS)
    resume: bool = option(
        "skip the frames that this engine's state already contains (``Engine.restore``)",
        False,
        flag=Flag(
            help="continue from the last commit in DIR, or from the start if there is none",
            details="The run reads the committed frames again, recognizes them and skips them. `--seed` and `--init` "
            "apply only to a start",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TableChangeOptions(Options):
    """The changes of tables that a restoration permits."""

    new_tables: bool = option(
        "tables that the commit, or the folder of ``init``, lacks start with their initial rows",
        False,
        flag=Flag(pages=("change_tables.md",)),
    )
    drop_table: Sequence[str] = option(
        "leave out a table of the commit that the configuration no longer has", (), flag=Flag("NAME", repeated=True)
    )
    rename: Mapping[str, str] | None = option(
        "old name → new name of a table, which keeps its rows, and its new rows those of the old name",
        flag=Flag("OLD=NEW", repeated=True, help="a table of the commit has another name; its rows stay as they are"),
    )
    reset_slots: Sequence[str] = option(
        "start the slots of a table anew, whose optimizer is another one; its weights stay",
        (),
        flag=Flag("NAME", repeated=True),
    )
    reset_table: Sequence[str] = option(
        "start a table anew, whose dim or another setting does not fit the rows in the commit",
        (),
        flag=Flag(
            "NAME",
            repeated=True,
            details="Given again, it changes no table that it has changed, nor do the three flags before it",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DeltaContents(Options):
    """What deltas hold."""

    slots: bool | Sequence[str] = option(
        "of deltas: names of slots to include next to the weights; True: all of them",
        (),
        flag=Flag(
            "all|NAME,NAME",
            all_or_names,
            name="delta-slots",
            help="with the optimizer's slots: all of them, or those named (default: none)",
        ),
    )
    op: bool = option("of deltas: add a column 'op', 'upsert' in every row; dynamic tables always have it", False)
    last: bool = option(
        "of deltas of dynamic tables: add a column 'last', the clock when the key occurred last, which tells "
        "whether it has expired",
        False,
        RUNS | {"serve"},
        Flag(name="delta-last", pages=("dynamic.md#expired-keys",)),
    )
    numbered: bool = option(
        "of deltas: add ``parent``, ``checksum`` and ``rows_left``, which reveal a missing, repeated, truncated or "
        "damaged delta",
        False,
    )
    per_steps: int | None = option(
        "one delta per so many steps, with the last value of every row that changed (default: one per step)",
        None,
        RUNS | {"serve"},
        Flag(
            "N",
            whole(1),
            name="delta-steps",
            help="one delta per N steps, with the last value of every row that changed (default: one per step; a "
            "service: one per commit, without a checkpoint one per step while a reader follows)",
        ),
    )


@dataclass(frozen=True, kw_only=True)
class DeltaOptions(DeltaContents):
    """What deltas hold, and how often one is emitted."""

    per_rows: int | None = option(
        "or per so many changes of rows, whichever comes first", flag=Flag("N", whole(1), name="delta-rows")
    )
    per_seconds: float | None = option(
        "or per so many seconds, whichever comes first",
        flag=Flag("S", number("seconds, at least 0", 0, 1e9), name="delta-seconds"),
    )


@dataclass(frozen=True, kw_only=True)
class DeltaTargetOptions:
    """Where deltas are written."""

    deltas: str | os.PathLike[str] | None = option(
        "write the rows that change, step by step, to a new file (a log with checksums), a pipe, a URI, or - for "
        "standard output; with a checkpoint to a file, which a resumed run continues",
        flag=Flag("FILE|URI", details="With `-`, text goes to stderr", pages=("deltas.md",)),
    )


@dataclass(frozen=True, kw_only=True)
class WatchingOptions:
    """What shows a command at work."""

    ui: str | None = option(
        "show a live page in a browser while it works (default 127.0.0.1, any free port, printed on stderr)",
        flag=Flag("HOST:PORT", bare="127.0.0.1:0", pages=("operations.md#metrics-and-the-live-page",)),
    )
    metrics: str | None = option("serve Prometheus' metrics there, at /metrics", flag=Flag("HOST:PORT"))
    report: Path | None = option(
        "write a page with plots of the run to DIR at the end",
        None,
        frozenset({"run"}),
        Flag("DIR", local_path, details="`DIR/index.html` needs no other file; the numbers are in `report.json`"),
    )
    metrics_file: Path | None = option("append the metrics, a JSON line a second", flag=Flag("FILE", local_path))
    log_level: str = option(
        "log events of this level or above to standard error (default warning)",
        "warning",
        frozenset({"serve"}),
        Flag(choices=("debug", "info", "warning", "error"), pages=("operations.md#logs",)),
    )
    log_format: str = option(
        "of the log: text (default), or a JSON object per line of standard error",
        "text",
        frozenset({"serve"}),
        Flag(choices=("text", "json")),
    )


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The devices of the tables, and the memory that other processes read."""

    devices: int | None = option(
        "devices that share the tables; on a CPU, parts of its memory (default: all accelerators, or 1)",
        flag=Flag("N", whole(1, MOST_PARALLEL)),
    )
    shared: str | os.PathLike[str] | None = option(
        "a folder of this machine, best in /dev/shm, whose files have the tables for other processes to read",
        None,
        frozenset({"run", "serve"}),
        Flag("DIR", local_path, pages=("readers.md",)),
    )


@dataclass(frozen=True, kw_only=True)
class ThreadOptions:
    """The threads of the host."""

    threads: int | None = option(
        "threads of the host (default: one per CPU; results do not depend on it)",
        flag=Flag("N", whole(1, MOST_PARALLEL)),
    )
