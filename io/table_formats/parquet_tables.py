"""Write Parquet as ``--out`` does, a file per table. Its rows have ids, so ``io.table_files`` reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.io.table_formats.table_format import TableFormat, TablesToWrite
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array

_ROWS_AT_ONCE = 1 << 14


def _write(out: Path, saved: TablesToWrite, step: int) -> list[Path]:
    from penstock.io.table_files import TablesWriter

    with TablesWriter(out) as writer:
        for name in saved.tables:
            dims = {"row" if part == WEIGHTS else part: dim for part, dim in saved.part_dims(name).items()}
            writer.write(name, dims, _blocks(saved.parts(name)), saved.keys(name), saved.rows)
    return writer.written


def _blocks(parts: Mapping[str, Array]) -> Iterator[tuple[Array, ...]]:
    for start in range(0, len(parts[WEIGHTS]), _ROWS_AT_ONCE):
        yield tuple(rows[start : start + _ROWS_AT_ONCE] for rows in parts.values())


FORMAT = TableFormat(
    name="parquet",
    title="a folder of Parquet files, as --out writes it",
    is_at=lambda path: path.is_dir() and any(each for form in ("*.parquet", "*/*.parquet") for each in path.glob(form)),
    write=_write,
    out="a folder, a file per table",
    has_keys=True,
)
