"""TensorFlow on the CPU: ``unique``, ``unsorted_segment_sum`` and the sparse-apply kernel, inside one tf.function."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import tensorflow as tf

from penstock.bench.contestants import RATE, Way, initial_parts
from penstock.bench.workloads import TableSize


def ways(threads: int) -> list[Way]:
    """Return the ways. TensorFlow has no sparse Adam and no row-wise Adagrad kernel."""
    with contextlib.suppress(RuntimeError):  # already initialized: the environment has set the same
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    result = [
        Way(
            "tf_unique_segment_sum",
            "tensorflow",
            "coalesce",
            coalesce,
            convert=tf.constant,
            to_numpy=_numpy,
        )
    ]
    steps = {
        "tf_scatter_sub": ("sgd", scatter_sub),
        "tf_sparse_apply_adagrad_v2": ("adagrad", adagrad),
        "tf_sparse_apply_ftrl_v2": ("ftrl", ftrl),
    }
    for name, (kind, equation) in steps.items():
        result.append(
            Way(
                name,
                "tensorflow",
                kind,
                lambda state, ids, grads: state["step"](ids, grads),
                convert=tf.constant,
                state=partial(start, kind, equation),
                read_rows=lambda state, ids: tf.gather(state["weights"], ids),
                to_numpy=_numpy,
            )
        )
    return result


def _numpy(tensor: Any) -> Any:
    return tensor.numpy()


SIGNATURE = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, None], tf.float32)]


def _coalesced(ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, index = tf.unique(ids)
    return unique, tf.math.unsorted_segment_sum(grads, index, tf.size(unique))


_compiled = tf.function(_coalesced, input_signature=SIGNATURE)


def coalesce(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, sums = _compiled(ids, grads)
    return unique, sums


def start(kind: str, equation: Any, table: TableSize) -> dict[str, Any]:
    """Return the variables, and the step over them as a compiled graph."""
    variables = [tf.Variable(tf.fill(shape, tf.constant(value))) for shape, value in initial_parts(kind, table)]
    step = tf.function(lambda ids, grads: equation(variables, ids, grads), input_signature=SIGNATURE)
    return {"weights": variables[0], "step": step, "variables": variables}


def scatter_sub(variables: list[Any], ids: Any, grads: Any) -> None:
    """Apply SGD without deduplication: it is a sum in any order."""
    tf.raw_ops.ResourceScatterSub(resource=variables[0].handle, indices=ids, updates=grads * RATE)


def adagrad(variables: list[Any], ids: Any, grads: Any) -> None:
    unique, sums = _coalesced(ids, grads)
    var, accum = (v.handle for v in variables)
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=var, accum=accum, lr=RATE, epsilon=0.0, grad=sums, indices=unique, update_slots=True
    )


def ftrl(variables: list[Any], ids: Any, grads: Any) -> None:
    unique, sums = _coalesced(ids, grads)
    var, accum, linear = (v.handle for v in variables)
    tf.raw_ops.ResourceSparseApplyFtrlV2(
        var=var,
        accum=accum,
        linear=linear,
        grad=sums,
        indices=unique,
        lr=RATE,
        l1=0.0,
        l2=0.0,
        l2_shrinkage=0.0,
        lr_power=-0.5,
    )
