"""A rank of a training job, as a process: ``python torch_rank.py ADDRESS RANK RANKS STEPS RENDEZVOUS OUT [KILL]``.

It trains bags of a service next to a dense part under DDP over gloo. The first rank saves both every few steps, and all
ranks continue from there when they start again. RENDEZVOUS: a file that the ranks meet in; "": one rank without
torch.distributed. KILL: seconds after the first step after which it kills itself.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.distributed as distributed
from torch_models import zipf_batch

import penstock.torch as pt

ROWS, DIM, SAVE_EVERY = 200, 4, 3


def batch_of(rank, number):
    return zipf_batch(np.random.default_rng([rank, number]), 16, ROWS)


def main(address, rank, ranks, steps, rendezvous, out, kill_after_s=""):
    rank, ranks, steps, out = int(rank), int(ranks), int(steps), Path(out)
    if rendezvous:
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    store = pt.store(address, contributor=f"rank-{rank}", patience_s=120.0)
    bag = pt.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, store=store)
    model = torch.nn.Linear(DIM, 1)
    dense = torch.nn.parallel.DistributedDataParallel(model) if rendezvous else model
    opt = pt.Step(bag, torch.optim.SGD(model.parameters(), lr=0.01))
    first, checkpoint = 0, out / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        bag.load_state_dict(saved["bag"])
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        first = saved["next"]
    if rendezvous:
        distributed.barrier()  # all have looked for it before the first rank saves one
    if kill_after_s:
        threading.Timer(float(kill_after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
    losses = []
    for number in range(first, steps):
        if rank == 0 and number % SAVE_EVERY == 0 and not (number == first and checkpoint.exists()):
            state = {"bag": bag.state_dict(), "model": model.state_dict(), "opt": opt.state_dict(), "next": number}
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)
        opt.zero_grad()
        loss = (dense(bag(*batch_of(rank, number))) ** 2).sum()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    done = {"report": tuple(opt.report), "model": model.state_dict(), "losses": losses}
    torch.save(done, out / f"rank-{rank}.done")
    store.close()
    if rendezvous:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
