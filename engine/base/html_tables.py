"""Tables of HTML, for notebooks and reports: escaped, and without colours, which are those of the page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from penstock.base.errors import listed


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table. rows : cells of any type, as text"""
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{_row('<th>', head)}{''.join(_row('<td>', cells) for cells in rows)}</table>"


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(tag + html.escape(_text(cell)) for cell in cells)}</tr>"


def _text(cell: object) -> str:
    if isinstance(cell, Mapping):
        return ", ".join(f"{name} {_text(value)}" for name, value in cell.items())
    if isinstance(cell, list | tuple):
        return listed(map(_text, cell))
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    if isinstance(cell, bool) or not isinstance(cell, int):
        return "" if cell is None else str(cell)
    return f"{cell:,}"
