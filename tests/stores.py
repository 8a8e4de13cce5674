"""What the tests of ``penstock follow`` share: a job with a static and a dynamic table, and stores that they read."""

import json
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from brokers import MockKafka, server_path
from dynamic import churning_steps, physical
from limits import until
from services import free_port

import penstock as ps

DIM, ITEMS, KEYS = 4, 30, 32
STEPS = churning_steps(200)


def config_of(item_dim=DIM, key_type="uint64"):
    """A static table and a dynamic one, whose keys come and go."""
    dynamic = ps.Dynamic(min_count=2, expire_after=9, evict="lru", key_type=key_type)
    tables = [
        ps.TableConfig(ITEMS, item_dim, name="item", optimizer=ps.Adagrad(0.1)),
        ps.TableConfig(KEYS, DIM, name="user", optimizer=ps.Adagrad(0.1), dynamic=dynamic),
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def frame(step, keys=None):
    """The frame of one step, the same in every test: rows of both tables."""
    keys = STEPS[step % len(STEPS)].view(np.uint64) if keys is None else np.array(keys, np.uint64)
    items = np.arange(step, step + 5, dtype=np.uint64) % np.uint64(ITEMS)
    values = np.random.default_rng(step).standard_normal((len(items) + len(keys), DIM)).astype(np.float32)
    return pa.record_batch(
        {
            "table": ["item"] * len(items) + ["user"] * len(keys),
            "id": pa.array(np.concatenate([items, keys])),
            "gradient": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), DIM),
        }
    )


def rows_of(engine):
    """table → id → the bytes of its row, as the engine has them."""
    items = {id_: row.tobytes() for id_, row in enumerate(engine.lookup("item", range(ITEMS)))}
    users = {key: np.array(row, np.float32).tobytes() for key, row in physical(engine).items()}
    return {"item": items, "user": users}


class Redis:
    """A Redis server of its own that syncs every write. read : with redis-py, as a serving system would"""

    extra = "redis"

    def __init__(self, folder, *options):
        self.redis = pytest.importorskip("redis")
        self.server = server_path("redis-server")
        self.folder, self.port, self.options = folder, free_port(), options
        self.target = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self):
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [self.server, "--port", str(self.port), "--bind", "127.0.0.1", *durable, *self.options],
            stdout=subprocess.DEVNULL,
        )
        self.client = self.redis.Redis(port=self.port)
        until(self._answers)

    def _answers(self):
        try:
            return self.client.ping()
        except self.redis.exceptions.AuthenticationError:
            return True
        except self.redis.exceptions.RedisError:
            return False

    def kill(self):
        self.process.kill()
        self.process.wait()

    def read(self):
        return {
            name: {int(id_): row for id_, row in self.client.hgetall(f"penstock:{name}").items()}
            for name in ("item", "user")
        }

    def step(self):
        return int(self.client.hget("penstock-state", "step"))

    def close(self):
        self.client.close()
        self.kill()


class Lmdb:
    extra = "lmdb"

    def __init__(self, folder):
        self.lmdb = pytest.importorskip("lmdb")
        self.path = folder / "rows.lmdb"
        self.target = f"lmdb:{self.path}"

    def _read(self, name):
        with self.lmdb.open(str(self.path), subdir=False, max_dbs=8, readonly=True) as env:
            database = env.open_db(name, create=False)
            with env.begin(db=database) as txn:
                return dict(txn.cursor())

    def read(self):
        return {
            name: {int.from_bytes(key, "big"): row for key, row in self._read(b"rows/" + name.encode()).items()}
            for name in ("item", "user")
        }

    def step(self):
        return int(self._read(b"penstock")[b"step"])

    def close(self):
        pass


class _OfRows:
    """A store that reads as an Arrow table with the columns table, id and row."""

    def read(self):
        found = {"item": {}, "user": {}}
        for row in self.table().to_pylist():
            id_ = row["id"] % 2**64
            assert id_ not in found[row["table"]]
            found[row["table"]][id_] = np.array(row["row"], np.float32).tobytes()
        return found

    def close(self):
        pass


class Lance(_OfRows):
    extra = "lance"

    def __init__(self, folder):
        self.lance = pytest.importorskip("lance")
        self.path = str(folder / "rows.lance")
        self.target = f"lance:{self.path}"

    def table(self):
        return self.lance.dataset(self.path).to_table()

    def step(self):
        dataset = self.lance.dataset(self.path)
        return int(dataset.read_transaction(dataset.version).transaction_properties["penstock.step"])


class Delta(_OfRows):
    extra = "delta"

    def __init__(self, folder):
        self.deltalake = pytest.importorskip("deltalake")
        self.path = str(folder / "rows.delta")
        self.target = f"delta:{self.path}"

    def table(self):
        return self.deltalake.DeltaTable(self.path).to_pyarrow_table()

    def step(self):
        table = self.deltalake.DeltaTable(self.path)
        return table.transaction_version(json.loads(table.metadata().description)["writer"])


class Parquet:
    extra = None

    def __init__(self, folder):
        self.path = folder / "rows"
        self.target = f"parquet:{self.path}"

    def read(self):
        found = {}
        for name in ("item", "user"):
            read = pa.parquet.read_table(self.path / "current" / f"{name}.parquet")
            rows = zip(read["id"].to_pylist(), read["row"].to_pylist(), strict=True)
            found[name] = {id_: np.array(row, np.float32).tobytes() for id_, row in rows}
        return found

    def step(self):
        return int(Path(self.path / "current").readlink().name.split("-")[1])

    def close(self):
        pass


class Kafka:
    """A topic of librdkafka's mock cluster, read as a consumer of a log-compacted topic would."""

    extra = "kafka"

    def __init__(self, folder):
        self.kafka = pytest.importorskip("confluent_kafka")
        self.cluster = MockKafka()
        self.target = f"kafka://{self.cluster.brokers}/rows"
        producer = self.kafka.Producer({"bootstrap.servers": self.cluster.brokers})
        until(lambda: producer.list_topics("rows", timeout=60).topics["rows"].partitions)  # creates it

    def messages(self):
        """The messages of all partitions, each in order."""
        settings = {"bootstrap.servers": self.cluster.brokers, "group.id": "reader", "enable.partition.eof": "true"}
        consumer = self.kafka.Consumer(settings)
        numbers = consumer.list_topics("rows").topics["rows"].partitions
        consumer.assign([self.kafka.TopicPartition("rows", number, 0) for number in numbers])
        found, ended = [], set()
        while len(ended) < len(numbers):
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                found.append(message)
            elif message is not None:
                assert message.error().code() == self.kafka.KafkaError._PARTITION_EOF
                ended.add(message.partition())
        consumer.close()
        return found

    def read(self):
        found = {"item": {}, "user": {}}
        for message in self.messages():
            table, _, id_ = message.key().decode().rpartition("/")
            if message.value() is None:
                found[table].pop(int(id_), None)
            elif table:
                found[table][int(id_)] = message.value()
        return found

    def step(self):
        return max(int(dict(of.headers())["penstock.step"]) for of in self.messages() if of.key() == b"penstock")

    def close(self):
        self.cluster.close()


STORES = {"redis": Redis, "kafka": Kafka, "lmdb": Lmdb, "lance": Lance, "delta": Delta, "parquet": Parquet}


@contextmanager
def opened(kind, folder):
    store = STORES[kind](folder)
    try:
        yield store
    finally:
        store.close()
