"""What the processes of a job agree on between two programs: a few numbers of each, or the error of one.

The numbers cross by an all-gather over the devices of the mesh, which are connected anyway. Every process makes the
same calls in the same order; each gather also shows whether they do, and whether one has failed. Then all raise.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NoReturn, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock.base.errors as errors
from penstock.base.errors import PeerError, PenstockError, UsageError
from penstock.model.frames import Int32
from penstock.rows.bridge.programs import Program, compiled, own_settings, row_sharding

Bools = npt.NDArray[np.bool_]

E = TypeVar("E", bound=BaseException)

# Words of a head: whether the process failed, a checksum of what it calls, the number of its words, and those that fit.
HEAD, STARTS = 64, 3
# Bytes of a text: an error, or what a process calls.
TEXT = 4096


class Processes:
    """The processes that a mesh spans, by rank: in the order of their numbers in the job.

    mesh : one axis, ``programs.AXIS``
    rank : of this process; count : of processes
    by_rank : the numbers of each process's devices in the mesh

    Raises UsageError unless every process has the same number of devices in the mesh, and this one has any.
    """

    def __init__(self, mesh: Mesh) -> None:
        owners = [device.process_index for device in mesh.devices.flat]
        members = sorted(set(owners))
        self.mesh, self.count = mesh, len(members)
        if mesh.devices.flat[0].client.process_index() not in members:
            raise UsageError("mesh: none of its devices is of this process; create the engine in its processes only")
        if len(set(Counter(owners).values())) > 1:
            raise UsageError(
                "mesh: expected the same number of devices of every process, got "
                + ", ".join(f"{number} of process {owner}" for owner, number in sorted(Counter(owners).items()))
            )
        self.rank = members.index(mesh.devices.flat[0].client.process_index())
        self.by_rank = tuple(tuple(i for i, owner in enumerate(owners) if owner == member) for member in members)
        self._is_broken = False

    def agree(self, call: str, numbers: Sequence[int] | Int32 = ()) -> Int32:
        """Return the numbers of all processes, int32 (processes, numbers), once all have made this call.

        call : what this process does, for messages; numbers : as many in every process
        Raises the error of a process that failed instead, or UsageError if one makes another call.
        """
        own = np.asarray(numbers, np.int32)
        heads = self._heads(0, call, own)
        rest = np.zeros(max(0, len(own) - (HEAD - STARTS)), np.int32)
        rest[:] = own[HEAD - STARTS :]
        more = self._gathered(rest) if len(rest) else np.zeros((self.count, 0), np.int32)
        return np.concatenate([heads[:, STARTS : STARTS + len(own)], more], axis=1)

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Return a context whose error the other processes raise too, in their next call of ``agree``."""
        try:
            yield
        except BaseException as error:
            if not (self._is_broken or vars(error).get("is_shared")):
                _mark(error)
                with suppress(PeerError):  # no other process is left to raise it
                    self._heads(1, f"{type(error).__name__}\0{error}", np.zeros(0, np.int32))
            raise

    def _heads(self, failed: int, text: str, numbers: Int32) -> Int32:
        """Return the heads of all processes, int32 (processes, HEAD)."""
        head = np.zeros(HEAD, np.int32)
        head_numbers = numbers[: HEAD - STARTS]
        head[:STARTS] = failed, zlib.crc32(text.encode()) & 0x7FFFFFFF, len(numbers)
        head[STARTS : STARTS + len(head_numbers)] = head_numbers
        heads = self._gathered(head)
        has_failed, differs = heads[:, 0] > 0, (heads[:, 1:STARTS] != head[1:STARTS]).any(axis=1)
        if has_failed.any() or differs.any():
            texts = self._texts(text)
            if not failed:  # else the caller raises its own error
                self._end(texts, has_failed, differs)
        return heads

    def _end(self, texts: Sequence[str], has_failed: Bools, differs: Bools) -> NoReturn:
        """Raise the first error of the processes, or that one makes another call than this one."""
        if has_failed.any():
            rank = int(has_failed.argmax())
            name, _, message = texts[rank].partition("\0")
            kind = getattr(errors, name, None)
            if isinstance(kind, type) and issubclass(kind, PenstockError):
                raise _mark(kind(f"process {rank}: {message}"))
            raise _mark(PeerError(f"process {rank} stopped with {name}: {message}"))
        other = int(differs.argmax())
        raise _mark(
            UsageError(
                f"process {self.rank} is at {texts[self.rank]} and process {other} at {texts[other]}: every process "
                "must make the same calls, with the same configuration, in the same order"
            )
        )

    def _texts(self, text: str) -> list[str]:
        padded = text.encode()[:TEXT].ljust(TEXT, b"\xff")  # a byte that UTF-8 does not have
        words = self._gathered(np.frombuffer(padded, np.int32))
        return [row.tobytes().rstrip(b"\xff").decode(errors="replace") for row in words]

    def _gathered(self, words: Int32) -> Int32:
        """Return the words of all processes, int32 (processes, words)."""
        try:
            gather = _gather(self.mesh, len(words))
            rows = placed(self.mesh, [words[None]] * len(self.by_rank[self.rank]))
            with own_settings(self.mesh):
                every = np.asarray(gather(rows).addressable_data(0))
        except jax.errors.JaxRuntimeError as error:
            self._is_broken = True
            raise _mark(
                PeerError(f"another process of the job is gone or does not answer: {str(error).splitlines()[0]}")
            ) from error
        by_process: Int32 = every[[devices[0] for devices in self.by_rank]]
        return by_process


def placed(mesh: Mesh, parts: Sequence[npt.NDArray[np.generic]]) -> jax.Array:
    """Return an array whose axis 0 is split over the devices. parts : of this process's devices, in their order"""
    devices = [device for device in mesh.devices.flat if device.process_index == device.client.process_index()]
    with jax.transfer_guard("allow"):
        shards = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
    shape = (len(parts[0]) * mesh.size, *parts[0].shape[1:])
    return jax.make_array_from_single_device_arrays(shape, row_sharding(mesh), shards)


@lru_cache(maxsize=64)
def _gather(mesh: Mesh, num_words: int) -> Program:
    """Return a program: (i32[n, words], split over the devices) → the same array on every device."""
    rows = jax.ShapeDtypeStruct((mesh.size, num_words), np.int32, sharding=row_sharding(mesh))
    same = NamedSharding(mesh, PartitionSpec())
    return compiled(mesh, jax.jit(lambda words: words, out_shardings=same), rows)


def _mark(error: E) -> E:
    """Mark an error that every process raises."""
    error.__dict__["is_shared"] = True
    return error
