"""``penstock export``: write the tables of a checkpoint as Parquet, safetensors or an Orbax checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.arrays import SavedTables
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, writing
from penstock.errors import UsageError
from penstock.filesystem import atomic_files
from penstock.io.table_files import TablesWriter
from penstock.tables.orbax import save_tree

EXAMPLE = "penstock export run1 tables --format parquet"
Float32 = npt.NDArray[np.float32]
FORMATS = ("parquet", "safetensors", "orbax")
_ROWS_AT_ONCE = 1 << 14


def add(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or DIR@VERSION")
    command.add_argument("out", metavar="OUT", type=Path, help="parquet, orbax: a folder; safetensors: a file")
    command.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: parquet, as --out writes it")


def run(args: argparse.Namespace, out: Output) -> None:
    save = _safetensors() if args.format == "safetensors" else None
    saved, files = SavedTables(args.checkpoint), [args.out]
    with writing(args.out):
        if save is not None:
            _write_whole(saved, args.out, save)
        elif args.format == "orbax":
            for name in saved.tables:
                if saved.keys(name) is not None:
                    raise UsageError(f"table '{name}' is dynamic, and an Orbax checkpoint has no keys; use parquet")
            save_tree(args.out, {name: saved.parts(name) for name in saved.tables})
        else:
            files = _write_parquet(saved, args.out)
    step = saved.commit.contents["global_step"]
    out.say_tables("wrote     ", [str(file) for file in files])
    out.say(f"step      {step}, commit {saved.commit.number} of {args.checkpoint}")
    out.result({"global_step": step, "commit": saved.commit.number, "out": [str(file) for file in files]})


def _write_parquet(saved: SavedTables, directory: Path) -> list[Path]:
    with TablesWriter(directory) as writer:
        for name in saved.tables:
            weights, *slots = saved.part_dims(name).items()
            columns = dict([("row", weights[1]), *slots])
            writer.write(name, columns, _blocks(saved.parts(name)), saved.keys(name))
    return writer.written


def _blocks(parts: dict[str, Float32]) -> Iterator[tuple[Float32, ...]]:
    for start in range(0, len(next(iter(parts.values()))), _ROWS_AT_ONCE):
        yield tuple(rows[start : start + _ROWS_AT_ONCE] for rows in parts.values())


def _write_whole(saved: SavedTables, path: Path, save: Any) -> None:
    """Write one file of tensors named ``table/parameters`` and ``table/slot``. All tables are in memory at once."""
    tensors: dict[str, Any] = {
        f"{name}/{key}": rows for name in saved.tables for key, rows in saved.parts(name).items()
    }
    tensors |= {f"{name}/keys": keys for name in saved.tables if (keys := saved.keys(name)) is not None}
    atomic_files.make_folders(path.absolute().parent)
    with atomic_files.publishing(path) as file:
        file.write(save(tensors, {"penstock.global_step": str(saved.commit.contents["global_step"])}))


def _safetensors() -> Any:
    try:
        from safetensors.numpy import save
    except ImportError:
        raise UsageError(
            "--format safetensors needs the package safetensors: pip install 'penstock[safetensors]'"
        ) from None
    return save
