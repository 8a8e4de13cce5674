"""What apply takes, parameters, tables and the hash: in and out of an engine."""

import numpy as np
import pytest
from engines import engine_of, frame, zeroed

import penstock as ps

# ---- what apply takes, parameters in and out


def test_loaded_parameters_are_retrieved_unchanged():
    engine = engine_of(ps.Adagrad(0.1))
    rows, slots = np.arange(20.0).reshape(10, 2), np.arange(20.0, 40).reshape(10, 2)
    engine.load_parameters("t", rows, accumulators=slots)
    state = engine.retrieve_parameters("t")
    assert list(state) == ["parameters", "accumulators"]
    assert state["parameters"].tolist() == rows.tolist()
    assert np.asarray(engine.slots("t")["accumulators"]).tolist() == slots.tolist()
    engine.load_parameters("t", [[7, 7]], ids=[3], accumulators=[[8, 8]])
    assert engine.lookup("t", [3, 4, 3]).tolist() == [[7, 7], [8, 9], [7, 7]]


def test_parameters_that_do_not_fit_are_refused_by_name():
    engine = engine_of(ps.Adagrad(0.1))
    rows = np.zeros((10, 2))
    with pytest.raises(ps.UsageError, match="expected the slots accumulators; got none"):
        engine.load_parameters("t", rows)
    with pytest.raises(ps.UsageError, match=r"accumulators: expected shape \(10, 2\), got \(9, 2\)"):
        engine.load_parameters("t", rows, accumulators=rows[1:])
    with pytest.raises(ps.UsageError, match=r"accumulators: expected floats of shape \(10, 2\), got <U1"):
        engine.load_parameters("t", rows, accumulators=[["x"]])
    with pytest.raises(ps.UsageError, match="table 't', parameters: expected values that are finite as float32"):
        engine.load_parameters("t", rows + 1e39, accumulators=rows)
    with pytest.raises(ps.UsageError, match="table 't', ids: expected an array, got lists of several lengths"):
        engine.lookup("t", [[1], [1, 2]])
    with pytest.raises(ps.UsageError, match="occurs twice"):
        engine.load_parameters("t", rows[:2], ids=[1, 1], accumulators=rows[:2])
    with pytest.raises(ps.UsageError, match="expected 0 <= id < 10, got 10"):
        engine.lookup("t", [0, 10])
    with pytest.raises(ps.UsageError, match="no table 'x'"):
        engine.table("x")
    with pytest.raises(ps.UsageError, match="no table"):
        engine.lookup(["t"], [0])


def test_tables_written_and_read_again_are_the_same_state(tmp_path):
    engine = engine_of(ps.Adagrad(0.1), tables=("t", "a/b"))
    engine.apply({"t": frame([1, 2]), "a/b": frame([3])})
    engine.write_tables(tmp_path)
    other = engine_of(ps.Adagrad(0.1), tables=("t", "a/b"), seed=9)
    other.read_tables(tmp_path)
    assert (other.global_step, engine.global_step) == (0, 1)
    for name in ("t", "a/b"):
        for key, value in engine.retrieve_parameters(name).items():
            assert other.retrieve_parameters(name)[key].tobytes() == value.tobytes()


def test_tables_that_cannot_be_read_at_all_leave_the_engine_as_it_was(tmp_path):
    engine = engine_of(tables=("t", "u"))
    before = engine.state_hash()
    for folder, message in (
        (tmp_path / "no", "no such file or folder"),
        (tmp_path / "half", "no file for table 'u'"),
    ):
        if folder.name == "half":
            engine_of().write_tables(folder)
        with pytest.raises(ps.InputError, match=message):
            engine.read_tables(folder)
    assert engine.state_hash() == before
    assert engine.apply({"t": frame([1])})


def test_a_bad_row_inside_a_table_leaves_an_engine_that_refuses_use(tmp_path):
    engine_of(rows=20).write_tables(tmp_path)
    engine = engine_of(rows=10)
    with pytest.raises(ps.InputError, match="expected 0 <= id < 10"):
        engine.read_tables(tmp_path)
    with pytest.raises(ps.StateError, match="failed half way"):
        engine.lookup("t", [1])


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        (None, "expected a mapping table → .* got NoneType"),
        ({"t": (np.array([1]),)}, r"expected a mapping table → \(ids, gradients\), got 1 values for 't'"),
        ({"t": 3}, "got int for 't'"),
        ({"t": ([1, 2], [[1.0], [1.0, 2.0]])}, r"apply\('t'\): expected an array"),
    ],
)
def test_gradients_of_a_wrong_form_are_refused(gradients, message):
    engine = engine_of()
    with pytest.raises(ps.PenstockError, match=message):
        engine.apply(gradients)
    assert engine.apply({"t": frame([1])})


def test_a_contributor_is_a_number_or_a_name_and_nothing_else_touches_the_gate(tmp_path):
    engine = engine_of(num_required=2)
    with pytest.raises(ps.UsageError, match="contributor: expected an int, a str or None, got list"):
        engine.apply({"t": frame([1])}, contributor=["a"])
    assert engine.apply({"t": frame([1])}, contributor=np.int64(7))
    engine.save(tmp_path / "saved")
    assert "7: 1" in ps.Engine.restore(tmp_path / "saved").gate.explain()


def test_tables_are_written_all_or_none(tmp_path, monkeypatch):
    engine = zeroed(engine_of(tables=("t", "u")))
    engine.write_tables(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    engine.apply({"t": frame([1]), "u": frame([1])})

    def full(part):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine.core.tables._tables["u"], "stream", full)
    with pytest.raises(OSError, match="No space"):
        engine.write_tables(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_hash_sees_every_part_of_the_state():
    engine = zeroed(engine_of(ps.Adagrad(0.1, initial_accumulator_value=1.0)))
    seen = {engine.state_hash()}
    engine.load_parameters("t", [[0, 0]], ids=[9], accumulators=[[1, 2]])
    seen.add(engine.state_hash())
    engine.load_parameters("t", [[0, 1e-30]], ids=[9], accumulators=[[1, 2]])
    seen.add(engine.state_hash())
    engine.apply({})
    seen.add(engine.state_hash())
    assert len(seen) == 4


def test_other_starts_than_the_default():
    tables = [
        ps.TableConfig(10, 2, name="rows", initializer=lambda shape, dtype: np.arange(20).reshape(shape).astype(dtype)),
        ps.TableConfig(10, 2, name="t"),
    ]
    config = ps.EmbeddingConfig.from_tables(tables, ps.SGD(0.1))
    assert ps.Engine(config).lookup("rows", [3]).tolist() == [[6, 7]]
    proto = engine_of().config.to_engine_proto()
    settings = proto.table.add(name="t")
    settings.constant.value = 2.5
    assert ps.Engine(ps.EmbeddingConfig.from_proto(proto)).lookup("t", [0]).tolist() == [[2.5, 2.5]]
    settings.uniform.min, settings.uniform.max = 3.0, 4.0
    drawn = ps.Engine(ps.EmbeddingConfig.from_proto(proto)).retrieve_parameters("t")["parameters"]
    assert drawn.min() >= 3
    assert drawn.max() < 4
    assert len(np.unique(drawn)) == 20


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda e: e.apply([1]), "gradients: expected a mapping"),
        (lambda e: e.apply({"t": np.array([1])}), "gradients: expected a mapping"),
        (lambda e: e.apply({"t": frame([1])}, local_step=99.5), "local_step: expected a whole number, got 99.5"),
        (lambda e: e.apply({"t": frame([1])}, local_step=True), "local_step: expected a whole number, got True"),
        (lambda e: e.apply({"t": frame([1])}, local_step=2**80), "local_step: expected an int64"),
        (lambda e: e.run([], limit=1.5), "limit: expected a whole number, got 1.5"),
        (lambda e: e.run([], limit=-1), "limit: expected at least 0"),
    ],
)
def test_calls_with_wrong_arguments_say_which(call, problem):
    engine = engine_of()
    with pytest.raises(ps.UsageError, match=problem):
        call(engine)
    assert engine.gate.num_accumulated == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_required": 0}, "num_required: expected at least 1"),
        ({"num_required": "3"}, "num_required: expected a whole number, got '3'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"mesh": 4}, "mesh: expected a jax.sharding.Mesh, got int"),
        ({"reduction": "max"}, "reduction: expected 'mean' or 'sum'"),
        ({"threads": 0}, "threads: expected at least 1"),
    ],
)
def test_engine_arguments_out_of_range(options, problem):
    with pytest.raises(ps.UsageError, match=problem):
        engine_of(**options)
