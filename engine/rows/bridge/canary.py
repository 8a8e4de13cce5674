"""The canary: before a machine uses one of our kernels, it updates a scratch table with it and with XLA's program.

The verdict holds for one version of a kernel, rule, line format, kind of device, jax and compiler. It is kept in the
directory of JAX's compilation cache, if there is one, so a machine runs a canary once. An exception may be transient
and is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from penstock.model.frames import Float32
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import program_cache
from penstock.rows.bridge.devices import AXIS
from penstock.rows.bridge.programs import own_settings, row_sharding
from penstock.rows.bridge.row_format import UNTOUCHED, Line
from penstock.rows.bridge.sharding import TILE_LINES
from penstock.rows.bridge.variants import kernel

# Steps of a canary, one after the other on the same lines.
STEPS = 4
# The bound between variants, in units of the last place of max(|before|, |change|), for each step.
MOST_ULPS = 2


@lru_cache(maxsize=256)
def failure(mesh: Mesh, rule: UpdateRule, line: Line, variant: str = "pallas") -> str:
    """Return why a kernel must not update such lines on these devices; "" if the canary passed."""
    device = mesh.local_devices[0]
    key = [repr(rule), repr(line), device.device_kind, program_cache.compiler_of(device), _kernel_digest(variant)]
    path = _path(key)
    try:
        record = json.loads(path.read_text()) if path is not None else {}
        if record.get("key") == key:
            return str(record["failure"])
    except (OSError, ValueError, KeyError, AttributeError):
        pass  # none yet, or damaged: find out
    alone = Mesh(np.asarray([device]), (AXIS,))
    try:
        with own_settings(alone):
            mismatch = _mismatch(alone, rule, line, variant)
    except Exception as error:  # a compiler or device may raise any type
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if path is not None:
        _save(path, {"key": key, "failure": mismatch})
    return mismatch


def _mismatch(mesh: Mesh, rule: UpdateRule, line: Line, variant: str) -> str:
    """Return the first difference between the kernel and XLA's program, over blocks and a few lines; "" if none."""
    by_row = variant == "sparsecore"
    size = kernel(variant).canary_lines(line)
    num_lines, sizes = size + TILE_LINES, {"xla": size, variant: size * (line.group if by_row else 1)}
    oracle, ours = (
        program_cache.compiled("apply", mesh, rule, line, name, num_lines, most) for name, most in sizes.items()
    )
    rng = np.random.default_rng(0)
    # Positive and similar, so that no rule takes the root of a negative number.
    start = [rng.uniform(0.1, 0.3, shape).astype(np.float32) for shape, _ in line.arrays(num_lines)]
    steps = list(_steps(rng, line, num_lines, size, line.dim if by_row else 32))
    single = _put(mesh, start)
    addresses = _addresses(single)
    by_kernel = [_by_row(rng, line, *arguments) for arguments in steps] if by_row else steps
    for step, ((lines, words, counts), of_kernel) in enumerate(zip(steps, by_kernel, strict=True)):
        before = _host(single)
        numbers = np.float32(0.1), np.int32(0), np.uint32(0)
        expected = _host(oracle(_put(mesh, before), lines, words, counts, *numbers)[0])
        single = ours(single, *of_kernel, *numbers)[0]
        after = _host(single)
        if _addresses(single) != addresses:
            return f"step {step}: the table moved"
        touched = _touched(line, num_lines, lines, words, counts)
        for mask, *arrays in zip(touched, before, after, expected, strict=True):
            old, got, wanted = (array.reshape(mask.shape) for array in arrays)
            wrong = np.argwhere(_differs(mask, old, got, wanted))
            if len(wrong):
                place = tuple(wrong[0])
                right = (wanted if mask[place] else old)[place]
                return f"step {step}: line {place[0]} has {got[place]:.9g} instead of {right:.9g}"
    chained = _put(mesh, start)
    addresses = _addresses(chained)
    for of_kernel in by_kernel:
        chained = ours(chained, *of_kernel, *numbers)[0]
    if any(a.tobytes() != b.tobytes() for a, b in zip(_host(chained), _host(single), strict=True)):
        return f"{STEPS} steps in flight at once give other bits than one at a time"
    return "" if _addresses(chained) == addresses else f"the table moved in {STEPS} steps in flight at once"


def _steps(
    rng: np.random.Generator, line: Line, num_lines: int, size: int, unit: int
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (lines, words, counts) of one device: the first line, the last, neighbours, but never line 1; then pads.

    unit : elements that have gradients, or have not, together
    """
    count = 2 * size // 3 + 3
    for _ in range(STEPS):
        lines = num_lines + np.arange(size, dtype=np.int32)
        lines[:count] = [0, num_lines - 1, *rng.permutation(np.arange(2, num_lines - 1))[: count - 2]]
        words = rng.uniform(-1, 1, (size, line.width)).astype(np.float32).view(np.int32)
        without = np.repeat(rng.random((size, line.width // unit)) < 0.3, unit, axis=1)
        words[:, : without.shape[1]][without] = UNTOUCHED
        words[:, line.packed * line.dim :] = UNTOUCHED
        yield lines[None], words[None], np.array([count], np.int32)


def _by_row(rng: np.random.Generator, line: Line, lines: Any, words: Any, counts: Any) -> tuple[Any, Any, Any]:
    """Return the arguments of the kernel for SparseCores: the touched rows of the lines, in random order, and pads.

    So most rows of a line are in blocks of different subcores, which write them at the same time.
    """
    rows = words[0, :, : line.packed * line.dim].reshape(-1, line.dim)
    (touched,) = np.nonzero((rows[: counts[0] * line.packed] != UNTOUCHED).any(axis=1))
    touched = rng.permutation(touched)
    numbers, sent = np.zeros(len(rows), np.int32), np.zeros((len(rows), line.dim), np.int32)
    numbers[: len(touched)] = lines[0, touched // line.packed] * line.packed + touched % line.packed
    sent[: len(touched)] = rows[touched]
    return numbers[None], sent.reshape(1, -1, line.strip), np.array([len(touched)], np.int32)


def _touched(line: Line, num_lines: int, lines: Any, words: Any, counts: Any) -> list[npt.NDArray[np.bool_]]:
    """Return which elements of each array a step updates; all arrays have a first axis of lines."""
    count = counts[0]
    plane = np.zeros((num_lines, line.width), bool)
    plane[lines[0, :count]] = words[0, :count] != UNTOUCHED
    strips = plane.reshape(num_lines, -1, line.strip)
    strips = np.tile(strips, (1, sum(line.groups) // strips.shape[1], 1))
    arrays: list[Any] = [strips[:, start:end] for start, end in pairwise(accumulate(line.groups, initial=0))]
    if line.row_slots:
        rows = plane[:, : line.packed * line.dim].reshape(num_lines, line.packed, line.dim)
        arrays += [rows.any(axis=2)] * line.row_slots
    return arrays


def _differs(touched: Any, before: Float32, got: Float32, wanted: Float32) -> npt.NDArray[np.bool_]:
    bound = MOST_ULPS * np.spacing(np.maximum(np.abs(before), np.abs(wanted - before)))
    within = np.abs(got.astype(np.float64) - wanted) <= bound  # False for NaN
    same: npt.NDArray[np.bool_] = got.view(np.int32) == before.view(np.int32)
    return ~np.where(touched, within, same)


def _put(mesh: Mesh, arrays: Sequence[Float32]) -> tuple[jax.Array, ...]:
    """Return copies on the device that a step may update in place: jax.device_put may alias host memory."""
    there = tuple(jax.device_put(array, row_sharding(mesh)) for array in arrays)
    copies: tuple[jax.Array, ...] = jax.jit(lambda table: jax.tree.map(jnp.copy, table))(there)
    return copies


def _host(table: Sequence[jax.Array]) -> list[Float32]:
    return [np.array(array) for array in table]


def _addresses(table: Sequence[jax.Array]) -> list[int]:
    return [array.block_until_ready().unsafe_buffer_pointer() for array in table]


def verdicts() -> Path | None:
    """Return the directory of the verdicts, JAX's compilation cache; None: without one, or if it is no directory."""
    folder = jax.config.values.get("jax_compilation_cache_dir")
    return Path(folder) if folder and "://" not in folder else None


@cache
def _kernel_digest(variant: str) -> str:
    return hashlib.sha256(Path(kernel(variant).__file__).read_bytes()).hexdigest()


def _path(key: Sequence[str]) -> Path | None:
    folder, digest = verdicts(), hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return folder / f"penstock-canary-{digest[:32]}.json" if folder is not None else None


def _save(path: Path, verdict: dict[str, Any]) -> None:
    """Write a verdict for the next process. Without a place to write, that one runs the canary again."""
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(verdict))
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
