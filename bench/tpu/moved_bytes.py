"""The bytes that a step for TPU moves from and to HBM.

They are counted as follows:

* the kernel: the bytes of its DMAs and of the blocks that Pallas loads, counted in the traced kernel;
* XLA programs: the operands and results that the schedule keeps in HBM. On-chip memory does not count, and a scatter
  counts as a read and a write of its lines: it fetches a tile before it changes a line in it.
  ``cost_analysis()["bytes accessed"]`` is unsuitable: it charges gathers for tiles that their DMAs do not move.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.bench.tpu.in_place import instructions, without_ones

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f32": 4, "s32": 4, "u32": 4}


def dma_bytes(jaxpr: Any) -> int:
    """Return the bytes per line that the DMAs of a traced kernel move: each array counts once in and once out."""
    sites: dict[tuple[str, str], int] = {}
    for eqn in walk(jaxpr):
        if eqn.primitive.name != "dma_start":
            continue
        source, target, *_ = eqn.params["tree"].unflatten(eqn.invars)
        shape, dtype = _moved(source, target)
        num_bytes = math.prod(shape) * dtype.itemsize
        # No two of a table's arrays have the same shape.
        assert sites.setdefault((str(_whole(source)), str(_whole(target))), num_bytes) == num_bytes
    return sum(sites.values())


def dma_bytes_by_turn(jaxpr: Any) -> int:
    """Return the bytes that the DMAs in the loop over blocks of a traced kernel move in one turn of it."""
    (kernel,) = (eqn for eqn in walk(jaxpr) if eqn.primitive.name in ("mpmd_map", "core_map"))
    turns = [eqn for inner in _inner(kernel) for eqn in inner.eqns if eqn.primitive.name in ("while", "scan")]
    (turn,) = (eqn for eqn in turns if any(each.primitive.name == "dma_start" for each in walk_of(eqn)))
    total = 0
    for eqn in walk_of(turn):
        if eqn.primitive.name == "dma_start":
            source, target, *_ = eqn.params["tree"].unflatten(eqn.invars)
            shape, dtype = _moved(target, source)
            total += math.prod(shape) * dtype.itemsize
    return total


def _moved(source: Any, target: Any) -> tuple[tuple[int, ...], Any]:
    """Return (shape, dtype) of the data that a copy moves: either end may be a whole buffer."""
    for end in (source, target):
        for transform in getattr(end, "transforms", ())[-1:]:
            return transform.get_indexer_shape(), _whole(end).dtype
    return source.aval.shape, source.aval.dtype


def _whole(end: Any) -> Any:
    """Return the type of the buffer that an end of a copy is in."""
    return getattr(end, "ref", end).aval


def walk(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a traced program, including nested ones."""
    for eqn in jaxpr.eqns:
        yield eqn
        yield from walk_of(eqn)


def walk_of(eqn: Any) -> Iterator[Any]:
    """Yield every equation of the programs that an equation runs."""
    for inner in _inner(eqn):
        yield from walk(inner)


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                yield getattr(inner, "jaxpr", inner)


def hbm_bytes(text: str, touched: Mapping[tuple[int, ...], tuple[int, ...]]) -> int:
    """Return the bytes that a compiled program moves from and to HBM.

    touched : the shape of each array of a table on a device → that of its touched part, which counts
    """
    touched = {without_ones(shape): part for shape, part in touched.items()}
    kinds: dict[str, str] = {}
    total = 0
    entry = text[text.index("ENTRY ") :]
    for name, kind, operation, operands, _ in instructions(entry):
        kinds[name] = kind
        if operation in ("parameter", "bitcast", "get-tuple-element", "tuple", "constant") or "-done" in operation:
            continue
        moved = [kind] if "-start" in operation else [kind, *(kinds.get(operand, "") for operand in operands)]
        arrays = [array for types in moved for array in ARRAY.findall(types)]
        total += sum(_array_bytes(array, touched) for array in arrays)
    return total


ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\{([^}]*)\}")


def _array_bytes(array: tuple[str, str, str], touched: Mapping[tuple[int, ...], tuple[int, ...]]) -> int:
    kind, dims, form = array
    if re.search(r"S\([1-9]", form):  # on the chip
        return 0
    shape = tuple(map(int, filter(None, dims.split(","))))
    return math.prod(touched.get(without_ones(shape), shape)) * WIDTHS.get(kind, 4)
