"""The update equations and the engine against results recorded from TensorFlow, and the order of the switches."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.embedding import EmbeddingConfig
from penstock.config.optimizers import SGD, Adagrad, DynamicLearningRate
from penstock.config.tables import TableConfig
from penstock.engine import Engine
from penstock.updates import Ops, UpdateRule, update

NUMPY = Ops(np)
OPTIMIZERS = {"stochastic_gradient_descent": SGD, "adagrad": Adagrad}
NUM_SLOTS = {"stochastic_gradient_descent": 0, "adagrad": 1}
# Of the file's parameters the engine has only TPU embedding's; the CPU op's others change the maths.
CPU_NAMES = {"accumulators": "accum"}
FILES = ["opt_sgd", "opt_adagrad", "opt_adagrad_v2"]
OWN_COPY = Path(__file__).parent / "data" / "golden_optimizers.json"


def all_cases():
    """Every case of the recorded files where they are here, else the few kept beside this test."""
    found = json.loads(OWN_COPY.read_text())["cases"]
    for name in FILES:
        path = Path(__file__).resolve().parents[2] / "shared" / "golden" / f"{name}.json"
        if path.exists():
            found += [dict(c, id=f"recorded_{c['id']}") for c in json.loads(path.read_text())["cases"]]
    return found


CASES = all_cases()
SAME = [c for c in CASES if c["tpu"]["same_maths"]]
OTHER = [c for c in CASES if not c["tpu"]["same_maths"]]


def arrays(state, case):
    slots = tuple(np.array(state[CPU_NAMES[s]], case["dtype"]) for s in case["tpu"]["slot_order"])
    return np.array(state["var"], case["dtype"]), slots


def worst_error(case):
    """Largest relative error of the equations in NumPy over the steps of a case."""
    rule = UpdateRule(case["tpu"]["field"], NUM_SLOTS[case["tpu"]["field"]])
    w, slots = arrays(case["init"], case)
    worst = 0.0
    for step in case["steps"]:
        at, g = step["indices"], np.array(step["grad"], case["dtype"])
        lr = w.dtype.type(step["lr"])
        w[at], new = update(NUMPY, rule, lr, g, w[at], tuple(s[at] for s in slots))
        for slot, rows in zip(slots, new, strict=True):
            slot[at] = rows
        wanted, wanted_slots = arrays(step["post"], case)
        for a, b in zip((w, *slots), (wanted, *wanted_slots), strict=True):
            worst = max(worst, (np.abs(a - b) / (1 + np.abs(b))).max())
    return worst


@pytest.mark.parametrize("case", SAME, ids=[c["id"] for c in SAME])
def test_the_equations_in_numpy_equal_tensorflow(case):
    assert worst_error(case) <= (1e-12 if case["dtype"] == "float64" else case["rel_tol_hint"])


@pytest.mark.parametrize("case", OTHER, ids=[c["id"] for c in OTHER])
def test_what_tensorflow_does_otherwise_on_a_cpu_differs(case):
    # update_slots=false and an epsilon outside the root have no counterpart in TPU embedding.
    # An epsilon of 1e-7 moves a float32 weight by its last bit only.
    assert worst_error(case) > 0


@pytest.mark.parametrize("case", SAME, ids=[c["id"] for c in SAME])
@pytest.mark.parametrize("devices", [1, 4])
def test_the_engine_equals_tensorflow(case, devices, mesh_of):
    optimizer = OPTIMIZERS[case["tpu"]["field"]](DynamicLearningRate(0))
    rows, dim = np.shape(case["init"]["var"])
    config = EmbeddingConfig.from_tables([TableConfig(rows, dim, name="t")], optimizer)
    engine = Engine(config, mesh_of(devices))
    w, slots = arrays(case["init"], case)
    engine.load_parameters("t", w, **dict(zip(case["tpu"]["slot_order"], slots, strict=True)))
    tolerance = case["rel_tol_hint"] if case["dtype"] == "float32" else 1e-5
    for step in case["steps"]:
        engine.apply({"t": (np.array(step["indices"]), np.array(step["grad"]))}, learning_rates=[step["lr"]])
        state = engine.retrieve_parameters("t")
        wanted, wanted_slots = arrays(step["post"], case)
        assert (np.abs(state["parameters"] - wanted) <= tolerance * (1 + np.abs(wanted))).all()
        for name, slot in zip(case["tpu"]["slot_order"], wanted_slots, strict=True):
            assert (np.abs(state[name] - slot) <= tolerance * (1 + np.abs(slot))).all()


def test_the_recorded_cases_are_all_of_them(shared):
    recorded = sum(len(json.loads(shared(f"golden/{name}.json").read_text())["cases"]) for name in FILES)
    assert sum(c["id"].startswith("recorded_") for c in CASES) == recorded


# ---- the switches


def apply_once(rule, w, g, lr=0.5, slots=()):
    new, _ = update(NUMPY, rule, np.float32(lr), np.float32([g]), np.float32([w]), slots)
    return float(new[0])


def test_the_gradient_is_clipped_before_it_is_used():
    rule = UpdateRule("stochastic_gradient_descent", 0, gradient_min=-1.0, gradient_max=2.0)
    assert apply_once(rule, 0.0, 10.0) == -1.0
    assert apply_once(rule, 0.0, -10.0) == 0.5


def test_reversed_limits_give_the_upper_one():
    assert apply_once(UpdateRule("stochastic_gradient_descent", 0, weight_min=3.0, weight_max=-3.0), 0.0, 0.0) == -3.0


def test_the_weight_decays_before_the_update_and_is_clipped_after_it():
    rule = UpdateRule("stochastic_gradient_descent", 0, weight_decay=0.25, weight_max=1.0)
    assert apply_once(rule, 2.0, 2.0) == 0.5  # 2 - 0.25*2 - 0.5*2
    assert apply_once(rule, 4.0, 2.0) == 1.0  # 4 - 0.25*4 - 0.5*2 = 2, clipped


def test_decay_times_learning_rate():
    rule = UpdateRule("stochastic_gradient_descent", 0, weight_decay=0.25, decay_times_learning_rate=True)
    assert apply_once(rule, 2.0, 0.0, lr=0.5) == 2.0 - 0.125 * 2.0


def test_a_touched_row_with_a_zero_gradient_still_decays_and_an_untouched_one_does_not():
    optimizer = SGD(0.1, weight_decay_factor=0.5)
    engine = Engine(EmbeddingConfig.from_tables([TableConfig(3, 2, name="t")], optimizer))
    before = engine.lookup("t", [0, 1, 2])
    engine.apply({"t": (np.array([1]), np.zeros((1, 2), np.float32))})
    after = engine.lookup("t", [0, 1, 2])
    assert after[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert after[1].tolist() == (before[1] * np.float32(0.5)).tolist()


clips = st.one_of(st.none(), st.floats(-2, 2, width=32))


@st.composite
def optimizers(draw):
    limits = {"clipvalue": (draw(clips), draw(clips))}
    limits |= {"clip_weight_min": draw(clips), "clip_weight_max": draw(clips)}
    decay = {"weight_decay_factor": draw(st.sampled_from([None, 0.01, 0.5]))}
    decay["multiply_weight_decay_factor_by_learning_rate"] = draw(st.sampled_from([None, True]))
    kind = draw(st.sampled_from([SGD, Adagrad]))
    return kind(draw(st.sampled_from([0.01, 1.0])), **limits, **decay)


@given(optimizers(), st.sampled_from([1, 2, 3, 8, 17, 128]), st.sampled_from([1, 4]), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_the_engine_equals_the_equations_in_numpy_bit_for_bit(optimizer, dim, devices, seed):
    import jax
    from jax.sharding import Mesh

    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("x",))
    config = EmbeddingConfig.from_tables([TableConfig(11, dim, name="t", optimizer=optimizer)])
    spec, engine = config.table("t"), Engine(config, mesh, reduction="sum")
    state = engine.retrieve_parameters("t")
    w, slots = state.pop("parameters"), tuple(state.values())
    rng = np.random.default_rng(seed)
    for _ in range(2):
        ids = rng.permutation(11)[:7]
        g = rng.standard_normal((7, dim), np.float32)
        w[ids], new = update(NUMPY, spec.rule, np.float32(spec.learning_rate), g, w[ids], tuple(s[ids] for s in slots))
        for slot, rows in zip(slots, new, strict=True):
            slot[ids] = rows
        engine.apply({"t": (ids, g)})
    after = engine.retrieve_parameters("t")
    assert after.pop("parameters").tobytes() == w.tobytes()
    assert [s.tobytes() for s in after.values()] == [s.tobytes() for s in slots]
