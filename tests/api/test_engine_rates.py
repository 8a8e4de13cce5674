"""Learning rates of a step: from the call, the column, a schedule."""

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from engines import column, engine_of, frame, zeroed

import penstock as ps
from penstock.model.updates import DynamicLearningRate

# ---- learning rates


def dynamic_engine(tags=2):
    tables = [ps.TableConfig(10, 2, name=f"t{tag}", optimizer=ps.SGD(DynamicLearningRate(tag))) for tag in range(tags)]
    return zeroed(ps.Engine(ps.EmbeddingConfig.from_tables(tables)))


def test_dynamic_rates_are_given_by_tag_in_the_call():
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


@pytest.mark.parametrize("gives", [None, "x", 1j, np.array([0.1, 0.2]), float("inf")])
def test_a_schedule_that_gives_no_number_is_named(gives):
    engine = zeroed(engine_of(ps.SGD(lambda: gives)))
    with pytest.raises(ps.ConfigError, match=r"the schedule of tag 0 gave .* at step 0; expected a (finite )?number"):
        engine.apply({"t": frame([0])})
    assert engine.gate.num_accumulated == 0


@pytest.mark.parametrize(
    ("rates", "error", "message"),
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
def test_missing_or_wrong_rates_are_refused_before_the_frame_is_applied(rates, error, message):
    engine = dynamic_engine()
    for call in (
        lambda: engine.apply({"t0": frame([0])}, learning_rates=rates),
        lambda: engine.run([batch([0], table="t0")], learning_rates=rates),
    ):
        with pytest.raises(error, match=message):
            call()
    assert engine.gate.num_accumulated == 0
    assert engine.apply({"t0": frame([0])}, learning_rates=[1, 1])
