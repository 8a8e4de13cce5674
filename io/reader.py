"""Sources → frames, each validated to its end before it is handed out.

A frame is the longest run of rows with equal (step, contributor). Without ``step`` a record batch
is a frame where batches mean something, and a change of contributor ends one too;
``contribution_rows`` cuts wherever that many rows have come. The last frame of a source is held
back until the source's end has been seen to be whole.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, InputError, UsageError
from penstock.frames import Frame, Rows
from penstock.io.decode import REASONS, Decoded, decode, explain, find_bad_rows
from penstock.io.schema import Roles, check_columns, resolve, suggestion
from penstock.io.sources import Batch, Part, Source, open_sources

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReadOptions:
    """How sources are to be read.

    sizes : table → (vocabulary_size, dim)
    num_tags : learning rates per row; rates_needed : some tag has a value nowhere else
    table : of rows that do not say theirs
    on_bad_row : "error" (stop before the frame) or "drop" (leave the row out, count it)
    """

    sizes: Mapping[str, tuple[int, int]]
    num_tags: int = 0
    rates_needed: bool = False
    table: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    contribution_rows: int | None = None
    merge: str | None = None
    on_bad_row: str = "error"
    gradient_dtype: str | None = None
    allow_missing_end: bool = False

    def __post_init__(self) -> None:
        check_columns(self.columns)
        choices = {
            "merge": (self.merge, (None, "step")),
            "on_bad_row": (self.on_bad_row, ("error", "drop")),
            "gradient_dtype": (self.gradient_dtype, (None, "bfloat16", "float16", "float32", "float64")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                wanted = ", ".join(repr(a) for a in allowed)
                raise UsageError(f"{name}: expected one of {wanted}, got {value!r}")
        if self.contribution_rows is not None and self.contribution_rows < 1:
            raise UsageError(f"contribution_rows: expected at least 1, got {self.contribution_rows}")
        if self.table is not None and self.table not in self.sizes:
            near = suggestion(self.table, list(self.sizes))
            raise UsageError(f"table '{self.table}' is not in the configuration ({', '.join(self.sizes)}){near}")


class FrameReader:
    """Iterate to get the frames of a source, or of several in the order given, or merged by step.

    first_bad : the first row dropped for each reason, as an error message
    """

    def __init__(self, source: Any, options: ReadOptions) -> None:
        self.options = options
        self.sources = open_sources(source, options.allow_missing_end)
        self.first_bad: dict[str, str] = {}
        self._reading = 0

    def __iter__(self) -> Iterator[Frame]:
        if self.options.merge is None:
            for self._reading, source in enumerate(self.sources):
                yield from self._frames(source)
            return
        keyed = (self._sorted(number, source) for number, source in enumerate(self.sources))
        for _, _, frame in heapq.merge(*keyed, key=lambda entry: entry[:2]):
            yield frame

    def fraction(self) -> float | None:
        """Share of the input read so far, where that is known."""
        if self.options.merge is not None:
            shares = [source.fraction() for source in self.sources]
            return None if None in shares else sum(s or 0.0 for s in shares) / len(shares)
        share = self.sources[self._reading].fraction()
        return None if share is None else (self._reading + share) / len(self.sources)

    def _sorted(self, number: int, source: Source) -> Iterator[tuple[int, int, Frame]]:
        last: int | None = None
        for frame in self._frames(source):
            if frame.local_step is None:
                raise InputError("--merge step needs a step column in every source", source=source.name)
            if last is not None and frame.local_step < last:
                raise InputError(
                    f"--merge step needs sources sorted by step: {frame.local_step} comes after {last}",
                    source=source.name,
                )
            last = frame.local_step
            yield last, number, frame

    def _frames(self, source: Source) -> Iterator[Frame]:
        building: _Building | None = None
        for part in source.parts():
            roles = self._roles(part)
            for batch in part.batches(roles.names()):
                if batch.data.num_rows == 0:
                    if batch.ends_frame and building is not None:
                        yield building.frame()
                        building = None
                    continue
                for whole in self._pieces(part, batch, roles):
                    rest: _Piece | None = whole
                    while rest is not None:
                        if building is not None and building.key != rest.key:
                            yield building.frame()
                            building = None
                        if building is None:
                            building = _Building(self.options, rest.key, part.name)
                        piece, rest = rest.cut(building.room())
                        building.add(piece)
                        if piece.ends_frame or building.room() == 0:
                            yield building.frame()
                            building = None
        if building is not None:
            yield building.frame()

    def _roles(self, part: Part) -> Roles:
        options = self.options
        roles = resolve(part.schema, part.name, options.columns, options.gradient_dtype)
        if roles.step is None and options.contribution_rows is None and not part.has_boundaries:
            raise InputError(
                f"a {part.container or 'source'} has no record batches that mean something, so without a 'step' "
                "column its frames are unknown: give --contribution-rows N (contribution_rows=N)",
                source=part.name,
            )
        if roles.table is None and self._default_table(roles) is None:
            raise InputError(
                "the rows do not say their table: no 'table' column, no 'penstock.table' in the schema's metadata, "
                f"and the configuration has several ({', '.join(options.sizes)}); give --table",
                source=part.name,
            )
        if options.rates_needed and roles.learning_rates is None:
            raise ConfigError(
                "the configuration has dynamic learning rates and nothing gives their values: add --learning-rate "
                f"TAG=VALUE for every tag (0 to {options.num_tags - 1}), or a 'learning_rates' column ({part.name})"
            )
        return roles

    def _default_table(self, roles: Roles) -> str | None:
        if roles.default_table is not None:
            return roles.default_table
        if self.options.table is not None:
            return self.options.table
        return next(iter(self.options.sizes)) if len(self.options.sizes) == 1 else None

    def _pieces(self, part: Part, batch: Batch, roles: Roles) -> Iterator[_Piece]:
        """Cut a batch where the key changes, and where enough rows have come."""
        place = {"source": part.name, "batch": batch.index}
        decoded = decode(batch.data, roles, self._default_table(roles), self.options.num_tags, place)
        bad = find_bad_rows(decoded, self.options.sizes)
        if bad is not None:
            self._meet_bad_rows(decoded, bad, roles, part, batch)
        batch_is_frame = decoded.steps is None and self.options.contribution_rows is None and part.has_boundaries
        for start, stop, key in run_keys(decoded):
            last = stop == decoded.num_rows
            ends = last and (batch.ends_frame or batch_is_frame)
            yield _Piece(decoded, bad, start, stop, key, roles, place, ends)

    def _meet_bad_rows(
        self, decoded: Decoded, bad: npt.NDArray[np.uint8], roles: Roles, part: Part, batch: Batch
    ) -> None:
        if self.options.on_bad_row == "error":
            raise self._bad_row(decoded, bad, int(np.argmax(bad != 0)), roles, part, batch)
        for code in np.unique(bad[bad != 0]).tolist():
            if REASONS[code] not in self.first_bad:
                row = int(np.argmax(bad == code))
                self.first_bad[REASONS[code]] = str(self._bad_row(decoded, bad, row, roles, part, batch))

    def _bad_row(
        self, decoded: Decoded, bad: npt.NDArray[np.uint8], row: int, roles: Roles, part: Part, batch: Batch
    ) -> InputError:
        problem, column = explain(decoded, row, int(bad[row]), self.options.sizes, roles)
        at = row if batch.index is not None else batch.first_row + row
        return InputError(
            problem, source=part.name, batch=batch.index, row=at, column=column, reason=REASONS[int(bad[row])]
        )


@dataclass(frozen=True)
class _Piece:
    """Rows start to stop of a decoded batch: one key."""

    decoded: Decoded
    bad: npt.NDArray[np.uint8] | None
    start: int
    stop: int
    key: tuple[int | None, Any]
    roles: Roles
    place: Mapping[str, Any]
    ends_frame: bool

    def cut(self, room: int | None) -> tuple[_Piece, _Piece | None]:
        """The first rows that there is room for, and the rest if any."""
        if room is None or self.stop - self.start <= room:
            return self, None
        at = self.start + room
        return replace(self, stop=at, ends_frame=False), replace(self, start=at)


class _Building:
    """A frame on its way."""

    def __init__(self, options: ReadOptions, key: tuple[int | None, Any], source: str) -> None:
        self._options, self.key, self._source = options, key, source
        self._rows: dict[str, list[Rows]] = {}
        self._dropped: Counter[str] = Counter()
        self._rates: tuple[float, ...] | None = None
        self.num_rows = 0

    def room(self) -> int | None:
        """Rows until contribution_rows ends the frame; None: no such limit."""
        limit = self._options.contribution_rows
        return None if limit is None else limit - self.num_rows

    def frame(self) -> Frame:
        rows = {table: tuple(blocks) for table, blocks in self._rows.items()}
        step, contributor = self.key
        return Frame(rows, self.num_rows, step, contributor, self._rates, dict(self._dropped), self._source)

    def add(self, piece: _Piece) -> None:
        self._take_rates(piece)
        self.num_rows += piece.stop - piece.start
        decoded, rows = piece.decoded, np.arange(0)
        bad = None if piece.bad is None else piece.bad[piece.start : piece.stop]
        if bad is not None and bad.any():
            counts = np.bincount(bad, minlength=len(REASONS)).tolist()
            self._dropped.update({reason: n for reason, n in zip(REASONS[1:], counts[1:], strict=True) if n})
            rows = piece.start + np.flatnonzero(bad == 0)
            if not len(rows):
                return
        if decoded.codes is None:
            self._add_rows(decoded, 0, rows if len(rows) else slice(piece.start, piece.stop))
            return
        if not len(rows):
            rows = np.arange(piece.start, piece.stop)
        codes = decoded.codes[rows]
        for code in np.unique(codes).tolist():
            self._add_rows(decoded, code, _as_slice(rows[codes == code]))

    def _add_rows(self, decoded: Decoded, code: int, rows: slice | Int64) -> None:
        table = decoded.tables[code]
        assert table is not None  # a row without a table is a bad row
        grads = decoded.gradients.take(rows, self._options.sizes[table][1])
        self._rows.setdefault(table, []).append(Rows(decoded.ids[rows], grads))

    def _take_rates(self, piece: _Piece) -> None:
        rates = piece.decoded.rates
        if rates is None:
            return
        rates = rates[piece.start : piece.stop]
        wanted = rates[0] if self._rates is None else np.array(self._rates, np.float32)
        same = (rates == wanted).all(axis=1)
        if not same.all():
            row = int(np.argmin(same))
            raise InputError(
                f"learning rates change inside a frame: {wanted.tolist()}, then {rates[row].tolist()}",
                row=piece.start + row,
                column=piece.roles.learning_rates.name if piece.roles.learning_rates is not None else None,
                **piece.place,
            )
        self._rates = tuple(wanted.tolist())


def run_keys(decoded: Decoded) -> Iterator[tuple[int, int, tuple[int | None, Any]]]:
    """The runs of equal (step, contributor) of a batch that is not empty: (start, stop, key)."""
    change = np.zeros(decoded.num_rows, bool)
    change[0] = True
    if decoded.steps is not None:
        change[1:] |= decoded.steps[1:] != decoded.steps[:-1]
    if decoded.contributors is not None:
        codes = decoded.contributors[0]
        change[1:] |= codes[1:] != codes[:-1]
    starts: list[int] = np.flatnonzero(change).tolist()
    for start, stop in zip(starts, [*starts[1:], decoded.num_rows], strict=True):
        yield start, stop, _key(decoded, start)


def _key(decoded: Decoded, row: int) -> tuple[int | None, Any]:
    step = None if decoded.steps is None else int(decoded.steps[row])
    if decoded.contributors is None:
        return step, None
    codes, values = decoded.contributors
    return step, values[codes[row]] if codes[row] >= 0 else None


def _as_slice(rows: Int64) -> slice | Int64:
    """Neighbouring rows as a slice: a view then, not a copy."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows
