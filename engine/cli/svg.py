"""Plots as inline SVG, by hand: lines and bars are all that reports need, and a page of its own needs no library."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

Points = Sequence[tuple[float, float]]

COLOURS = ("#1b6ca8", "#d98032", "#7b9e89", "#8a7fb8", "#b5533c", "#c79b1c", "#4a9fa5", "#9aa5b1")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 270, 64, 40, 24, 20
INK, PALE, LINE = "#1f2933", "#7b8794", "#e4e7eb"
MAX_LEGEND = len(COLOURS)


class Axis:
    """Where a value lies between two ends of the picture. Logarithmic axes leave out what is not above 0."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float, zero: bool = False) -> None:
        self._log, self._start, self._end = log, start, end
        placed = [self._place(v) for v in values if self.shows(v)]
        self.low, self.high = min(placed, default=0.0), max(placed, default=1.0)
        if zero and not log:
            self.low = min(0.0, self.low)
        if log:
            self.low, self.high = math.floor(self.low), math.ceil(self.high)
        if self.high <= self.low:
            self.high = self.low + 1

    def shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self._log)

    def at(self, value: float) -> float:
        share = (self._place(value) - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Values worth a line: powers of ten, or four to eight round numbers."""
        if self._log:
            every = max(1, round((self.high - self.low) / 6))
            return [10.0**power for power in range(int(self.low), int(self.high) + 1, every)]
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(n * size for n in (1, 2, 5, 10) if n * size >= raw)
        first = math.ceil(self.low / step)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _place(self, value: float) -> float:
        return math.log10(value) if self._log else value


def lines(named: Mapping[str, Points], x: str, y: str, log_x: bool = False, log_y: bool = False) -> str:
    """Curves of several names over one axis; "" where there is nothing to draw."""
    points = [p for of in named.values() for p in of]
    across = Axis([p[0] for p in points], log_x, LEFT, WIDTH - RIGHT)
    up = Axis([p[1] for p in points], log_y, HEIGHT - BOTTOM, TOP, zero=True)
    if sum(across.shows(a) and up.shows(b) for a, b in points) < 2:
        return ""
    parts = [*_grid(across, up), _text(WIDTH / 2, HEIGHT - 4, x, "middle"), _text(LEFT, TOP - 12, y, "start")]
    for number, of in enumerate(named.values()):
        path = " ".join(f"{across.at(a):.1f},{up.at(b):.1f}" for a, b in of if across.shows(a) and up.shows(b))
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return _svg(parts, HEIGHT) + _legend(list(named))


def bars(values: Mapping[str, float], unit: str) -> str:
    """One bar a name, with its value at its end."""
    most, height = max(values.values(), default=0.0) or 1.0, 26 * len(values) + 8
    parts = []
    for number, (name, value) in enumerate(values.items()):
        top, width = 26 * number + 6, (WIDTH - 330) * max(0.0, value) / most
        parts.append(_text(170, top + 13, name, "end"))
        parts.append(f'<rect x="178" y="{top}" width="{width:.1f}" height="18" rx="3" fill="{COLOURS[0]}"/>')
        parts.append(_text(184 + width, top + 13, f"{short(value)} {unit}", "start"))
    return _svg(parts, height)


def short(value: float) -> str:
    """1234567 → '1.23 M'."""
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
    at = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {at} font-size="12" fill="{PALE}">{html.escape(text)}</text>'


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _legend(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    shown = [
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{html.escape(name)}</span>'
        for n, name in enumerate(names)
    ]
    return f"<p class=legend>{''.join(shown)}</p>"
