"""The options of a run, a stage, a job and a replay in passes, and the table of all options.

The code uses these dataclasses, which are made of the concerns of options.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from penstock.base.flag_values import Flag, Option, number_of_passes, option, whole
from penstock.model.options import (
    COMMANDS,
    ENGINES,
    EVERYWHERE,
    JOB,
    ONE_ENGINE,
    PASSES,
    READS,
    RESTORES,
    RUNS,
    CommittingOptions,
    DeltaContents,
    DeltaOptions,
    DeltaTargetOptions,
    GateOptions,
    InitialOptions,
    MachineOptions,
    OneReaderOptions,
    OutputOptions,
    ReadingOptions,
    RoundOptions,
    SteppingOptions,
    TableChangeOptions,
    ThreadOptions,
    WatchingOptions,
)

if TYPE_CHECKING:
    from penstock.model.config.embedding import EmbeddingConfig
    from penstock.model.options import Progress

# Fields stand in the order of the bases from the last one to the first.


@dataclass(frozen=True, kw_only=True)
class SourceOptions(CommittingOptions, SteppingOptions, OneReaderOptions, ReadingOptions):
    """How a source is read, applied and committed."""

    progress: Progress | Literal["tqdm"] | None = option(
        'called after every frame with the counters, the gate and the share of input read; or ``"tqdm"``, a bar'
    )


@dataclass(frozen=True, kw_only=True)
class StageOptions(DeltaOptions, SourceOptions):
    """The arguments of ``Engine.stage``."""

    source: Any = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(DeltaTargetOptions, StageOptions):
    """The arguments of ``Engine.run``."""

    numbered: bool = True


@dataclass(frozen=True, kw_only=True)
class JobOptions(
    DeltaContents,
    DeltaTargetOptions,
    CommittingOptions,
    SteppingOptions,
    ReadingOptions,
    ThreadOptions,
    GateOptions,
    InitialOptions,
    OutputOptions,
):
    """The arguments of ``Job``."""

    config: EmbeddingConfig = field(kw_only=False)
    sources: Sequence[Any] = field(kw_only=False)
    threads: int | None = 1
    numbered: bool = True
    address: str | None = option(
        "of the Ray cluster, as ``ray.init`` takes it; None: the one that is connected, else auto",
        flag=Flag(
            "ADDRESS",
            name="ray",
            help="address of the cluster; auto (default): this machine's; local: start one here",
            pages=("ray.md",),
        ),
    )
    shares: int = option("owners of the rows, each with a share", flag=Flag("N", whole(1)))
    readers: int | None = option("readers of the sources (default: one per share)", flag=Flag("M", whole(1)))
    accelerator: str | None = option("give each share one GPU or TPU chip to itself", flag=Flag(choices=("gpu", "tpu")))
    rounds_per_block: int | None = option(
        "frames of every source that travel together; None: about 16 MiB of rows per share"
    )
    owner_options: Mapping[str, Any] | None = option('of the owners\' actors, such as ``{"resources": {"TPU": 4}}``')
    reader_options: Mapping[str, Any] | None = option("of the readers' actors")


@dataclass(frozen=True, kw_only=True)
class PassOptions(
    TableChangeOptions,
    DeltaContents,
    DeltaTargetOptions,
    SourceOptions,
    ThreadOptions,
    GateOptions,
    InitialOptions,
):
    """How a replay in passes runs. checkpoint : the folder of the commit, on a file system with hard links"""

    checkpoint: str | os.PathLike[str]
    numbered: bool = True
    passes: int | str = option(
        "read the sources K times, each time for one share of the rows; auto (default): as often as memory requires",
        "auto",
        flag=Flag("K|auto", number_of_passes, pages=("placement.md#in-passes",)),
    )
    memory: int | None = option(
        "memory that --passes auto may use (default: what limits and other processes leave)",
        flag=Flag("BYTES", whole(1)),
    )


# Concern → the group of its flags, and the modes of its options; groups stand in this order under ``--help``.
CONCERNS: dict[type, tuple[str, frozenset[str]]] = {
    OutputOptions: ("", COMMANDS),
    InitialOptions: ("", ENGINES),
    ReadingOptions: ("reading", READS),
    OneReaderOptions: ("reading", READS - JOB),
    GateOptions: ("the gate", EVERYWHERE),
    RoundOptions: ("the gate", frozenset({"run", "serve", "check"})),
    SteppingOptions: ("the gate", READS),
    SourceOptions: ("the gate", RUNS - JOB),
    CommittingOptions: ("checkpoint", ENGINES),
    TableChangeOptions: ("checkpoint", RESTORES),
    DeltaTargetOptions: ("deltas", RUNS - {"stage"}),
    DeltaContents: ("deltas", RUNS),
    DeltaOptions: ("deltas", ONE_ENGINE),
    WatchingOptions: ("watching", COMMANDS - PASSES),
    MachineOptions: ("machine", COMMANDS - JOB),
    ThreadOptions: ("machine", ENGINES),
    PassOptions: ("tables larger than memory (docs/placement.md)", PASSES),
    JobOptions: ("a job on a Ray cluster (docs/ray.md)", JOB),
}
OPTIONS: Mapping[str, Option] = {
    each.name: Option(each.name, each.default, group, **{**each.metadata, "modes": each.metadata["modes"] or modes})
    for concern, (group, modes) in CONCERNS.items()
    for each in fields(concern)
    if each.metadata and each.name in concern.__annotations__
}


def options_of(mode: str | None = None, *classes: type) -> Mapping[str, Option]:
    """Return the options of some classes, by name. mode : in which they work; None: any; classes : none: all"""
    names = {each.name for kind in classes for each in fields(kind)}
    return {
        name: found
        for name, found in OPTIONS.items()
        if (name in names or not classes) and (mode is None or mode in found.modes)
    }
