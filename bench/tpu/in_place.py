"""The check of compiled programs: whether a table stays where it is, and how much memory it needs in addition.

Every tool that compiles programs ahead uses it, for TPUs and GPUs, and for steps, reads and writes:

* a program that updates a table aliases all of it;
* no instruction produces a result the size of a table: one of the shape of one of its arrays, or at least half the
  bytes of the smallest and more than the step's own lines. Its kind does not matter, nor does the memory that
  the result is in: a fusion that converts a table is a copy, and so is one that moves it to VMEM. Excepted are
  instructions whose result is the table's own memory: bitcasts, loops, and updates in place;
* temporary memory is bounded.

XLA updates an operand in place in a scatter, a dynamic-update-slice, a fusion that ends in one, and a custom call that
declares it. Where it cannot, it adds a copy, which is a separate instruction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
# At the end of an array.
PADDING_BYTES = 4096
# Operations whose results are their operands' memory, and those that run other computations on it.
SAME_MEMORY = {
    "parameter",
    "bitcast",
    "get-tuple-element",
    "tuple",
    "opt-barrier",
    "while",
    "conditional",
    "call",
    "call-done",
}
IN_PLACE = ("scatter", "dynamic-update-slice")
RUNS = re.compile(r"\b(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


class Instruction(NamedTuple):
    """An instruction in XLA's text form. kind : the type of its result; attributes : the text after its operands"""

    name: str
    kind: str
    operation: str
    operands: list[str]
    attributes: str


def instructions(computation: str) -> Iterator[Instruction]:
    """Yield every instruction of a computation in XLA's text form."""
    for line in computation.splitlines()[1:]:
        name, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if not equals:
            return
        end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
        kind, rest = rest[:end], rest[end:].strip()
        start = rest.index("(")
        close = _closing(rest, start)
        operands = re.findall(r"%[\w.\-]+", rest[start + 1 : close])
        yield Instruction(name, kind, rest[:start], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for end in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end
    raise ValueError(f"a parenthesis is not closed: {text[:80]}")


class Copied(NamedTuple):
    """A result of the size of a table that is not the table. space : 0, HBM; else a memory on the chip"""

    operation: str
    name: str
    array: str
    num_bytes: int
    space: int


def check(layout: Any, program: Any, temporary: int, staged: int, is_read: bool = False) -> list[str]:
    """Return the faults of a compiled program.

    layout : of the table or stack; temporary : the most bytes that the program may need in addition to it
    staged : bytes of the largest array of a step's, write's or read's own lines
    is_read : whether the program returns rows, and its table is not donated
    """
    memory, of_device = program.memory_analysis(), layout.nbytes // layout.num_devices
    arrays, aliased, faults = arrays_on_device(layout), memory.alias_size_in_bytes, []
    if not is_read and not of_device <= aliased < of_device + PADDING_BYTES * len(arrays):
        faults.append(f"aliases {aliased} bytes of a table of {of_device}")
    if memory.temp_size_in_bytes > temporary:
        faults.append(f"needs {memory.temp_size_in_bytes} bytes in addition to the table, more than {temporary}")
    for copy in copies(arrays, program.as_text(), staged):
        memory_space = f"memory space {copy.space}" if copy.space else "HBM"
        result = f"{copy.array}, {copy.num_bytes} bytes"
        faults.append(f"copies a table: {copy.operation} {copy.name} puts {result}, into {memory_space}")
    return faults


def line_bytes(line: Any) -> int:
    """Return the bytes of a line and of its gradient."""
    size: int = line.nbytes(1) + 4 * line.halves * line.width
    return size


def read_bound(line: Any, rows: int) -> int:
    """Return the bytes that a read of rows may need in addition to the table: their lines four times."""
    bound: int = (1 << 20) + 4 * rows * line.nbytes(1)
    return bound


def arrays_on_device(layout: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Return (shape, dtype) of a table's or stack's arrays on one device."""
    arrays: list[tuple[tuple[int, ...], Any]] = list(layout.line.arrays(layout.lines_per_device))
    return arrays


def copies(arrays: Sequence[tuple[tuple[int, ...], Any]], text: str, staged: int = 0) -> Iterator[Copied]:
    """Yield each result of a compiled program that has the size of a table, and is not the table itself.

    arrays : (shape, dtype) of the table's on one device; staged : as for ``check``
    """
    import numpy as np

    shapes = {without_ones(shape) for shape, _ in arrays}
    least = min(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in arrays) / 2
    bodies = computations(text)
    for instruction in executed(bodies):
        for index, (name, dims, form) in enumerate(ARRAY.findall(instruction.kind)):
            shape = tuple(map(int, filter(None, dims.split(","))))
            num_bytes = math.prod(shape) * WIDTHS.get(name, 4)
            if without_ones(shape) not in shapes and not (num_bytes >= least and num_bytes > staged):
                continue
            if not _is_operand(instruction, index, bodies):
                space = re.search(r"S\((\d+)\)", form)
                array, number = f"{name}[{dims}]", int(space[1]) if space else 0
                yield Copied(instruction.operation, instruction.name, array, num_bytes, number)


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without axes of one element: XLA adds and removes them by a bitcast."""
    return tuple(length for length in shape if length != 1)


def computations(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of every computation of a program, by its name; that of the program is "ENTRY"."""
    bodies = {}
    for part in re.split(r"\n(?=%|ENTRY )", text)[1:]:
        name = "ENTRY" if part.startswith("ENTRY ") else part[1:].split(maxsplit=1)[0]
        bodies[name] = list(instructions(part))
    return bodies


def executed(bodies: dict[str, list[Instruction]]) -> Iterator[Instruction]:
    """Yield the instructions that have results in memory: those of the program, its loops, branches and calls."""
    waiting, known = ["ENTRY"], {"ENTRY"}
    while waiting:
        for instruction in bodies[waiting.pop()]:
            yield instruction
            if instruction.operation in ("while", "conditional", "call", "call-start"):
                branches = ",".join(BRANCHES.findall(instruction.attributes)).replace("%", "").split(",")
                names = {*RUNS.findall(instruction.attributes), *map(str.strip, branches)} - known - {""}
                waiting += names
                known |= names


def _is_operand(instruction: Instruction, index: int, bodies: dict[str, list[Instruction]]) -> bool:
    """Return whether an array of a result is in the memory of an operand. index : of the array in the result"""
    operation = instruction.operation
    if operation in SAME_MEMORY or operation in IN_PLACE or operation.endswith("-start"):
        return True  # a copy that is started has its result when it is done
    if operation == "custom-call":
        aliased = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", instruction.attributes)
        places = re.findall(r"\{(\d*)\}: \(", aliased[1]) if aliased else []
        return str(index) in places or (index == 0 and "" in places)
    called = re.search(r"\bcalls=%?([\w.\-]+)", instruction.attributes)
    return operation == "fusion" and called is not None and _ends_in_place(bodies, called[1], index)


def _ends_in_place(bodies: dict[str, list[Instruction]], called: str, index: int = 0) -> bool:
    """Return whether a result of a fusion is an update of one of its parameters.

    called : the computation of the fusion. Its last instruction may be a fusion, too
    """
    fused = bodies[called]
    by_name = {instruction.name: instruction for instruction in fused}

    def traced(name: str) -> Instruction:
        while by_name[name].operation == "bitcast":
            name = by_name[name].operands[0]
        return by_name[name]

    root = fused[-1]
    last = traced(root.operands[index] if root.operation == "tuple" else root.name)
    updated = last.operands[:1]
    if last.operation == "fusion":
        (inner,) = re.findall(r"\bcalls=%?([\w.\-]+)", last.attributes)
        updated = [name for name in last.operands if by_name[name].kind == last.kind]
        return _ends_in_place(bodies, inner) and all(traced(name).operation == "parameter" for name in updated)
    return last.operation in IN_PLACE and traced(updated[0]).operation == "parameter"
