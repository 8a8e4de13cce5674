"""One of two ranks that save sharded tensors with torch.distributed.checkpoint: python dcp_rank.py FOLDER FILE RANK."""

import sys
from pathlib import Path

import torch
from limits import until
from torch.distributed import checkpoint, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

folder, file, rank = sys.argv[1:]
init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
mesh = init_device_mesh("cpu", (2,))
user = torch.arange(240, dtype=torch.float32).reshape(60, 4)
item = torch.arange(80, dtype=torch.float32).reshape(20, 4)
state = {
    "embedding_bags.user.weight": distribute_tensor(user, mesh, [Shard(0)]),
    "embedding_bags.item.weight": distribute_tensor(item, mesh, [Shard(1)]),
}
checkpoint.save({"model": state}, checkpoint_id=folder)
# A rank that ends while the other one still reads from it would fail that one.
Path(f"{file}.{rank}").touch()
until(lambda: all(Path(f"{file}.{other}").exists() for other in range(2)))
destroy_process_group()
