"""torchrec: its managed collision module, which searches the sorted ids.

New ids enter at every call in training; looking up present keys is the remapping alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from penstock.bench.contestants import KeyWay


def ways(threads: int) -> list[KeyWay]:
    torch.set_num_threads(threads)
    return [
        KeyWay(
            "torchrec_managed_collision",
            "torchrec",
            create,
            lambda module, keys: module(jagged(keys))["f"].values(),
            look_up=lambda module, keys: module.remap(jagged(keys))["f"].values(),
            convert=torch.from_numpy,
            to_numpy=lambda tensor: np.asarray(tensor),
        )
    ]


def create(capacity: int) -> Any:
    """Return a module with a row more: its last one stands for unknown ids."""
    cpu = torch.device("cpu")
    return MCHManagedCollisionModule(capacity + 1, cpu, DistanceLFU_EvictionPolicy(), eviction_interval=1)


def jagged(keys: Any) -> dict[str, Any]:
    return {"f": JaggedTensor(keys, lengths=torch.ones(len(keys), dtype=torch.int64))}
