"""The options for reading sources, checked on construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral

from penstock.config.specs import FeatureSpec
from penstock.errors import UsageError, listed
from penstock.io.decoding.schema import FLOATS, check_columns, suggestion

# Of a message of a broker.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class ReadOptions:
    """The options for reading sources.

    sizes : table → (vocabulary_size, dim); for dynamic tables ANY_INT64 or ANY_UINT64 (``config.id_ranges``)
    features : of the configuration, for example streams
    num_tags : learning rates per row, None: they are not read; rates_needed : the tags that have a value nowhere else
    table : of rows that name none
    columns : role → name, if the streams use other names
    contribution_rows : rows or examples of a frame; None: the stream itself says where frames end
    merge : "step" merges sources that are sorted by step, "round" takes a frame of each source in turn
    on_bad_row : "error" (stop before the frame), "drop" (drop the row, count it) or "quarantine" (also pass it on)
    gradient_dtype : what the gradient's values must be; None: whatever they are
    needs_time : the clock of a dynamic table is the column ``time``
    ids_only : read no gradients: frames have rows of no floats, and the dims in ``sizes`` are 0
    follow : after the end of sources that grow, wait for more; patience_s : retry an unreachable one for so long
    max_message : bytes of a message of a broker
    as_files : read the files of a directory that is a table with versions
    unvalidated : return frames before their ids' range and their values are checked; ``Frame.audit`` checks them
    """

    sizes: Mapping[str, tuple[int, int]]
    features: tuple[FeatureSpec, ...] = ()
    num_tags: int | None = 0
    rates_needed: tuple[int, ...] = ()
    table: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    contribution_rows: int | None = None
    merge: str | None = None
    on_bad_row: str = "error"
    gradient_dtype: str | None = None
    allow_missing_end: bool = False
    needs_time: bool = False
    ids_only: bool = False
    unvalidated: bool = False
    follow: bool = False
    patience_s: float = 60.0
    max_message: int = MOST_BYTES
    as_files: bool = False

    def __post_init__(self) -> None:
        check_columns(self.columns)
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
        if rows is not None and (not isinstance(rows, Integral) or rows < 1):
            raise UsageError(f"contribution_rows: expected a whole number of at least 1, got {rows!r}")
        if self.table is not None and self.table not in self.sizes:
            near = suggestion(self.table, self.sizes)
            raise UsageError(f"table '{self.table}' is not in the configuration ({listed(self.sizes)}){near}")
