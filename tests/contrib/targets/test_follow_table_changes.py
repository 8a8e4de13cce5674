"""The tables of a service change in every way, while producers push, a Redis follower runs, and both are killed.

The oracle is an engine per table, which receives the frames of the table in their order.
"""

import json
import random
import signal
import time

import numpy as np
import pytest
from batches import batch
from cli import started
from limits import HANG_S, in_thread, until
from services import Process, connect, free_port
from stores import open_store

import penstock as ps
from penstock.checkpoint.store import Folder

ROWS = 50


def table(name, dim=4, optimizer=None):
    return ps.TableConfig(ROWS, dim, name=name, optimizer=optimizer or ps.Adagrad(0.1))


# A change: its flags, the tables afterwards, and the one that a producer feeds until the next change.
ANCHOR = table("anchor")
CHANGES = [
    ((), [table("a"), table("b", 2)], "a"),
    (("--new-tables",), [table("a"), table("b", 2), table("c", 3)], "c"),
    (("--rename", "a=z"), [table("z"), table("b", 2), table("c", 3)], "z"),
    (("--reset-slots", "z"), [table("z", optimizer=ps.SGD(0.2)), table("b", 2), table("c", 3)], "z"),
    (("--reset-table", "b"), [table("z", optimizer=ps.SGD(0.2)), table("b", 5), table("c", 3)], "b"),
    (("--drop-table", "c"), [table("z", optimizer=ps.SGD(0.2)), table("b", 5)], "b"),
]


def frame(name, number, dim):
    rng = np.random.default_rng([sum(name.encode()), number])
    return batch(rng.integers(0, ROWS, 8), rng.standard_normal((8, dim)), table=name)


def loads(engine, name, frames):
    for each in frames:
        flat = each["gradient"].flatten().to_numpy()
        engine.apply({name: (each["id"], flat.reshape(len(each["id"]), -1))})


def engine_of(each):
    return ps.Engine(ps.EmbeddingConfig.from_tables([each]))


def rows_of(engine, name):
    return {id_: row.tobytes() for id_, row in enumerate(engine.lookup(name, range(ROWS)))}


def with_sgd(engine, name):
    """An engine with the weights of this one, and other slots."""
    new = engine_of(table(name, optimizer=ps.SGD(0.2)))
    new.load_parameters(name, engine.retrieve_parameters(name)["parameters"])
    return new


class Service:
    """``penstock serve``, which is killed now and then, and started again by the same command."""

    def __init__(self, folder, config, rng):
        self.folder, self.config, self.rng = folder, config, rng
        self.address = f"grpc://127.0.0.1:{free_port()}"
        self.running = None

    def start(self, flags):
        words = ("--listen", self.address, "--checkpoint", self.folder, "--every", 3, "--resume", *flags)
        self.words = (self.config, *words)
        if flags:  # killed in the middle of its change, or before, or after
            trial = started("serve", *self.words)
            time.sleep(self.rng.uniform(0, 2.5))
            trial.kill()
            trial.communicate(timeout=HANG_S)
        self.running = Process(*self.words)
        assert self.running.uri is not None, self.running.wait()[2]

    def restart(self):
        self.running.process.kill()
        self.running.wait()
        self.running = Process(*self.words)

    def stop(self):
        if self.rng.random() < 0.5:
            self.running.process.kill()
            self.running.wait()
        else:
            self.running.end(signal.SIGTERM)


@pytest.mark.sampled("0")
@pytest.mark.parametrize("seed", range(4))
def test_a_redis_follower_equals_tables_that_change_under_producers_and_kills(seed, tmp_path):
    rng, folder, config = random.Random(seed), tmp_path / "c", tmp_path / "tables.pbtxt"
    service = Service(folder, config, rng)
    first_names, oracle = {}, {"anchor": engine_of(ANCHOR)}
    is_over = []
    with open_store("redis", tmp_path) as store:

        def follow():
            return started(
                "follow", service.address, "--into", store.target, "--interval", "0.02", "--patience", HANG_S
            )

        def feed_anchor():
            with connect(service.address, patience_s=HANG_S) as client:
                number = 0
                while not is_over:
                    number += 1
                    client.put([frame("anchor", number, 4)], "anchor", first=number)
            return number

        following = anchor = None
        position = 0
        for flags, tables, fed in CHANGES:
            ps.EmbeddingConfig.from_tables([ANCHOR, *tables]).save(config)
            service.start(flags)
            following, anchor = following or follow(), anchor or in_thread(feed_anchor)
            if flags == ("--rename", "a=z"):
                oracle["z"], first_names["z"] = oracle.pop("a"), "a"
            elif flags == ("--reset-slots", "z"):
                oracle["z"] = with_sgd(oracle["z"], "a")
            elif flags == ("--reset-table", "b"):
                del oracle["b"]
            elif flags == ("--drop-table", "c"):
                del oracle["c"]
            oracle |= {each.name: engine_of(each) for each in tables if each.name not in oracle}
            dim = next(each.dim for each in tables if each.name == fed)
            frames = [frame(fed, position + number, dim) for number in range(12)]

            def feed(frames=frames, first=position + 1):
                with connect(service.address, patience_s=HANG_S) as client:
                    for number, each in enumerate(frames, start=first):
                        client.put([each], "w0", first=number)

            feeding = in_thread(feed)
            time.sleep(rng.uniform(0, 0.2))
            service.restart()
            if rng.random() < 0.5:
                following.kill()
                following.communicate(timeout=HANG_S)
                following = follow()
            feeding()
            position += len(frames)
            loads(oracle[fed], first_names.get(fed, fed), frames)
            assert following.poll() is None, following.communicate()[1]
            if (flags, tables, fed) != CHANGES[-1]:
                service.stop()
        is_over.append(True)
        num_anchor = anchor()
        loads(oracle["anchor"], "anchor", [frame("anchor", number, 4) for number in range(1, num_anchor + 1)])
        with connect(service.address, patience_s=HANG_S) as client:
            client.checkpoint()
            step = client.table("anchor").version.step
            assert step == position + num_anchor
            until(lambda: store.step() == step)
            expected = {name: rows_of(engine, first_names.get(name, name)) for name, engine in oracle.items()}
            for name, rows in expected.items():
                assert {id_: row.tobytes() for id_, row in enumerate(client.table(name).rows)} == rows
            store.tables = tuple(expected)
            assert store.read() == expected
            state = json.loads(store.client.hget("penstock-state", "job"))
            assert set(state["tables"]) == set(expected)
            assert {key.decode() for key in store.client.keys("penstock:*")} == {
                f"penstock:{name}" for name in expected
            }
        following.send_signal(signal.SIGINT)
        following.communicate(timeout=HANG_S)
        service.stop()
    changes = Folder(folder).newest().contents["table_changes"]
    assert [change["number"] for change in changes] == [1, 2, 3, 4, 5]
