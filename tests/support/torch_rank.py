"""A rank of a training job, as a process: ``python torch_rank.py ADDRESS RANK RANKS STEPS RENDEZVOUS OUT``.

It trains bags of a service next to a dense part under DDP over gloo. RENDEZVOUS: a file that the ranks meet in.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as distributed
from torch_models import zipf_batch

import penstock.torch as pt

ROWS, DIM = 200, 4


def batch_of(rank, number):
    """The batch of a rank with a number."""
    return zipf_batch(np.random.default_rng([rank, number]), 16, ROWS)


def main(address, rank, ranks, steps, rendezvous, out):
    rank, ranks, steps, out = int(rank), int(ranks), int(steps), Path(out)
    distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    store = pt.store(address, contributor=f"rank-{rank}", patience_s=120.0)
    bag = pt.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, store=store)
    model = torch.nn.Linear(DIM, 1)
    dense = torch.nn.parallel.DistributedDataParallel(model)
    opt = pt.Step(bag, torch.optim.SGD(model.parameters(), lr=0.01))
    for number in range(steps):
        opt.zero_grad()
        (dense(bag(*batch_of(rank, number))) ** 2).sum().backward()
        opt.step()
    torch.save({"report": tuple(opt.report), "model": model.state_dict()}, out / f"rank-{rank}.done")
    store.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
