"""The optimizers of our own whose rate depends on the step: in an engine, across commits, in native code and Python."""

import numpy as np
import pyarrow as pa
import pytest
from device_table import stepped
from engines import config_of, parts_of, same

import penstock as ps

ROWS, DIM = 40, 4
DECAYING = ps.TorchAdagrad(0.5, lr_decay=0.25)
CORRECTED = ps.PartialRowWiseAdam(0.125)
BOTH = pytest.mark.parametrize("optimizer", [DECAYING, CORRECTED], ids=["decaying", "corrected"])


def batches(steps):
    for step in steps:
        rng = np.random.default_rng(step)
        ids = np.sort(rng.permutation(ROWS)[:12])
        grads = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(12 * DIM, np.float32)), DIM)
        yield pa.RecordBatch.from_pydict({"id": ids, "gradient": grads, "step": np.full(12, step)})


def engine_of(optimizer, **options):
    return ps.Engine(config_of(optimizer, dim=DIM, rows=ROWS), seed=3, **options)


@BOTH
@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])  # rows of the last one share lines, as on a TPU
def test_each_step_has_its_own_rate(optimizer, variant, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    engine, rng = engine_of(optimizer), np.random.default_rng(0)
    spec, wanted = engine.config.table("t"), parts_of(engine)
    for step in range(4):
        ids, grads = rng.permutation(ROWS)[:9], rng.standard_normal((9, DIM), np.float32)
        wanted = stepped(spec.rule, spec.rule.rate_at(spec.learning_rate, step), wanted, ids, grads)
        engine.apply({"t": (ids, grads)})
    assert same(parts_of(engine), wanted)


@BOTH
def test_frames_of_a_stream_have_the_rates_of_their_steps(optimizer):
    """As those of tables that native code updates with one rate for many steps."""
    streamed, applied = engine_of(optimizer), engine_of(optimizer)
    streamed.run(batches(range(9)))
    for batch in batches(range(9)):
        grads = batch["gradient"].flatten().to_numpy().reshape(-1, DIM)
        applied.apply({"t": (batch["id"].to_numpy(), grads)})
    assert streamed.state_hash() == applied.state_hash()


@BOTH
def test_a_resumed_run_continues_with_the_rate_of_its_step(optimizer, tmp_path):
    whole, part = engine_of(optimizer), engine_of(optimizer)
    whole.run(batches(range(9)))
    part.run(batches(range(4)), checkpoint=tmp_path)
    resumed = ps.Engine.restore(tmp_path)
    resumed.run(batches(range(9)), checkpoint=tmp_path, resume=True)
    assert resumed.state_hash() == whole.state_hash()


def test_tables_of_one_rate_and_different_decays_are_updated_apart():
    tables = [
        ps.TableConfig(ROWS, DIM, name=name, optimizer=ps.TorchAdagrad(0.5, lr_decay=decay))
        for name, decay in (("fast", 1.0), ("slow", 0.0))
    ]
    together = ps.Engine(ps.EmbeddingConfig.from_tables(tables), variant="xla")
    alone = {table.name: ps.Engine(ps.EmbeddingConfig.from_tables([table]), variant="xla") for table in tables}
    rng = np.random.default_rng(0)
    for _ in range(3):
        rows = {table.name: (rng.permutation(ROWS)[:9], rng.standard_normal((9, DIM), np.float32)) for table in tables}
        together.apply(rows)
        for name, engine in alone.items():
            engine.apply({name: rows[name]})
    assert all(same(parts_of(together, name), parts_of(engine, name)) for name, engine in alone.items())


def test_the_second_moment_has_one_column_everywhere(tmp_path):
    engine = engine_of(CORRECTED)
    engine.run(batches(range(3)), checkpoint=tmp_path / "c")
    parts = engine.retrieve_parameters("t")
    assert [(name, part.shape[1]) for name, part in parts.items()] == [
        ("parameters", DIM),
        ("exp_avg", DIM),
        ("exp_avg_sq", 1),
    ]
    engine.write_tables(tmp_path / "out")
    other = engine_of(CORRECTED)
    other.read_tables(tmp_path / "out")
    assert same(parts_of(other), parts.values())
    assert same(parts_of(ps.Engine.restore(tmp_path / "c")), parts.values())
    (delta,) = engine.stage(batches([3]), slots=True)
    assert {len(values) for values in delta["exp_avg"].to_pylist()} == {DIM}
    assert {len(values) for values in delta["exp_avg_sq"].to_pylist()} == {1}
