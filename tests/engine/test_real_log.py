"""A real gradient log (skip-gram over Shakespeare), replayed through the engine against plain NumPy."""

import io
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from ipc import stream
from oracle import adagrad_step, coalesce, ulps

from penstock.config.embedding import EmbeddingConfig
from penstock.config.tables import TableConfig
from penstock.engine import Engine
from penstock.updates import Adagrad

LR, DIM, WORDS = 0.1, 8, 1083
COLUMNS = {"gradient": "grad"}
MODES = list(itertools.product([1, 3], ["mean", "sum"], [("center",), ("center", "context")]))


@pytest.fixture
def log(shared):
    return pa.ipc.open_stream(shared("realdata/shakespeare_words.arrows")).read_all()


def config_of(tables):
    return EmbeddingConfig.from_tables([TableConfig(WORDS, DIM, name=t) for t in tables], Adagrad(LR))


def only(log, tables):
    names = log["table"].cast(pa.string())
    return log.filter(pa.compute.is_in(names, pa.array(tables)))


def frames_of(log):
    """[{table: [(id, gradient row), …]}, …] by step, straight from Python lists."""
    frames = {}
    grads = np.stack(log["grad"].to_numpy())
    for row, (step, table, i) in enumerate(
        zip(log["step"].to_pylist(), log["table"].to_pylist(), log["id"].to_pylist(), strict=True)
    ):
        frames.setdefault(step, {}).setdefault(table, []).append((i, grads[row]))
    return [frames[step] for step in sorted(frames)]


@pytest.mark.parametrize(("num_required", "reduction", "tables"), MODES)
def test_every_step_equals_a_plain_numpy_loop_row_for_row(log, num_required, reduction, tables):
    frames = frames_of(only(log, tables))
    engine = Engine(config_of(tables), num_required=num_required, reduction=reduction)
    drained = spy_on_steps(engine)
    for start in range(0, len(frames) - num_required + 1, num_required):
        group = frames[start : start + num_required]
        before = {t: engine.retrieve_parameters(t) for t in tables}
        engine.run([batch_of(start + n, frame) for n, frame in enumerate(group)])
        for table in tables:
            wanted = coalesce([frame.get(table, []) for frame in group], reduction)
            got = dict(zip(drained[table][0].tolist(), drained[table][1], strict=True))
            assert list(got) == list(wanted)
            assert all(got[i].tobytes() == wanted[i].tobytes() for i in wanted)  # coalesced sums: exactly
            weights, accumulators = before[table]["parameters"], before[table]["accumulators"]
            updates = adagrad_step(weights, accumulators, wanted, LR)
            after = engine.retrieve_parameters(table)
            scale = np.abs(weights)
            for i, update in updates.items():
                scale[i] = np.maximum(scale[i], update)
            # The promise is 2 ULP of max(|w|, |update|) on any backend; on a CPU it is equality.
            assert ulps(after["parameters"], weights, scale).max() <= 2
            assert after["parameters"].tobytes() == weights.tobytes()
            assert after["accumulators"].tobytes() == accumulators.tobytes()
    assert engine.global_step == len(frames) // num_required


def batch_of(step, frame):
    """One frame as a record batch, from the oracle's lists."""
    rows = [(table, i, g) for table, rows in frame.items() for i, g in rows]
    return pa.record_batch(
        {
            "step": pa.array([step] * len(rows), pa.int64()),
            "table": pa.array([table for table, _, _ in rows]),
            "id": pa.array([i for _, i, _ in rows]),
            "gradient": pa.array([g.tolist() for _, _, g in rows], pa.list_(pa.float32(), DIM)),
        }
    )


def spy_on_steps(engine):
    """What every step hands to the tables, by table: the coalesced ids and sums of the latest."""
    seen, apply = {}, engine.core.tables.apply

    def spy(coalesced, rates, step):
        for name, (rows,) in ((name, rows) for name, rows in coalesced.items() if rows):
            seen[name] = tuple(np.concatenate(of) for of in zip(*rows.parts, strict=True))
        apply(coalesced, rates, step)

    engine.core.tables.apply = spy
    return seen


def hash_of(source, tables, mesh=None, threads=None, num_required=1, reduction="mean", **reading):
    engine = Engine(config_of(tables), mesh, num_required=num_required, reduction=reduction, threads=threads)
    engine.run(source, columns=COLUMNS, **reading)
    return engine.state_hash()


@pytest.mark.parametrize(("num_required", "reduction", "tables"), MODES)
def test_the_hash_depends_on_no_device_count_and_no_thread_count(log, mesh_of, num_required, reduction, tables):
    source = only(log, tables)
    hashes = {
        hash_of(source, tables, mesh_of(devices), threads, num_required, reduction)
        for devices in (1, 2, 3, 4, 8)
        for threads in (1, 2)
    }
    assert len(hashes) == 1


@pytest.mark.parametrize(("num_required", "reduction", "tables"), MODES)
def test_the_hash_depends_on_no_record_batch_boundary(log, num_required, reduction, tables):
    source = only(log, tables)
    wanted = hash_of(source, tables, None, None, num_required, reduction)
    rng = np.random.default_rng(5)
    for most in (1 if num_required == 3 else 7, 100, 5000):
        cuts = np.cumsum(rng.integers(1, most + 1, 500))  # what is left then is one batch
        cuts = [0, *cuts[cuts < len(source)].tolist(), len(source)]
        batches = [source.slice(a, b - a).combine_chunks().to_batches()[0] for a, b in itertools.pairwise(cuts)]
        assert hash_of(batches, tables, None, None, num_required, reduction) == wanted


@pytest.mark.parametrize(("num_required", "reduction", "tables"), MODES)
def test_the_hash_depends_on_no_container(log, tmp_path, num_required, reduction, tables):
    source = only(log, tables)
    for name, make in (("a.arrows", pa.ipc.new_stream), ("a.arrow", pa.ipc.new_file)):
        (tmp_path / name).write_bytes(stream(source.to_batches(), make=make))
    pq.write_table(source, tmp_path / "a.parquet", row_group_size=999)
    files = [tmp_path / "a.arrows", tmp_path / "a.arrow", tmp_path / "a.parquet"]
    pipes = [io.BytesIO(path.read_bytes()) for path in files]
    hashes = {hash_of(s, tables, None, None, num_required, reduction) for s in [*files, *pipes]}
    assert len(hashes) == 1


def test_the_command_line_gives_the_same_hash_and_writes_the_tables(log, shared, tmp_path, call):
    tables = ("center", "context")
    config_of(tables).save(tmp_path / "c.pbtxt")
    path = shared("realdata/shakespeare_words.arrows")
    flags = ["--column", "gradient=grad", "--out", tmp_path / "out"]
    _, report = call(0, "replay", tmp_path / "c.pbtxt", path, *flags)
    engine = Engine(config_of(tables))
    engine.run(path, columns=COLUMNS)
    assert report["state_hash"] == engine.state_hash()
    assert (report["rows"], report["steps"], report["tables"]["center"]["rows"]) == (20988, 28, 10494)
    written = pq.read_table(tmp_path / "out" / "context.parquet")
    assert written["id"].to_pylist() == list(range(WORDS))
    state = engine.retrieve_parameters("context")
    assert np.stack(written["row"].to_numpy()).tobytes() == state["parameters"].tobytes()
    assert np.stack(written["accumulators"].to_numpy()).tobytes() == state["accumulators"].tobytes()
