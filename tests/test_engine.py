"""The Engine from Python: frames, the gate, learning rates, parameters in and out."""

import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import penstock as ps
from penstock.config.optimizers import DynamicLearningRate
from penstock.store import TableStore


def engine_of(optimizer=None, tables=("t",), dim=2, rows=10, **options):
    config = ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(rows, dim, name=t) for t in tables], optimizer or ps.SGD(1.0)
    )
    return ps.Engine(config, **options)


def zeroed(engine, dim=2, rows=10):
    for name in engine.config.table_names:
        slots = {slot: np.full((rows, dim), start, np.float32) for slot, start in engine.config.table(name).slots}
        engine.load_parameters(name, np.zeros((rows, dim)), **slots)
    return engine


def frame(ids, value=1.0, dim=2):
    return np.array(ids), np.full((len(ids), dim), value, np.float32)


def batch(ids, step=None, table=None, value=1.0, dim=2, **columns):
    columns = {
        "id": pa.array(ids, pa.int64()),
        "gradient": pa.array([[value] * dim] * len(ids), pa.list_(pa.float32(), dim)),
    } | columns
    if step is not None:
        columns["step"] = pa.array([step] * len(ids), pa.int64())
    if table is not None:
        columns["table"] = pa.array([table] * len(ids))
    return pa.record_batch(columns)


def column(engine, name="t"):
    return engine.lookup(name, range(10))[:, 0].tolist()


# ---- frames and the gate


def test_repeated_ids_are_summed_and_updated_once():
    engine = zeroed(engine_of(ps.Adagrad(1.0, initial_accumulator_value=0.5)))
    engine.apply({"t": frame([3, 3, 3])})
    assert engine.retrieve_parameters("t")["accumulators"][3].tolist() == [9.5, 9.5]  # (1+1+1)², not 1+1+1
    assert engine.retrieve_parameters("t")["accumulators"][4].tolist() == [0.5, 0.5]


def test_mean_divides_by_the_frames_that_held_the_row_and_sum_does_not():
    for reduction, wanted in (("mean", [-1.5, -4.0]), ("sum", [-3.0, -4.0])):
        engine = zeroed(engine_of(num_required=2, reduction=reduction))
        engine.apply({"t": frame([0, 0], 0.5)})
        engine.apply({"t": (np.array([0, 1]), np.array([[2, 2], [4, 4]], np.float32))})
        assert column(engine)[:2] == wanted


def test_a_frame_without_rows_counts_for_the_gate():
    engine = zeroed(engine_of(num_required=2, tables=("t", "u")))
    engine.apply({})
    engine.apply({"u": frame([1])})
    assert (engine.global_step, column(engine, "u")[1]) == (1, -1.0)


def test_one_gate_for_all_tables():
    engine = zeroed(engine_of(num_required=2, tables=("t", "u")))
    engine.apply({"t": frame([1])})
    assert (engine.gate.num_accumulated, column(engine)[1]) == (1, 0.0)
    engine.apply({"u": frame([1])})
    assert (engine.gate.num_accumulated, column(engine)[1], column(engine, "u")[1]) == (0, -1.0, -1.0)


def test_a_stale_frame_is_dropped_whole_and_counted_and_one_without_a_step_never_is():
    engine = zeroed(engine_of())
    assert engine.apply({"t": frame([0])}, local_step=0)
    assert not engine.apply({"t": frame([0])}, local_step=0)
    assert engine.apply({"t": frame([0])}, local_step=99)  # the future is accepted
    assert engine.apply({"t": frame([0])})
    assert (column(engine)[0], engine.gate.num_stale, engine.global_step) == (-3.0, 1, 3)


def test_what_the_gate_holds_stays_for_the_next_run():
    engine = zeroed(engine_of(num_required=3))
    first = engine.run([batch([0]), batch([0])])
    assert (first.steps, first.pending, column(engine)[0]) == (0, 2, 0.0)
    second = engine.run([batch([0])])
    assert (second.steps, second.pending, column(engine)[0]) == (1, 0, -3.0 / 3)


def test_flush_opens_the_gate_once_more_and_only_if_it_holds_something():
    engine = zeroed(engine_of(num_required=3))
    assert engine.run([batch([0])], flush=True).steps == 1
    assert engine.run([], flush=True).steps == 0
    assert not engine.flush()
    engine.apply({"t": frame([1])})
    assert engine.flush()
    assert (engine.global_step, column(engine)[:2]) == (2, [-1.0, -1.0])


def test_limit_counts_frames_stale_ones_included():
    engine = zeroed(engine_of())
    report = engine.run([batch([0], step=s) for s in (0, 1, 0, 2)], limit=3)
    assert (report.frames, report.stale, report.steps) == (3, 1, 2)
    assert engine.run([batch([0])], limit=0).frames == 0


def test_accumulation_off_applies_every_frame_by_itself_undivided():
    engine = zeroed(engine_of(ps.Adagrad(1.0, 1.0, use_gradient_accumulation=False), num_required=2))
    engine.apply({"t": frame([0, 0], 1.0)})
    engine.apply({"t": frame([0], 2.0)})
    # 1 + 2² after the first frame, + 2² after the second; merged it would be 1 + ((1+1+2)/2)².
    assert engine.retrieve_parameters("t")["accumulators"][0].tolist() == [9.0, 9.0]
    assert engine.global_step == 1


def test_most_frames_stale_is_said_with_what_to_do():
    report = engine_of().run([batch([0], step=0, contributor=pa.array([w])) for w in range(5)])
    assert (report.frames, report.stale) == (5, 4)
    assert "--num-required" in report.notes[0]
    assert "--merge" in report.notes[0]


def test_the_report_counts_rows_tables_and_distinct_ids():
    engine = engine_of(tables=("t", "u"), num_required=2)
    report = engine.run([batch([0, 0, 1], table="t"), batch([2, 3], table="u"), batch([1, 7], table="t")])
    assert (report.rows, report.frames, report.steps, report.pending) == (7, 3, 1, 1)
    assert report.tables == {"t": ps.TableReport(5, 3), "u": ps.TableReport(2, 2)}
    assert report.dropped == {}
    assert not report.verified
    assert report.held_bytes > 0
    again = engine.run([batch([5], table="t")])
    assert (again.rows, again.tables["t"].rows) == (1, 1)


def test_ids_held_from_an_earlier_run_are_not_counted_again():
    engine = engine_of(num_required=3)
    engine.run([batch([0, 1])])
    assert engine.run([batch([1, 2])]).tables["t"] == ps.TableReport(2, 2)
    assert engine.run([], flush=True).tables["t"] == ps.TableReport(0, 0)


def test_gate_settings_of_the_configuration_hold_unless_the_call_says_otherwise():
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(10, 2)], ps.SGD(1.0), num_required=4, reduction="sum")
    engine = ps.Engine(config)
    assert (engine.gate.num_required, engine.reduction) == (4, "sum")
    engine = ps.Engine(config, num_required=2, reduction="mean")
    assert (engine.gate.num_required, engine.reduction) == (2, "mean")


# ---- nothing half applied


def test_a_bad_row_late_in_a_frame_leaves_nothing_of_the_frame_behind():
    good, bad = [batch([0], step=0), batch([1], step=1)], [batch([2] * 50, step=2), batch([99], step=2)]
    engine, other = (zeroed(engine_of(num_required=3)) for _ in range(2))
    with pytest.raises(ps.InputError, match="batch 3, row 0, column 'id': expected 0 <= id < 10") as caught:
        engine.run([*good, *bad])
    assert (caught.value.batch, caught.value.row, caught.value.column) == (3, 0, "id")
    other.run(good)
    assert engine.gate.num_accumulated == other.gate.num_accumulated == 2
    for e in (engine, other):
        e.run([batch([3], step=2)])
    assert engine.state_hash() == other.state_hash()


def test_apply_refuses_a_frame_whole():
    engine = zeroed(engine_of(tables=("t", "u")))
    before = engine.state_hash()
    for bad in ([10], [-1]):
        with pytest.raises(ps.InputError, match="expected 0 <= id < 10"):
            engine.apply({"t": frame([1]), "u": frame(bad)})
    with pytest.raises(ps.InputError, match="expected 2 floats"):
        engine.apply({"t": frame([1], dim=3)})
    with pytest.raises(ps.InputError, match="finite"):
        engine.apply({"t": frame([1], np.nan)})
    with pytest.raises(ps.InputError, match=r"expected a table of the configuration \(t, u\), got 'v'.*unknown_table"):
        engine.apply({"v": frame([1])})
    assert (engine.state_hash(), engine.gate.num_accumulated) == (before, 0)


def test_after_a_step_that_failed_half_way_the_engine_says_so(monkeypatch):
    engine = zeroed(engine_of(tables=("t", "u")))
    monkeypatch.setattr(
        engine._state._tables["u"], "apply_segments", lambda *a: (_ for _ in ()).throw(RuntimeError("device lost"))
    )
    with pytest.raises(RuntimeError, match="device lost"):
        engine.apply({"t": frame([1]), "u": frame([1])})
    for use in (
        lambda: engine.apply({"t": frame([1])}),
        engine.state_hash,
        lambda: engine.lookup("t", [1]),
        lambda: engine.write_tables("never"),
        lambda: engine.load_parameters("t", np.zeros((10, 2))),
    ):
        with pytest.raises(ps.StateError, match=r"failed half way \(RuntimeError: device lost\)"):
            use()


def test_inference_mode_refuses_updates():
    proto = engine_of().config.to_proto()
    proto.mode = 1
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(proto))
    with pytest.raises(ps.ConfigError, match="INFERENCE"):
        engine.apply({"t": frame([1])})
    assert engine.lookup("t", [1]).shape == (1, 2)


# ---- learning rates


def dynamic_engine(tags=2):
    tables = [ps.TableConfig(10, 2, name=f"t{tag}", optimizer=ps.SGD(DynamicLearningRate(tag))) for tag in range(tags)]
    return zeroed(ps.Engine(ps.EmbeddingConfig.from_tables(tables)))


def test_dynamic_rates_come_by_tag_from_the_call():
    engine = dynamic_engine()
    engine.apply({"t0": frame([0]), "t1": frame([0])}, learning_rates=[0.5, 0.25])
    assert (column(engine, "t0")[0], column(engine, "t1")[0]) == (-0.5, -0.25)


def test_the_column_gives_the_rates_of_the_frame_that_opens_the_gate_and_the_call_goes_before_it():
    def with_rates(step, rates):
        return batch([0], step=step, table="t0", learning_rates=pa.array([rates], pa.list_(pa.float32())))

    engine = dynamic_engine()
    report = engine.run([with_rates(0, [1.0, 9.0]), with_rates(1, [2.0, 9.0])])
    assert (column(engine, "t0")[0], report.learning_rates) == (-3.0, (2.0, 9.0))
    report = engine.run([with_rates(2, [1.0, 9.0])], learning_rates={0: 0.5})
    assert (column(engine, "t0")[0], report.learning_rates) == (-3.5, (0.5, 9.0))


def test_a_schedule_is_called_once_per_step_with_the_global_step():
    asked = []

    def schedule(step):
        asked.append(step)
        return 1.0 / (1 + step)

    engine = zeroed(engine_of(ps.SGD(schedule), tables=("t", "u"), num_required=2))
    for _ in range(4):
        engine.apply({"t": frame([0])})
    assert asked == [0, 1]
    assert column(engine)[0] == -1.5


def test_a_callable_without_arguments_is_tensorflows():
    engine = zeroed(engine_of(ps.SGD(lambda: 0.25)))
    engine.apply({"t": frame([0])})
    assert column(engine)[0] == -0.25


def test_a_callable_whose_arguments_have_defaults_is_called_without_any():
    engine = zeroed(engine_of(ps.SGD(lambda rate=0.25: rate)))
    for _ in range(3):
        engine.apply({"t": frame([0])})
    assert column(engine)[0] == -0.75


@pytest.mark.parametrize("gives", [None, "x", 1j, np.array([0.1, 0.2])])
def test_a_schedule_that_gives_no_number_is_named(gives):
    engine = zeroed(engine_of(ps.SGD(lambda: gives)))
    with pytest.raises(ps.ConfigError, match=r"the schedule of tag 0 gave .* at step 0; expected a number"):
        engine.apply({"t": frame([0])})
    assert engine.gate.num_accumulated == 0


@pytest.mark.parametrize(
    ("rates", "error", "says"),
    [
        (None, ps.ConfigError, "dynamic learning rates"),
        ([0.1], ps.UsageError, "expected 2 values"),
        ({2: 0.1}, ps.UsageError, "tags 0 to 1"),
        ([0.1, float("nan")], ps.UsageError, "tag 1: expected a finite number"),
        (["x", 0.1], ps.UsageError, "tag 0: expected a number, got 'x'"),
        ([None, 0.1], ps.UsageError, "tag 0: expected a number, got None"),
        (3.0, ps.UsageError, "expected a sequence or a mapping by tag, got 3.0"),
        ({"a": 1.0}, ps.UsageError, "tag 'a': the configuration has tags 0 to 1"),
        ([0.1, 1e39], ps.UsageError, "tag 1: expected a finite number that fits float32"),
    ],
)
def test_rates_that_are_missing_or_wrong_are_told_before_anything_is_taken_in(rates, error, says):
    engine = dynamic_engine()
    for call in (
        lambda: engine.apply({"t0": frame([0])}, learning_rates=rates),
        lambda: engine.run([batch([0], table="t0")], learning_rates=rates),
    ):
        with pytest.raises(error, match=says):
            call()
    assert engine.gate.num_accumulated == 0
    assert engine.apply({"t0": frame([0])}, learning_rates=[1, 1])


def test_a_schedule_that_fails_leaves_the_frame_out():
    engine = zeroed(engine_of(ps.SGD(lambda step: float("inf"))))
    with pytest.raises(ps.ConfigError, match="gave inf at step 0"):
        engine.apply({"t": frame([0])})
    assert engine.gate.num_accumulated == 0


# ---- what apply takes, parameters in and out


@pytest.mark.parametrize(
    "make",
    [
        lambda ids, grads: (ids, grads),
        lambda ids, grads: (ids.astype(np.uint8), grads.astype(np.float64)),
        lambda ids, grads: (ids.tolist(), grads.tolist()),
        lambda ids, grads: (jnp.asarray(ids), jnp.asarray(grads, jnp.bfloat16)),
        lambda ids, grads: (pa.array(ids), pa.array(grads.tolist(), pa.list_(pa.float32(), 2))),
        lambda ids, grads: (pa.chunked_array([ids[:1], ids[1:]]), pa.array(grads.tolist(), pa.list_(pa.float16()))),
    ],
    ids=["numpy", "other dtypes", "lists", "jax", "arrow", "chunked"],
)
def test_apply_takes_arrays_of_any_kind(make):
    engine = zeroed(engine_of())
    engine.apply({"t": make(np.array([1, 2, 1]), np.array([[1, 2], [3, 4], [5, 6]], np.float32))})
    assert engine.lookup("t", [1, 2]).tolist() == [[-6, -8], [-3, -4]]


def test_parameters_come_out_as_they_went_in():
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
    with pytest.raises(ps.UsageError, match="occurs twice"):
        engine.load_parameters("t", rows[:2], ids=[1, 1], accumulators=rows[:2])
    with pytest.raises(ps.UsageError, match="expected 0 <= id < 10, got 10"):
        engine.lookup("t", [0, 10])
    with pytest.raises(ps.UsageError, match="no table 'x'"):
        engine.table("x")


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


def test_tables_are_written_all_or_none(tmp_path, monkeypatch):
    engine = zeroed(engine_of(tables=("t", "u")))
    engine.write_tables(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    engine.apply({"t": frame([1]), "u": frame([1])})

    def full(part):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine._state._tables["u"], "stream", full)
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


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_large_blocks_split_over_threads_give_the_same_bits(threads):
    rng = np.random.default_rng(1)
    ids, grads = rng.zipf(1.2, 100_000) % 10, rng.standard_normal((100_000, 2), np.float32)
    engine = zeroed(engine_of(tables=("t", "u"), threads=threads))
    engine.apply({"t": (ids, grads), "u": (ids[::-1].copy(), grads)})
    from penstock.pyx.reference import coalesce

    for name, order in (("t", slice(None)), ("u", slice(None, None, -1))):
        unique, sums, _ = coalesce([(ids[order], grads)], 2)
        assert engine.lookup(name, unique).tobytes() == (0 - sums).tobytes()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.apply([1]), "gradients: expected a mapping"),
        (lambda e: e.apply({"t": np.array([1])}), "gradients: expected a mapping"),
        (lambda e: e.apply({"t": frame([1])}, local_step=99.5), "local_step: expected a whole number, got 99.5"),
        (lambda e: e.apply({"t": frame([1])}, local_step=2**80), "local_step: expected an int64"),
        (lambda e: e.run([], limit=1.5), "limit: expected a whole number, got 1.5"),
        (lambda e: e.run([], limit=-1), "limit: expected at least 0"),
    ],
)
def test_calls_with_wrong_arguments_say_which(call, says):
    engine = engine_of()
    with pytest.raises(ps.UsageError, match=says):
        call(engine)
    assert engine.gate.num_accumulated == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_required": 0}, "num_required: expected at least 1"),
        ({"num_required": "3"}, "num_required: expected a whole number, got '3'"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
        ({"mesh": 4}, "mesh: expected a jax.sharding.Mesh, got int"),
        ({"reduction": "max"}, "reduction: expected 'mean' or 'sum'"),
        ({"threads": 0}, "threads: expected at least 1"),
    ],
)
def test_engine_arguments_out_of_range(options, says):
    with pytest.raises(ps.UsageError, match=says):
        engine_of(**options)


def test_an_optimizer_without_a_public_formula_is_a_clear_error():
    proto = engine_of().config.to_proto()
    proto.table_descriptor[0].optimization_parameters.mdl_adagrad_light.l2 = 0.9
    with pytest.raises(ps.ConfigError, match="cannot be run"):
        ps.Engine(ps.EmbeddingConfig.from_proto(proto))


# ---- memory


@pytest.mark.parametrize("table", ["a", "b"])
def test_a_frame_that_finds_no_memory_leaves_everything_as_it_was(table, monkeypatch):
    engine, other = (zeroed(engine_of(tables=("a", "b"), num_required=2)) for _ in range(2))
    engine.apply({"a": frame([1]), "b": frame([2, 3])})
    before, held, begin = engine.state_hash(), engine.gate.get_state(), TableStore.begin

    def none_left(store, *arguments):
        if store is engine._pipeline.stores[table]:
            raise MemoryError("cannot allocate 4096 bytes for sums")
        return begin(store, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TableStore, "begin", none_left)
        with pytest.raises(MemoryError):
            engine.apply({"a": frame([1, 4]), "b": frame([5])})
    assert (engine.state_hash(), engine.gate.get_state()) == (before, held)
    other.apply({"a": frame([1]), "b": frame([2, 3])})
    for one in (engine, other):
        one.apply({"a": frame([1, 4]), "b": frame([5])})
    assert (engine.global_step, engine.state_hash()) == (1, other.state_hash())
