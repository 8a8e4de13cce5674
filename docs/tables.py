"""Tables of the pages that list what registers itself in the code. ``python docs/tables.py`` writes them.

A table stands between ``<!-- docs/tables.py NAME: begin -->`` and ``<!-- docs/tables.py NAME: end -->``.
tests/repository/test_docs_tables.py checks that every page is up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from penstock.updates import OPTIMIZERS
from penstock.updates.optimizer_class import KeywordOptimizer, Optimizer

DOCS = Path(__file__).resolve().parent


def optimizers() -> str:
    """Return the optimizers that TensorFlow has no class for, with their arguments."""
    common = {field.name for field in dataclasses.fields(KeywordOptimizer)} | {"clipvalue"}
    rows = []
    for optimizer in OPTIMIZERS.values():
        if issubclass(optimizer, KeywordOptimizer):
            runs = optimizer.has_formula()
            arguments = ", ".join(_arguments(optimizer, common)) if runs else "the fields of its message"
            defaults = re.search(r"(?<=efaults: ).*?(?=\.(\s|$))", inspect.getdoc(optimizer) or "", re.DOTALL)
            text = " ".join(defaults[0].split()) if defaults else ""
            rows.append(
                (
                    f"`{optimizer.__name__}`",
                    arguments,
                    text if runs else "can be loaded and saved, not run: no formula is public",
                )
            )
    return table(("class", "arguments and defaults", "the defaults are"), rows)


def _arguments(optimizer: type[Optimizer], common: set[str]) -> Iterator[str]:
    for name, parameter in inspect.signature(optimizer).parameters.items():
        if name not in common:
            default = parameter.default
            if default is parameter.empty:
                yield name
            else:
                yield f"{name}={getattr(default, '__name__', default)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Page → name → function that returns the table.
TABLES: dict[str, dict[str, Callable[[], str]]] = {"configuration.md": {"optimizers": optimizers}}


def current(page: str) -> str:
    """Return the text of a page with all its tables up to date."""
    text = (DOCS / page).read_text()
    for name, create in TABLES[page].items():
        begin, end = (f"<!-- docs/tables.py {name}: {side} -->" for side in ("begin", "end"))
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{create()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (DOCS / page).write_text(current(page))
