"""Tables of a service: the bits of an engine in this process; what a store checks, waits for and closes."""

import multiprocessing
import signal
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from limits import HANG_S, in_thread, suspend, until  # noqa: E402
from services import Killable, free_port, service_of  # noqa: E402
from torch_models import (  # noqa: E402
    IDS,
    PAIRS,
    BagConfig,
    bags_of,
    config_of,
    engine_of,
    synchronous,
    train,
    trained,
)

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("tables", PAIRS.values(), ids=PAIRS)
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


# ---- waits


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


@pytest.mark.parametrize("names", [("rank-0", "rank-1"), ("left", "right")])
def test_a_wait_for_a_rank_that_is_gone_is_logged_and_ends_with_its_name(names, monkeypatch, caplog):
    monkeypatch.setattr("penstock.base.limited_calls.LOG_EVERY_S", 0.2)
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
