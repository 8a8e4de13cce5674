"""PyTorch modules whose rows are in an engine or a service: pull rows, let torch differentiate, push their gradients.

    store = pt.store(engine)  # or pt.store("grpc://host:port")
    bags = pt.EmbeddingBagCollection(tables=[…], store=store)
    opt = pt.Step(bags, dense_optimizer)
    loss = model(bags(features), dense).mean()
    loss.backward()
    opt.step()  # one frame, then the dense optimizer

Only this package imports torch (docs/torch.md).
"""

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError:
    needed = "penstock.torch needs the package torch: pip install 'penstock[torch]'"
    raise ModuleNotFoundError(needed, name="torch") from None

from penstock.contrib.torch.jagged import JaggedTensor, KeyedTensor
from penstock.contrib.torch.materialized_modules import materialized
from penstock.contrib.torch.modules import Embedding, EmbeddingBag, requires_grad_
from penstock.contrib.torch.open_store import store
from penstock.contrib.torch.step import Step
from penstock.contrib.torch.stores import StepReport, Store
from penstock.contrib.torch.table_collections import EmbeddingBagCollection, EmbeddingCollection

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "JaggedTensor",
    "KeyedTensor",
    "Step",
    "StepReport",
    "Store",
    "materialized",
    "requires_grad_",
    "store",
]
