"""The progress of a run as a bar of tqdm: in a notebook its widget, else text on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.model.options import Progress
    from penstock.model.stats import Counters, GateProgress

try:
    from tqdm.auto import tqdm
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "progress='tqdm' needs the package tqdm: pip install 'penstock[tqdm]'", name=error.name
    ) from None


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield what a run calls; the bar ends with the context.

    It shows the share of the input, whose widget needs a total from the beginning, or rows if the share is unknown.
    """
    bar: Any = None
    with ExitStack() as stack:

        def show(counters: Counters, gate: GateProgress, fraction: float | None) -> None:
            nonlocal bar
            if bar is None:
                form = "{percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
                known = {} if fraction is None else {"total": 1, "initial": fraction, "bar_format": form}
                bar = stack.enter_context(tqdm(unit=" rows", unit_scale=True, **known))
            done: float = counters.rows
            text = f"step {gate.global_step:,}"
            if bar.total is not None:
                done, text = fraction or bar.n, f"{counters.rows:,} rows, {text}"
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        yield show
