"""Frames without the rows of frozen tables, which are counted, or refused."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from penstock.base.errors import ConfigError, InputError
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame, Overflows, fingerprint
from penstock.model.stats import FROZEN


def frozen_tables(specs: Iterable[TableSpec], step: float = math.inf) -> dict[str, bool]:
    """Return the tables that are frozen in a step → whether they refuse gradients.

    step : the steps before it; infinite: return only the tables that are never trained
    """
    return {
        spec.name: spec.refuses_gradients
        for spec in specs
        if not spec.trainable and (spec.until_step is None or step < spec.until_step)
    }


def check_no_until_step(specs: Iterable[TableSpec], subject: str) -> None:
    """Raise ConfigError for a table that is frozen up to a step. subject : what has no such tables"""
    for spec in specs:
        if not spec.trainable and spec.until_step is not None:
            raise ConfigError(
                f"table '{spec.name}' has until_step {spec.until_step}, which {subject} does not support; freeze it "
                "for good, and set trainable: true in a later start"
            )


def without_frozen(frame: Frame, frozen: Mapping[str, bool]) -> Frame:
    """Return a frame without the rows of frozen tables, which are valid and count as dropped.

    frozen : as ``frozen_tables`` returns it. Raises InputError for a bad row, and for rows of a table that refuses them
    """
    if not frozen or frozen.keys().isdisjoint(frame.rows):
        return frame
    frame = frame.audited()
    names = sorted(frozen.keys() & frame.rows.keys())
    counts = {name: sum([len(block.ids) for block in frame.rows[name]]) for name in names}
    for name, count in counts.items():
        if count and frozen[name]:
            problem = f"{count} gradients for table '{name}', which is frozen and refuses them (on_gradient: REFUSE)"
            raise InputError(problem, source=frame.source)

    def reject(overflows: Overflows) -> Frame:
        none = {name: [np.zeros(len(block.ids), np.bool_) for block in frame.rows[name]] for name in names}
        return without_frozen(frame.without({**none, **overflows}), frozen)

    return replace(
        frame,
        rows={name: blocks for name, blocks in frame.rows.items() if name not in frozen},
        dropped=Counter(frame.dropped) + Counter({f"{FROZEN}{name}": count for name, count in counts.items()}),
        reject=reject,
        fingerprint=fingerprint(frame),
    )
