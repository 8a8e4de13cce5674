"""Tensors of pulled rows: the leaves of autograd, whose gradients become a frame.

A lookup is planned from ids alone, on any thread; its rows become a tensor in the forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.base.errors import InputError, UsageError, UsageTypeError
from penstock.base.validation import INT64_MAX
from penstock.contrib.torch.stores import Block, Ids, distinct
from penstock.model.frames import Float32, Int64

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)


@dataclass(eq=False)
class PulledRows:
    """The rows of one forward pass, in one tensor, once they have a gradient.

    ids : table → its distinct ids, in the order of the rows
    rows : shape (n, dim), a leaf; step : that the rows were read at
    padding : index of the row that gets no gradient; None: all get one
    """

    ids: dict[str, Ids]
    rows: torch.Tensor
    step: int
    padding: int | None = None

    def block(self) -> Block:
        """Return the gradient rows on the host, as float32."""
        gradients, ids = _on_host(self.rows.grad), self.ids
        if self.padding is not None:
            ids = {name: np.delete(table_ids, self.padding) for name, table_ids in ids.items()}
            gradients = np.delete(gradients, self.padding, axis=0)
        return Block(ids, gradients)


def check_integers(tensor: Any, argument: str, place: str = "") -> None:
    """Raise UsageTypeError for anything but a tensor of integers: the place, torch's words."""
    if not isinstance(tensor, torch.Tensor):
        raise UsageTypeError(f"{place}embedding(): argument '{argument}' must be Tensor, not {type(tensor).__name__}")
    if tensor.dtype not in _INTEGERS:
        raise UsageTypeError(
            f"{place}Expected tensor for argument '{argument}' to have one of the following scalar types: Long, Int; "
            f"but got {tensor.type()} instead (while checking arguments for embedding)"
        )


def ids_of(tensor: Any, place: str = "") -> Ids:
    """Return ids on the host as int64 (uint64 stays), shape (n,). Raises UsageTypeError for anything but integers.

    Raises UsageError for ids without values, as ``torch.func`` and ``torch.export`` pass to a function, and in a trace.
    """
    check_integers(tensor, "indices", place)
    if torch.jit.is_tracing():
        raise UsageError(
            f"{place}torch.jit.trace would record the rows of these ids, and return them for all others; trace what "
            "penstock.torch.materialized returns"
        )
    dtype = torch.uint64 if tensor.dtype == torch.uint64 else torch.int64
    try:
        ids: Ids = tensor.detach().reshape(-1).to("cpu", dtype).contiguous().numpy()
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):  # of meta tensors
            raise
        raise UsageError(
            f"{place}cannot read the ids ({str(error).splitlines()[0]}); inside a function that torch.func or "
            "torch.export transforms, ids have no values: look up the embeddings outside, and pass them to the function"
        ) from error
    return ids


def joined(parts: Sequence[Ids]) -> Ids:
    """Return ids as one array. NumPy makes float64 of int64 and uint64: where one of them holds all ids, it is that."""
    if len({part.dtype for part in parts}) > 1:
        is_large = any((part > INT64_MAX).any() for part in parts)
        if not is_large or all((part >= 0).all() for part in parts):
            parts = [part.astype(np.uint64 if is_large else np.int64) for part in parts]
    return np.concatenate(parts)


def planned(ids: Mapping[str, Ids]) -> tuple[dict[str, Ids], dict[str, Int64]]:
    """Return the distinct ids of every table, and for each id its index among them."""
    plans = {name: distinct(table_ids) for name, table_ids in ids.items()}
    return {name: plan[0] for name, plan in plans.items()}, {name: plan[1] for name, plan in plans.items()}


def leaf_of(arrays: Sequence[Float32], like: torch.Tensor, needs_grad: bool, zero: int | None = None) -> torch.Tensor:
    """Return the rows as one tensor of the device and type of ``like``; on the CPU, one array shares its memory.

    zero : index of a row to set to zeros
    """
    array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if zero is not None:
        array[zero] = 0
    rows = torch.from_numpy(array)
    if like.device.type == "cuda":
        rows = rows.pin_memory()
    return rows.to(like.device, like.dtype, non_blocking=True).detach().requires_grad_(needs_grad)


def _on_host(gradients: torch.Tensor) -> Float32:
    """Return a gradient as float32 on the host."""
    gradients = gradients.detach().to(torch.float32)
    if gradients.device.type == "cuda":
        gradients = torch.empty(gradients.shape, dtype=torch.float32, device="cpu", pin_memory=True).copy_(gradients)
    array: Float32 = gradients.cpu().contiguous().numpy()
    return array


def blocks_of(pulled: Sequence[PulledRows]) -> list[Block]:
    """Return the frame of the gradients: every table once, with distinct ids.

    Raises InputError for a gradient that is not finite.
    """
    blocks = [block for block in (part.block() for part in pulled) if len(block.rows)]
    for block in blocks:
        _check_finite(block)
    seen: set[str] = set()
    for block in blocks:
        if seen & block.ids.keys():
            blocks = _merged(blocks)
            for merged in blocks:
                _check_finite(merged)
            return blocks
        seen |= block.ids.keys()
    return blocks


def add_repeated(pulled: Sequence[PulledRows]) -> None:
    """Add up the gradients of a row that several forwards pulled, for clipping: in the first one; the others get zeros.

    The frame stays the same.
    """
    parts: dict[str, list[tuple[Ids, torch.Tensor]]] = {}
    for part in pulled:
        gradients: Any = part.rows.grad
        by_table = gradients.split([len(ids) for ids in part.ids.values()])
        for (name, ids), rows in zip(part.ids.items(), by_table, strict=True):
            end = len(ids) if part.padding is None else part.padding
            around = (ids[:end], rows[:end]), (ids[end + 1 :], rows[end + 1 :])  # a padding row gets no gradient
            parts.setdefault(name, []).extend(piece for piece in around if len(piece[0]))
    for pieces in parts.values():
        if len(pieces) > 1:
            _add_to_first(pieces)


def _add_to_first(pieces: Sequence[tuple[Ids, torch.Tensor]]) -> None:
    """pieces : ids of one table, distinct in each, and their gradients, which change in place"""
    ids, index, sums = _summed(pieces)
    if len(ids) == len(index):
        return
    num_seen = 0
    for place, (_, rows) in zip(index.split([len(piece[0]) for piece in pieces]), pieces, strict=True):
        is_first = place >= num_seen  # indices count ids in order of first appearance
        rows.copy_(torch.where(is_first[:, None], sums[place], 0.0))
        num_seen += int(is_first.sum())


def _merged(blocks: Sequence[Block]) -> list[Block]:
    """Return a block per table: gradients of an id that several forwards pulled are summed in their order."""
    parts: dict[str, list[tuple[Ids, torch.Tensor]]] = {}
    for block in blocks:
        for name, ids, rows in block.parts():
            parts.setdefault(name, []).append((ids, torch.from_numpy(rows)))
    merged = []
    for name, pieces in parts.items():
        ids, _, sums = _summed(pieces)
        merged.append(Block({name: ids}, sums.numpy()))
    return merged


def _summed(pieces: Sequence[tuple[Ids, torch.Tensor]]) -> tuple[Ids, torch.Tensor, torch.Tensor]:
    """Return the distinct ids of pieces, for every id its index among them, and the sums of their gradients."""
    ids, index = distinct(joined([piece[0] for piece in pieces]))
    places, dim = torch.from_numpy(index), pieces[0][1].shape[1]
    sums = torch.zeros(len(ids), dim, dtype=torch.float32, device="cpu")  # torch's defaults may be others
    return ids, places, sums.index_add_(0, places, torch.cat([rows.to(sums) for _, rows in pieces]))


def _check_finite(block: Block) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(block.rows.sum()):  # else a value is not finite, or only their sum
            return
    for name, ids, rows in block.parts():
        finite = np.isfinite(rows).all(axis=1)
        if not finite.all():
            row = int(finite.argmin())
            raise InputError(
                f"expected a finite gradient, got {rows[row][~np.isfinite(rows[row])][0]} for id {ids[row]} of table "
                f"'{name}'; nothing was sent",
                source="step",
                row=row,
                column="gradient",
                reason="gradient_not_finite",
            )
