"""Flags shared by the commands that run an engine, replay and serve; some also by validate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.cli.options import MAX_DEVICES, MAX_THREADS, Parser, number, whole


def add_table_options(command: Parser) -> None:
    """Add the flags for the initial tables and for the folder that they are written to."""
    command.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<table>.parquet at the end")
    command.add_argument("--init", type=Path, metavar="DIR", help="start from tables that --out wrote, or Orbax")
    command.add_argument("--seed", type=whole(), default=0, metavar="N", help="of the tables' random start (default 0)")


def add_gate_options(command: Parser) -> Any:
    """Add the gate's flags. Return their group, to which a command may add more."""
    gate = command.add_argument_group("the gate")
    gate.add_argument(
        "--num-required",
        type=whole(1),
        metavar="N",
        help="frames that make a step (default: the configuration's, or 1)",
    )
    gate.add_argument(
        "--reduction",
        choices=("mean", "sum"),
        help="mean: divide a row's sum by the frames that held it (default: the configuration's, or mean)",
    )
    gate.add_argument(
        "--learning-rate",
        action="append",
        default=[],
        metavar="TAG=VALUE",
        help="value of a dynamic learning rate; once per tag of the configuration",
    )
    return gate


def add_replay_gate_options(command: Parser) -> None:
    """Add the flags of commands that read sources to their end: frame order, limit, bad rows and stale frames."""
    gate = add_gate_options(command)
    gate.add_argument(
        "--merge",
        choices=("step", "round"),
        help="step: merge sources that are sorted by step, one per worker; round: a frame of each source in turn",
    )
    gate.add_argument("--flush", action="store_true", help="at the end apply what the gate holds")
    gate.add_argument("--limit", type=whole(0), metavar="FRAMES", help="stop after that many frames")
    gate.add_argument(
        "--on-bad-row",
        default="error",
        metavar="error|drop|quarantine=FILE",
        help="error (default): stop before the frame; drop: leave the row out and count it; quarantine=FILE: also put "
        "it into a new Arrow file, to be mended and replayed",
    )
    gate.add_argument(
        "--max-stale",
        type=number("a share from 0 to 1", 0, 1),
        metavar="SHARE",
        help="0 to 1, of the rows read: exit 3 at the end, without --out, where stale frames held more (default: 1)",
    )


def add_checkpoint_options(command: Parser, title: str, otherwise: str) -> Any:
    """Add the checkpoint flags and return their group. otherwise : when a commit happens without ``--every``"""
    saving = command.add_argument_group(title)
    saving.add_argument("--checkpoint", type=Path, metavar="DIR", help="commit the state with its position to DIR")
    saving.add_argument("--every", type=whole(1), metavar="N", help=f"after every N steps (default: {otherwise})")
    saving.add_argument(
        "--resume", action="store_true", help="go on from the last commit in DIR; from the start where there is none"
    )
    return saving


def add_machine_options(command: Parser) -> Any:
    """Add the flags for devices and threads, and return their group."""
    machine = command.add_argument_group("machine")
    machine.add_argument(
        "--devices",
        type=whole(1, MAX_DEVICES),
        metavar="N",
        help="devices that share the tables; on a CPU that many are made (default: all accelerators, or 1)",
    )
    machine.add_argument(
        "--threads",
        type=whole(1, MAX_THREADS),
        metavar="N",
        help="threads of the host (default: one per CPU; results do not depend on it)",
    )
    return machine
