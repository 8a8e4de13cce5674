"""synth: the log is as requested, fits the configuration next to it, and is the same every time."""

import itertools

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

import penstock as ps
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.synth import SynthOptions, write_synthetic
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.updates import Adagrad


def write(path, **options):
    return write_synthetic(path, SynthOptions(**{"rows": 1000, "rows_per_step": 300, "vocabulary": 50, **options}))


def table_in(path):
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path)
    opened = pa.ipc.open_file(path) if path.suffix in (".arrow", ".feather") else pa.ipc.open_stream(path)
    return opened.read_all()


def columns(path):
    """ids, steps and gradients as numpy; gradients flat."""
    table = table_in(path).combine_chunks()
    flat = table["gradient"].combine_chunks().flatten()
    return table["id"].to_numpy(), table["step"].to_numpy(), flat.to_numpy()


def frames(written, **options):
    """The frames of the log, each validated against the configuration next to it."""
    sizes = EmbeddingConfig.load(written.config).sizes
    return list(FrameReader(written.log, ReadOptions(sizes=sizes, **options)))


# ---- the same every time


@pytest.mark.parametrize("suffix", [".arrows", ".arrow", ".parquet"])
@pytest.mark.parametrize("distribution", ["zipf", "uniform", "dlrm"])
def test_the_same_options_give_the_same_bytes(tmp_path, suffix, distribution):
    logs = [write(tmp_path / f"{name}{suffix}", distribution=distribution) for name in "ab"]
    assert logs[0].log.read_bytes() == logs[1].log.read_bytes()
    assert logs[0].config.read_bytes() == logs[1].config.read_bytes()


def test_rows_do_not_depend_on_how_they_are_cut(tmp_path):
    options = {"rows": 150_000, "dim": 3, "vocabulary": 1000}
    first, many = (columns(write(tmp_path / f"{n}.arrows", rows_per_step=n, **options).log) for n in (150_000, 777))
    assert first[0].tobytes() == many[0].tobytes()
    assert first[2].tobytes() == many[2].tobytes()


def test_a_longer_log_begins_with_the_shorter(tmp_path):
    options = {"tables": 3, "distribution": "dlrm"}
    short, long = (columns(write(tmp_path / f"{n}.arrows", rows=n, **options).log) for n in (900, 1800))
    assert short[0].tobytes() == long[0][:900].tobytes()
    assert short[2].tobytes() == long[2][: len(short[2])].tobytes()


# ---- hashed ids


def keys_by_step(path):
    ids, steps, _ = columns(path)
    return [set(ids[steps == step].tolist()) for step in range(steps.max() + 1)]


def test_hashed_ids_are_int64_of_both_signs_one_per_entry(tmp_path):
    dense, hashed = (columns(write(tmp_path / f"{ids}.arrows", ids=ids).log) for ids in ("dense", "hashed"))
    pairs = set(zip(dense[0].tolist(), hashed[0].tolist(), strict=True))
    assert len(pairs) == len(set(dense[0].tolist())) == len(set(hashed[0].tolist())) == 50
    assert 10 < sum(key < 0 for _, key in pairs) < 40
    assert max(abs(key) for _, key in pairs) > 2**60
    assert dense[2].tobytes() == hashed[2].tobytes()  # the gradients are those of dense ids


def test_the_keys_of_two_tables_and_of_two_seeds_differ(tmp_path):
    options = {"ids": "hashed", "tables": 2, "distribution": "uniform"}
    keys = [set(columns(write(tmp_path / f"{seed}.arrows", seed=seed, **options).log)[0].tolist()) for seed in (0, 1)]
    assert len(keys[0]) == len(keys[1]) == 100
    assert not keys[0] & keys[1]


@pytest.mark.parametrize(("churn", "replaced"), [(0.0, 0), (0.5, 20), (2.0, 80)])
def test_churn_replaces_that_share_of_the_vocabulary_in_even_steps_and_no_key_returns(tmp_path, churn, replaced):
    options = {"rows": 5000, "rows_per_step": 1000, "distribution": "uniform", "ids": "hashed", "churn": churn}
    steps = keys_by_step(write(tmp_path / "log.arrows", **options).log)
    assert all(len(keys) == 50 for keys in steps)  # every entry occurs in every step
    assert len(set().union(*steps)) == 50 + replaced  # in the last of 5 steps, four fifths have been replaced
    for before, after in itertools.pairwise(steps):
        assert len(after - before) == replaced // 4
    for number, keys in enumerate(steps):
        gone = set().union(*steps[:number]) - keys
        assert not gone & set().union(*steps[number:])


def test_hashed_ids_get_dynamic_tables_that_replay_takes(tmp_path):
    written = write(tmp_path / "log.arrows", ids="hashed", churn=1.0, dim=2)
    (spec,) = EmbeddingConfig.load(written.config).tables
    assert (spec.dynamic.evict, spec.vocabulary_size) == ("lru", 63)
    engine = ps.Engine(EmbeddingConfig.load(written.config))
    assert engine.run(written.log).rows == 1000
    assert set(engine.keys("table_0").to_pylist()) <= set(columns(written.log)[0].tolist())


# ---- what was asked for


def test_steps_have_the_rows_asked_for_and_the_last_the_rest(tmp_path):
    _, steps, _ = columns(write(tmp_path / "log.arrows", rows=1000, rows_per_step=300).log)
    assert np.bincount(steps).tolist() == [300, 300, 300, 100]
    assert (np.diff(steps) >= 0).all()


def test_a_batch_holds_one_step_and_a_long_step_is_several_batches(tmp_path):
    log = write(tmp_path / "log.arrows", rows=140_000, rows_per_step=70_000, dim=1).log
    batches = [(b.num_rows, *set(b["step"].to_pylist())) for b in pa.ipc.open_stream(log)]
    assert batches.pop() == (0,)  # the log's closing record
    assert batches == [(65_536, 0), (4_464, 0), (65_536, 1), (4_464, 1)]


def test_gradients_are_normal_with_a_standard_deviation_of_a_hundredth(tmp_path):
    log = write(tmp_path / "log.arrows", rows=20_000, dim=16).log
    values = columns(log)[2]
    assert values.dtype == np.float32
    assert values.std() == pytest.approx(0.01, rel=0.01)
    assert abs(values.mean()) < 1e-4


def test_the_frequent_ids_do_not_lie_side_by_side(tmp_path):
    log = write(tmp_path / "log.arrows", rows=50_000, vocabulary=1000, dim=1).log
    frequent = np.argsort(np.bincount(columns(log)[0], minlength=1000))[::-1][:5]
    assert np.abs(np.diff(np.sort(frequent))).min() > 1


# ---- what fits together


@pytest.mark.parametrize("distribution", ["zipf", "uniform", "dlrm"])
@pytest.mark.parametrize("tables", [1, 3])
def test_the_reader_accepts_every_row_under_the_written_configuration(tmp_path, distribution, tables):
    written = write(tmp_path / "log.arrows", distribution=distribution, tables=tables)
    got = frames(written)
    assert [f.local_step for f in got] == [0, 1, 2, 3]
    assert sum(f.num_rows for f in got) == 1000


def test_the_configuration_trains_every_table_with_adagrad(tmp_path):
    config = EmbeddingConfig.load(write(tmp_path / "log.arrows", tables=2, vocabulary=50, dim=8).config)
    assert config.mode == "TRAINING"
    assert config.sizes == {"table_0": (50, 8), "table_1": (50, 8)}
    assert {table.optimizer for table in config.tables} == {Adagrad(float(np.float32(0.05)))}


def test_one_table_is_named_in_the_metadata_and_several_in_a_column(tmp_path):
    first = table_in(write(tmp_path / "one.arrows").log).schema
    several = table_in(write(tmp_path / "several.arrows", tables=2).log).schema
    assert first.names == ["step", "id", "gradient"]
    assert first.metadata == {b"penstock.table": b"table_0", b"penstock.log": b"1"}
    assert several.names == ["table", "step", "id", "gradient"]
    assert several.field("table").type == pa.dictionary(pa.int32(), pa.utf8())


def test_several_tables_share_the_rows_of_every_step(tmp_path):
    written = write(tmp_path / "log.arrows", tables=4, rows=4000, rows_per_step=1000)
    assert sum(written.rows.values()) == 4000
    assert list(written.rows.values()) == pytest.approx([1000] * 4, rel=0.15)
    assert all(set(f.rows) == set(written.rows) for f in frames(written))


def test_small_steps_reach_every_table(tmp_path):
    written = write(tmp_path / "log.arrows", tables=5, rows=200, rows_per_step=2)
    assert min(written.rows.values()) > 0


def test_the_rows_reported_are_the_rows_written(tmp_path):
    written = write(tmp_path / "log.arrows", distribution="dlrm")
    counted = table_in(written.log)["table"].combine_chunks().value_counts().to_pylist()
    assert {c["values"]: c["counts"] for c in counted} == {n: rows for n, rows in written.rows.items() if rows}


def test_dlrm_has_eight_uneven_tables_of_other_widths(tmp_path):
    written = write(tmp_path / "log.arrows", distribution="dlrm", vocabulary=100_000, rows=8000, dim=7)
    sizes = EmbeddingConfig.load(written.config).sizes
    assert [dim for _, dim in sizes.values()] == [4, 8, 16, 32, 64, 128, 4, 8]
    assert max(size for size, _ in sizes.values()) == 100_000
    assert min(size for size, _ in sizes.values()) == 100
    assert max(written.rows.values()) > 3 * min(written.rows.values())
    assert len({table.alpha for table in written.tables}) == 8


def test_rows_of_tables_whose_widths_differ_are_lists(tmp_path):
    written = write(tmp_path / "log.arrows", distribution="dlrm", tables=2)
    table = table_in(written.log)
    assert table.schema.field("gradient").type == pa.list_(pa.float32())
    lengths = zip(table["table"].to_pylist(), (len(g) for g in table["gradient"].to_pylist()), strict=True)
    assert set(lengths) == {("table_0", 4), ("table_1", 8)}


def test_rows_of_one_width_are_fixed_size_lists(tmp_path):
    written = write(tmp_path / "log.arrows", tables=2, dim=5)
    assert table_in(written.log).schema.field("gradient").type == pa.list_(pa.float32(), 5)


@pytest.mark.parametrize("options", [{}, {"tables": 3}, {"distribution": "dlrm"}])
def test_all_containers_hold_the_same_rows(tmp_path, options):
    stream, *others = (
        write(tmp_path / f"log{s}", **options).log for s in (".arrows", ".arrow", ".feather", ".parquet")
    )
    expected = table_in(stream)
    expected.validate(full=True)
    for other in others:
        assert table_in(other).equals(expected), other
        metadata = {k: v for k, v in expected.schema.metadata.items() if k != b"penstock.log"}
        assert (table_in(other).schema.metadata or {}) == metadata, other


def test_small_steps_make_no_small_row_groups(tmp_path):
    log = write(tmp_path / "log.parquet", rows=1000, rows_per_step=1).log
    assert pa.parquet.ParquetFile(log).num_row_groups == 1


# ---- edges


@pytest.mark.parametrize("suffix", [".arrows", ".arrow", ".parquet"])
def test_no_rows_make_a_whole_log_without_frames(tmp_path, suffix):
    written = write(tmp_path / f"log{suffix}", rows=0)
    assert frames(written) == []


def test_a_vocabulary_of_one_gives_one_id(tmp_path):
    assert set(columns(write(tmp_path / "log.arrows", vocabulary=1).log)[0]) == {0}


def test_a_steep_zipf_gives_one_id(tmp_path):
    assert len(set(columns(write(tmp_path / "log.arrows", alpha=500.0).log)[0])) == 1


def test_the_largest_vocabulary_does_not_wrap(tmp_path):
    ids, _, _ = columns(write(tmp_path / "log.arrows", vocabulary=2**31, distribution="uniform", dim=1).log)
    assert ids.min() >= 0
    assert 2**30 < ids.max() < 2**31


def test_very_wide_rows_are_in_smaller_batches(tmp_path):
    log = write(tmp_path / "log.arrows", rows=600, rows_per_step=600, dim=65_536).log
    assert [b.num_rows for b in pa.ipc.open_stream(pa.memory_map(str(log)))] == [512, 88, 0]
