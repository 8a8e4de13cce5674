"""The options for reading sources, checked on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from penstock.base.errors import UsageError, listed
from penstock.base.validation import whole
from penstock.io.decoding.role_types import FLOATS, check_columns, suggestion
from penstock.model.config.specs import FeatureSpec
from penstock.model.options import OneReaderOptions, ReadingOptions

if TYPE_CHECKING:
    from penstock.model.config.embedding import EmbeddingConfig


@dataclass(frozen=True)
class ReadOptions(OneReaderOptions, ReadingOptions):
    """The options for reading sources: those of a run, where ``on_bad_row`` may be "quarantine" (also pass it on), and

    sizes : table → (vocabulary_size, dim); for dynamic tables ANY_INT64 or ANY_UINT64 (``config.id_ranges``)
    features : of the configuration, for example streams
    num_tags : learning rates per row, None: they are not read; rates_needed : the tags that have a value nowhere else
    needs_time : read the column ``time``: the clock of a dynamic table, or for ages, where ``columns`` names it
    ids_only : read no gradients: frames have rows of no floats, and the dims in ``sizes`` are 0
    unvalidated : return frames before their ids' range and their values are checked; ``Frame.audit`` checks them
    verifies : check the checksums of what is read, which ``ids_only`` never does
    """

    sizes: Mapping[str, tuple[int, int]]
    features: tuple[FeatureSpec, ...] = ()
    num_tags: int | None = 0
    rates_needed: tuple[int, ...] = ()
    needs_time: bool = False
    ids_only: bool = False
    unvalidated: bool = False
    verifies: bool = True
    columns: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @property
    def frame_rows(self) -> int | None:
        """The number of rows after which a frame ends; None: rows are not counted."""
        return self.contribution_rows if isinstance(self.contribution_rows, int) else None

    @classmethod
    def of_config(cls, config: EmbeddingConfig, values: Mapping[str, Any], **others: Any) -> ReadOptions:
        """Return the options for the tables of a configuration. values : options of a run; others : take precedence"""
        own_columns = values.get("columns") or {}
        check_columns(own_columns)
        columns = {**config.columns, **own_columns}
        tables = {"sizes": config.id_ranges, "features": config.features, "num_tags": config.num_tags}
        needs_time = config.needs_time or "time" in columns
        return cls.among(values, **{**tables, "columns": columns, "needs_time": needs_time, **others})

    def __post_init__(self) -> None:
        check_columns(self.columns)
        whole("max_message", self.max_message, 1)
        choices = {
            "merge": (self.merge, (None, "step", "round")),
            "on_bad_row": (self.on_bad_row, ("error", "drop", "quarantine")),
            "gradient_dtype": (self.gradient_dtype, (None, "bfloat16", *FLOATS)),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                expected = ", ".join(repr(a) for a in allowed)
                raise UsageError(f"{name}: expected one of {expected}, got {value!r}")
        rows = self.contribution_rows
        if rows not in (None, "batch") and (not isinstance(rows, Integral) or rows < 1):
            raise UsageError(f"contribution_rows: expected a whole number of at least 1, or 'batch', got {rows!r}")
        if isinstance(rows, Integral):
            object.__setattr__(self, "contribution_rows", int(rows))
        if self.hash_ids and all(vocabulary_size > 0 for vocabulary_size, _ in self.sizes.values()):
            raise UsageError("hash_ids: the hashes of ids are keys of dynamic tables, and the configuration has none")
        if self.table is not None and self.table not in self.sizes:
            near = suggestion(self.table, self.sizes)
            raise UsageError(f"table '{self.table}' is not in the configuration ({listed(self.sizes)}){near}")
