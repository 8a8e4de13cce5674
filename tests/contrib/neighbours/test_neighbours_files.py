"""Files that other libraries write, replayed: the result is that of Arrow's own table.

Each runs where its library is installed; docs/sources.md lists the containers of each.
"""

import itertools
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet
import pytest
from neighbours import state_of


def plain_tables(gradients):
    """Without dictionaries."""
    return gradients.set_column(1, "table", gradients["table"].cast(pa.string()))


IPC_CODECS = ["uncompressed", "lz4", "zstd"]
PARQUET_CODECS = ["uncompressed", "snappy", "gzip", "zstd", "lz4", "brotli"]


@pytest.mark.parametrize("codec", IPC_CODECS)
@pytest.mark.parametrize("columns", ["fixed lists, categories", "lists, strings"])
def test_ipc_files_and_streams_of_polars(gradients, expected, tmp_path, columns, codec):
    pl = pytest.importorskip("polars")
    frame = pl.from_arrow(gradients)
    if columns == "lists, strings":
        frame = frame.with_columns(pl.col("gradient").cast(pl.List(pl.Float32)), pl.col("table").cast(pl.String))
    frame.write_ipc(tmp_path / "a.arrow", compression=codec)
    frame.write_ipc(tmp_path / "b.arrow", compression=codec, record_batch_size=33)
    frame.write_ipc(tmp_path / "c.arrow", compression=codec, compat_level=pl.CompatLevel.oldest())
    frame.lazy().sink_ipc(tmp_path / "d.arrow", compression=codec)
    frame.write_ipc_stream(tmp_path / "e.arrows", compression=codec)
    for name in ("a.arrow", "b.arrow", "c.arrow", "d.arrow", "e.arrows"):
        assert state_of(tmp_path / name) == expected


@pytest.mark.parametrize("codec", PARQUET_CODECS)
def test_parquet_files_of_polars(gradients, expected, tmp_path, codec):
    pl = pytest.importorskip("polars")
    frame = pl.from_arrow(gradients)
    frame.write_parquet(tmp_path / "a.parquet", compression=codec, row_group_size=64)
    frame.lazy().sink_parquet(tmp_path / "b.parquet", compression=codec)
    assert state_of(tmp_path / "a.parquet") == expected
    assert state_of(tmp_path / "b.parquet") == expected


@pytest.mark.parametrize("arrow_types", [False, True])
def test_feather_and_parquet_files_of_pandas(gradients, expected, tmp_path, arrow_types):
    pd = pytest.importorskip("pandas")
    frame = gradients.to_pandas(types_mapper=pd.ArrowDtype) if arrow_types else gradients.to_pandas()
    for codec in IPC_CODECS:
        frame.to_feather(tmp_path / f"{codec}.feather", compression=codec)
        assert state_of(tmp_path / f"{codec}.feather") == expected
    for codec in PARQUET_CODECS:
        frame.to_parquet(tmp_path / f"{codec}.parquet", compression=None if codec == "uncompressed" else codec)
        assert state_of(tmp_path / f"{codec}.parquet") == expected


@pytest.mark.parametrize("version", ["V1", "V2"])
def test_parquet_files_of_duckdb(gradients, expected, tmp_path, version):
    duckdb = pytest.importorskip("duckdb").connect()
    duckdb.register("log", gradients)
    for codec in PARQUET_CODECS:
        path = tmp_path / f"{codec}.parquet"
        duckdb.execute(f"copy log to '{path}' (format parquet, compression {codec}, parquet_version {version})")
        assert state_of(path) == expected


def test_a_folder_of_parquet_files_of_duckdb(gradients, expected, tmp_path):
    duckdb = pytest.importorskip("duckdb").connect()
    duckdb.register("log", gradients)
    duckdb.execute(f"copy log to '{tmp_path / 'log'}' (format parquet, per_thread_output true)")
    assert state_of(tmp_path / "log") == expected


def test_ipc_streams_of_nanoarrow(gradients, expected, tmp_path):
    ipc = pytest.importorskip("nanoarrow.ipc")
    with ipc.StreamWriter.from_path(tmp_path / "log.arrows") as writer:
        writer.write_stream(plain_tables(gradients))
    assert state_of(tmp_path / "log.arrows") == expected


SPARK = """
import sys
from pyspark.sql import SparkSession

source, target, *codecs = sys.argv[1:]
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
for codec in codecs:
    spark.read.parquet(source).coalesce(1).write.option("compression", codec).parquet(f"{target}/{codec}")
"""


def test_folders_of_parquet_files_of_spark(gradients, expected, tmp_path):
    pytest.importorskip("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs java")
    codecs = ["none", "snappy", "gzip", "zstd", "lz4_raw"]
    pa.parquet.write_table(plain_tables(gradients), tmp_path / "log.parquet", store_schema=False)
    command = [sys.executable, "-c", SPARK, str(tmp_path / "log.parquet"), str(tmp_path), *codecs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    for codec in codecs:
        assert (tmp_path / codec / "_SUCCESS").exists()
        assert state_of(tmp_path / codec) == expected


@pytest.mark.parametrize("codec", [None, "lz4", "zstd"])
def test_ipc_files_and_streams_of_arrow(gradients, expected, tmp_path, codec):
    old = [{"use_legacy_format": True}, {"metadata_version": pa.ipc.MetadataVersion.V4}]  # which compress nothing
    for number, more in enumerate([{}, *([] if codec else old)]):
        options = pa.ipc.IpcWriteOptions(compression=codec, **more)
        for suffix, make in ((".arrow", pa.ipc.new_file), (".arrows", pa.ipc.new_stream)):
            path = tmp_path / f"{number}{suffix}"
            with make(str(path), gradients.schema, options=options) as writer:
                writer.write_table(gradients, max_chunksize=60)
            assert state_of(path) == expected
    pa.feather.write_feather(gradients, tmp_path / "log.feather", compression=codec or "uncompressed")
    assert state_of(tmp_path / "log.feather") == expected


@pytest.mark.parametrize("codec", PARQUET_CODECS)
def test_parquet_files_of_arrow(gradients, expected, tmp_path, codec):
    path, codec = tmp_path / "log.parquet", "none" if codec == "uncompressed" else codec
    for version, pages in itertools.product(("1.0", "2.4", "2.6"), ("1.0", "2.0")):
        pa.parquet.write_table(gradients, path, compression=codec, version=version, data_page_version=pages)
        assert state_of(path) == expected


@pytest.mark.parametrize("container", ["ipc", "parquet"])
def test_a_folder_of_arrow_files(gradients, expected, tmp_path, container):
    pa.dataset.write_dataset(gradients, tmp_path / "log", format=container, preserve_order=True)
    assert state_of(tmp_path / "log") == expected
