"""Support for tests of ``penstock follow``: a job with a static and a dynamic table, and the stores of its rows."""

import datetime
import json
import shutil
import subprocess
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import function_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from batches import batch
from brokers import MockKafka, Tansu, server_path
from dynamic import churning_steps, physical
from limits import until
from services import free_port

import penstock as ps
from penstock.model.row_encodings import ENCODINGS
from penstock.serving.followers.target_kinds import open_target

DIM, ITEMS, KEYS = 4, 30, 32
STEPS = churning_steps(200)
DYNAMIC = ps.Dynamic(min_count=2, expire_after=9, evict="lru", key_type="uint64")


def config_of(item_dim=DIM, key_type="uint64"):
    """Return a job of a static table, and of a dynamic one whose keys are admitted and evicted."""
    dynamic = replace(DYNAMIC, key_type=key_type)
    tables = [
        ps.TableConfig(ITEMS, item_dim, name="item", optimizer=ps.Adagrad(0.1)),
        ps.TableConfig(KEYS, DIM, name="user", optimizer=ps.Adagrad(0.1), dynamic=dynamic),
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def frame(step, keys=None):
    """Return the frame of one step, with rows of both tables. It is the same in every test."""
    keys = STEPS[step % len(STEPS)].view(np.uint64) if keys is None else np.array(keys, np.uint64)
    items = np.arange(step, step + 5, dtype=np.uint64) % np.uint64(ITEMS)
    values = np.random.default_rng(step).standard_normal((len(items) + len(keys), DIM)).astype(np.float32)
    tables = ["item"] * len(items) + ["user"] * len(keys)
    return batch(pa.array(np.concatenate([items, keys])), values, table=tables)


def rows_of(engine, rows="float32"):
    """Return table → id → the bytes of the row in the engine, stored as ``rows``."""
    stored, encoding = _rows_of(engine), ENCODINGS[rows]
    dims = {spec.name: spec.dim for spec in engine.config.tables}
    return {
        name: {
            id_: encoding.encode(np.frombuffer(row, np.float32).reshape(1, dims[name])).tobytes()
            for id_, row in table.items()
        }
        for name, table in stored.items()
    }


def _rows_of(engine):
    rows = {}
    for name, spec in ((spec.name, spec) for spec in engine.config.tables):
        if spec.dynamic is None:
            rows[name] = {
                id_: row.tobytes() for id_, row in enumerate(engine.lookup(name, range(spec.vocabulary_size)))
            }
        else:
            rows[name] = {key: np.array(row, np.float32).tobytes() for key, row in physical(engine, name).items()}
    return rows


def bytes_of(row):
    """Return the bytes of a row that a store has as a list of floats, or as the bytes of an encoded one."""
    return row if isinstance(row, bytes) else np.array(row, np.float32).tobytes()


class _Store:
    """The base of the stores.

    Subclasses implement these methods with the store's client library or with its files, not with penstock:

    read : returns table → id → the bytes of the row
    snapshot, set_back : return a copy of the contents, and return to it
    empty : removes the contents

    step : returns the step of the position
    flags : of ``penstock follow``, besides the target
    tables : names of those to read
    is_optimistic : whether a transaction compares the position in the store without holding a lock
    """

    flags: tuple = ()
    tables = ("item", "user")
    is_optimistic = False

    def open_target(self):
        return open_target(self.target)

    def position(self):
        """Return the epoch and the step in the store, as penstock reads them; None: the store has no position."""
        target = self.open_target()
        stored = target.stored()
        target.close()
        return stored and (stored.version.epoch, stored.version.step)


class _FileStore(_Store):
    """A store that is a file or a folder at ``path``."""

    num_snapshots = 0

    def snapshot(self):
        self.num_snapshots += 1
        copy = Path(f"{self.path}-{self.num_snapshots}")
        _copy(Path(self.path), copy)
        return copy

    def set_back(self, copy):
        """Replace the file or the folder by a copy."""
        new = Path(f"{self.path}-new")
        _copy(copy, new)
        self.empty()
        if new.exists():
            new.rename(self.path)

    def empty(self):
        path = Path(self.path)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)

    def close(self):
        pass


def _copy(path, new):
    if path.is_dir():
        shutil.copytree(path, new, symlinks=True)
    elif path.exists():
        shutil.copy(path, new)


class Redis(_Store):
    """A dedicated Redis server that syncs every write. redis-py reads it, as in a serving system."""

    extra = "redis"
    is_optimistic = True

    def __init__(self, folder, *options):
        self.redis = pytest.importorskip("redis")
        self.server = server_path("redis-server")
        self.folder, self.port, self.options = folder, free_port(), options
        self.target = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self):
        durability_flags = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(self.folder)]
        self.process = subprocess.Popen(
            [self.server, "--port", str(self.port), "--bind", "127.0.0.1", *durability_flags, *self.options],
            stdout=subprocess.DEVNULL,
        )
        self.client = self.redis.Redis(port=self.port)
        until(self._answers)

    def _answers(self):
        assert self.process.poll() is None, "redis-server has ended: its output says why"
        try:
            return self.client.ping()
        except self.redis.exceptions.AuthenticationError:
            return True
        except self.redis.exceptions.RedisError:
            return False

    def kill(self):
        self.client.close()  # ``start`` connects another one
        self.process.kill()
        self.process.wait()

    def read(self):
        return {
            name: {int(id_): row for id_, row in self.client.hgetall(f"penstock:{name}").items()}
            for name in self.tables
        }

    def step(self):
        return int(self.client.hget("penstock-state", "step"))

    def snapshot(self):
        self.client.save()
        return (self.folder / "dump.rdb").read_bytes()

    def set_back(self, snapshot):
        """Restart from a snapshot, as after a failover to a replica that is behind. Needs ``--appendonly no``."""
        self.kill()
        (self.folder / "dump.rdb").write_bytes(snapshot)
        self.start()

    def empty(self):
        self.client.flushall()

    def close(self):
        self.kill()


class Lmdb(_FileStore):
    """An LMDB environment."""

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
            for name in self.tables
        }

    def step(self):
        return int(self._read(b"penstock")[b"step"])


class _ArrowTableStore(_FileStore):
    """A store whose ``table`` returns an Arrow table with the columns table, id and row."""

    def read(self):
        results = {name: {} for name in self.tables}
        for row in self.table().to_pylist():
            id_ = row["id"] % 2**64  # an int64 id has the bits of a uint64 key
            assert id_ not in results[row["table"]]
            results[row["table"]][id_] = np.array(row["row"], np.float32).tobytes()
        return results

    def step(self):
        return self.position()[1]

    def path_exists(self):
        return Path(self.path).exists()


class Lance(_ArrowTableStore):
    """A Lance dataset."""

    extra = "lance"
    is_optimistic = True

    def __init__(self, folder):
        self.lance = pytest.importorskip("lance")
        self.path = str(folder / "rows.lance")
        self.target = f"lance:{self.path}"

    def table(self):
        return self.lance.dataset(self.path).to_table()

    first_version = 1

    def version(self):
        return self.lance.dataset(self.path).version

    def restore(self, version):
        """Return to a version with Lance's ``restore``."""
        self.lance.dataset(self.path, version=version).restore()

    def compact(self):
        self.lance.dataset(self.path).optimize.compact_files()

    def remove_row(self):
        """Remove a row as another program would."""
        self.lance.dataset(self.path).delete("`table` = 'item' AND id = 3")

    def forget(self):
        """Remove the old versions."""
        self.lance.dataset(self.path).cleanup_old_versions(datetime.timedelta(0))


class Delta(_ArrowTableStore):
    """A Delta Lake table."""

    extra = "delta"
    is_optimistic = True

    def __init__(self, folder):
        self.deltalake = pytest.importorskip("deltalake")
        self.path = str(folder / "rows.delta")
        self.target = f"delta:{self.path}"

    def table(self):
        return self.deltalake.DeltaTable(self.path).to_pyarrow_table()

    first_version = 0

    def version(self):
        return self.deltalake.DeltaTable(self.path).version()

    def restore(self, version, by_time=False):
        """Return to a version with Delta Lake's ``restore``."""
        table = self.deltalake.DeltaTable(self.path)
        if by_time:
            # Rounded up to a millisecond, because an earlier time would select the version before.
            written_ns = Path(self.path, "_delta_log", f"{version:020}.json").stat().st_mtime_ns
            begin = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
            version = begin + datetime.timedelta(milliseconds=written_ns // 1_000_000 + 1)
        table.restore(version)

    def compact(self):
        self.deltalake.DeltaTable(self.path).optimize.compact()

    def remove_row(self):
        """Remove a row as another program would."""
        self.deltalake.DeltaTable(self.path).delete("\"table\" = 'item' AND id = 3")

    def forget(self):
        """Remove the old versions from the log."""
        table = self.deltalake.DeltaTable(self.path)
        table.create_checkpoint()
        for version in range(table.version()):
            Path(self.path, "_delta_log", f"{version:020}.json").unlink()


class Parquet(_FileStore):
    """Parquet files in a folder."""

    extra = None

    def __init__(self, folder):
        self.path = folder / "rows"
        self.target = f"parquet:{self.path}"

    def read(self):
        results = {}
        for name in self.tables:
            read = pa.parquet.read_table(self.path / "current" / f"{name}.parquet")
            rows = zip(read["id"].to_pylist(), read["row"].to_pylist(), strict=True)
            results[name] = {id_: bytes_of(row) for id_, row in rows}
        return results

    def step(self):
        return int(Path(self.path / "current").readlink().name.split("-")[1])


class Shared(_FileStore):
    """Files of this machine, which penstock's reader maps: there is no other one. rows : the dtype that it reads"""

    extra = None
    rows = "float32"

    def __init__(self, folder):
        self.path = folder / "rows"
        self.target = f"shared:{self.path}"

    def read(self):
        with ps.Reader(self.path, dtype=self.rows) as reader:
            ids = {
                layout.name: np.arange(layout.num_rows) if layout.keys is None else reader.keys(layout.name)
                for layout in reader.layouts
            }
            rows = reader.lookup(ids, consistent=True)
        return {name: {int(id_): row.tobytes() for id_, row in zip(ids[name], rows[name], strict=True)} for name in ids}

    def step(self):
        with ps.Reader(self.path) as reader:
            return reader.version.step


class Kafka(_Store):
    """A topic of librdkafka's mock cluster. A consumer reads it as a log-compacted topic."""

    extra = "kafka"

    def __init__(self, folder):
        self.kafka = pytest.importorskip("confluent_kafka")
        self.cluster = MockKafka()
        self.producer = self.kafka.Producer({"bootstrap.servers": self.cluster.brokers})
        self.use_topic("rows")

    def use_topic(self, topic):
        """Create a topic, and make it the target."""
        self.topic, self.target = topic, f"kafka://{self.cluster.brokers}/{topic}"
        until(lambda: self.producer.list_topics(topic, timeout=60).topics[topic].partitions)

    def messages(self):
        """Return the messages of all partitions, in order within each partition."""
        settings = {"bootstrap.servers": self.cluster.brokers, "group.id": "reader", "enable.partition.eof": "true"}
        settings["fetch.wait.max.ms"] = "10"
        consumer = self.kafka.Consumer(settings)
        numbers = consumer.list_topics(self.topic).topics[self.topic].partitions
        consumer.assign([self.kafka.TopicPartition(self.topic, number, 0) for number in numbers])
        results, ended = [], set()
        while len(ended) < len(numbers):
            message = consumer.poll(1.0)
            if message is not None and message.error() is None:
                results.append(message)
            elif message is not None:
                assert message.error().code() == self.kafka.KafkaError._PARTITION_EOF
                ended.add(message.partition())
        consumer.close()
        return results

    def read(self):
        results = {}
        for message in self.messages():
            table, _, id_ = message.key().decode().rpartition("/")
            if table and message.value() is None:
                results.get(table, {}).pop(int(id_), None)
            elif table:
                results.setdefault(table, {})[int(id_)] = message.value()
        return {name: {} for name in self.tables} | {name: rows for name, rows in results.items() if rows}

    def step(self):
        return self.position()[1]

    def position(self):
        marks = [json.loads(message.value()) for message in self.messages() if message.key() == b"penstock"]
        # Earlier versions wrote marks without an epoch: they are of the first one, "0".
        return (marks[-1].get("epoch", "0"), marks[-1]["step"]) if marks else None

    def close(self):
        self.cluster.close()


class KafkaOfTansu(Kafka):
    """A topic of a Tansu broker."""

    def __init__(self, folder):
        self.cluster = Tansu()
        self.kafka = self.cluster.kafka
        self.use_topic("rows")

    def use_topic(self, topic):
        self.topic, self.target = topic, f"kafka://{self.cluster.brokers}/{topic}"
        self.cluster.create(topic)


class Function(_Store):
    """A function in this process, and the file with its position."""

    extra = None
    target = "function_rows:update"

    def __init__(self, folder):
        self.state = folder / "state.json"
        self.flags = ("--state", self.state)
        function_rows.rows.clear()

    def open_target(self):
        return open_target(self.target, self.state)

    def read(self):
        tables = {name: {} for name in self.tables}
        for (table, id_), row in function_rows.rows.items():
            tables[table][id_] = bytes_of(row)
        return tables

    def step(self):
        return self.position()[1]

    def snapshot(self):
        return dict(function_rows.rows), self.state.read_text() if self.state.exists() else None

    def set_back(self, snapshot):
        rows, state = snapshot
        self.empty()
        function_rows.rows.update(rows)
        if state is not None:
            self.state.write_text(state)

    def empty(self):
        function_rows.rows.clear()
        with suppress(FileNotFoundError):
            self.state.unlink()

    def close(self):
        pass


STORES = {"redis": Redis, "kafka": Kafka, "lmdb": Lmdb, "lance": Lance, "delta": Delta, "parquet": Parquet}
STORES |= {"shared": Shared}
STORES_AND_FUNCTION = {**STORES, "function": Function}


@contextmanager
def open_store(kind, folder, *options):
    """A store of a kind, closed at the end."""
    store = STORES_AND_FUNCTION[kind](folder, *options)
    try:
        yield store
    finally:
        store.close()
