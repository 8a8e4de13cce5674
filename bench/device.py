"""The first hour of an accelerator: does every variant work there, and how close does it come to the memory's limit?

One page, the same for TPUs and GPUs: the device and the compiler; how fast the device copies; the canary of every
kernel; the bits of every optimizer's steps, repeated on the device and next to a CPU's; engines whose threads, batches,
placements and restarts differ; the time of steps, writes and reads; steps of a user's own, their bits, sums and time; a
trace for Perfetto. Only an accelerator can show this: without one, the program says so, with exit code 2. Exit code 1:
a check failed.

A row's traffic is the least that any implementation must move: for a step weights and slots read and written, gradient
and number read; for a write the row twice; for a read once. The limit is the measured bandwidth of a copy. Steps are
timed in one loop of one program, so neither launches nor Python count; writes and reads are calls in flight at once.

    python -m penstock.bench.device [--rows 10000000] [--unique 65536] [--trace DIR] [--any]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from penstock.base.integrations import KERNELS
from penstock.base.threads import ThreadTeam
from penstock.bench import device_runs
from penstock.bench.device_cases import optimizers
from penstock.bench.device_own_steps import OwnStep
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import backends, canary
from penstock.rows.bridge.backend_tables import BackendTables
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.devices import AXIS
from penstock.rows.bridge.functional_table import Format, step_of
from penstock.rows.bridge.packing import Packer
from penstock.rows.bridge.program_cache import compiled, compiler_of
from penstock.rows.bridge.programs import NEW_ROWS, row_sharding, written
from penstock.rows.bridge.sharding import Layout, TableDefinition
from penstock.rows.bridge.stacking import MemberRows, Stack, form

Steps = Sequence[tuple[Any, Any]]

TIMED, DIMS = ("SGD", "Adagrad", "Adam"), (8, 32, 128)
# Rows of the steps whose bits are compared, and the dim; the units of the last place that a step may differ by.
CHECKED_ROWS, CHECKED_STEPS, CHECKED_DIM, MOST_ULPS = 4096, 3, 32, 2
# Rounds of all steps in the loops whose difference is the time of a round, and how often each is timed.
SHORT, LONG, ROUNDS_TIMED, COPIES = 2, 22, 5, 9
CALLS = 20
READ_AT_ONCE = 32_768


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.device", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="of a table")
    parser.add_argument("--unique", type=int, default=65_536, help="rows per step")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="of the trace; default: a new temporary directory")
    parser.add_argument("--any", action="store_true", help="also where the device is a CPU, to see the program work")
    args = parser.parse_args(words)
    try:
        (device, *_) = jax.devices()
    except RuntimeError as error:  # a plugin without its device
        print(f"no accelerator: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return 2
    mesh = Mesh(np.asarray([device]), (AXIS,))
    if device.platform == "cpu" and not args.any:
        print("no accelerator: jax sees only CPUs, and this program measures what they cannot show", file=sys.stderr)
        return 2
    faults: list[str] = []
    limit = copy_bandwidth(1 << 30 if device.platform != "cpu" else 1 << 26)
    print(f"# {device.device_kind} ({device.platform})\n")
    print(f"{compiler_of(device)}; Python {sys.version.split()[0]}; a copy moves {limit / 1e9:.1f} GB/s.")
    for title, lines in (
        ("Canaries", canaries(mesh, faults)),
        ("Bits", bits(mesh, faults)),
        ("Engines", device_runs.checks(mesh, faults)),
        ("Steps, writes and reads", times(mesh, limit, args.rows, args.unique)),
        ("Steps of your own", own_steps(mesh, faults, limit, args.rows, args.unique)),
    ):
        print(f"\n## {title}\n")
        for line in lines:
            print(line, flush=True)
    folder = args.trace or Path(tempfile.mkdtemp(prefix="penstock-trace-"))
    rule = rules()["Adagrad"]
    with jax.profiler.trace(str(folder)):
        table = created(mesh, rule, 32, args.rows, usual(mesh, rule, 32))
        run_steps(table, steps_of(args.rows, args.unique, 32))
    print(f"\n## Trace\n\nFour steps of Adagrad at dim 32, for Perfetto or TensorBoard: {folder}")
    print(f"\n{'; '.join(faults) if faults else 'Every check passed'}.")
    return int(bool(faults))


def rules() -> dict[str, UpdateRule]:
    """Return the rule of every optimizer, by name."""
    return {name: _spec(optimizer).rule for name, optimizer in optimizers().items()}


def _spec(optimizer: Any) -> Any:
    return EmbeddingConfig.from_tables([TableConfig(1024, 8, name="t", optimizer=optimizer)]).table("t")


# ---- what must be right


def canaries(mesh: Mesh, faults: list[str]) -> Iterator[str]:
    """Yield a line for the canaries of each kernel."""
    for variant in KERNELS:
        passed: list[str] = []
        failed: list[str] = []
        for name, rule in rules().items():
            for dim in DIMS:
                layout = layout_of(mesh, rule, dim, 1024)
                if not on_tpu(mesh) or not backends.possible(variant, mesh, layout, rule):
                    continue
                problem = canary.failure(mesh, rule, form(backends.formatted(layout, variant), rule), variant)
                (failed if problem else passed).append(f"{name} {dim}" + f": {problem}" * bool(problem))
        faults += [f"canary of {variant}: {failure}" for failure in failed]
        yield f"- {variant}: {len(passed)} pass, {len(failed)} fail{''.join(f'; {item}' for item in failed)}"


def bits(mesh: Mesh, faults: list[str]) -> Iterator[str]:
    """Yield a line per variant: whether steps of every optimizer have the same bits twice, and a CPU's to few units."""
    for variant in variants(mesh):
        repeated, near, compared = 0, 0, 0
        for name, rule in rules().items():
            if not backends.possible(variant, mesh, layout_of(mesh, rule, CHECKED_DIM, CHECKED_ROWS), rule):
                continue
            steps = steps_of(CHECKED_ROWS, CHECKED_ROWS // 2, CHECKED_DIM)[:CHECKED_STEPS]
            first, second = (weights(mesh, rule, variant, steps) for _ in range(2))
            expected, change = on_cpu(rule, steps)
            ulps = np.abs(first - expected) / np.spacing(np.maximum(np.abs(expected), change))
            compared, repeated = compared + 1, repeated + (first.tobytes() == second.tobytes())
            near += bool((ulps <= MOST_ULPS * CHECKED_STEPS).all())
            if first.tobytes() != second.tobytes():
                faults.append(f"{variant}, {name}: other bits in a second run")
            if not (ulps <= MOST_ULPS * CHECKED_STEPS).all():
                faults.append(f"{variant}, {name}: {np.nanmax(ulps):.0f} units of the last place from a CPU's weights")
        yield (
            f"- {variant}: {repeated} of {compared} optimizers have the same bits twice, "
            f"{near} are within {MOST_ULPS} units of the last place per step of a CPU's"
        )


def weights(mesh: Any, rule: UpdateRule, variant: str, steps: Steps) -> Any:
    """Return the weights of a table after steps."""
    table = created(mesh, rule, CHECKED_DIM, CHECKED_ROWS, variant)
    run_steps(table, steps)
    rows = np.empty((CHECKED_ROWS, CHECKED_DIM), np.float32)
    table.backend.read(0, np.arange(CHECKED_ROWS), rows, 0)
    return rows


def on_cpu(rule: UpdateRule, steps: Steps) -> tuple[Any, Any]:
    """Return the weights that NumPy computes, and the largest change of each in a step."""
    from penstock.model.updates import Ops, update

    shape = CHECKED_ROWS, CHECKED_DIM
    after, dims = np.zeros(shape, np.float32), [rule.slot_dim(shape[1], slot) for slot in range(rule.num_slots)]
    slots = [np.full((shape[0], dim), 0.1, np.float32) for dim in dims]
    change = np.zeros(shape, np.float32)
    for ids, grads in steps:
        before = after[ids]
        with np.errstate(all="ignore"):
            after[ids], new = update(Ops(np), rule, np.float32(0.1), grads, before, tuple(s[ids] for s in slots))
        for slot, values in zip(slots, new, strict=True):
            slot[ids] = values
        change[ids] = np.maximum(change[ids], np.abs(after[ids] - before))
    return after, change


# ---- how long it takes


def times(mesh: Mesh, limit: float, rows: int, unique: int) -> Iterator[str]:
    """Yield the lines of a table: millions of rows per second, and the share of the limit."""
    yield "| optimizer | dim | variant | step, on the device | step, from the host | write | read |"
    yield "|---" * 7 + "|"
    for name in TIMED:
        rule = rules()[name]
        for dim in DIMS:
            for variant in variants(mesh):
                if not backends.possible(variant, mesh, layout_of(mesh, rule, dim, rows), rule):
                    continue
                table, steps = created(mesh, rule, dim, rows, variant), steps_of(rows, unique, dim)
                row = 4 * dim * (1 + rule.num_slots)
                traffic = 2 * row + 4 * dim + 4
                cells = [name, dim, variant, cell(alone(mesh, table, rule, steps), traffic, limit)]
                cells += [cell(whole(table, steps), traffic, limit), cell(written_rows(table, steps), 2 * row, limit)]
                yield f"| {' | '.join(map(str, [*cells, cell(read_rows(table, steps), row, limit)]))} |"


def cell(rate: float, traffic: float, limit: float) -> str:
    return f"{rate / 1e6:.1f} M/s, {rate * traffic / limit:.0%}"


def copy_bandwidth(num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / min(timed(lambda: copy(array)) for _ in range(COPIES))


def alone(mesh: Mesh, table: DeviceTable, rule: UpdateRule, steps: Steps) -> float:
    """Return the rows per second of the device, whose steps are in one loop of one program.

    All arguments are on the device: neither launches nor Python count.
    """
    tables: Any = table.backend
    stack, sharding = Stack.of([table.layout], rule, compact=False), row_sharding(mesh)
    packer = Packer(stack, ThreadTeam(None), by_row=tables.variant == "sparsecore")
    local = step_of(Format(stack.line, mesh, tables.variant), rule)
    sent = []
    for ids, grads in steps:
        routed = packer.route([MemberRows(0, ids, grads)])
        packed = packer.pack(routed)
        sent.append(tuple(jax.device_put(part, sharding) for part in packed.arguments))

    @partial(jax.jit, donate_argnums=0)
    def run(arrays: Any, sent: Any, rounds: Any, *numbers: Any) -> Any:
        def one_round(_: Any, arrays: Any) -> Any:
            for of_step in sent:
                arrays, _ = local(arrays, *of_step, *numbers)
            return arrays

        return jax.lax.fori_loop(0, rounds, one_round, arrays)

    def rounds_of(rounds: int) -> object:
        numbers = np.int32(rounds), np.float32(0.1), np.int32(0), np.uint32(0)
        with jax.set_mesh(mesh):
            tables.arrays = run(tables.arrays, tuple(sent), *numbers)
        return tables.arrays

    return sum(len(ids) for ids, _ in steps) / per_round(rounds_of)


def per_round(run: Callable[[int], object]) -> float:
    """Return the seconds of a round of a loop. A short and a long loop run, and the difference counts."""

    def seconds(rounds: int) -> float:
        return statistics.median(timed(lambda: run(rounds)) for _ in range(ROUNDS_TIMED))

    seconds(SHORT)  # compiles
    return (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT)


def own_steps(mesh: Mesh, faults: list[str], limit: float, rows: int, lookups: int) -> Iterator[str]:
    """Yield the lines about a user's own step: bits and sums of every optimizer, and a table of times."""
    for variant in variants(mesh):
        repeated = compared = 0
        for name, rule in rules().items():
            possible = backends.possible(variant, mesh, layout_of(mesh, rule, CHECKED_DIM, CHECKED_ROWS), rule)
            if not possible or rule.non_lazy:
                continue
            first, second = (own_step(mesh, rule, variant) for _ in range(2))
            compared, same = compared + 1, first.train() == second.train()
            repeated += same
            if not same:
                faults.append(f"{variant}, {name}: other bits in a second run of a step of your own")
        step = own_step(mesh, rules()["SGD"], variant, trained=True)
        in_order = step.sums_are_numpys()
        if step.by_gathers and not in_order:
            faults.append(f"{variant}: the sums of a step of your own are not in the documented order")
        yield (
            f"- {variant}: {repeated} of {compared} optimizers have the same bits twice, and sums are "
            f"{'those' if in_order else 'not those'} of NumPy in the same order"
        )
    yield from ["", "| optimizer | dim | variant | lookups, on the device |", "|---" * 4 + "|"]
    for name in TIMED:
        rule = rules()[name]
        for dim in DIMS:
            for variant in variants(mesh):
                if backends.possible(variant, mesh, layout_of(mesh, rule, dim, rows), rule):
                    step = OwnStep(mesh, created(mesh, rule, dim, rows, variant), variant, rule, lookups)
                    rate = cell(step.lookups_per_second(per_round), step.least_bytes, limit)
                    yield f"| {name} | {dim} | {variant} | {rate} |"


def own_step(mesh: Mesh, rule: UpdateRule, variant: str, trained: bool = False) -> OwnStep:
    """Return a step in a small table. trained : whether some have changed its weights, which are 0 at first"""
    table = created(mesh, rule, CHECKED_DIM, CHECKED_ROWS, variant)
    step = OwnStep(mesh, table, variant, rule, 4 * CHECKED_ROWS)
    if trained:
        step.train()
    return step


def whole(table: DeviceTable, steps: Steps) -> float:
    """Return the rows per second of steps from host arrays, partitioned and transferred as in a run."""
    timed(lambda: run_steps(table, steps))  # compiles
    return sum(len(ids) for ids, _ in steps) / statistics.median(
        timed(lambda: run_steps(table, steps)) for _ in range(ROUNDS_TIMED)
    )


def written_rows(table: DeviceTable, steps: Steps) -> float:
    """Return the rows per second of writes of all parts, whose arguments are on the device."""
    tables: Any = table.backend
    stack = Stack.of([table.layout], UpdateRule("none", table.layout.num_slots), compact=False)
    ids, grads = steps[0]
    packer = Packer(stack, ThreadTeam(None))
    routed = packer.route([MemberRows(0, ids[:READ_AT_ONCE], grads[:READ_AT_ONCE])])
    packed = packer.pack(routed)
    arguments = [jax.device_put(part, row_sharding(tables.mesh)) for part in packed.arguments]
    parts = 1 + table.layout.num_slots
    num_lines, size = stack.lines_per_device, packed.lines.shape[1]
    program = compiled("write", tables.mesh, None, stack.line, "xla", num_lines, size)
    numbers = (*written(NEW_ROWS, parts), np.full(parts, 0.1, np.float32))

    def calls() -> object:
        for _ in range(CALLS):
            tables.arrays, _ = program(tables.arrays, *arguments, *numbers)
        return tables.arrays

    timed(calls)
    return CALLS * min(len(ids), READ_AT_ONCE) / timed(calls)


def read_rows(table: DeviceTable, steps: Steps) -> float:
    """Return the rows per second of reads of all parts, which stay on the device."""
    tables: Any = table.backend
    ids = np.sort(steps[0][0])[:READ_AT_ONCE]
    stack = Stack.of([table.layout], UpdateRule("none", table.layout.num_slots))
    ((_, padded, _),) = stack.locate(0, ids)
    program = tables.programs.at("read", padded.shape[1], table.layout.line)
    numbers = jax.device_put(padded, row_sharding(tables.mesh))

    def calls() -> object:
        return [program(tables.arrays, numbers) for _ in range(CALLS)]

    timed(calls)
    return CALLS * len(ids) / timed(calls)


# ---- tables and steps


def variants(mesh: Mesh) -> list[str]:
    """Return the variants that a device may have: off a TPU kernels are interpreted, which takes hours."""
    return ["xla", *(KERNELS if on_tpu(mesh) else ())]


def on_tpu(mesh: Mesh) -> bool:
    return bool(mesh.devices.flat[0].platform == "tpu")


def usual(mesh: Mesh, rule: UpdateRule, dim: int) -> str:
    """Return the variant that such a table gets; on a CPU that of a device."""
    variant, _ = backends.choose(mesh, layout_of(mesh, rule, dim, 1024), rule)
    return "xla" if variant == "host" else variant


def layout_of(mesh: Mesh, rule: UpdateRule, dim: int, rows: int) -> Layout:
    return Layout("t", rows, dim, rule.num_slots, 1, False, backends.lanes(mesh), row_slots=rule.row_slots)


def created(mesh: Mesh, rule: UpdateRule, dim: int, rows: int, variant: str) -> DeviceTable:
    """Return a table with weights of 0 and slots of 0.1."""
    definition = TableDefinition(layout_of(mesh, rule, dim, rows), rule, (0.1,) * rule.num_slots)
    tables: BackendTables
    (tables,) = backends.create_tables(mesh, [definition], ThreadTeam(None), variant)
    return DeviceTable(tables)


def steps_of(rows: int, unique: int, dim: int) -> Steps:
    """Return four steps of distinct rows."""
    rng = np.random.default_rng(0)
    return [(rng.choice(rows, unique, replace=False), rng.standard_normal((unique, dim), np.float32)) for _ in range(4)]


def run_steps(table: DeviceTable, steps: Steps) -> None:
    for ids, grads in steps:
        table.apply(ids, grads, 0.1)
    table.wait()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the result of ``work`` is ready."""
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
