"""Which rows of every table an engine holds: all of them, or those of one share of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.base.errors import UsageError
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Float32, Frame, Int64
from penstock.rows.initializers import start_of
from penstock.rows.shares import AnyShare, Share, checked_share, reduced, shares_of


class HeldRows:
    """The rows that an engine holds. A local row is the index of a row among them, from 0.

    whole : name → the spec of the whole table; mod : the configuration's strategy is MOD; seed : of the initializers
    share : (rank, count); None: all rows, whose local rows are the ids of a static table

    shares : name → the share of the table; empty if all rows are held
    specs : name → the spec, with the number of rows that are held, at least 1, as ``vocabulary_size``
    """

    def __init__(self, whole: Mapping[str, TableSpec], mod: bool, seed: int, share: tuple[int, int] | None) -> None:
        self._whole, self._seed, self.is_share = whole, seed, share is not None
        self.shares: Mapping[str, AnyShare] = {}
        if share is not None:
            self.shares = shares_of(whole.values(), mod, seed, *checked_share(share))
        rows = {name: share.held_rows for name, share in self.shares.items()}
        self.specs = {n: replace(spec, vocabulary_size=rows.get(n, spec.vocabulary_size)) for n, spec in whole.items()}

    def start_of(self, name: str) -> Callable[[Int64], Float32]:
        """Return the initializer of a static table: local rows → float32 (n, dim)."""
        spec = self._whole[name]
        start, share, last = start_of(spec, self._seed), self.shares.get(name), spec.vocabulary_size - 1
        # The row that no id has may lie beyond a table that a callable created.
        return start if share is None else lambda rows: start(np.minimum(share.ids(rows), last))

    def among(self, name: str) -> tuple[int, int]:
        """Return which rows of a static table these are: (the first one, distance between neighbours)."""
        share = self.shares.get(name)
        return (share.ids(0), share.stride) if isinstance(share, Share) else (0, 1)

    def reduced(self, frame: Frame, alone: bool) -> Frame:
        """Return a frame reduced to these rows, with local rows for ids, unless it is reduced already.

        alone : whether its sums are those of a step
        """
        return reduced(frame, self.shares, alone) if self.shares and frame.fingerprint is None else frame

    def part_of(self, name: str, sums: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return what concerns these rows of the buffered sums of a whole table, by local rows; keys stay keys.

        sums : as ``TableStore.get_state`` returns them: "0.ids", "0.sums", …; of several frames also "1.ids", …
        A frame stays in the part even without rows of this share; accumulated sums without such rows are dropped.
        """
        if name not in self.shares:
            return sums
        part: dict[str, Array] = {}
        for number in {key.partition(".")[0] for key in sums}:
            positions, rows = self.shares[name].select(np.ascontiguousarray(sums[f"{number}.ids"]))
            if len(positions) or not self._whole[name].accumulate:
                frame_sums = {key: array for key, array in sums.items() if key.startswith(f"{number}.")}
                part |= {key: array[positions] for key, array in frame_sums.items()} | {f"{number}.ids": rows}
        return part

    def by_id(self, name: str, sums: Mapping[str, Array]) -> dict[str, Array]:
        """Return sums of ``TableStore.get_state`` with the ids of the whole table for local rows; keys stay keys."""
        return {key: self.ids(name, array) if key.endswith(".ids") else array for key, array in sums.items()}

    def num_rows(self, name: str) -> int:
        """Return how many rows of a table these are; 0 is possible for a share."""
        return self.shares[name].num_rows if name in self.shares else self._whole[name].vocabulary_size

    def ids(self, name: str, rows: Int64) -> Int64:
        """Return the ids of local rows, int64 (n,); for a dynamic table, the argument unchanged."""
        share = self.shares.get(name)
        return share.ids(rows) if isinstance(share, Share) else rows

    def all_ids(self, name: str) -> range:
        """Return the ids of all these rows of a static table, in order of local row."""
        share = self.shares.get(name)
        if share is None:
            return range(self._whole[name].vocabulary_size)
        return range(share.ids(0), share.ids(share.num_rows), share.stride)

    def local_rows(self, name: str, ids: Int64) -> Int64:
        """Return the local rows of ids of this share, int64 (n,); for a dynamic table, the keys unchanged."""
        return self.shares[name].locate(ids)[1] if name in self.shares else ids

    def select(self, name: str, ids: Int64, parts: list[Float32]) -> tuple[Int64, list[Float32]]:
        """Select the ids of these rows. Return their local rows, int64 (m,), and their values of every part.

        ids : int64 (n,); parts : values of the ids, float32 (n, floats of the part) each
        A dynamic table has keys in place of local rows.
        """
        if name not in self.shares:
            return ids, parts
        positions, rows = self.shares[name].select(np.ascontiguousarray(ids))
        return rows, [values[positions] for values in parts]

    def located(self, name: str, ids: Int64, given: Any) -> Int64:
        """Return the local rows of valid ids, int64 (n,), or keys. Raises UsageError for one of another share.

        given : the ids as the caller gave them, for the message
        """
        if name not in self.shares:
            return ids
        ranks, rows = self.shares[name].locate(ids)
        other = ranks != self.shares[name].rank
        if other.any():
            raise UsageError(
                f"table '{name}': id {np.asarray(given).reshape(-1)[other][0]} belongs to share {ranks[other][0]}, and "
                f"this engine holds share {self.share_text(name)}"
            )
        return rows

    def share_text(self, name: str) -> str:
        """Return which share of a table these rows are, such as "1 of 3", for messages."""
        return f"{self.shares[name].rank} of {self.shares[name].count}"

    def check_whole(self, name: str) -> None:
        """Raise UsageError if these are only a share of a table's rows."""
        if name in self.shares:
            raise UsageError(
                f"table '{name}': this engine holds only share {self.share_text(name)} of its rows; look up its ids, "
                "or read the tables of the whole job"
            )

    def check_all(self, subject: str) -> None:
        """Raise UsageError if these are only a share of the rows. subject : the result that needs all rows"""
        for name in self.shares:
            raise UsageError(f"{subject} needs whole tables, and this engine holds only share {self.share_text(name)}")
