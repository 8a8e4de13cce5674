"""Stores in the worker processes of a DataLoader, which are forks of the trainer."""

import pytest

torch = pytest.importorskip("torch")

from services import Process  # noqa: E402
from torch_models import IDS, config_of, engine_of  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:os.fork:RuntimeWarning",
    "ignore:.*multi-threaded:DeprecationWarning",
)


class InWorker(torch.utils.data.Dataset):
    """Calls functions in a worker. An item is the text of the result, or of the error."""

    def __init__(self, *functions):
        self.functions = functions

    def __len__(self):
        return len(self.functions)

    def __getitem__(self, number):
        try:
            return str(self.functions[number]())
        except ps.PenstockError as error:
            return f"{type(error).__name__}: {error}"


def answers(*functions):
    workers = {"num_workers": 1, "multiprocessing_context": "fork", "batch_size": None, "timeout": 60}
    return list(torch.utils.data.DataLoader(InWorker(*functions), **workers))


def test_a_worker_reads_rows_of_the_trainers_engine_and_cannot_train():
    engine = engine_of(optimizer=ps.SGD(0.5))
    store = pt.store(engine)
    bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
    opt = pt.Step(bag)
    expected = bag(IDS).tolist()

    def step():
        bag(IDS).sum().backward()
        opt.step()

    rows, stepped, prefetched = answers(lambda: bag(IDS).tolist(), step, lambda: bag.prefetch(IDS))
    assert rows == str(expected)
    assert stepped.startswith("StateError: process ")
    assert "this process is a fork of it" in stepped
    assert prefetched == "None"
    opt.zero_grad()
    step()
    assert engine.global_step == 1


def test_a_worker_may_not_use_the_trainers_store_of_a_service(tmp_path):
    config_of(("user", 50, 4), optimizer=ps.SGD(0.5)).save(tmp_path / "tables.pbtxt")
    with Process(tmp_path / "tables.pbtxt") as service, pt.store(service.uri) as store:
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
        opt = pt.Step(bag)
        bag(IDS).sum().backward()
        opt.step()
        looked_up, closed = answers(lambda: bag(IDS), store.close)
        assert looked_up.startswith(f"StateError: the store of {service.uri} belongs to process ")
        assert closed == "None"
        bag(IDS).sum().backward()
        opt.step()
        assert opt.report.step == 2
