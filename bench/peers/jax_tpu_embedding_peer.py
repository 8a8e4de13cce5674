"""jax-tpu-embedding's host preprocessing: partitions, sorts and deduplicates ids for four SparseCores. No gradients.

It does less than coalesce, so the results report it without a ratio. One id per sample; the buffers have the size that
a user would set from the statistics that the library returns.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from jax_tpu_embedding.sparsecore.lib.nn import embedding, embedding_spec

from penstock.bench.contestants import Way

SPARSE_CORES = 4
ROOM = 1.25  # size factor of the buffers: partitions are padded and uneven


def ways(threads: int) -> list[Way]:
    """Return the ways. The library sets its threads; the process is pinned to as many CPUs."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    return [
        Way(
            "jax_tpu_embedding_preprocess",
            "jax_tpu_embedding",
            "coalesce",
            lambda state, ids, grads: step(ids),
            convert=convert,
            ids_kept=lambda result: num_kept(*result),
        )
    ]


def convert(array: Any) -> Any:
    """Return ids as samples of one id each, padded to a multiple of the SparseCores; gradients are not used."""
    if array.dtype == np.float32:
        return array
    padding = -len(array) % (8 * SPARSE_CORES)
    ids = np.concatenate([array, np.full(padding, array[-1])]).astype(np.int32)
    return ids[:, None], feature(len(ids), int(ids.max()) + 1), len(array)


def feature(rows: int, vocabulary_size: int) -> Any:
    most = rows // SPARSE_CORES
    # The library aborts the process if a buffer is larger than it could ever need.
    room = min(int(ROOM * rows) // 32 * 32 + 1024, most * SPARSE_CORES * SPARSE_CORES)
    table = embedding_spec.TableSpec(
        vocabulary_size=vocabulary_size,
        embedding_dim=8,
        initializer=None,
        optimizer=embedding_spec.SGDOptimizerSpec(0.1),
        combiner="sum",
        name="table",
        max_ids_per_partition=most,
        max_unique_ids_per_partition=most,
        suggested_coo_buffer_size_per_device=room,
    )
    spec = embedding_spec.FeatureSpec(table_spec=table, input_shape=(rows, 1), output_shape=(rows, 8), name="feature")
    embedding.prepare_feature_specs_for_training([spec], global_device_count=1, num_sc_per_device=SPARSE_CORES)
    return spec


def step(ids: Any) -> Any:
    samples, spec, rows = ids
    preprocess = embedding.preprocess_sparse_dense_matmul_input
    result, _ = preprocess([samples], None, [spec], 1, 1, num_sc_per_device=SPARSE_CORES)
    return result, rows, len(samples)


def num_kept(result: Any, rows: int, samples: int) -> int:
    """Return the number of ids in the result without padding, from the row pointers; parts begin at multiples of 8."""
    (pointers,) = result.sparse_dense_matmul_input.lhs_row_pointers.values()
    ends = pointers.reshape(SPARSE_CORES, -1).astype(np.int64)
    starts = np.zeros_like(ends)
    starts[:, 1:] = -(-ends[:, :-1] // 8) * 8
    return int((ends - starts).sum()) - (samples - rows)
