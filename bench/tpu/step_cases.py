"""The steps and writes that the matrix compiles, and their results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product

from penstock.bench.device_cases import optimizers

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
FOUR_HOSTS = "v5e, 4 hosts"
OF_FOUR_HOSTS = {FOUR_HOSTS: "v5e:4x4", "v5p, 4 hosts": "v5p:2x2x4"}
DIMS = (8, 24, 32, 64, 100, 128, 200, 256, 300, 1024)
MAIN = ("SGD", "Adagrad", "Adam", "FTRL")
ROWS, LINES, MANY_LINES, MOST_LINES = 1 << 22, 4096, 16_384, 131_072
# Topologies of eight chips and more.
OF_EIGHT = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x2"}
# Dims and numbers of rows for which a chip's lines are no multiple of 8. Large tables stay in HBM; with UNSEEN_ROWS,
# a prime number, the arrays of one strip fit into VMEM up to dim 128 on one chip.
ODD_DIMS, ODD_ROWS, ODD_CHIPS = (12, 20, 24, 40), 8_000_003, (1, 3)
UNSEEN_DIMS, UNSEEN_ROWS, UNSEEN_CHIPS = (12, 20, 24, 40, 48, 80, 100, 384, 768), 1_000_003, (1, 3, 8)


@dataclass(frozen=True)
class Case:
    generation: str
    optimizer: str
    dim: int
    variant: str
    bfloat16: bool = False
    program: str = "apply"
    lines: int = LINES
    compact: bool = False  # whether rows are sent compact, as many as lines, and the step spreads them
    rows: int = ROWS
    chips: int = 0  # of the topology; 0: all

    @property
    def title(self) -> str:
        """The optimizer, and the differences from its usual step."""
        unit = "rows read" if self.program == "read" else "lines"
        lines = f", {self.lines:,} {unit}" * (self.lines != LINES)
        program = f", {self.program}" * (self.program != "apply")
        switches = ", bfloat16" * self.bfloat16 + program + ", compact" * self.compact
        rows = f", {self.rows:,} rows" * (self.rows != ROWS)
        chips = f", {self.chips} chip{'s' * (self.chips > 1)}" * (self.chips > 0)
        return self.optimizer + switches + lines + rows + chips

    def has(self, words: str) -> bool:
        """Return whether all words are values of the case."""
        return set(words.split()) <= {str(word) for word in asdict(self).values()}

    @property
    def by_xla(self) -> bool:
        """Whether XLA compiles the program, and not Pallas."""
        return self.variant == "xla" or self.program != "apply"


@dataclass(frozen=True)
class Result:
    """The result of compiling a case.

    bytes_per_line : bytes moved; None: nothing was compiled
    floor, row_floor : the least bytes of a line, and of one row of it
    failed : the faults
    """

    case: Case
    temp_bytes: int
    bytes_per_line: float | None
    floor: float
    row_floor: float
    seconds: float
    failed: tuple[str, ...] = ()

    def times(self, floor: float) -> float | None:
        """Return the bytes moved per line as a multiple of a floor."""
        return None if self.bytes_per_line is None else self.bytes_per_line / floor


def cases(small: bool) -> Iterator[Case]:
    """Yield the cases of the grid. small : each generation and each optimizer once, the rest sampled"""
    for generation, dim, optimizer in product(TOPOLOGIES, DIMS, MAIN):
        everywhere = generation == "v5e" or optimizer in ("Adagrad", "Adam")
        if (generation, optimizer, dim) in SMALL or (everywhere and not small):
            yield from (Case(generation, optimizer, dim, variant) for variant in ("pallas", "xla"))
    if not small:
        for generation, dim, variant in product(TOPOLOGIES, (32, 128, 300), ("pallas", "xla")):
            yield Case(generation, "Adam", dim, variant, lines=MANY_LINES)
            if variant == "pallas":
                yield Case(generation, "Adam", dim, variant, lines=MOST_LINES)
        for optimizer in sorted(set(optimizers()) - set(MAIN)):
            for dim in (32, 128):
                if optimizer != ROW_WISE:
                    yield from (Case("v5e", optimizer, dim, variant) for variant in ("pallas", "xla"))
        for optimizer in MAIN:
            yield from (Case(FOUR_HOSTS, optimizer, dim, "pallas") for dim in (32, 128))
            yield from (Case(generation, optimizer, 128, "xla", True) for generation in TOPOLOGIES)
    for generation, dim in [("v5e", 32)] if small else product(TOPOLOGIES, (8, 32, 128, 200)):
        yield from (Case(generation, ROW_WISE, dim, "xla", program=program) for program in ("apply", "write"))
    for generation, dim in SMALL_WRITES if small else product(TOPOLOGIES, (8, 32, 64, 128, 200)):
        for variant in ("pallas", "xla"):
            yield Case(generation, "Adagrad", dim, variant, program="write")
        if dim == 128:
            yield Case(generation, "Adagrad", dim, "xla", True, "write")

    for generation, dim in [("v5e", 8), ("v5p", 32)] if small else product(TOPOLOGIES, (8, 24, 32, 64, 100, 300)):
        yield from (Case(generation, "Adagrad", dim, variant, compact=True) for variant in ("pallas", "xla"))
        if dim == 32:
            yield Case(generation, "Adagrad", dim, "xla", program="write", compact=True)
            yield Case(generation, "Adam", dim, "xla", True, compact=True)
    yield from reads(small)
    yield from odd_cases(small)
    yield from unseen_cases(small)


def reads(small: bool) -> Iterator[Case]:
    """Yield the reads of the grid's tables."""
    for generation, dim in [("v4", 32), ("v5p", 128)] if small else product(TOPOLOGIES, (8, 32, 64, 128, 200)):
        yield from (Case(generation, "Adam", dim, variant, program="read") for variant in ("pallas", "xla"))
        if dim == 32:
            yield Case(generation, ROW_WISE, dim, "xla", program="read")
            yield Case(generation, "Adagrad", dim, "xla", True, "read")
            yield from (Case(generation, "Adam", dim, "pallas", program="read", lines=rows) for rows in (512, 32_768))


def odd_cases(small: bool) -> Iterator[Case]:
    """Yield steps, writes and reads of tables whose lines per chip would be no multiple of 8."""
    for generation, dim, chips, optimizer in product(TOPOLOGIES, ODD_DIMS, ODD_CHIPS, ("SGD", "Adam")):
        if (generation, dim, chips, optimizer) not in SMALL_ODD and (small or (generation != "v5e" and dim != 24)):
            continue
        for program, compact in (("read", False), ("write", False), ("write", True), ("apply", False), ("apply", True)):
            for variant in ("pallas",) if generation != "v5e" or small else ("pallas", "xla"):
                if not small or not compact:
                    yield Case(generation, optimizer, dim, variant, False, program, LINES, compact, ODD_ROWS, chips)


def unseen_cases(small: bool) -> Iterator[Case]:
    """Yield a read, a write and a step of a table of a prime number of rows, for each dim, number of chips and rule."""
    for (number, dim), chips in product(enumerate(UNSEEN_DIMS), UNSEEN_CHIPS):
        generation = list(TOPOLOGIES)[(number + chips) % len(TOPOLOGIES)]
        for optimizer, variant in (("SGD", "pallas"), ("FTRL", "xla"), (ROW_WISE, "xla")):
            for program in ("read", "write", "apply"):
                case = Case(generation, optimizer, dim, variant, False, program, LINES, False, UNSEEN_ROWS, chips)
                if not small or (dim, chips, optimizer) in SMALL_UNSEEN:
                    yield case


ROW_WISE = "RowWiseAdagrad"  # the one whose slots are no lines; XLA compiles its steps
SMALL = {("v4", "SGD", 8), ("v5e", "Adagrad", 32), ("v5e", "Adam", 128), ("v5p", "FTRL", 64), ("v6e", "Adam", 200)}
SMALL |= {("tpu7x", "Adagrad", 128)}
SMALL_ODD = {("v5e", 24, 1, "SGD"), ("v5e", 40, 3, "Adam"), ("v6e", 24, 3, "Adam"), ("tpu7x", 24, 1, "SGD")}
SMALL_UNSEEN = {(12, 8, "SGD"), (48, 1, "FTRL"), (100, 3, ROW_WISE)}
SMALL_WRITES = [("v4", 8), ("v5e", 128), ("v5p", 32), ("v6e", 200), ("tpu7x", 64)]
