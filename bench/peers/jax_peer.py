"""Plain JAX: ids deduplicated by NumPy on the host, or inside one jit; the update is one donated jit.

Host arrays are passed directly to the jit, which is as fast as ``device_put``. The padding to a power of two, which
limits the number of compiled programs, is timed, as a user would pay for it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock.bench.contestants import BETA1, BETA2, EPSILON, RATE, UPDATES, Way, initial_parts
from penstock.bench.peers.numpy_peer import coalesce
from penstock.bench.workloads import TableSize


def ways(threads: int) -> list[Way]:
    """Return the ways. JAX uses as many threads as the process has CPUs."""
    result = [
        Way(
            "jax_unique_segment_sum",
            "jax",
            "coalesce",
            segment_sum,
            convert=jnp.asarray,
            finish=jax.block_until_ready,
            to_numpy=np.asarray,
            slow=True,
        )
    ]
    for kind in UPDATES:
        result.append(
            Way(
                "jax_np_dedup",
                "jax",
                kind,
                partial(deduplicated, kind),
                state=partial(start, kind),
                read_rows=lambda state, ids: np.asarray(state["parts"][0][ids]),
                finish=jax.block_until_ready,
            )
        )
    return result


def segment_sum(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, sums = _segment_sum(ids, grads)
    num = int((unique >= 0).sum())
    return unique[:num], sums[:num]


@jax.jit
def _segment_sum(ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, inverse = jnp.unique(ids, return_inverse=True, size=len(ids), fill_value=-1)
    return unique, jax.ops.segment_sum(grads, inverse, num_segments=len(ids))


def start(kind: str, table: TableSize) -> dict[str, Any]:
    """Return weights and slots, created on the device so that they can be donated."""
    parts = [jax.jit(partial(jnp.full, shape, value, jnp.float32))() for shape, value in initial_parts(kind, table)]
    return {"parts": tuple(parts)}


def deduplicated(kind: str, state: dict[str, Any], ids: Any, grads: Any) -> Any:
    unique, sums = coalesce(ids, grads)
    room = 1 << max(3, (len(unique) - 1).bit_length())
    rows = np.full(room, np.iinfo(np.int32).max, np.int32)
    rows[: len(unique)] = unique
    # Padding ids are distinct too, as unique_indices requires.
    rows[len(unique) :] -= np.arange(room - len(unique), dtype=np.int32)[::-1]
    padded = np.zeros((room, sums.shape[1]), np.float32)
    padded[: len(unique)] = sums
    state["parts"] = _update(kind, state["parts"], rows, padded)
    return state["parts"]


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(kind: str, parts: tuple[Any, ...], rows: Any, g: Any) -> tuple[Any, ...]:
    promises = {"unique_indices": True, "indices_are_sorted": True}
    now = [part.at[rows].get(mode="fill", fill_value=1.0, **promises) for part in parts]
    new = _equation(kind, now, g)
    return tuple(part.at[rows].set(value, mode="drop", **promises) for part, value in zip(parts, new, strict=True))


def _equation(kind: str, now: list[Any], g: Any) -> list[Any]:
    w = now[0]
    if kind == "sgd":
        return [w - RATE * g]
    if kind in ("adagrad", "rowwise_adagrad"):
        a = now[1] + (g * g if kind == "adagrad" else (g * g).mean(axis=1, keepdims=True))
        return [w - RATE * g / jnp.sqrt(a), a]
    if kind == "adam":
        m, v = BETA1 * now[1] + (1 - BETA1) * g, BETA2 * now[2] + (1 - BETA2) * g * g
        return [w - RATE * m / (jnp.sqrt(v) + EPSILON), m, v]
    a = now[1] + g * g
    z = now[2] + g - (jnp.sqrt(a) - jnp.sqrt(now[1])) / RATE * w
    return [-z * RATE / jnp.sqrt(a), a, z]
