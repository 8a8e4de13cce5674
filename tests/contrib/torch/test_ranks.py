"""Training jobs of several processes: ranks with DDP for the dense part, and ranks that are killed."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from evidence import IS_EVIDENCE, IS_LONG  # noqa: E402
from limits import HANG_S  # noqa: E402
from scripts import ROOT  # noqa: E402
from services import Process, free_port, service_of  # noqa: E402
from torch_models import engine_of  # noqa: E402
from torch_rank import DIM, ROWS, batch_of  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402

STEPS = 12
KILLS = 200 if IS_LONG else 10 if IS_EVIDENCE else 2


LONG_STEPS = 100


def started(*words):
    command = [sys.executable, ROOT / "tests" / "support" / "torch_rank.py", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process):
    out, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, out


def in_one_process(ranks):
    """The engine and the dense part after the same frames."""
    engine = tables(ranks)
    torch.manual_seed(0)
    bag = pt.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, store=pt.store(engine))
    model = torch.nn.Linear(DIM, 1)
    opt, dense = pt.Step(bag), torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(STEPS):
        dense.zero_grad()
        for rank in range(ranks):
            loss = (model(bag(*batch_of(rank, number))) ** 2).sum()
            loss.backward()
            opt.step()
        for parameter in model.parameters():
            parameter.grad /= ranks  # as DDP does
        dense.step()
    return engine, model


def tables(ranks):
    return engine_of(("user", ROWS, DIM), optimizer=ps.Adagrad(0.1), num_required=ranks, reduction="sum")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_equal_one_process_with_the_same_frames(ranks, tmp_path):
    engine, model = in_one_process(ranks)
    with service_of(tables(ranks)) as service:
        meeting = tmp_path / "meeting"
        processes = [started(service.address.uri, rank, ranks, STEPS, meeting, tmp_path) for rank in range(ranks)]
        for process in processes:
            ended(process)
        results = [torch.load(tmp_path / f"rank-{rank}.done", weights_only=True) for rank in range(ranks)]
        assert [result["report"][:3] for result in results] == [(STEPS, STEPS, 0)] * ranks
        for result in results:
            for name, tensor in model.state_dict().items():
                torch.testing.assert_close(result["model"][name], tensor, rtol=1e-5, atol=1e-6)
        rows, expected = (each.retrieve_parameters("user")["parameters"] for each in (service.engine, engine))
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
        if ranks == 1:
            assert service.engine.state_hash() == engine.state_hash()


def losses_of_whole_batches(ranks):
    """The mean losses in one process, whose batches are those of all ranks together."""
    torch.manual_seed(0)
    bag = pt.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True, store=pt.store(tables(1)))
    model = torch.nn.Linear(DIM, 1)
    opt, dense = pt.Step(bag), torch.optim.SGD(model.parameters(), lr=0.01 / ranks)  # DDP averages
    losses = []
    for number in range(LONG_STEPS):
        ids, offsets = zip(*(batch_of(rank, number) for rank in range(ranks)), strict=True)
        begins = np.cumsum([0, *map(len, ids)])
        ends = [begin + each[1:] for begin, each in zip(begins, offsets, strict=False)]
        dense.zero_grad()
        output = model(bag(torch.cat(ids), torch.cat([torch.zeros(1, dtype=torch.int64), *ends])))
        loss = (output**2).sum()
        loss.backward()
        opt.step()
        dense.step()
        losses.append(loss.item() / len(output))
    return losses


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.evidence)])
def test_losses_of_ranks_in_rounds_are_those_of_whole_batches_in_one_process(ranks, tmp_path):
    with service_of(in_rounds(ranks)) as service:
        for process in job(service, tmp_path, ranks, steps=LONG_STEPS):
            ended(process)
    parts = [torch.load(tmp_path / f"rank-{rank}.done", weights_only=True)["losses"] for rank in range(ranks)]
    bags = ranks * 16
    whole = np.sum(parts, 0) / bags
    np.testing.assert_allclose(whole, losses_of_whole_batches(ranks), rtol=0, atol=1e-6)
    assert whole[-1] < whole[0] / 2  # it has learned


def arrays(engine):
    """The rows and the slots of the table."""
    return [array.tobytes() for _, array in sorted(engine.retrieve_parameters("user").items())]


def in_rounds(ranks):
    return engine_of(("user", ROWS, DIM), optimizer=ps.Adagrad(0.1), workers=ranks, reduction="sum")


def job(service, folder, ranks, *kill, steps=STEPS):
    """Start the ranks of a job, and wait for their ends. kill : after so many seconds, the first rank"""
    meeting = folder / f"meeting-{len(list(folder.glob('meeting-*')))}"
    words = [(service.address.uri, rank, ranks, steps, meeting, folder) for rank in range(ranks)]
    return [started(*each, *(kill if rank == 0 else ())) for rank, each in enumerate(words)]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """The tables and the losses' model after a job of two ranks in rounds."""
    folder = tmp_path_factory.mktemp("unbroken")
    with service_of(in_rounds(2)) as service:
        for process in job(service, folder, 2):
            ended(process)
        return arrays(service.engine), torch.load(folder / "rank-0.done", weights_only=True)["model"]


def test_ranks_in_rounds_give_the_same_bits_each_time_and_those_of_one_process(unbroken, tmp_path):
    with service_of(in_rounds(2)) as service:
        for process in job(service, tmp_path, 2):
            ended(process)
        assert arrays(service.engine) == unbroken[0]
        engine, _ = in_one_process(2)
        rows, expected = (each.retrieve_parameters("user")["parameters"] for each in (service.engine, engine))
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("Workers in rounds have one hash, in any order of arrival and after any kill")
@pytest.mark.parametrize("number", range(KILLS))
def test_ranks_that_are_killed_go_back_together_and_end_with_the_same_tables(number, unbroken, tmp_path):
    delay_s = np.random.default_rng([7, number]).random() * 0.4
    with service_of(in_rounds(2), tmp_path / "run", every=2) as service:
        for process in (processes := job(service, tmp_path, 2, f"{delay_s:.3f}")):
            if process is processes[0]:
                process.communicate(timeout=HANG_S)
            else:
                process.kill()  # as torchrun does, when a rank has ended
                process.communicate()
        for process in job(service, tmp_path, 2):
            ended(process)
        assert arrays(service.engine) == unbroken[0], number
        for name, tensor in torch.load(tmp_path / "rank-0.done", weights_only=True)["model"].items():
            assert torch.equal(tensor, unbroken[1][name])


def test_ranks_outlive_a_service_that_is_killed(unbroken, tmp_path):
    config, address = tmp_path / "tables.pbtxt", f"grpc://127.0.0.1:{free_port()}"
    config.write_text(str(in_rounds(2).config.to_engine_proto()))
    words = [config, "--workers", 2, "--reduction", "sum", "--listen", address]
    words += ["--checkpoint", tmp_path / "run", "--every", 1, "--resume"]
    service = Process(*words)
    meeting = tmp_path / "meeting"
    ranks = [started(address, rank, 2, STEPS, meeting, tmp_path) for rank in range(2)]
    for _ in range(3):
        with ps.connect(address, patience_s=HANG_S) as client:
            least = min(client.status()["global_step"] + 2, STEPS)
            while any(rank.poll() is None for rank in ranks) and client.status()["global_step"] < least:
                pass
        service.process.kill()
        service.process.communicate()
        service = Process(*words)
    for rank in ranks:
        ended(rank)
    service.process.terminate()
    service.process.communicate(timeout=HANG_S)
    assert arrays(ps.Engine.restore(tmp_path / "run")) == unbroken[0]


@pytest.mark.evidence
def test_a_rank_that_is_killed_at_any_moment_loses_no_frame_and_repeats_none(tmp_path):
    """Its dense part and its place in the data are its own checkpoint; frames after that are skipped by number."""
    rng = np.random.default_rng(5)
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with service_of(tables(1), folder / "run", every=2) as service, ps.connect(service.address.uri) as client:
            words = (service.address.uri, 0, 1, STEPS, "", folder)
            killed = started(*words, f"{rng.random() * 0.2:.3f}")
            killed.communicate(timeout=HANG_S)
            assert client.position("rank-0") <= service.engine.global_step <= STEPS
            ended(started(*words))
            status = client.status()
            assert (status["frames"], status["stale"], status["global_step"]) == (STEPS, 0, STEPS), number
            assert client.position("rank-0") == STEPS
        assert ps.Engine.restore(folder / "run").global_step == STEPS


def test_ddp_ignores_the_modules_of_a_wrapped_model(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        engine = tables(1)
        model = torch.nn.Sequential(pt.EmbeddingBag(ROWS, DIM, store=pt.store(engine)), torch.nn.Linear(DIM, 1))
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        opt = pt.Step(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        for _ in range(2):
            opt.zero_grad()
            wrapped(torch.tensor([[1, 2]])).sum().backward()
            opt.step()
        assert opt.report == (2, 2, 0, 0)
        assert set(wrapped.state_dict()) == {"module.0._extra_state", "module.1.weight", "module.1.bias"}
    finally:
        torch.distributed.destroy_process_group()


def test_an_engine_of_one_of_several_ranks_is_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    store = pt.store(tables(1))
    assert store.contributor == "rank-1"
    with pytest.raises(ps.UsageError, match="would get the gradients of one rank of 2; serve its configuration"):
        pt.Step(pt.Embedding(ROWS, DIM, store=store))
