"""The state of optimizers next to the weights, users' programs, and the rows that a forward lookup returns."""

from functools import partial

import engines
import numpy as np
import pytest
from engines import parts_of, same

import penstock.updates as o
from penstock.api.engine import Engine
from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import QuantizationConfig, TableConfig

# One row for each of the layout's shards, so that several devices share them.
ROWS = 1024


def heavy_ball(gradient, weights, momenta):
    """A program whose result does not hang on its roundings: halves and doubles of small whole numbers."""
    momenta = 0.5 * momenta + gradient
    return weights - 2.0 * momenta, momenta


engine_of = partial(engines.engine_of, dim=3, rows=ROWS)


# ---- slots in and out


@pytest.mark.parametrize("optimizer", [o.CenteredRMSProp(learning_rate=0.1, momentum=0.9), o.Adam(0.1)])
def test_any_number_of_slots_is_loaded_retrieved_hashed_and_written(optimizer, tmp_path, mesh_of):
    engine, other = engine_of(optimizer, mesh=mesh_of(1)), engine_of(optimizer, mesh=mesh_of(3), seed=1)
    rng = np.random.default_rng(0)
    engine.apply({"t": (rng.permutation(ROWS)[:40], rng.standard_normal((40, 3), np.float32))})
    state = engine.retrieve_parameters("t")
    assert list(state) == ["parameters", *optimizer.slot_names]
    assert [np.asarray(slot).tobytes() for slot in engine.slots("t").values()] == [
        state[name].tobytes() for name in optimizer.slot_names
    ]
    engine.write_tables(tmp_path)
    other.read_tables(tmp_path)
    assert same(parts_of(other), list(state.values()))
    other.load_parameters("t", np.zeros((ROWS, 3)), **dict.fromkeys(optimizer.slot_names, np.ones((ROWS, 3))))
    assert not same(parts_of(other), list(state.values()))
    weights = state.pop("parameters")
    other.load_parameters("t", weights, **state)
    other.apply({"t": (np.array([0]), np.ones((1, 3)))})
    engine.apply({"t": (np.array([0]), np.ones((1, 3)))})
    assert same(parts_of(other), parts_of(engine))


def test_a_users_program_updates_weights_and_slots(mesh_of):
    engine = engine_of(o.UserDefinedProgram(program=heavy_ball, initial_slot_values=[2.0]), mesh=mesh_of(4))
    ids, weights = np.arange(0, ROWS, 7), np.arange(3 * ROWS, dtype=np.float32).reshape(ROWS, 3)
    (slot,) = engine.slots("t")
    engine.load_parameters("t", weights, **{slot: np.full((ROWS, 3), 2.0)})
    engine.apply({"t": (ids, np.full((len(ids), 3), 3.0))})
    weights[ids] -= 8
    assert parts_of(engine)[0].tolist() == weights.tolist()
    assert parts_of(engine)[1][ids].tolist() == np.full((len(ids), 3), 4.0).tolist()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda g, w: w, r"TypeError: .* takes 2 positional arguments but 3 were given"),
        (lambda g, w, s: w, r"ValueError: program: expected 2 results \(weights, then slots\), got 1"),
        (lambda g, w, s: (w[:1], s), r"expected weights of shape \(8, 3\), got \(1, 3\)"),
        (lambda g, w, s: (w, s[:, 0]), r"expected slot 0 of shape \(8, 3\), got \(8,\)"),
        (lambda g, w, s: (w if g[0, 0] > 0 else g, s), r"TracerBoolConversionError"),
    ],
)
def test_a_program_that_cannot_run_is_refused_before_anything_is_applied(program, reason):
    with pytest.raises(ConfigError, match=f"table 't': its program fails: .*{reason}|{reason}"):
        engine_of(o.UserDefinedProgram(program=program, initial_slot_values=[0.0]))


def test_the_frequency_estimator_counts_the_engines_steps():
    engine = engine_of(o.FrequencyEstimator(tau=0.5, max_delta=8.0), dim=1)
    for ids in ([3], [5], [3, 5], [5]):
        engine.apply({"t": (np.array(ids), np.ones((len(ids), 1)))})
    state = engine.retrieve_parameters("t")
    # The first hit of 3 is at step 0, 0 after the start: (8 + 0)/2; then 2 after that.
    assert state["last_hit_step"][[3, 5]].tolist() == [[2.0], [3.0]]
    assert state["parameters"][[3, 4, 5]].tolist() == [[3.0], [8.0], [1.875]]


# ---- the forward direction


def test_a_forward_lookup_sees_quantized_rows_and_the_table_stays_as_it_is():
    table = TableConfig(ROWS, 3, name="t", quantization_config=QuantizationConfig(5, -1.0, 1.0))
    engine = Engine(EmbeddingConfig.from_tables([table], o.SGD(1.0)))
    rows = np.float32([[-9, -0.25, -0.3], [0.2, 0.25, 0.75], [0.1, 9, -1]])
    engine.load_parameters("t", rows, ids=[3, 4, 5])
    assert engine.lookup("t", [3, 4, 5, 3], forward=True).tolist() == [
        [-1, 0, -0.5],
        [0, 0.5, 1],
        [0, 1, -1],
        [-1, 0, -0.5],
    ]
    assert engine.lookup("t", [3, 4, 5]).tolist() == rows.tolist()
    engine.apply({"t": (np.array([4]), np.ones((1, 3)))})  # straight through: of the stored row, not the seen one
    assert engine.lookup("t", [4]).tolist() == [(rows[1] - 1).tolist()]


def test_a_forward_lookup_without_quantization_is_the_row():
    engine = engine_of(o.SGD(0.1))
    assert engine.lookup("t", [3], forward=True).tolist() == engine.lookup("t", [3]).tolist()
