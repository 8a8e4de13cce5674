"""Small good inputs that the fuzzer damages: every container and the shapes that take another path through the reader.

The same bytes every time (with the same pyarrow), so that a case is known by its seed and number.
"""

import io
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ipc
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
from google.protobuf import text_format
from ipc import log

import penstock as ps
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

CONFIG = """
table_descriptor {
  name: "user" vocabulary_size: 50 dimension: 4
  optimization_parameters { adagrad {} learning_rate { constant: 0.1 } gradient_accumulation_status: ENABLED }
}
table_descriptor {
  name: "item" vocabulary_size: 20 dimension: 4
  optimization_parameters { stochastic_gradient_descent {} learning_rate { constant: 0.5 } }
}
mode: TRAINING
"""
ENGINE_CONFIG = f"""
tpu_embedding_configuration {{ {CONFIG} }}
table {{ name: "user"
  dynamic {{ key_type: INT64 admit {{ min_count: 2 count: FRAMES forget_after: 20 }} expire {{ after: 9 clock: STEPS }}
    evict {{ by: LFU half_life: 8 }} on_full: REJECT missing: ZERO }} }}
"""
NUM_BATCHES, NUM_ROWS, DIM = 3, 24, 4
LAYOUTS = ("plain", "lists", "dictionary", "views", "nulls", "wide", "example")


@dataclass(frozen=True)
class Seed:
    """One good input. is_config : the configuration rather than the source"""

    name: str
    suffix: str
    content: bytes
    is_config: bool = False
    is_log: bool = False


def all_seeds() -> list[Seed]:
    seeds = []
    for layout in LAYOUTS:
        batches = [batch_of(layout, number) for number in range(NUM_BATCHES)]
        seeds.append(Seed(f"{layout}/stream", ".arrows", stream(batches)))
        seeds.append(Seed(f"{layout}/file", ".arrow", stream(batches, as_file=True)))
        seeds.append(Seed(f"{layout}/log", ".arrows", log(batches), is_log=layout != "example"))
        for codec in ("lz4", "zstd"):
            seeds.append(Seed(f"{layout}/stream-{codec}", ".arrows", stream(batches, compression=codec)))
        seeds.append(Seed(f"{layout}/file-zstd", ".arrow", stream(batches, as_file=True, compression="zstd")))
        if layout != "views":
            for codec, version in (("none", "1.0"), ("snappy", "2.0"), ("zstd", "1.0")):
                seeds.append(Seed(f"{layout}/parquet-{codec}", ".parquet", parquet(batches, codec, version)))
    message = text_format.Parse(CONFIG, TPUEmbeddingConfiguration())
    seeds.append(Seed("config/text", ".pbtxt", CONFIG.encode(), is_config=True))
    seeds.append(Seed("config/engine", ".pbtxt", ENGINE_CONFIG.encode(), is_config=True))
    engine = text_format.Parse(ENGINE_CONFIG, EngineConfig())
    seeds.append(Seed("config/binary", ".pb", message.SerializeToString(), is_config=True))
    seeds.append(Seed("config/engine-binary", ".pb", engine.SerializeToString(), is_config=True))
    return seeds


def batch_of(layout: str, number: int) -> pa.RecordBatch:
    rng = np.random.default_rng([LAYOUTS.index(layout), number])
    flat = pa.array(rng.standard_normal(NUM_ROWS * DIM).astype(np.float32))
    if layout == "example":
        return example_of(rng)
    gradient = pa.FixedSizeListArray.from_arrays(flat, DIM)
    tables = pa.array(["user", "item"] * (NUM_ROWS // 2))
    ids = pa.array(rng.integers(0, 20, NUM_ROWS))
    columns = {"id": ids, "gradient": gradient, "table": tables}
    if layout == "lists":
        offsets = pa.array(np.arange(0, NUM_ROWS * DIM + 1, DIM, dtype=np.int32))
        columns["gradient"] = pa.ListArray.from_arrays(offsets, flat)
    if layout == "dictionary":
        columns["table"] = tables.dictionary_encode()
        columns["contributor"] = pa.array([f"worker {number}"] * NUM_ROWS).dictionary_encode()
    if layout == "views":
        columns["table"] = tables.cast(pa.string_view())
        columns["contributor"] = pa.array([f"a worker with a long name, {number}"] * NUM_ROWS, pa.string_view())
    if layout == "nulls":
        columns["id"] = pa.array([None if row == 7 else row % 20 for row in range(NUM_ROWS)], pa.int32())
        columns["gradient"] = pa.array([None if row == 9 else [0.5] * DIM for row in range(NUM_ROWS)], gradient.type)
    if layout == "wide":
        columns["gradient"] = gradient.cast(pa.list_(pa.float64(), DIM))
        columns["comment"] = pa.array([f"row {row}" for row in range(NUM_ROWS)])
        columns["nested"] = pa.array([{"a": [1, 2], "b": {"c": "d"}}] * NUM_ROWS)
        columns["map"] = pa.array([[("k", 1)]] * NUM_ROWS, pa.map_(pa.utf8(), pa.int32()))
    columns["step"] = pa.array([number] * NUM_ROWS, pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def example_of(rng: np.random.Generator) -> pa.RecordBatch:
    """The other layout: a struct column per feature. This version says in one line that it cannot read it."""
    ids = pa.array([[1, 2]] * NUM_ROWS, pa.list_(pa.int64()))
    flat = pa.array(rng.standard_normal(NUM_ROWS * DIM).astype(np.float32))
    gradient = pa.FixedSizeListArray.from_arrays(flat, DIM)
    return pa.RecordBatch.from_pydict({"watched": pa.StructArray.from_arrays([ids, gradient], ["ids", "gradient"])})


def stream(batches: list[pa.RecordBatch], as_file: bool = False, compression: str | None = None) -> bytes:
    if as_file:
        return ipc.stream(one_dictionary(batches), make=pa.ipc.new_file, compression=compression)
    return ipc.stream(batches, compression=compression)


def one_dictionary(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """An Arrow IPC file may not replace a dictionary."""
    return pa.Table.from_batches(batches).unify_dictionaries().to_batches()


def parquet(batches: list[pa.RecordBatch], compression: str, version: str) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_batches(batches)
    pa.parquet.write_table(table, sink, compression=compression, data_page_version=version, row_group_size=NUM_ROWS)
    return sink.getvalue()


def checkpoint() -> dict[str, bytes]:
    """The files of a checkpoint after the first half of the first log, by name."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.pbtxt")
        config.write_text(ENGINE_CONFIG)
        engine = ps.Engine(ps.EmbeddingConfig.load(config))
        source = Path(folder, "good.arrows")
        source.write_bytes(all_seeds()[0].content)
        engine.run(source, limit=NUM_BATCHES // 2, checkpoint=Path(folder, "run"))
        return {path.name: path.read_bytes() for path in Path(folder, "run").iterdir() if path.name != ".lock"}
