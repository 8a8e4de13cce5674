"""The largest error of one compiled step against the equations in NumPy, per optimizer.

    python bench/experiments/ulp.py            measures, prints the table, and writes it into bench/results/ulp.md
    python bench/experiments/ulp.py --check    measures and compares with the written table; exit code 1 if they differ
    python bench/experiments/ulp.py --check --variant xla    the same with XLA's programs, also on a CPU

Unit: the last place of max(|old value|, |change|), float32, over weights and slots. It runs every combination of the
parameters of every optimizer with each switch; dims 1 to 128, and one and four host devices, alternate. Rows and
gradients are normally distributed; a few gradients are 0. Takes some minutes on two cores, mostly for compiling.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.threads import ThreadTeam
from penstock.model.updates import OPTIMIZERS, UPDATES, Ops, UpdateRule, update, update_rule

RESULT = Path(__file__).resolve().parents[1] / "results" / "ulp.md"
BEGIN, END = "<!-- bench/experiments/ulp.py: begin -->\n", "<!-- bench/experiments/ulp.py: end -->\n"
DIMS = (1, 2, 3, 8, 17, 128)
NUM_ROWS, NUM_TOUCHED = 1024, 40  # one row for each of the layout's shards, so that four devices share them
RATES = (0.1, 0.3, 0.01, 1.0)

NUM_SLOTS = {algorithm: len(OPTIMIZERS[algorithm].slot_names) for algorithm in UPDATES} | {"user_defined_program": 1}

# The values of optimizers' parameters; every combination is run. Other optimizers run with their defaults.
BOTH = [False, True]
L1_L2 = {"l1": [0.0, 0.05], "l2": [0.0, 0.1]}
HYPER: dict[str, dict[str, list[Any]]] = {
    "adagrad_momentum": {"momentum": [0.9], "use_nesterov": BOTH, "exponent": [2.0, 3.0], "beta2": [1.0, 0.9]}
    | {"epsilon": [1e-3]},
    "bounded_adagrad": {"update_accumulator_first": BOTH, "max_var_update": [0.0, 0.1], "max_accumulator": [0.0, 1.0]},
    "proximal_adagrad": L1_L2,
    "ftrl": L1_L2 | {"lr_power": [-0.5, -0.4], "beta": [0.0, 0.3], "multiply_linear_by_lr": BOTH},
    "adam": {"beta1": [0.9], "beta2": [0.999], "epsilon": [1e-7, 1e-3], "use_sum_inside_sqrt": BOTH},
    "momentum": {"momentum": [0.9], "use_nesterov": BOTH},
    "lion": {"beta1": [0.9], "beta2": [0.99]},
    "rms_prop": {"rho": [0.9], "momentum": [0.0, 0.9], "epsilon": [1e-7]},
    "centered_rms_prop": {"rho": [0.9], "momentum": [0.0, 0.9], "epsilon": [1e-7]},
    "adadelta": {"rho": [0.95], "epsilon": [1e-6]},
    "online_yogi": L1_L2 | {"beta2": [0.999]},
    "proximal_yogi": L1_L2 | {"beta1": [0.9], "beta2": [0.999], "epsilon": [1e-3]},
    "row_wise_adagrad": {"epsilon": [0.0, 1e-3]},
    "torch_adagrad": {"epsilon": [1e-10, 1e-3]},
    "partial_row_wise_adam": {"beta1": [0.9], "beta2": [0.999], "epsilon": [1e-8, 1e-3]},
    "frequency_estimator": {"tau": [0.1], "max_delta": [100.0], "outlier_threshold": [2.0], "weight_exponent": [1.0]},
}

SWITCHES: list[dict[str, Any]] = [
    {},
    {"gradient_min": -1.0, "gradient_max": 0.5},
    {"weight_decay": 0.0625},
    {"weight_decay": 0.25, "decay_times_learning_rate": True},
    {"weight_min": -1.5, "weight_max": 1.0},
    {"gradient_max": 1.0, "weight_decay": 0.125, "decay_times_learning_rate": True, "weight_min": -2.0},
]

# The largest error that the tests accept, in the unit above: none with only IEEE add, multiply, divide and sqrt.
# pow agrees if NumPy and XLA both call the C library's (x86-64 without AVX-512); if one has its own implementation, it
# is a unit off, as in the table's last column: large in this unit only if old value and change cancel.
EXACT, WITH_POW = 0.0, 4096.0
# A user-defined program is compiled unchanged, with products fused into sums.
OF_THE_USER = 64.0


def user_program(gradient: Any, weights: Any, momenta: Any) -> tuple[Any, Any]:
    """An example of a user_defined_program: heavy-ball momentum with a fixed rate."""
    momenta = np.float32(0.9) * momenta + gradient
    return weights - np.float32(0.1) * momenta, momenta


def hypers(algorithm: str) -> list[tuple[tuple[str, Any], ...]]:
    """Return every combination of an optimizer's parameters, with numbers rounded to float32."""
    if algorithm not in HYPER and algorithm != "user_defined_program":
        return [update_rule(OPTIMIZERS[algorithm]()).hyper]
    grid = HYPER.get(algorithm, {})
    return [
        tuple((name, v if isinstance(v, bool) else float(np.float32(v))) for name, v in zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]


def rules(algorithm: str, switches: list[dict[str, Any]] = SWITCHES) -> list[UpdateRule]:
    """Return a rule for every combination of an optimizer's parameters with each of the switches."""
    program = user_program if algorithm == "user_defined_program" else None
    lazy = BOTH if algorithm in ("adam", "lion") else [False]
    return [
        UpdateRule(algorithm, NUM_SLOTS[algorithm], hyper, program=program, non_lazy=non_lazy, **switch)
        for hyper in hypers(algorithm)
        for non_lazy in lazy
        for switch in switches
    ]


def bound(rule: UpdateRule) -> float:
    """Return the documented bound of a rule's error."""
    if rule.algorithm == "user_defined_program":
        return OF_THE_USER
    hyper = dict(rule.hyper)
    return WITH_POW if hyper.get("exponent", 2) != 2 or hyper.get("lr_power", -0.5) != -0.5 else EXACT


def start(rule: UpdateRule, rng: np.random.Generator, dim: int) -> list[Any]:
    """Return weights and slots. Slots are positive, like accumulators."""
    parts = [rng.standard_normal((NUM_ROWS, dim), np.float32)]
    for slot in range(rule.num_slots):
        parts.append(np.abs(rng.standard_normal((NUM_ROWS, rule.slot_dim(dim, slot)), np.float32)) + np.float32(0.1))
    return parts


def frames(rule: UpdateRule, rng: np.random.Generator, dim: int) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (rate, distinct ids, gradients) of a few steps; four devices get equal numbers of rows."""
    for step, rate in enumerate(RATES):
        quarters = [q * NUM_ROWS // 4 + rng.permutation(NUM_ROWS // 4)[: NUM_TOUCHED // 4] for q in range(4)]
        ids = rng.permutation(np.concatenate(quarters))
        grads = rng.standard_normal((len(ids), dim), np.float32)
        grads[:3] = 0
        rate = 100.0 + 7 * step if rule.algorithm == "frequency_estimator" else rate
        yield np.float32(rule.rate_at(rate, step)), ids, grads


def stepped(rule: UpdateRule, rate: Any, ids: Any, grads: Any, parts: list[Any], xp: Any = np) -> list[Any]:
    """Return weights and slots of the whole table after one step, by the equations in NumPy."""
    if rule.non_lazy:
        all_grads = np.zeros_like(parts[0])
        all_grads[ids] = grads
        ids, grads = np.arange(NUM_ROWS), all_grads
    weights, slots = update(Ops(xp), rule, rate, grads, parts[0][ids], tuple(p[ids] for p in parts[1:]))
    after = [part.copy() for part in parts]
    for part, rows in zip(after, (weights, *slots), strict=True):
        part[ids] = rows
    return after


def ulps(got: Any, wanted: Any, before: Any) -> float:
    """Return the largest |got - wanted| in units of the last place of max(|before|, |wanted - before|)."""
    scale = np.spacing(np.maximum(np.abs(before), np.abs(wanted - before)).astype(np.float32))
    assert np.isfinite(wanted).all()
    return float((np.abs(got.astype(np.float64) - wanted) / scale).max())


def error_on_device(rule: UpdateRule, dim: int, num_devices: int, seed: int = 0, variant: str | None = None) -> float:
    """Return the largest error of a table on the devices; each step starts from the state on the devices."""
    import jax
    from jax.sharding import Mesh

    from penstock.rows.bridge.backends import create_tables
    from penstock.rows.bridge.device_tables import DeviceTable
    from penstock.rows.bridge.mesh_selection import make_mesh
    from penstock.rows.bridge.sharding import Layout, TableDefinition

    rng = np.random.default_rng(seed)
    mesh = make_mesh(Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",)))
    layout = Layout("t", NUM_ROWS, dim, rule.num_slots, num_devices, False, row_slots=rule.row_slots)
    definition = TableDefinition(layout, rule, (0.0,) * rule.num_slots)
    table = DeviceTable(*create_tables(mesh, [definition], ThreadTeam(None), variant))
    everything = np.arange(NUM_ROWS)
    parts = start(rule, rng, dim)
    for part, values in enumerate(parts):
        table.write(everything, values, part)
    worst = 0.0
    for rate, ids, grads in frames(rule, rng, dim):
        wanted = stepped(rule, rate, ids, grads, parts)
        table.apply(ids, grads, tuple(rate.tolist()) if rate.ndim else float(rate))
        got = [table.read(everything, part) for part in range(1 + rule.num_slots)]
        worst = max(worst, *(ulps(*arrays) for arrays in zip(got, wanted, parts, strict=True)))
        parts = got
    return worst


class OffByOne:
    """numpy with a pow that is one unit in the last place off, up or down at random."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def power(self, base: Any, exponent: Any) -> Any:
        exact = np.power(base, exponent)
        return exact + np.spacing(exact) * self._rng.integers(-1, 2, exact.shape).astype(exact.dtype)


def error_with_pow_off(rule: UpdateRule, dim: int) -> float:
    """Return the largest change of one step's result if every pow is a unit off."""
    rng = np.random.default_rng(0)
    parts, worst, off = start(rule, rng, dim), 0.0, OffByOne()
    for rate, ids, grads in frames(rule, rng, dim):
        wanted = stepped(rule, rate, ids, grads, parts)
        got = stepped(rule, rate, ids, grads, parts, off)
        worst = max(worst, *(ulps(*arrays) for arrays in zip(got, wanted, parts, strict=True)))
        parts = wanted
    return worst


def runs(algorithm: str) -> Iterator[tuple[UpdateRule, int, int]]:
    """Yield (rule, dim, devices) of one optimizer; with many parameters, only two of the switches per combination."""
    places = itertools.cycle(itertools.product(DIMS, (1, 4)))
    sets = rules(algorithm, [{}])
    for number, plain in enumerate(sets):
        chosen = SWITCHES if len(sets) <= 4 else [SWITCHES[number % (len(SWITCHES) - 1)], SWITCHES[-1]]
        for switch in chosen:
            yield dataclasses.replace(plain, **switch), *next(places)


def measure(variant: str | None) -> list[str]:
    """Return the lines of the table. variant : of the table on the devices; None: the default of the devices"""
    lines = ["| optimizer | runs | largest error | stated bound | if pow were a unit off |", "|---|---|---|---|---|"]
    for algorithm in UPDATES:
        errors, bounds, off = [], set(), [0.0]
        for rule, dim, devices in runs(algorithm):
            errors.append(error_on_device(rule, dim, devices, variant=variant))
            bounds.add(bound(rule))
            if bound(rule) == WITH_POW:
                off.append(error_with_pow_off(rule, 128))
            if errors[-1] > bound(rule):
                print(f"beyond its bound: {rule}", file=sys.stderr)
        stated = ", with pow ".join(f"{b:g}" for b in sorted(bounds))
        cells = (algorithm, len(errors), f"{max(errors):.3g}", stated, f"{max(off):.2g}" if any(off) else "")
        lines.append(f"| {' | '.join(map(str, cells))} |")
        print(lines[-1], flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with what bench/results/ulp.md says")
    parser.add_argument("--variant", choices=["xla"], help="XLA's own programs; default: what suits the devices")
    args = parser.parse_args()
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    table = "\n".join(measure(args.variant)) + "\n"
    head, rest = RESULT.read_text().split(BEGIN)
    written, tail = rest.split(END)
    if args.check:
        print("as written" if written == table else f"differs from {RESULT.name}:\n{written}")
        return int(written != table)
    RESULT.write_text(head + BEGIN + table + END + tail)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
