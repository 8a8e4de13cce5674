"""PyTorch on the CPU: tensors share the memory of the arrays, so there is no conversion.

The fastest coalesce is a composition: sort, count runs, and sum the rows of each run with ``embedding_bag``.
"""

from __future__ import annotations

from typing import Any

import torch

from penstock.bench.contestants import ACCUMULATOR, BETA1, BETA2, EPSILON, RATE, WEIGHT, Way
from penstock.bench.workloads import TableSize


def ways(threads: int) -> list[Way]:
    torch.set_num_threads(threads)
    coalesces = {
        "torch_unique_embedding_bag": (unique_embedding_bag, False),
        "torch_unique_index_add": (unique_index_add, False),
        "torch_coalesce": (sparse_coalesce, True),
    }
    result = [
        Way(name, "torch", "coalesce", call, convert=torch.from_numpy, to_numpy=_numpy, slow=slow)
        for name, (call, slow) in coalesces.items()
    ]
    result.append(_way("torch_scatter_add", "sgd", scatter_add, weights))
    result.append(_way("torch_optim_sgd", "sgd", optimizer_step, lambda t: optimizer(t, torch.optim.SGD, lr=RATE)))
    adagrad = {"lr": RATE, "initial_accumulator_value": ACCUMULATOR}
    result.append(
        _way("torch_optim_adagrad", "adagrad", optimizer_step, lambda t: optimizer(t, torch.optim.Adagrad, **adagrad))
    )
    adam: dict[str, Any] = {"lr": RATE, "betas": (BETA1, BETA2), "eps": EPSILON}
    result.append(
        _way("torch_sparse_adam", "adam", optimizer_step, lambda t: optimizer(t, torch.optim.SparseAdam, **adam), True)
    )
    return result


def _way(name: str, kind: str, step: Any, state: Any, corrects_bias: bool = False) -> Way:
    return Way(
        name,
        "torch",
        kind,
        step,
        convert=torch.from_numpy,
        state=state,
        read_rows=lambda state, ids: state["weights"].detach()[ids],
        to_numpy=_numpy,
        corrects_bias=corrects_bias,
    )


def _numpy(tensor: Any) -> Any:
    return tensor.detach().numpy()


def unique_embedding_bag(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    ranked, order = torch.sort(ids)
    unique, counts = torch.unique_consecutive(ranked, return_counts=True)
    offsets = torch.zeros_like(counts)
    torch.cumsum(counts[:-1], 0, out=offsets[1:])
    return unique, torch.nn.functional.embedding_bag(order, grads, offsets, mode="sum")


def unique_index_add(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, torch.zeros(len(unique), grads.shape[1]).index_add_(0, inverse, grads)


def sparse_coalesce(_: Any, ids: Any, grads: Any) -> tuple[Any, Any]:
    size = (int(ids.max()) + 1, grads.shape[1])
    summed = torch.sparse_coo_tensor(ids[None], grads, size, check_invariants=False).coalesce()
    return summed.indices()[0], summed.values()


def weights(table: TableSize) -> dict[str, Any]:
    return {"weights": torch.full((table.vocabulary_size, table.dim), WEIGHT)}


def scatter_add(state: dict[str, Any], ids: Any, grads: Any) -> None:
    """Apply SGD without deduplication: it is a sum in any order."""
    state["weights"].scatter_add_(0, ids[:, None].expand_as(grads), grads * -RATE)


def optimizer(table: TableSize, kind: Any, **settings: Any) -> dict[str, Any]:
    parameter = torch.nn.Parameter(weights(table)["weights"])
    return {"weights": parameter, "optimizer": kind([parameter], **settings)}


def optimizer_step(state: dict[str, Any], ids: Any, grads: Any) -> None:
    """Apply an uncoalesced sparse gradient, as an embedding layer produces it; the optimizer coalesces."""
    parameter = state["weights"]
    parameter.grad = torch.sparse_coo_tensor(ids[None], grads, parameter.shape, check_invariants=False)
    state["optimizer"].step()
