"""SVG plots for the pages of ``--report``: curves and bars, without a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

Points = Sequence[tuple[float, float]]

COLOURS = ("#1b6ca8", "#d98032", "#7b9e89", "#8a7fb8", "#b5533c", "#c79b1c", "#4a9fa5", "#9aa5b1")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 270, 64, 40, 24, 20
# They show on a light page and on a dark one. LINE lets the page shine through.
PALE, LINE, MARK = "#7b8794", "#7b879440", "#d98032"
# The colours of pages with plots: dark where the reader's system is.
SCHEME = """:root{color-scheme:light dark;--ink:#1f2933;--pale:#6b7785;--line:#7b879440;--back:#f7f9fb;--card:#fff;
--ours:#1b6ca8;--warm:#d98032;--bad:#a11}
@media(prefers-color-scheme:dark){:root{--ink:#dde3ea;--pale:#98a4b0;--back:#14181d;--card:#1c2229;--ours:#3f8fcf;
--bad:#ff8a80}}"""
# The width of a letter of a plot's text, at most on average.
LETTER = 7.4
MAX_LEGEND = len(COLOURS)


class Bar(NamedTuple):
    """One bar of a chart.

    value : on the axis
    text : at the end of the bar
    mark : a second value on the axis, drawn across the bar
    """

    name: str
    value: float
    text: str
    colour: str = COLOURS[0]
    mark: float | None = None


class Axis:
    """The mapping of values to coordinates between ``start`` and ``end``. A log axis omits values of 0 and below."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float, zero: bool = False) -> None:
        self._log, self._start, self._end = log, start, end
        placed = [self._place(v) for v in values if self.shows(v)]
        self.low, self.high = min(placed, default=0.0), max(placed, default=1.0)
        if zero and not log:
            self.low = min(0.0, self.low)
        if log:
            rounded = _one_two_five(self.low, self.high)
            self.low, self.high = math.log10(rounded[0]), math.log10(rounded[-1])
        if self.high <= self.low:
            self.high = self.low + 1

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self._log)

    def at(self, value: float) -> float:
        fraction = (self._place(value) - self.low) / (self.high - self.low)
        return self._start + fraction * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Return the tick values: round numbers, or powers of ten, with 2 and 5 between them if there are few."""
        if self._log:
            every = max(1, round((self.high - self.low) / 6))
            powers = [10.0**p for p in range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1, every)]
            return powers if len(powers) > 3 else _one_two_five(self.low, self.high)
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(n * size for n in (1, 2, 5, 10) if n * size >= raw)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _place(self, value: float) -> float:
        return math.log10(value) if self._log else value


def lines(
    named: Mapping[str, Points],
    x: str,
    y: str,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, Sequence[tuple[float, float]]] = {},
    dashed: Container[str] = (),
) -> str:
    """Return a plot of named curves over one axis; "" if there is nothing to draw. bands : (low, high) at each point

    A curve breaks at a value that is not finite, and on a log axis at one of 0 or below. A point without neighbours is
    a dot.
    """
    points = [p for curve in named.values() for p in curve]
    across = Axis([p[0] for p in points], log_x, LEFT, WIDTH - RIGHT)
    ends = [value for band in bands.values() for bound in band for value in bound]
    up = Axis([p[1] for p in points] + ends, log_y, HEIGHT - BOTTOM, TOP, zero=True)
    if not any(across.shows(a) and up.shows(b) for a, b in points):
        return ""
    parts = [*_grid(across, up), _text(WIDTH / 2, HEIGHT - 4, x, "middle"), _text(LEFT, TOP - 12, y, "start")]
    for number, (name, curve) in enumerate(named.items()):
        colour = COLOURS[number % len(COLOURS)]
        if name in bands:
            low, high = ([(p[0], band[end]) for p, band in zip(curve, bands[name], strict=True)] for end in (0, 1))
            path = _path([*low, *reversed(high)], across, up)
            parts.append(f'<polygon points="{path}" fill="{colour}" fill-opacity="0.2"/>')
        dash = ' stroke-dasharray="5 3"' if name in dashed else ""
        for is_shown, group in groupby(curve, lambda point: across.shows(point[0]) and up.shows(point[1])):
            run = list(group) if is_shown else []
            if len(run) == 1:
                x_at, y_at = across.at(run[0][0]), up.at(run[0][1])
                parts.append(f'<circle cx="{x_at:.1f}" cy="{y_at:.1f}" r="2.5" fill="{colour}"/>')
            elif run:
                path = _path(run, across, up)
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    legend, height = _legend(list(named))
    return _svg([*parts, *legend], HEIGHT + height)


def bars(
    rows: Sequence[Bar],
    x: str = "",
    start: float = 0.0,
    log: bool = False,
    title: str = "",
    legend: Mapping[str, str] = {},
) -> str:
    """Return a chart with one bar for each row, from ``start``.

    x : the axis label; without it there is no axis
    legend : name → colour, of bars and marks
    """
    bottom = 26 * len(rows) + 6
    values = [start, *(value for row in rows for value in (row.value, row.mark) if value is not None)]
    first = 8 + LETTER * max((len(row.name) for row in rows), default=0)
    last = WIDTH - 12 - LETTER * max((len(row.text) for row in rows), default=0)
    across = Axis(values, log, first, last, zero=True)
    parts = [_text(0, -8, title, "start")] if title else []
    if x:
        for tick in across.ticks():
            position = across.at(tick)
            parts.append(f'<line x1="{position:.1f}" x2="{position:.1f}" y1="0" y2="{bottom}" stroke="{LINE}"/>')
            parts.append(_text(position, bottom + 16, short(tick), "middle"))
        parts.append(_text(WIDTH / 2, bottom + 34, x, "middle"))
    for number, row in enumerate(rows):
        top, (left, right) = 26 * number + 6, sorted((across.at(start), across.at(row.value)))
        parts.append(_text(first - 8, top + 13, row.name, "end"))
        bar = f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="18" rx="3" fill="{row.colour}"/>'
        parts.append(bar)
        parts.append(_text(max(right, across.at(row.mark or start)) + 6, top + 13, row.text, "start"))
        if row.mark is not None:
            parts.append(
                f'<rect x="{across.at(row.mark) - 1.5:.1f}" y="{top - 2}" width="3" height="22" fill="{MARK}"/>'
            )
    height = bottom + (40 if x else 2)
    left = 8.0
    for name, colour in legend.items():
        if left + 24 + LETTER * len(name) > WIDTH and left > 8:
            left, height = 8.0, height + 20
        parts.append(f'<rect x="{left:.1f}" y="{height + 4}" width="12" height="12" rx="2" fill="{colour}"/>')
        parts.append(_text(left + 18, height + 15, name, "start"))
        left += 40 + LETTER * len(name)
    height += 22 if legend else 0
    return _svg(parts, height, 24 if title else 0)


def standalone(picture: str) -> str:
    """Return the picture as the text of a standalone file."""
    return picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1) + "\n"


def short(value: float) -> str:
    """Return 1234567 as '1.23 M'."""
    for size, name in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return f"{value / (1e3 if size == 1e4 else size):.3g}{name}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for tick in up.ticks():
        y = up.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(LEFT - 6, y + 4, short(tick), "end"))
    parts += [_text(across.at(tick), HEIGHT - BOTTOM + 16, short(tick), "middle") for tick in across.ticks()]
    return parts


def _text(x: float, y: float, text: str, anchor: str) -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {attributes} font-size="12" fill="{PALE}">{html.escape(text)}</text>'


def _path(points: Points, across: Axis, up: Axis) -> str:
    return " ".join(f"{across.at(a):.1f},{up.at(b):.1f}" for a, b in points if across.shows(a) and up.shows(b))


def _one_two_five(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10 …, from the last at or below ``low`` to the first at or above ``high``, both log10."""
    round_numbers = [n * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for n in (1, 2, 5)]
    first = max(n for n in round_numbers if math.log10(n) <= low + 1e-9)
    last = min(n for n in round_numbers if math.log10(n) >= high - 1e-9)
    return [n for n in round_numbers if first <= n <= last]


def _svg(parts: Sequence[str], height: int, above: int = 0) -> str:
    """Return an SVG element of the parts. above : space above the picture, in pixels"""
    return f'<svg viewBox="0 {-above} {WIDTH} {above + height}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """Return a legend to put below the plot, and its height; empty and 0 for a single curve."""
    if len(names) < 2:
        return [], 0
    parts, x, y = [], LEFT, HEIGHT + 16
    for number, name in enumerate(names):
        width = 34 + 7 * len(name)
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 18
        parts.append(f'<rect x="{x}" y="{y - 6}" width="12" height="3" fill="{COLOURS[number % len(COLOURS)]}"/>')
        parts.append(_text(x + 17, y, name, "start"))
        x += width
    return parts, y + 8 - HEIGHT
