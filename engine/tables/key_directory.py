"""The directory of a dynamic table as its settings say, its clock, and the counts and errors that follow from it."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.config.specs import TableSpec
from penstock.errors import CapacityError
from penstock.pyx.keys.directory import Directory
from penstock.stats import KeyReport


def make_directory(spec: TableSpec, seed: int) -> Directory:
    """Return the empty directory of a dynamic table."""
    settings = spec.dynamic
    assert settings is not None
    return Directory(
        spec.vocabulary_size,
        seed,
        spec.name,
        min_count=settings.min_count,
        by_frames=settings.count == "frames",
        probability=settings.probability,
        forget_after=settings.forget_after,
        expire_after=settings.expire_after,
        evict=settings.evict,
        half_life=settings.half_life,
    )


def clock_at(spec: TableSpec, directory: Directory, step: int, time: int | None) -> int:
    """Return the clock of a step. time : the largest of any frame so far"""
    assert spec.dynamic is not None
    if spec.dynamic.clock == "steps":
        return step
    return directory.clock if time is None else time


def no_room(table: str, directory: Directory, num_rejected: int, fullest: tuple[int, int, int]) -> CapacityError:
    """Return the error of new keys that find no room. fullest : ``Plan.fullest``"""
    shard = f", in one of the {directory.num_shards} virtual shards {fullest[0]} of {fullest[1]}"
    return CapacityError(
        f"table '{table}': no room for {num_rejected} new keys: {len(directory)} of {directory.capacity} rows are in "
        f"use{shard if directory.num_shards > 1 else ''}; set a larger vocabulary_size, with which a run can resume, "
        "or begin anew with evict or on_full: REJECT"
    )


def key_counts(directory: Directory) -> dict[str, int]:
    """Return what became of keys so far, by the names of KeyReport."""
    return {
        "admitted": directory.num_admitted,
        "expired": directory.num_expired,
        "evicted": directory.num_evicted,
        "returned": directory.num_returned,
        "rejected": directory.num_rejected,
        "unadmitted_rows": directory.unadmitted_rows,
    }


def key_report(directory: Directory, before: Mapping[str, int] | None = None) -> KeyReport:
    """Return the keys now, and what became of keys since ``before``, earlier ``key_counts``; None: from the start."""
    counts = {name: number - (before[name] if before else 0) for name, number in key_counts(directory).items()}
    return KeyReport(
        len(directory),
        directory.num_expired_now,
        directory.num_waiting,
        directory.nbytes + directory.candidate_bytes,
        len(directory) / directory.capacity,
        **counts,
    )
