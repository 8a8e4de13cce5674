"""The norms of each contributor's frames, and what becomes of a frame whose norm is unusual for its contributor."""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.core.gradient_norms import norm_of, squares_of
from penstock.model.config.clipping import Limit
from penstock.model.frames import MAX_CONTRIBUTORS, Contributor, Frame, Overflows, Rows, count_by, fingerprint
from penstock.model.stats import NORM_LIMIT, Counters

WINDOW = 100  # frames of a contributor: until so many were applied, none is judged


class FrameLimits:
    """Judges frames by the norms of the last ones of their contributors. Call every method under the gate's lock.

    leaves_out : whether the frame that was judged last is left out
    """

    def __init__(self, limit: Limit) -> None:
        self._limit, self.leaves_out = limit, False
        self._norms: dict[Contributor, deque[float]] = {}
        self._judged: tuple[Contributor, float, bool] = None, 0.0, False

    def judge(self, frame: Frame) -> Frame:
        """Return an audited frame as it is, scaled down, or without rows. Nothing counts it before ``took``."""
        who = self._name(frame.contributor)
        window, norm, most = self._norms.get(who, ()), norm_of(map(_squares, _blocks(frame))), math.inf
        if len(window) == WINDOW:
            most = self._limit.contributor_norm * _median(window)
        leaves_out = self._limit.action == "quarantine"
        exceeds = norm > most or (leaves_out and most < math.inf and "gradient_not_finite" in frame.dropped)
        self.leaves_out, self._judged = exceeds and leaves_out, (who, min(norm, most), exceeds)
        if not exceeds:
            return frame
        return _without_rows(frame) if leaves_out else _scaled(frame, np.float32(most / norm))

    def took(self, counters: Counters) -> None:
        """Note that the frame that was judged last has entered, or is left out."""
        who, norm, exceeds = self._judged
        if norm and not self.leaves_out:
            self._norms.setdefault(who, deque(maxlen=WINDOW)).append(norm)
        if exceeds:
            count_by(counters.limited, _text(who))

    def _name(self, contributor: Contributor) -> Contributor:
        is_new = contributor not in self._norms and len(self._norms) >= MAX_CONTRIBUTORS
        return "others" if is_new else contributor

    def medians(self) -> dict[str, float]:
        """Return the median of the norms of each contributor's last frames."""
        return {_text(who): _median(window) for who, window in self._norms.items()}

    def get_state(self) -> list[list[Any]]:
        """Return the norms as plain data."""
        stored = {who: np.array(norms, "<f8").tobytes() for who, norms in self._norms.items()}
        return [[who, base64.b64encode(norms).decode()] for who, norms in stored.items()]

    def set_state(self, state: Iterable[Any]) -> None:
        """Set the norms that ``get_state`` returned."""
        read = {who: np.frombuffer(base64.b64decode(norms), "<f8").tolist() for who, norms in state}
        self._norms = {who: deque(norms, maxlen=WINDOW) for who, norms in read.items()}


def _median(norms: Collection[float]) -> float:
    return sorted(norms)[(len(norms) - 1) // 2]


def _text(contributor: Contributor) -> str:
    return "unnamed" if contributor is None else str(contributor)


def _blocks(frame: Frame) -> list[Rows]:
    return [block for blocks in frame.rows.values() for block in blocks]


def _squares(block: Rows) -> Any:
    return squares_of(np.ascontiguousarray(block.gradient(_all(block))))


def _all(block: Rows) -> Any:
    return np.arange(len(block.ids))


def _without_rows(frame: Frame) -> Frame:
    num_rows = sum([len(block.ids) for block in _blocks(frame)])
    dropped = Counter(frame.dropped) + Counter({NORM_LIMIT: num_rows})
    nothing: dict[str, Any] = {"rows": {}, "learning_rates": None, "time": None, "reject": None}
    return replace(frame, dropped=dropped, fingerprint=fingerprint(frame), **nothing)


def _scaled(frame: Frame, scale: np.float32) -> Frame:
    def reject(overflows: Overflows) -> Frame:
        return _scaled(frame.without(overflows), scale)

    rows = {
        table: tuple([Rows(block.ids, block.gradient(_all(block)) * scale) for block in blocks])
        for table, blocks in frame.rows.items()
    }
    return replace(frame, rows=rows, reject=reject, fingerprint=fingerprint(frame))
