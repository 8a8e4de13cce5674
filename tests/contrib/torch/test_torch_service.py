"""Tables of a service: the bits of an engine in this process, also over restarts and for ranks that were killed."""

import multiprocessing
import signal
import threading
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from limits import HANG_S, in_thread, suspend, until  # noqa: E402
from services import Process, free_port, service_of  # noqa: E402
from torch_models import IDS, BagConfig, config_of, engine_of, zipf_batch  # noqa: E402

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402
from penstock.serving.flight.producer import Producer  # noqa: E402

TABLES = {"same dims": (("user", 200, 4), ("item", 100, 4)), "other dims": (("user", 200, 4), ("item", 100, 3))}


def bags_of(store):
    configs = [BagConfig(name, info.num_rows, info.dim, [f"of_{name}"]) for name, info in store.tables.items()]
    return pt.EmbeddingBagCollection(tables=configs, store=store)


def batch_of(number):
    rng = np.random.default_rng(number)
    return {f"of_{name}": zipf_batch(rng, 16, rows) for name, rows in (("user", 200), ("item", 100))}


def train(bags, opt, numbers, prefetches=False):
    losses = []
    batches = [batch_of(number) for number in [*numbers, numbers[-1] + 1]]
    for batch, following in pairwise(batches):
        opt.zero_grad()
        loss = (bags(batch).values() ** 2).sum()
        if prefetches:
            bags.prefetch(following)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_a_service_trains_to_the_bits_of_an_engine(tables, prefetches):
    local = engine_of(*tables, optimizer=ps.Adagrad(0.1))
    bags = bags_of(pt.store(local))
    expected = train(bags, pt.Step(bags), range(20))
    with service_of(engine_of(*tables, optimizer=ps.Adagrad(0.1))) as service, pt.store(service.address.uri) as store:
        bags = bags_of(store)
        opt = pt.Step(bags)
        assert train(bags, opt, range(20), prefetches) == expected
        assert opt.report == (20, 20, 0, 0)
        assert service.engine.state_hash() == local.state_hash()
        twins = bags.materialize()
        np.testing.assert_array_equal(twins["item"].weight.detach(), local.retrieve_parameters("item")["parameters"])


def test_modules_check_the_tables_of_a_service():
    with service_of(engine_of(num_required=2)) as service, pt.store(service.address.uri, timeout_s=7.0) as store:
        assert (store.num_required, store.reduction, store._timeout_s) == (2, "mean", 7.0)
        assert repr(store) == f"Store({service.address.uri})"
        with pytest.raises(ps.UsageError, match="its vocabulary_size is 50, got num_embeddings=60"):
            pt.Embedding(60, 4, store=store)
        embedding = pt.Embedding(50, 4, store=store)
        with pytest.raises(ValueError, match="50"):
            embedding(torch.tensor([50]))
        assert embedding(torch.tensor([49])).shape == (1, 4)


def test_a_stale_frame_and_a_gate_that_waits_are_reported():
    engine = engine_of(optimizer=ps.SGD(0.5))
    with service_of(engine) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, store=store)
        opt = pt.Step(bag)
        bag(IDS).sum().backward()
        engine.apply({"user": ([9], np.ones((1, 4), np.float32))})
        with pytest.warns(UserWarning, match=r"stale.*read at step 0, .*the global step is 1\); 1 of 1 frames"):
            opt.step()
        assert opt.report == (1, 0, 1, 0)
        bag(IDS).sum().backward()
        opt.step()
        assert opt.report == (2, 1, 1, 0)


class Killable:
    """``penstock serve`` at one address, in a process that ``kill`` ends and ``start`` starts again."""

    def __init__(self, folder, config, *words):
        self.folder = folder
        config.save(folder / "tables.pbtxt")
        self.words = (folder / "tables.pbtxt", "--listen", f"grpc://127.0.0.1:{free_port()}", *words)
        self.start("run")

    def start(self, name):
        resume = ["--resume"] if (self.folder / name).exists() else []
        self.process = Process(*self.words, "--checkpoint", self.folder / name, *resume)
        assert self.process.uri is not None, self.process.wait()
        self.uri = self.process.uri

    def kill(self):
        self.process.process.kill()
        self.process.process.communicate()

    def state_hash(self):
        with ps.connect(self.uri) as client:
            client.checkpoint()
        return ps.Engine.restore(self.folder / "run").state_hash()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.__exit__()


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_service_that_is_killed_between_steps_gets_every_frame_once(tmp_path, prefetches):
    tables = TABLES["same dims"]
    local = engine_of(*tables, optimizer=ps.Adagrad(0.1))
    bags = bags_of(pt.store(local))
    expected = train(bags, pt.Step(bags), range(12))
    with Killable(tmp_path, local.config, "--every", "4") as running, pt.store(running.uri) as store:
        bags = bags_of(store)
        opt = pt.Step(bags)
        losses = train(bags, opt, range(6), prefetches)
        running.kill()
        running.start("run")
        losses += train(bags, opt, range(6, 9), prefetches)
        assert opt.state_dict() == {"dense": None, "frames": 9}  # durable now
        running.kill()
        running.start("run")
        losses += train(bags, opt, range(9, 12), prefetches)
        assert losses == expected
        assert opt.report == (12, 12, 0, 0)
        assert running.state_hash() == local.state_hash()


def test_a_frame_for_a_service_that_is_away_is_sent_by_the_next_step(tmp_path):
    config = config_of(("user", 50, 4), optimizer=ps.SGD(0.5))
    with Killable(tmp_path, config) as running, pt.store(running.uri, patience_s=0.2) as store:
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
        opt = pt.Step(bag)
        bag(IDS).sum().backward()
        opt.step()
        loss = bag(IDS).sum()
        loss.backward()
        running.kill()
        with pytest.raises(ps.ServiceError) as raised:
            opt.step()
        assert "gRPC client debug context" not in str(raised.value)
        with pytest.raises(ps.ServiceError, match=r"Connection refused; retried for 0.2 s \(patience\)$"):
            bag(IDS)
        running.start("run")
        opt.step()
        bag(IDS).sum().backward()
        opt.step()
        assert opt.report == (3, 3, 0, 0)


def test_a_service_that_lost_its_checkpoint_is_an_error(tmp_path):
    with Killable(tmp_path, config_of(("user", 50, 4))) as running:
        store = pt.store(running.uri)
        bag = pt.EmbeddingBag(50, 4, store=store)
        opt = pt.Step(bag)
        bag(IDS).sum().backward()
        opt.step()
        running.kill()
        running.start("other")
        with pytest.raises(ps.StateError, match="restarted without its checkpoint"):
            bag(IDS)


def test_a_rank_that_restarts_continues_after_its_checkpoint(tmp_path):
    """The frames after it are recognized by their numbers, and are not applied again."""
    tables = TABLES["same dims"]
    local = engine_of(*tables, optimizer=ps.Adagrad(0.1))
    bags = bags_of(pt.store(local))
    train(bags, pt.Step(bags), range(10))
    with service_of(engine_of(*tables, optimizer=ps.Adagrad(0.1)), tmp_path / "run") as service:
        store = pt.store(service.address.uri)
        bags = bags_of(store)
        opt = pt.Step(bags)
        train(bags, opt, range(4))
        state, model = opt.state_dict(), bags.state_dict()
        assert state["frames"] == 4
        train(bags, opt, range(4, 7))  # and is killed

        again = pt.store(service.address.uri)
        bags = bags_of(again)
        opt = pt.Step(bags)
        bags.load_state_dict(model)
        opt.load_state_dict(state)
        train(bags, opt, range(4, 10))
        assert opt.report == (10, 3, 0, 0)
        assert opt.state_dict()["frames"] == 10
        assert service.engine.state_hash() == local.state_hash()
        for lose in (store._producer._drop, again.close):  # a connection is lost, and then the other trainer is gone
            lose()
            with pytest.raises(ps.UsageError, match="another stream of producer 'rank-0' has begun"):
                train(bags_of(store), pt.Step(bags_of(store)), [8])
        with suppress(ps.UsageError):
            store.close()
        assert service.engine.state_hash() == local.state_hash()


def test_a_frame_of_a_killed_run_does_not_take_the_number_of_the_next_ones(monkeypatch):
    """It may still be on its way while the next run learns its position."""
    tables = TABLES["same dims"]
    local = engine_of(*tables, optimizer=ps.Adagrad(0.1))
    bags = bags_of(pt.store(local))
    train(bags, pt.Step(bags), range(2))
    with service_of(engine_of(*tables, optimizer=ps.Adagrad(0.1))) as service:
        killed = pt.store(service.address.uri)
        train(bags := bags_of(killed), pt.Step(bags), [0])
        late, begin = bags(batch_of(7)), Producer._begin

        def begin_after_the_late_frame(producer):
            monkeypatch.setattr(Producer, "_begin", begin)
            (late.values() ** 2).sum().backward()
            with pytest.raises(ps.UsageError, match="another stream of producer 'rank-0' has begun"):
                pt.Step(bags).step()
            return begin(producer)

        with pt.store(service.address.uri) as again:
            twins = bags_of(again)
            opt = pt.Step(twins)
            monkeypatch.setattr(Producer, "_begin", begin_after_the_late_frame)
            train(twins, opt, [1])
            assert opt.report == (2, 1, 0, 0)
            with pytest.raises(ps.UsageError, match="another stream of producer 'rank-0' has begun"):
                killed.close()
        assert service.engine.state_hash() == local.state_hash()


def test_ranks_that_cannot_return_together_say_which_one_failed(tmp_path, monkeypatch):
    """Else the others would wait in torch for one that has ended."""
    with (
        service_of(engine_of(workers=2, reduction="sum"), tmp_path, every=1) as service,
        pt.store(service.address.uri) as store,
    ):
        opt = pt.Step(pt.EmbeddingBag(50, 4, store=store))
        state, gathered = opt.state_dict(), []

        def gather(states, mine):
            gathered.append(mine)
            states[:] = [mine, (mine[0], "it is out of luck")]

        monkeypatch.setattr("penstock.contrib.torch.step.is_distributed", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        monkeypatch.setattr("torch.distributed.all_gather_object", gather)
        with pytest.raises(ps.StateError, match="load_state_dict: rank 1 failed: it is out of luck"):
            opt.load_state_dict(state)
        store.frames += 1
        with pytest.raises(ps.UsageError, match="this store has pushed frames"):
            opt.load_state_dict(state)
        assert "has pushed frames" in gathered[1][1]


def test_a_run_that_begins_again_in_rounds_without_a_state_is_warned(tmp_path):
    stores = []
    with service_of(engine_of(workers=1), tmp_path, every=1) as service:

        def trainer():
            stores.append(pt.store(service.address.uri))
            bag = pt.EmbeddingBag(50, 4, mode="sum", store=stores[-1])
            return bag, pt.Step(bag, synchronous=True)

        def step(bag, opt):
            bag(IDS).sum().backward()
            opt.step()

        bag, opt = trainer()
        state = opt.state_dict()
        step(bag, opt)
        bag, opt = trainer()
        with pytest.warns(UserWarning, match="has 1 frames of 'rank-0' from an earlier run.*without load_state_dict"):
            step(bag, opt)
        step(bag, opt)
        bag, opt = trainer()
        opt.load_state_dict(state)
        step(bag, opt)
        for store in stores:
            with suppress(ps.UsageError):  # of a name that another one has taken
                store.close()


def test_a_state_of_another_history_or_a_later_step_is_refused(tmp_path):
    with service_of(engine_of()) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, store=store)
        state = bag.state_dict()
        with service_of(engine_of()) as other, pt.store(other.address.uri) as others:
            stranger = pt.EmbeddingBag(50, 4, store=others)
            with pytest.raises(ps.StateError, match="has the tables of another history"):
                stranger.load_state_dict(state)
        saved = ps.Version(state["_extra_state"]["version"])
        state["_extra_state"]["version"] = str(saved.at(3))
        with pytest.raises(ps.StateError, match="at step 3 or later, got step 0"):
            bag.load_state_dict(state)
        state["_extra_state"] = {"lineage": saved.lineage, "epoch": saved.epoch, "step": 0, "digest": ""}
        with pytest.raises(ps.StateError, match="load_state_dict: written by an unreleased earlier version"):
            bag.load_state_dict(state)


def test_a_state_of_more_frames_than_the_service_has_is_refused():
    with service_of(engine_of()) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, store=store)
        opt = pt.Step(bag)
        opt.load_state_dict({"frames": 50, "dense": None})
        bag(IDS).sum().backward()
        with pytest.raises(ps.StateError, match=r"the state is of 50 frames of 'rank-0', and .* has 0"):
            opt.step()


def test_a_frame_that_the_service_refuses_is_dropped_and_not_counted():
    with service_of(engine_of(optimizer=ps.SGD(0.5))) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
        opt = pt.Step(bag)
        bag(IDS).sum().backward()
        opt.step()
        bag(IDS).sum().backward()
        store.pending[1].ids["user"][0] = 77
        with pytest.raises(ps.InputError, match="expected 0 <= id < 50"):
            opt.step()
        for _ in range(2):
            bag(IDS).sum().backward()
            opt.step()
        assert opt.report == (3, 3, 0, 0)
        assert service.engine.global_step == 3


def test_ranks_of_one_step_wait_for_each_other():
    """Each is a thread here; tests of processes are in test_ranks.py."""
    engine = engine_of(optimizer=ps.SGD(0.5), num_required=2, reduction="sum")
    ready = threading.Barrier(2)

    def rank(number):
        store = pt.store(service.address.uri, contributor=f"rank-{number}")
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
        opt = pt.Step(bag, synchronous=True)
        ready.wait()
        for _ in range(10):
            bag(IDS).sum().backward()
            opt.step()
        assert opt.report.step >= 10
        with pytest.raises(ps.UsageError, match="this batch has no rows, and the gate waits for a frame of each of 2"):
            opt.step()
        store.close()
        return opt.report

    with service_of(engine) as service:
        ranks = [in_thread(lambda number=number: rank(number)) for number in range(2)]
        for result in ranks:
            report = result()
            assert (report.applied, report.stale) == (10, 0)
        assert engine.global_step == 10


# ---- waits


def synchronous(address, number):
    """A synchronous rank of two, without its data: its step, and its bag."""
    store = pt.store(address, contributor=f"rank-{number}")
    bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
    return pt.Step(bag, synchronous=True), bag


def trained(rank, opt, bag, numbers):
    """Train on batches, each as often as ``numbers`` has it; the report."""
    for number in numbers:
        opt.zero_grad()
        bag(torch.tensor([[number, 10 + rank]])).sum().backward()
        opt.step()
    return opt.report


def test_a_synchronous_rank_that_restarts_does_not_wait_for_openings_that_are_over(tmp_path):
    with service_of(engine_of(num_required=2, reduction="sum"), tmp_path / "run") as service:
        ranks = [synchronous(service.address.uri, number) for number in range(2)]
        for result in [in_thread(lambda number=number: trained(number, *ranks[number], [0])) for number in range(2)]:
            result()
        state = ranks[0][0].state_dict()
        for result in [in_thread(lambda number=number: trained(number, *ranks[number], [1, 2])) for number in range(2)]:
            result()
        again = synchronous(service.address.uri, 0)  # the first rank was killed
        again[0].load_state_dict(state)
        assert trained(0, *again, [1, 2])[:3] == (3, 0, 0)
        others = in_thread(lambda: trained(1, *ranks[1], [3]))
        assert trained(0, *again, [3])[:3] == (4, 1, 0)
        others()
        assert service.engine.global_step == 4


def test_a_frame_that_is_skipped_but_still_in_the_gate_waits_for_its_opening(tmp_path):
    """The rank was killed between its push and the opening. Its next frame would else be in the same step."""
    with service_of(engine_of(num_required=2, reduction="sum"), tmp_path / "run") as service:
        opt, bag = synchronous(service.address.uri, 0)
        state = opt.state_dict()
        opt.store._timeout_s = 0.5
        with pytest.raises(ps.ServiceTimeoutError):
            trained(0, opt, bag, [0])
        until(lambda: service.engine.gate.num_accumulated)
        again = synchronous(service.address.uri, 0)
        again[0].load_state_dict(state)
        first = in_thread(lambda: trained(0, *again, [0]))
        other = synchronous(service.address.uri, 1)
        assert trained(1, *other, [0])[:3] == (1, 1, 0)
        assert first()[:3] == (1, 0, 0)
        assert service.engine.gate.num_accumulated == 0


@pytest.mark.parametrize("names", [("rank-0", "rank-1"), ("left", "right")])
def test_a_wait_for_a_rank_that_is_gone_is_logged_and_ends_with_its_name(names, monkeypatch, caplog):
    monkeypatch.setattr("penstock.contrib.torch.limited_calls.LOG_EVERY_S", 0.2)
    with service_of(engine_of(num_required=2, reduction="sum")) as service:
        stores = [pt.store(service.address.uri, contributor=name) for name in names]
        bags = [pt.EmbeddingBag(50, 4, mode="sum", store=store) for store in stores]
        opts = [pt.Step(bag, synchronous=True) for bag in bags]
        both = [in_thread(lambda rank=rank: trained(rank, opts[rank], bags[rank], [0])) for rank in range(2)]
        for result in both:
            result()
        stores[0]._timeout_s = 2.0
        with pytest.raises(ps.ServiceTimeoutError) as raised:
            trained(0, opts[0], bags[0], [1])
        stores[0]._timeout_s = HANG_S
        assert isinstance(raised.value, TimeoutError)
        expected = (
            f"{service.address.uri}: waited 2 s (timeout_s) for the opening of step 2 with frame 2 of '{names[0]}'; "
            f"missing: {names[1]}; the gate: 1 of 2 frames in ('{names[0]}': 1); global step 1"
        )
        assert expected in str(raised.value)
        waiting = [record.penstock for record in caplog.records if record.penstock["event"] == "waiting"]
        assert {event["service"] for event in waiting} == {service.address.uri}
        assert any("frame 2" in event["waits_for"] for event in waiting)
        assert trained(1, opts[1], bags[1], [1])[:3] == (2, 2, 0)  # its frame was not lost
        for store in stores:
            store.close()


@pytest.mark.filterwarnings("ignore:a frame was dropped as stale")
def test_every_wait_for_a_service_that_has_stopped_ends(tmp_path):
    config = config_of(("user", 50, 4), optimizer=ps.SGD(0.5))
    waits = {
        "pull": lambda opt: opt.bag(IDS),
        "push": pt.Step.step,
        "prefetch": lambda opt: opt.bag(IDS),
        "whole": lambda opt: opt.bag.materialize(),
        "state": pt.Step.state_dict,
        "close": lambda opt: opt.store.close(),
    }
    with Killable(tmp_path, config) as running:
        opts = {}
        for name in waits:
            store = pt.store(running.uri, contributor=name)
            bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
            opt = opts[name] = pt.Step(bag)
            opt.bag = bag
            trained(0, opt, bag, [0])
        opts["push"].bag(IDS).sum().backward()
        suspend(running.process.process)
        opts["prefetch"].bag.prefetch(IDS)
        for name, wait in waits.items():
            opts[name].store._timeout_s = 0.5
            with pytest.raises(
                ps.ServiceTimeoutError, match=r"grpc://127.0.0.1:\d+: waited 0.5 s \(timeout_s\) for \w+"
            ):
                wait(opts[name])
        opts["whole"].store.close()  # without another wait
        running.process.process.send_signal(signal.SIGCONT)
        for opt in opts.values():
            opt.store._timeout_s = HANG_S
        opt = opts["push"]
        trained(0, opt, opt.bag, [1])
        assert opt.report.applied + opt.report.stale == 3  # the frame was not lost
        for opt in opts.values():
            opt.store.close()


def test_other_threads_read_rows_while_one_waits_for_a_rank():
    with service_of(engine_of(num_required=2, reduction="sum")) as service:
        opt, bag = synchronous(service.address.uri, 0)
        waiting = in_thread(lambda: trained(0, opt, bag, [0]))
        until(lambda: service.engine.gate.num_accumulated)
        assert bag.eval()(IDS).shape == (2, 4)
        assert trained(1, *synchronous(service.address.uri, 1), [0])[:3] == (1, 1, 0)
        assert waiting()[:3] == (1, 1, 0)


def test_a_limit_is_a_positive_number():
    with pytest.raises(ps.UsageError, match="timeout_s: expected seconds above 0, got 0"):
        pt.store("grpc://127.0.0.1:1", timeout_s=0)


@pytest.mark.filterwarnings("ignore:a frame was dropped as stale")
def test_an_interrupt_while_a_frame_is_sent_neither_loses_nor_repeats_it(monkeypatch):
    from penstock.serving.flight import producer

    write = producer._PutStream._write

    def interrupted(stream, frame):
        monkeypatch.setattr(producer._PutStream, "_write", write)
        stream._writer.write_batch(frame.pieces[0])
        raise KeyboardInterrupt

    with service_of(engine_of(optimizer=ps.SGD(0.5))) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, mode="sum", store=store)
        opt = pt.Step(bag)
        before = service.engine.lookup("user", [5])
        bag(IDS).sum().backward()
        monkeypatch.setattr(producer._PutStream, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opt.step()
        bag(torch.tensor([[7]])).sum().backward()
        opt.step()
        np.testing.assert_allclose(service.engine.lookup("user", [5]), before - 1.0, rtol=1e-5)
        assert opt.report.applied + opt.report.stale == 2


def test_a_batch_of_more_ids_than_a_request_takes_is_pulled_in_several():
    tables = (("user", 100_000, 2), ("item", 100_000, 2))
    local = engine_of(*tables)
    with service_of(engine_of(*tables)) as service, pt.store(service.address.uri) as store:
        bags = bags_of(store)
        ids = torch.arange(100_000)
        pooled = bags({"of_user": (ids, [0, 100_000]), "of_item": (ids.flip(0), [0, 100_000])})
        expected = [local.retrieve_parameters(name)["parameters"].sum(axis=0) for name in ("user", "item")]
        np.testing.assert_allclose(pooled.values()[0].detach(), np.concatenate(expected), rtol=1e-3, atol=1e-2)
        opt = pt.Step(bags)
        pooled.values().sum().backward()
        opt.step()
        assert opt.report == (1, 1, 0, 0)


def test_rows_of_more_bytes_than_an_answer_has_are_pulled_in_several(monkeypatch):
    from penstock.serving.service.limits import Limits

    monkeypatch.setattr("penstock.contrib.torch.service_store._MOST_BYTES", 10_000, raising=False)
    monkeypatch.setattr("penstock.contrib.torch.service_store._MOST_IDS", 100)
    tables = (("user", 150, 300), ("item", 100, 4))
    limits = Limits(message_bytes=10_000, rows_asked=100)
    with service_of(engine_of(*tables), limits=limits) as service, pt.store(service.address.uri) as store:
        bags = bags_of(store)
        ids = torch.arange(100)
        pooled = bags({"of_user": (ids + 50, [0, 100]), "of_item": (ids, [0, 100])}).values()[0].detach()
        expected = [service.engine.lookup("user", range(50, 150)), service.engine.lookup("item", range(100))]
        np.testing.assert_allclose(
            pooled, np.concatenate([rows.sum(axis=0) for rows in expected]), rtol=1e-4, atol=1e-4
        )


@pytest.fixture
def left_open(monkeypatch):
    """Returns how many clients are open of those since the fixture, once the threads of stores have ended."""
    from penstock.serving.flight import Client

    before, num_open = set(threading.enumerate()), []
    begin, close = Client.__init__, Client.close
    monkeypatch.setattr(Client, "__init__", lambda *args, **named: num_open.append(1) or begin(*args, **named))
    monkeypatch.setattr(Client, "close", lambda client: num_open.append(-1) or close(client))

    def left():
        for thread in set(threading.enumerate()) - before:
            if thread.name == "penstock-store":
                thread.join(HANG_S)
                assert not thread.is_alive(), "it did not end"
        return sum(num_open)

    return left


def test_a_store_that_cannot_open_leaves_nothing_open(left_open):
    with pytest.raises(ps.ServiceError, match="Connection refused"):
        pt.store(f"grpc://127.0.0.1:{free_port()}", patience_s=0.0)
    assert left_open() == 0


def test_a_store_that_cannot_close_in_order_leaves_nothing_open(left_open, monkeypatch):
    from penstock.serving.flight import producer

    def failing(_):
        raise ps.ServiceError("gone")

    with service_of(engine_of()) as service:
        store = pt.store(service.address.uri)
        bag = pt.EmbeddingBag(50, 4, store=store)
        trained(0, pt.Step(bag), bag, [0])
        monkeypatch.setattr(producer.Producer, "close", failing)
        with pytest.raises(ps.ServiceError, match="gone"):
            store.close()
        monkeypatch.undo()
        assert left_open() == 0


def test_the_token_of_a_store_is_stripped_and_checked():
    with service_of(engine_of(), tokens=[b"t0ken"]) as service:
        with pt.store(service.address.uri, "t0ken\n") as store:
            assert list(store.tables) == ["user"]
        with pytest.raises(ps.UsageError, match=r"^token: expected one token, ASCII without spaces") as raised:
            pt.store(service.address.uri, "operator t0ken", patience_s=3600)
    assert "t0ken" not in str(raised.value)


# jax warns of any fork.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:os.fork:RuntimeWarning")
def test_a_forked_process_cannot_use_the_connections_of_its_parent():
    def use_store(results):
        with pytest.raises(ps.StateError) as raised:
            bag(IDS)
        store.close()
        results.put(str(raised.value))

    with service_of(engine_of()) as service, pt.store(service.address.uri) as store:
        bag = pt.EmbeddingBag(50, 4, store=store)
        bag(IDS)
        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        child = context.Process(target=use_store, args=(results,))
        child.start()
        child.join(HANG_S)
        assert "this process is a fork of it; open another one here" in results.get()
        assert bag(IDS).shape == (2, 4)


@pytest.mark.parametrize("dims", [(4, 4), (4, 3)], ids=["one block", "two blocks"])
def test_a_frame_has_keys_from_2_63_on_and_ids_of_another_table(dims):
    def tables():
        keys = ps.Dynamic(key_type="uint64")
        return ps.EmbeddingConfig.from_tables(
            [
                ps.TableConfig(200, dims[0], ps.Constant(1.0), ps.SGD(0.5), name="user", dynamic=keys),
                ps.TableConfig(100, dims[1], ps.Constant(1.0), ps.SGD(0.5), name="item"),
            ]
        )

    def train_mixed(store):
        configs = [BagConfig(name, 200, dim, [f"of_{name}"]) for name, dim in zip(("user", "item"), dims, strict=True)]
        configs[1].num_embeddings = 100
        bags = pt.EmbeddingBagCollection(tables=configs, store=store)
        opt = pt.Step(bags)
        for key_type in (torch.int64, torch.uint64):
            keys = torch.tensor([5, 2**63 + 1 if key_type == torch.uint64 else 7], dtype=key_type)
            bags({"of_user": (keys, [0, 2]), "of_item": (torch.tensor([3]), [0, 1])}).values().sum().backward()
            opt.step()
        assert opt.report == (2, 2, 0, 0)

    local, served = ps.Engine(tables()), ps.Engine(tables())
    train_mixed(pt.store(local))
    with service_of(served) as service, pt.store(service.address.uri) as store:
        train_mixed(store)
        assert served.state_hash() == local.state_hash()


def test_a_state_is_taken_before_another_is_loaded(tmp_path):
    """As torch.distributed.checkpoint does, which loads into a state that is there."""
    with service_of(engine_of(optimizer=ps.SGD(0.5)), tmp_path / "run") as service:
        first, bag = synchronous(service.address.uri, 0)
        trained(0, first, bag, [0, 1])
        state = first.state_dict()
        trained(0, first, bag, [2])
        opt, bag = synchronous(service.address.uri, 0)
        assert opt.state_dict()["frames"] == 3
        opt.load_state_dict(state)
        assert opt.state_dict()["frames"] == 2
        opt.load_state_dict(state)
        trained(0, opt, bag, [2, 3])
        assert opt.report == (4, 1, 0, 0)
        with pytest.raises(ps.UsageError, match="has pushed frames"):
            opt.load_state_dict(state)
