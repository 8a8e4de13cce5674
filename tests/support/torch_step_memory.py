"""Print the memory of training steps, as multiples of the bytes of their distinct rows: python torch_step_memory.py."""

import numpy as np
import torch
from peak_memory import PeakMemory
from torch_models import engine_of

import penstock.torch as pt

TABLE_ROWS, ROWS, DIM = 1_000_000, 200_000, 64

bag = pt.EmbeddingBag(TABLE_ROWS, DIM, mode="sum", store=pt.store(engine_of(("user", TABLE_ROWS, DIM))))
opt, rng = pt.Step(bag), np.random.default_rng(0)
for _ in range(4):
    ids, offsets = torch.from_numpy(rng.permutation(TABLE_ROWS)[:ROWS]), torch.arange(0, ROWS, 1000)
    with PeakMemory() as peak:
        opt.zero_grad()
        bag(ids, offsets).square().sum().backward()
        opt.step()
    opt.zero_grad()
    print(peak.growth / (4 * DIM * ROWS))
