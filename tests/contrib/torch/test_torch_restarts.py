"""Services and ranks that were killed and continue, and states of ranks that do not fit the service."""

from contextlib import suppress

import pytest

torch = pytest.importorskip("torch")

from limits import in_thread, until  # noqa: E402
from services import Killable, service_of  # noqa: E402
from torch_models import (  # noqa: E402
    IDS,
    PAIRS,
    bags_of,
    batch_of,
    config_of,
    engine_of,
    synchronous,
    train,
    trained,
)

import penstock as ps  # noqa: E402
import penstock.torch as pt  # noqa: E402
from penstock.serving.flight.producer import Producer  # noqa: E402


@pytest.mark.parametrize("prefetches", [False, True])
def test_a_service_that_is_killed_between_steps_gets_every_frame_once(tmp_path, prefetches):
    tables = PAIRS["same dims"]
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
    tables = PAIRS["same dims"]
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
    tables = PAIRS["same dims"]
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


# ---- states


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
