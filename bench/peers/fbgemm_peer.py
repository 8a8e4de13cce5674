"""FBGEMM's table-batched embeddings on the CPU: the backward pass deduplicates and updates at once.

One module per table, one id per bag; the forward pass before it is not timed.
"""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import torch

with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

from penstock.bench.contestants import ACCUMULATOR, RATE, WEIGHT, Way
from penstock.bench.workloads import TableSize

KINDS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def ways(threads: int) -> list[Way]:
    """Return the ways; the library supports no Adam in CPU mode."""
    torch.set_num_threads(threads)
    return [
        Way(
            "fbgemm_tbe_backward",
            "fbgemm_gpu",
            kind,
            backward,
            convert=torch.from_numpy,
            state=partial(module, optim),
            forward=forward,
            read_rows=lambda state, ids: state.split_embedding_weights()[0].detach()[ids],
            to_numpy=lambda tensor: tensor.numpy(),
        )
        for kind, optim in KINDS.items()
    ]


def module(optim: Any, table: TableSize) -> Any:
    embeddings = SplitTableBatchedEmbeddingBagsCodegen(
        [(table.vocabulary_size, table.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=optim,
        learning_rate=RATE,
        eps=0.0,
        pooling_mode=PoolingMode.SUM,
    )
    for weights in embeddings.split_embedding_weights():
        weights.detach().fill_(WEIGHT)
    for slots in embeddings.split_optimizer_states():
        for slot in slots:
            slot.detach().fill_(ACCUMULATOR)
    return embeddings


def forward(state: Any, ids: Any) -> Any:
    return state(ids, torch.arange(len(ids) + 1))


def backward(_: Any, out: Any, grads: Any) -> None:
    out.backward(grads)
