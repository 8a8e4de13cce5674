"""Write this folder: what penstock leaves on disk, in stores and in topics, by the code of commit 0db4065.

    git worktree add ../at_0db4065 0db4065 && cd ../at_0db4065  # and build it
    python …/tests/data/at_0db4065/write.py OUT

It needs the libraries of .ci/neighbours.txt, redis-server and nats-server, and imports the test support modules of the
working directory. The data may never be rewritten: later versions must read what that version wrote, and
tests/test_at_0db4065.py checks that they do. A format that is added later gets a new folder.

Each folder has a configuration, the sources, and what a run over part of them left. ``expected.json`` has, of each, the
state at that moment, and the state after all of the sources, computed by a run that was never interrupted.

static, dynamic, cached  ``replay`` with commits, deltas and a file of bad rows; frames are in the gate
job  commits of two shares: of engines in one process, and of ``replay --ray local``
passes  a replay in passes that was interrupted in the second of them
init  ``replay --out``, to continue with ``--init``
service, stores  ``penstock serve`` with a producer, and every kind of store that followed it
topic  messages of a topic, and positions in it of ``replay`` and ``serve``, from Kafka and NATS
versions  a Delta table and a Lance dataset, and positions in them
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from base64 import b64encode
from pathlib import Path

import pyarrow as pa
from frames import COMPRESSED, GATE, NUM_FRAMES, STATIC_DIMS, STATIC_MOST, STOP, digest, frames_of, static_config
from replays import Replays


class Writer(Replays):
    """Also writes what services and their followers leave, and positions in topics and tables with versions."""

    def service(self):
        from services import Process, connect
        from stores import KEYS, STORES, config_of, frame, opened, rows_of

        frames = [frame(step) for step in range(40)]
        os.makedirs("service")
        config_of().save("service/tables.pbtxt")
        with pa.ipc.new_stream("service/frames.arrows", frames[0].schema, options=COMPRESSED) as file:
            for each in frames:
                file.write_batch(each)
        saving = ["--checkpoint", "service/commits", "--every", 4, "--num-required", 2]
        with contextlib.ExitStack() as stack:
            serving = stack.enter_context(Process("service/tables.pbtxt", *saving))
            client = stack.enter_context(connect(serving.uri, patience_s=60))
            os.makedirs("stores/function")
            stores = {}
            for kind in STORES:
                os.makedirs(f"stores/{kind}")
                stores[kind] = stack.enter_context(opened(kind, Path(f"stores/{kind}")))
            targets = {kind: ["--into", store.target] for kind, store in stores.items()}
            targets["function"] = ["--into", "operator:is_", "--state", "stores/function/state.json"]
            for end in (0, 20, 31):  # tables, deltas, and a frame that is in the gate
                client.put(frames[:end], "w0", first=1)
                for target in targets.values():
                    done = self.penstock("follow", serving.uri, *target, "--once")
                    assert done["step"] == end // 2
                    assert done["anew"] == (end == 0)
            self.messages_of(stores["kafka"])
            self.hashes_of(stores["redis"])
            code, _, error = serving.end(signal.SIGTERM)
            assert code == 130, error
            engine = self.ps.Engine.restore("service/commits")
            assert engine.session.positions.producers == {"w0": 31}
            assert engine.session.positions.lineage
            rows = rows_of(engine)
            assert 0 < len(rows["user"]) <= KEYS
            for kind, store in stores.items():
                assert (store.step(), store.read()) == (15, rows), kind
        for path in Path("stores/redis").iterdir():  # the server's files; its rows are in redis.json
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.rmtree("stores/redis")
        shutil.rmtree("stores/kafka")
        Path("stores/lmdb/rows.lmdb-lock").unlink()
        engine.run(iter(frames[31:]))
        self.expected["service"] = {
            "step": 15,
            "producers": {"w0": 31},
            "lineage": engine.session.positions.lineage,
            "rows": digest(rows),
            "resumed": engine.state_hash(),
            "resumed_step": engine.global_step,
            "resumed_rows": digest(rows_of(engine)),
        }
        whole = self.ps.Engine(config_of(), num_required=2)
        whole.run(iter(frames))
        assert whole.state_hash() == engine.state_hash()

    def messages_of(self, store):
        """The messages of the topic, in the order of each partition."""
        results = [
            {
                "partition": message.partition(),
                "key": _text(message.key()),
                "value": _text(message.value()),
                "headers": [[name, _text(value)] for name, value in message.headers() or []],
            }
            for message in store.messages()
        ]
        Path("stores/kafka.json").write_text("\n".join(map(json.dumps, results)) + "\n")

    def hashes_of(self, store):
        """The hashes of the database, by their names."""
        results = {
            key.decode(): [[_text(field), _text(value)] for field, value in sorted(store.client.hgetall(key).items())]
            for key in sorted(store.client.keys())
        }
        assert list(results) == ["penstock-state", "penstock:item", "penstock:user"]
        Path("stores/redis.json").write_text(json.dumps(results, indent=0) + "\n")

    # ---- positions in a topic, and in tables with versions

    def topic(self):
        from brokers import MockKafka, Nats, message_of

        messages = [message_of(frame) for frame in frames_of(STATIC_DIMS, STATIC_MOST)]
        os.makedirs("topic")
        static_config(self.ps).save("topic/tables.pbtxt")
        # NATS has one sequence, Kafka two partitions that take turns.
        table = pa.table({"message": messages})
        with pa.ipc.new_stream("topic/messages.arrows", table.schema, options=COMPRESSED) as file:
            file.write_table(table)
        words = ["replay", "topic/tables.pbtxt"]
        with MockKafka() as cluster:
            import confluent_kafka as kafka

            producer = kafka.Producer({"bootstrap.servers": cluster.brokers})
            for number, message in enumerate(messages):
                producer.produce("gradients", message, partition=number % 2)
            producer.flush(60)
            uri = f"kafka://{cluster.brokers}/gradients"
            saving = ["--checkpoint", "topic/kafka", "--every", 1, "--limit", STOP]
            self.penstock(*words, uri, *GATE, "--merge", "round", *saving)
            self.check("topic", [*words, uri], *GATE, "--merge", "round", commits="kafka")
            self.serving(
                "topic/kafka-service",
                "--kafka",
                uri,
                {"kafka/gradients/0": 12, "kafka/gradients/1": 12},
            )
        Path("server").mkdir()
        with Nats(Path("server")) as server:
            server.send(*messages)
            saving = ["--checkpoint", "topic/nats", "--every", 1, "--limit", STOP]
            self.penstock(*words, server.uri, *GATE, *saving)
            self.check("topic", [*words, server.uri], *GATE, commits="nats")
        shutil.rmtree("server")
        Path("server").mkdir()
        with Nats(Path("server")) as server:
            server.send(*messages[:STOP])
            self.serving("topic/nats-service", "--nats", server.uri, {"nats/gradients": STOP})
        shutil.rmtree("server")

    def serving(self, folder, flag, uri, producers):
        from limits import until
        from services import Process, connect

        saving = ["--checkpoint", folder, "--every", 4, *GATE]
        with (
            Process("topic/tables.pbtxt", flag, uri, *saving) as serving,
            connect(serving.uri, patience_s=60) as client,
        ):
            until(lambda: all(client.position(name) == last for name, last in producers.items()))
            code, _, error = serving.end(signal.SIGTERM)
            assert code == 130, error
        engine = self.ps.Engine.restore(folder)
        assert engine.session.positions.producers == producers
        self.expected[folder] = {
            "step": engine.global_step,
            "pending": engine.gate.num_accumulated,
            "restored": engine.state_hash(),
        }

    def versions(self):
        import deltalake
        import lance

        frames = frames_of(STATIC_DIMS, STATIC_MOST)
        os.makedirs("versions")
        static_config(self.ps).save("versions/tables.pbtxt")
        for number, first in enumerate(range(0, NUM_FRAMES, 8)):
            rows = pa.Table.from_batches(frames[first : first + 8]).combine_chunks()
            deltalake.write_deltalake("versions/rows.delta", rows, mode="append")
            lance.write_dataset(rows, "versions/rows.lance", mode="append" if number else "create")
        for kind in ("delta", "lance"):
            words = ["replay", "versions/tables.pbtxt", f"{kind}:versions/rows.{kind}"]
            self.penstock(*words, *GATE, "--checkpoint", f"versions/{kind}", "--every", 1, "--limit", STOP)
            self.check("versions", words, *GATE, commits=kind)


def _text(data):
    return None if data is None else b64encode(data).decode()


def main(out):
    sys.path.insert(0, os.path.abspath("tests"))
    os.makedirs(out)
    os.chdir(out)
    writer = Writer()
    for write in (
        writer.replays,
        writer.shares,
        writer.passes,
        writer.service,
        writer.topic,
        writer.versions,
        writer.ray,
    ):
        print(write.__name__, flush=True)
        write()
    Path("expected.json").write_text(json.dumps(writer.expected, indent=2, sort_keys=True) + "\n")
    for path in [*Path().rglob(".lock"), *Path().rglob("__pycache__")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(sys.argv[1])
