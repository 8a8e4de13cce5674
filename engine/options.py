"""Every option of a run, in one table: its type, text, default and flag, and the modes in which it works.

A ``TypedDict`` per concern lists them, which type checkers read as the keywords of ``Engine.run`` and ``Engine.stage``.
Signatures and docstrings (keywords.py), the dataclasses that the code uses, the flags of commands, and the lists of
docs/cli.md are derived from it. A new option is a new key here.

Modes: "run", one engine (``Engine.run``, ``penstock replay``); "stage", ``Engine.stage``; "serve", the service; "job",
a job on a Ray cluster (``penstock job``); "passes", a replay in passes (``penstock passes``); "restore",
``Engine.restore``; "check", commands that read a log without tables.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ForwardRef, Self, TypedDict, get_args

from penstock.flag_values import (
    MOST_PARALLEL,
    Flag,
    Option,
    all_or_names,
    folder_or_uri,
    local_path,
    megabytes,
    number,
    number_of_passes,
    rows_of_a_frame,
    whole,
)

if TYPE_CHECKING:
    from penstock.learning_rates import Rates
    from penstock.stats import Counters, GateProgress

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


# ---- the table


class OutputKeywords(TypedDict, total=False):
    out: Annotated[AnyPath | None, Option("write DIR/<table>.parquet at the end"), Flag("DIR", local_path)]
    state_hash: Annotated[
        bool,
        Option("compute the state hash at the end", True),
        Flag(name="no-hash", help="do not compute the state hash"),
    ]


class InitialKeywords(TypedDict, total=False):
    init: Annotated[
        AnyPath | None,
        Option("start from the tables of a folder that --out wrote, or of another format of ``penstock import``"),
        Flag("PATH", local_path),
    ]
    seed: Annotated[int, Option("of the tables' initial values", 0), Flag("N", whole())]


class ReadingKeywords(TypedDict, total=False):
    table: Annotated[
        str | None, Option("table of the rows that name none (never a filter)", None, EVERYWHERE), Flag("T")
    ]
    columns: Annotated[
        "Mapping[str, str] | None",
        Option("role → name, where the stream's columns have other names", None, EVERYWHERE),
        Flag(
            "ROLE=NAME",
            name="column",
            help="the stream's name of a column; roles: id, gradient, table, step, contributor, learning_rates, time",
            repeated=True,
        ),
    ]
    gradient_dtype: Annotated[
        str | None,
        Option("of the gradient column's values; needed for bfloat16, which Arrow holds as uint16", None, EVERYWHERE),
        Flag(choices=("bfloat16", "float16", "float32", "float64")),
    ]
    contribution_rows: Annotated[
        int | str | None,
        Option(
            "a frame is N rows, or N examples; batch: a record batch. Needed without a 'step' column where batches are "
            "arbitrary: those of Parquet files, Arrow IPC files and queries"
        ),
        Flag("N|batch", rows_of_a_frame),
    ]
    merge: Annotated[
        str | None,
        Option(
            "step: merge sources that are sorted by step, one per worker; round: a frame of each source in turn",
            None,
            READS - JOB,
        ),
        Flag(
            choices=("step", "round"),
            details="Frames of equal steps stay in the order of their sources. `round` skips sources that have ended; "
            "it is the order of jobs",
            pages=("ray.md",),
        ),
    ]
    hash_ids: Annotated[
        bool,
        Option(
            "take strings as ids: keys of dynamic tables are their hashes, ``penstock.hash_ids``", False, EVERYWHERE
        ),
        Flag(pages=("dynamic.md#ids-that-are-strings",)),
    ]
    on_bad_row: Annotated[
        str,
        Option(
            "error (default): stop before the frame; drop: skip the row and count it; quarantine=FILE: also write it "
            "to a new Arrow file, complete when the run ends, to be repaired and replayed",
            "error",
        ),
        Flag("error|drop|quarantine=FILE", pages=("bad_rows.md",)),
    ]
    allow_missing_end: Annotated[bool, Option("accept streams without an end marker", False), Flag()]
    follow: Annotated[
        bool,
        Option("read topics and tables with versions on, beyond their current end, until a signal", False, ONE_ENGINE),
        Flag(pages=("brokers.md#replay-a-topic", "lakehouse.md")),
    ]
    patience: Annotated[
        float,
        Option("seconds to retry while a broker, or the server of a table, is gone", 60.0, EVERYWHERE - JOB - PASSES),
        Flag("S", number("seconds, at least 0", 0, 86_400)),
    ]
    max_message: Annotated[
        int,
        Option("bytes of the largest message of a broker", 64 << 20, EVERYWHERE - JOB - PASSES),
        Flag("MB", megabytes, help="largest message of a broker; for serve also largest record batch", unit=1 << 20),
    ]
    as_files: Annotated[
        bool,
        Option("read all files of a directory that is a Delta, Lance or Iceberg table", False, READS - JOB),
        Flag(),
    ]


class GateKeywords(TypedDict, total=False):
    num_required: Annotated[
        int | None, Option("frames that make a step (default: the configuration's, or 1)"), Flag("N", whole(1))
    ]
    reduction: Annotated[
        str | None,
        Option(
            "mean: divide a row's sum by the frames that contain it; sum: do not (default: the configuration's or mean)"
        ),
        Flag(choices=("mean", "sum")),
    ]


class SteppingKeywords(TypedDict, total=False):
    learning_rates: Annotated[
        "Rates",
        Option("by tag, a mapping or a sequence; take precedence over the column and the schedules", None, EVERYWHERE),
        Flag(
            "TAG=VALUE",
            name="learning-rate",
            help="value of a dynamic learning rate, once per tag; takes precedence over the column",
            repeated=True,
        ),
    ]
    flush: Annotated[bool, Option("open the gate once more at the end, for the frames that wait in it", False), Flag()]
    limit: Annotated[
        int | None,
        Option("stop after that many frames, including stale ones and those that a resumed run skips"),
        Flag("FRAMES", whole(0)),
    ]
    max_stale: Annotated[
        float | None,
        Option(
            "0 to 1, a share of the rows read, including those that a resumed run skips: if stale frames contain more, "
            "raise InputError at the end, which undoes nothing: steps, commits and deltas stay"
        ),
        Flag(
            "SHARE",
            number("a share from 0 to 1", 0, 1),
            help="exit 3 and do not write --out if stale frames contain more than this share, 0 to 1 (default: 1)",
            details="Rows that `--resume` skips count. Checked at the end: the last commit and the deltas stay",
        ),
    ]
    progress: Annotated[
        "Progress | None",
        Option("called after every frame with the counters, the gate and the share of input read", None, RUNS - JOB),
    ]


class CommittingKeywords(TypedDict, total=False):
    checkpoint: Annotated[
        AnyPath | None,
        Option("a folder or URI to commit the state with its position to, at the end, whatever ends the run"),
        Flag("DIR", folder_or_uri, pages=("checkpoints.md",)),
    ]
    every: Annotated[
        int | None,
        Option(
            "also commit after every N steps, in the background (default: at the end only; a service: when a producer "
            "waits for it)"
        ),
        Flag("N", whole(1)),
    ]
    keep: Annotated[int, Option("number of commits that stay", KEEP, RUNS)]
    resume: Annotated[
        bool,
        Option("skip the frames that this engine's state already contains (``Engine.restore``)", False),
        Flag(
            help="continue from the last commit in DIR, or from the start if there is none",
            details="The run reads the committed frames again, recognizes them and skips them. `--seed` and `--init` "
            "apply only to a start",
        ),
    ]


class TableChangeKeywords(TypedDict, total=False):
    new_tables: Annotated[
        bool,
        Option("tables that the commit, or the folder of ``init``, lacks start with their initial rows", False),
        Flag(pages=("checkpoints.md#change-the-tables",)),
    ]
    drop_table: Annotated[
        "Sequence[str]",
        Option("leave out a table of the commit that the configuration no longer has", ()),
        Flag("NAME", repeated=True),
    ]
    rename: Annotated[
        "Mapping[str, str] | None",
        Option("old name → new name of a table, which keeps its rows, and its new rows those of the old name"),
        Flag("OLD=NEW", repeated=True, help="a table of the commit has another name; its rows stay as they are"),
    ]
    reset_slots: Annotated[
        "Sequence[str]",
        Option("start the slots of a table anew, whose optimizer is another one; its weights stay", ()),
        Flag("NAME", repeated=True),
    ]
    reset_table: Annotated[
        "Sequence[str]",
        Option("start a table anew, whose dim or another setting does not fit the rows in the commit", ()),
        Flag("NAME", repeated=True, details="Given again, none of these flags changes a table that it has changed"),
    ]


class DeltaKeywords(TypedDict, total=False):
    slots: Annotated[
        "bool | Sequence[str]",
        Option("of deltas: names of slots to include next to the weights; True: all of them", ()),
        Flag(
            "all|NAME,NAME",
            all_or_names,
            name="delta-slots",
            help="with the optimizer's slots: all of them, or those named (default: none)",
        ),
    ]
    op: Annotated[
        bool, Option("of deltas: add a column 'op', 'upsert' in every row; dynamic tables always have it", False)
    ]
    last: Annotated[
        bool,
        Option(
            "of deltas of dynamic tables: add a column 'last', the clock when the key occurred last, which tells "
            "whether it has expired",
            False,
            RUNS | {"serve"},
        ),
        Flag(name="delta-last", pages=("dynamic.md#expired-keys",)),
    ]
    numbered: Annotated[
        bool,
        Option(
            "of deltas: add ``parent``, ``checksum`` and ``rows_left``, which reveal a missing, repeated, truncated or "
            "damaged delta",
            False,
            elsewhere=dict.fromkeys(("run", "job", "passes"), True),
        ),
    ]
    per_steps: Annotated[
        int | None,
        Option(
            "one delta per so many steps, with the last value of every row that changed (default: one per step)",
            None,
            RUNS | {"serve"},
        ),
        Flag(
            "N",
            whole(1),
            name="delta-steps",
            help="one delta per N steps, with the last value of every row that changed (default: one per step; a "
            "service: one per commit, without a checkpoint one per step while a reader follows)",
        ),
    ]
    per_rows: Annotated[
        int | None,
        Option("or per so many changes of rows, whichever comes first", None, ONE_ENGINE),
        Flag("N", whole(1), name="delta-rows"),
    ]
    per_seconds: Annotated[
        float | None,
        Option("or per so many seconds, whichever comes first", None, ONE_ENGINE),
        Flag("S", number("seconds, at least 0", 0, 1e9), name="delta-seconds"),
    ]


class DeltaTargetKeywords(TypedDict, total=False):
    deltas: Annotated[
        AnyPath | None,
        Option(
            "write the rows that change, step by step, to a new file (a log with checksums), a pipe, a URI, or - for "
            "standard output; with a checkpoint to a file, which a resumed run continues",
            None,
            RUNS - {"stage"},
        ),
        Flag("FILE|URI", details="With `-`, text goes to stderr", pages=("deltas.md",)),
    ]


class WatchingKeywords(TypedDict, total=False):
    ui: Annotated[
        str | None,
        Option("show a live page in a browser while it works (default 127.0.0.1, any free port, printed on stderr)"),
        Flag("HOST:PORT", bare="127.0.0.1:0", pages=("metrics.md",)),
    ]
    metrics: Annotated[str | None, Option("serve Prometheus' metrics there, at /metrics"), Flag("HOST:PORT")]
    report: Annotated[
        Path | None,
        Option("write a page with plots of the run to DIR at the end", None, frozenset({"run"})),
        Flag("DIR", local_path, details="`DIR/index.html` needs no other file; the numbers are in `report.json`"),
    ]
    metrics_file: Annotated[Path | None, Option("append the metrics, a JSON line a second"), Flag("FILE", local_path)]
    log_level: Annotated[
        str,
        Option(
            "log events of this level or above to standard error (default warning)", "warning", frozenset({"serve"})
        ),
        Flag(choices=("debug", "info", "warning", "error"), pages=("operations.md#logs",)),
    ]
    log_format: Annotated[
        str,
        Option("of the log: text (default), or a JSON object per line of standard error", "text", frozenset({"serve"})),
        Flag(choices=("text", "json")),
    ]


class DeviceKeywords(TypedDict, total=False):
    devices: Annotated[
        int | None,
        Option("devices that share the tables; on a CPU, parts of its memory (default: all accelerators, or 1)"),
        Flag("N", whole(1, MOST_PARALLEL)),
    ]


class ThreadKeywords(TypedDict, total=False):
    threads: Annotated[
        int | None,
        Option("threads of the host (default: one per CPU; results do not depend on it)", elsewhere={"job": 1}),
        Flag("N", whole(1, MOST_PARALLEL)),
    ]


class SharedKeywords(TypedDict, total=False):
    shared: Annotated[
        AnyPath | None,
        Option("a folder of this machine, best in /dev/shm, whose files have the tables for other processes to read"),
        Flag("DIR", local_path, pages=("readers.md",)),
    ]


class PassKeywords(TypedDict, total=False):
    passes: Annotated[
        int | str | None,
        Option(
            "read the sources K times, each time for one share of the rows; auto (default): as often as memory "
            "requires",
            "auto",
        ),
        Flag("K|auto", number_of_passes, pages=("placement.md#in-passes",)),
    ]
    memory: Annotated[
        int | None,
        Option("memory that --passes auto may use (default: what limits and other processes leave)"),
        Flag("BYTES", whole(1)),
    ]


class ClusterKeywords(TypedDict, total=False):
    address: Annotated[
        str | None,
        Option("of the Ray cluster, as ``ray.init`` takes it; None: the one that is connected, else auto"),
        Flag(
            "ADDRESS",
            name="ray",
            help="address of the cluster; auto (default): this machine's; local: start one here",
            pages=("ray.md",),
        ),
    ]
    shares: Annotated[int | None, Option("owners of the rows, each with a share"), Flag("N", whole(1))]
    readers: Annotated[int | None, Option("readers of the sources (default: one per share)"), Flag("M", whole(1))]
    accelerator: Annotated[
        str | None, Option("give each share one GPU or TPU chip to itself"), Flag(choices=("gpu", "tpu"))
    ]
    rounds_per_block: Annotated[
        int | None, Option("frames of every source that travel together; None: about 16 MiB of rows per share")
    ]
    owner_options: Annotated[
        "Mapping[str, Any] | None", Option('of the owners\' actors, such as ``{"resources": {"TPU": 4}}``')
    ]
    reader_options: Annotated["Mapping[str, Any] | None", Option("of the readers' actors")]


# Concern → the group of its flags, and the modes of its options; groups stand in this order under ``--help``.
CONCERNS: dict[type, tuple[str, frozenset[str]]] = {
    OutputKeywords: ("", COMMANDS),
    InitialKeywords: ("", ENGINES),
    ReadingKeywords: ("reading", READS),
    GateKeywords: ("the gate", EVERYWHERE),
    SteppingKeywords: ("the gate", READS),
    CommittingKeywords: ("checkpoint", ENGINES),
    TableChangeKeywords: ("checkpoint", RESTORES),
    DeltaTargetKeywords: ("deltas", RUNS),
    DeltaKeywords: ("deltas", RUNS),
    WatchingKeywords: ("watching", COMMANDS - PASSES),
    DeviceKeywords: ("machine", COMMANDS - JOB),
    ThreadKeywords: ("machine", ENGINES),
    SharedKeywords: ("machine", frozenset({"run", "serve"})),
    PassKeywords: ("tables larger than memory (docs/placement.md)", PASSES),
    ClusterKeywords: ("a job on a Ray cluster (docs/ray.md)", JOB),
}
SOURCE = (ReadingKeywords, SteppingKeywords, CommittingKeywords)
RUN = (*SOURCE, DeltaTargetKeywords, DeltaKeywords)
ENGINE = (InitialKeywords, GateKeywords, ThreadKeywords)
JOB_CONCERNS = (OutputKeywords, *ENGINE, *RUN, ClusterKeywords)
PASS_CONCERNS = (*ENGINE, *RUN, TableChangeKeywords, PassKeywords)


class StageKeywords(ReadingKeywords, SteppingKeywords, CommittingKeywords, DeltaKeywords, total=False):
    """The keywords of ``Engine.stage``."""


class RunKeywords(StageKeywords, DeltaTargetKeywords, total=False):
    """The keywords of ``Engine.run``."""


# ---- what is derived from it


@cache
def options_of(mode: str | None = None, *concerns: type) -> Mapping[str, Option]:
    """Return the options of some concerns, by name. mode : in which they work; None: any; concerns : none: all"""
    options = {}
    for concern in concerns or CONCERNS:
        group, modes = CONCERNS[concern]
        for name, hint in concern.__annotations__.items():
            kind, option, *flags = get_args(hint)
            option = replace(
                option,
                name=name,
                hint=kind.__forward_arg__ if isinstance(kind, ForwardRef) else inspect.formatannotation(kind),
                group=group,
                modes=option.modes or modes,
                flag=flags[0] if flags else None,
            )
            if mode is None or mode in option.modes:
                options[name] = option
    return options


class Options:
    """Base of frozen dataclasses whose fields are options, with their defaults.

    concerns : of the options; mode : in which they work; None: any
    """

    names: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

        def __init__(self, *_: Any, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, concerns: tuple[type, ...] = (), mode: str | None = None) -> None:
        options = options_of(mode, *concerns)
        cls.names = tuple(options)
        cls.__annotations__ = inspect.get_annotations(cls) | dict.fromkeys(options, Any)
        for name, option in options.items():
            setattr(cls, name, field(default=option.default_in(mode or ""), kw_only=True))
        dataclass(frozen=True)(cls)

    @classmethod
    def among(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Return the options that ``values`` has among others. others : fields that are set"""
        return cls(**{name: values[name] for name in cls.names if name in values} | others)
