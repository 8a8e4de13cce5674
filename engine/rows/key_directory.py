"""The directory of a dynamic table, and the keys of an opening: what decides which keys have a row."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.base.errors import CapacityError, listed
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Coalesced, Int64
from penstock.model.stats import KeyReport
from penstock.pyx.keys.directory import Directory, directory_bytes
from penstock.pyx.keys.directory_plan import Plan

_NO_KEYS = np.zeros(0, np.int64)


def make_directory(spec: TableSpec, seed: int, sample_bits: int = 0, share: tuple[int, int] = (0, 1)) -> Directory:
    """Return the empty directory of a dynamic table.

    sample_bits : keep one virtual shard of 2 ** sample_bits; share : (rank, count): keep those of one of count owners
    """
    settings = spec.dynamic
    assert settings is not None
    return Directory(
        spec.vocabulary_size,
        seed,
        spec.drawn_as,
        min_count=settings.min_count,
        by_frames=settings.count == "frames",
        probability=settings.probability,
        forget_after=settings.forget_after,
        expire_after=settings.expire_after,
        evict=settings.evict,
        half_life=settings.half_life,
        sample_bits=sample_bits,
        share=share,
    )


def joined_states(states: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the saved states of a dynamic table's shares as one; ``DynamicTable.set_state`` restores it."""
    first = states[0]
    joined = {name: np.concatenate([state[name] for state in states]) for name in first if name != "numbers"}
    # Capacity, clock and epoch are the same in all; the others are counts.
    counts = np.sum([state["numbers"][3:] for state in states], axis=0)
    return {**joined, "numbers": np.concatenate([first["numbers"][:3], counts])}


def bytes_of_directories(tables: Sequence[tuple[TableSpec, int]], count: int = 1) -> int:
    """Return the bytes of several directories. tables : the spec of each, and its ``sample_bits``

    count : of which this is one share's part
    Raises MemoryError if they exceed the host's memory: Linux kills the process that uses more than there is.
    """
    num_bytes = 0
    for spec, sample_bits in tables:
        assert spec.dynamic is not None
        num_bytes += directory_bytes(spec.vocabulary_size, spec.dynamic.evict == "lfu") // count >> sample_bits
    if num_bytes > (has := os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")):
        names = listed(dict.fromkeys(f"'{spec.name}'" for spec, _ in tables))
        whose = f"table {names}: its directory needs" if len(tables) == 1 else f"tables {names}: their directories need"
        raise MemoryError(f"{whose} {num_bytes / 1e9:.1f} GB, this machine has {has / 1e9:.1f} GB")
    return num_bytes


def clock_at(spec: TableSpec, directory: Directory, step: int, time: int | None) -> int:
    """Return the clock of a step. time : the largest of any frame so far"""
    assert spec.dynamic is not None
    if spec.dynamic.clock == "steps":
        return step
    return directory.clock if time is None else time


def keys_of_opening(
    frames: Sequence[Coalesced], num_frames: Int64 | None, allocate: Callable[[Any, int], Any]
) -> tuple[Int64, Int64 | None, Int64 | None]:
    """Return the distinct keys of an opening, and of each how many rows it has and in how many frames it occurs.

    frames, num_frames : what ``TableStore.look`` returned; allocate : (dtype, n) → an array
    Returns int64 (n,) each; rows and frames are None if they were not counted.
    """
    summed = [part for frame in frames for part in frame.summed]
    keys, rows = _joined([part.ids for part in summed], allocate), None
    counted = [part.rows for part in summed if part.rows is not None]
    if counted:
        rows = _joined(counted, allocate)
    if len(frames) > 1:
        keys, inverse = np.unique(keys, return_inverse=True)
        num_frames = np.bincount(inverse, minlength=len(keys))
        rows = None if rows is None else np.bincount(inverse, rows, len(keys)).astype(np.int64)
    return keys, rows, num_frames


def shortage(directory: Directory, plan: Plan) -> str:
    """Return how many new keys of a plan find no room, and how full the directory is."""
    in_use, rows = plan.fullest
    shard = f", in one of the {directory.num_shards} virtual shards {in_use} of {rows}"
    return (
        f"no room for {plan.num_rejected} of {plan.num_admitted + plan.num_rejected} new keys: {len(directory)} of "
        f"{directory.capacity} rows are in use{shard if directory.num_shards > 1 else ''}"
    )


def no_room(spec: TableSpec, directory: Directory, plan: Plan, of_load: bool = False) -> CapacityError:
    """Return the error of a plan with new keys that find no room. of_load : of a load, which never rejects keys"""
    assert spec.dynamic is not None
    other = "on_full: REJECT" if spec.dynamic.evict is not None else "evict or on_full: REJECT"
    of_run = "" if of_load else f", with which a run can resume, or begin anew with {other}"
    return CapacityError(f"table '{spec.name}': {shortage(directory, plan)}; set a larger vocabulary_size{of_run}")


def no_room_for_load(table: str, directory: Directory, num_lost: int) -> CapacityError:
    """Return the error of a load that would evict keys which it has loaded. num_lost : how many, so far"""
    return CapacityError(
        f"table '{table}': no room for all keys of one load: {num_lost} of them would be evicted again from "
        f"{directory.capacity} rows; set a larger vocabulary_size"
    )


def key_report(
    directory: Directory, before: Mapping[str, int] | None = None, expired_waiting: int | None = None
) -> KeyReport:
    """Return the keys now, and what became of keys since ``before``, earlier ``counts``; None: from the start.

    expired_waiting : None: count them, which reads every entry
    """
    counts = {name: number - (before[name] if before else 0) for name, number in directory.counts.items()}
    return KeyReport(
        len(directory),
        directory.num_expired_waiting() if expired_waiting is None else expired_waiting,
        directory.num_waiting,
        directory.nbytes + directory.candidate_bytes,
        len(directory) / directory.capacity,
        **counts,
    )


def _joined(arrays: Sequence[Int64], allocate: Callable[[Any, int], Any]) -> Int64:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([_NO_KEYS, *arrays], out=allocate(np.int64, sum(map(len, arrays))))
