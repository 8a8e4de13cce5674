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
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

import numpy as np
import pyarrow as pa

NUM_FRAMES, STOP = 24, 17  # frames of a log, and where a run ends for the first time: one frame is in the gate
GATE = ("--num-required", 3)
DYNAMIC = ("visitor", "session")
COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


# ---- what the frames are


def batch_of(rows):
    """rows : (table, step, contributor, id, gradient, time)"""
    types = (pa.string(), pa.int64(), pa.string(), pa.int64(), pa.list_(pa.float32()), pa.int64())
    names = ("table", "step", "contributor", "id", "gradient", "time")
    columns = zip(*rows, strict=True)
    return pa.record_batch([pa.array(column, kind) for column, kind in zip(columns, types, strict=True)], names)


def frames_of(dims, most):
    """Frames of three workers, one of which is stale once. dims, most : of each table, and how many ids it has"""
    frames = []
    for number in range(NUM_FRAMES):
        step, worker = divmod(number, 3)
        rng, rows = np.random.default_rng(number), []
        for name, dim in dims.items():
            for _ in range(5):
                id_ = int(rng.zipf(1.3)) % most[name] + (3 * step if name in DYNAMIC else 0)
                id_ = id_ * 0x9E3779B97F4A7C15 % 2**62 if name in DYNAMIC else id_
                values = rng.standard_normal(dim).astype(np.float32)
                rows.append((name, max(0, step - 3 * (number == 14)), f"w{worker}", id_, values, 1000 + 60 * step))
        frames.append(batch_of(rows))
    return frames


def damaged(frames):
    """The frames, with a row in two of them whose id is out of range."""
    found = list(frames)
    for number in (4, 19):
        ids = pa.array([-1, *frames[number]["id"].to_pylist()[1:]], pa.int64())
        found[number] = frames[number].set_column(frames[number].schema.get_field_index("id"), "id", ids)
    return found


def static_config(ps):
    return ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(90, 4, name="user", optimizer=ps.Adagrad(0.1)),
            ps.TableConfig(40, 2, name="item", optimizer=ps.Adam(0.05)),
            ps.TableConfig(5, 3, name="group", optimizer=ps.SGD(0.5, use_gradient_accumulation=False)),
        ]
    )


def dynamic_config(ps, visitors=48, visitor_dim=4):
    visitor = ps.Dynamic(min_count=2, expire_after=3, evict="lru")
    session = ps.Dynamic(clock="time", expire_after=200, evict="lfu", half_life=120)
    return ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(40, 2, name="item", optimizer=ps.Adam(0.05)),
            ps.TableConfig(visitors, visitor_dim, name="visitor", optimizer=ps.Adagrad(0.1), dynamic=visitor),
            ps.TableConfig(48, 3, name="session", optimizer=ps.RowWiseAdagrad(0.1), dynamic=session),
        ]
    )


STATIC_DIMS, STATIC_MOST = {"user": 4, "item": 2, "group": 3}, {"user": 90, "item": 40, "group": 5}
DYNAMIC_DIMS, DYNAMIC_MOST = {"item": 2, "visitor": 4, "session": 3}, {"item": 40, "visitor": 60, "session": 60}


# ---- what the writer and the test share


def digest(rows):
    """Return the digest of a store. rows : table → id → the bytes of its row"""
    hashed = hashlib.sha256()
    for table, of_table in sorted(rows.items()):
        for id_, row in sorted(of_table.items()):
            hashed.update(f"{table}\0{id_}\0".encode() + row)
    return hashed.hexdigest()


def read_frames(path):
    with pa.ipc.open_stream(Path(path).read_bytes()) as reader:
        return list(reader)


def text(data):
    return None if data is None else b64encode(data).decode()


# ---- the folders


class Writer:
    """Writes into the working directory. expected : of each folder"""

    def __init__(self):
        import penstock as ps

        self.ps, self.expected = ps, {}

    def penstock(self, *words, code=0):
        command = [sys.executable, "-m", "penstock", *map(str, words), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == code, (words, done.stderr)
        return json.loads(done.stdout)

    def sources(self, folder, config, frames):
        from penstock.io.log import LogWriter

        os.makedirs(folder)
        config.save(f"{folder}/tables.pbtxt")
        with LogWriter(f"{folder}/log.arrows", frames[0].schema) as log:
            for frame in frames:
                log.write(frame)
        return ["replay", f"{folder}/tables.pbtxt", f"{folder}/log.arrows"]

    def check(self, folder, words, *flags, commits="commits"):
        """Record the state of a checkpoint, and that of all of its sources, to which resuming a copy must lead."""
        engine = self.ps.Engine.restore(f"{folder}/{commits}")
        whole = self.penstock(*words, *flags)
        shutil.copytree(f"{folder}/{commits}", "copy")
        again = self.penstock(*words, *flags, "--checkpoint", "copy", "--resume")
        shutil.rmtree("copy")
        assert again["state_hash"] == whole["state_hash"] != engine.state_hash(), folder
        self.expected[f"{folder}/{commits}"] = {
            "step": engine.global_step,
            "pending": engine.gate.num_accumulated,
            "skipped": again["skipped"],
            "restored": engine.state_hash(),
            "resumed": whole["state_hash"],
        }

    def replays(self):
        from cached import cached
        from cached import config_of as cached_config
        from cached import log_of as cached_log

        static, dynamic = frames_of(STATIC_DIMS, STATIC_MOST), frames_of(DYNAMIC_DIMS, DYNAMIC_MOST)
        logs = {
            "static": (static_config(self.ps), damaged(static)),
            "dynamic": (dynamic_config(self.ps), damaged(dynamic)),
            "cached": (cached_config(cached(0.1)), cached_log(steps=5, rows=10)),
        }
        for folder, (config, frames) in logs.items():
            words = self.sources(folder, config, frames)
            gate = ("--num-required", 2) if folder == "cached" else GATE
            stop = 7 if folder == "cached" else STOP
            form = ["--deltas-slots", "all"]
            bad = ["--on-bad-row", f"quarantine={folder}/bad.arrows"]
            saving = ["--checkpoint", f"{folder}/commits", "--every", 1, "--limit", stop]
            self.penstock(*words, *gate, *saving, *form, "--deltas", f"{folder}/deltas.arrows", *bad)
            assert list(Path(folder, "commits").glob("*.delta"))
            self.check(folder, words, *gate, "--on-bad-row", "drop")
            self.initial(folder, words, gate)

    def initial(self, folder, words, gate):
        """``--out`` of a replay that begins at the first frame, and one that begins at its tables."""
        self.penstock(*words, *gate, "--on-bad-row", "drop", "--limit", 12, "--out", f"init/{folder}")
        found = self.penstock(*words, *gate, "--on-bad-row", "drop", "--init", f"init/{folder}")
        self.expected[f"init/{folder}"] = {"resumed": found["state_hash"]}

    def shares(self):
        from sharing import LocalJob

        frames = frames_of(DYNAMIC_DIMS | {"visitor": 1}, DYNAMIC_MOST)
        config = dynamic_config(self.ps, 8192, 1)  # two virtual shards, so that both shares have keys
        words = self.sources("job", config, frames)
        job = LocalJob(config, 2, num_required=3)
        job.run(words[2:], limit=7).commit("job/shares")
        job = LocalJob(config, 2, "job/shares")
        job.run(words[2:], limit=STOP - 7).commit("job/shares")
        self.check("job", words, *GATE, "--merge", "round", commits="shares")

    def ray(self):
        words = ["replay", "job/tables.pbtxt", "job/log.arrows"]
        saving = ["--checkpoint", "job/ray", "--every", 2, "--limit", STOP]
        self.penstock(*words, *GATE, *saving, "--ray", "local", "--shares", 2)
        assert {path.name[8:14] for path in Path("job/ray").glob("*.base")} == {"-0of2.", "-1of2."}
        self.check("job", words, *GATE, "--merge", "round", commits="ray")

    def passes(self):
        from penstock.cli import main
        from penstock.passes.multi_pass import MultiPass

        words = self.sources("passes", static_config(self.ps), frames_of(STATIC_DIMS, STATIC_MOST)[:20])
        flags = [
            *GATE,
            "--passes",
            3,
            "--checkpoint",
            "passes/commits",
            "--every",
            1,
            "--deltas",
            "passes/deltas.arrows",
        ]
        before = MultiPass._progress

        def progress(replay, number):
            def interrupt(counters, gate, done):
                if number == 1 and counters.frames == STOP:
                    raise KeyboardInterrupt

            return interrupt

        MultiPass._progress = progress
        with contextlib.redirect_stdout(io.StringIO()):
            assert main([*map(str, [*words, *flags]), "--json"]) == 130
        MultiPass._progress = before
        assert Path("passes/commits/.passes/replay.json").exists()
        whole = self.penstock(*words, *GATE)["state_hash"]
        shutil.copytree("passes", "before")
        assert self.penstock(*words, *flags, "--resume")["state_hash"] == whole
        shutil.rmtree("passes")
        os.rename("before", "passes")
        self.expected["passes"] = {"resumed": whole}

    # ---- a service and its followers

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
        found = [
            {
                "partition": message.partition(),
                "key": text(message.key()),
                "value": text(message.value()),
                "headers": [[name, text(value)] for name, value in message.headers() or []],
            }
            for message in store.messages()
        ]
        Path("stores/kafka.json").write_text("\n".join(map(json.dumps, found)) + "\n")

    def hashes_of(self, store):
        """The hashes of the database, by their names."""
        found = {
            key.decode(): [[text(field), text(value)] for field, value in sorted(store.client.hgetall(key).items())]
            for key in sorted(store.client.keys())
        }
        assert list(found) == ["penstock-state", "penstock:item", "penstock:user"]
        Path("stores/redis.json").write_text(json.dumps(found, indent=0) + "\n")

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
