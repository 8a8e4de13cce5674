"""The update equations and the engine against results recorded from TensorFlow, and against published formulas."""

import json
from pathlib import Path

import numpy as np
import pytest

from penstock.api.engine import Engine
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.updates import Ops, UpdateRule, update

OWN_COPY = Path(__file__).parents[2] / "data" / "golden_optimizers.json"
RECORDED = Path(__file__).resolve().parents[4] / "shared" / "golden"


def all_cases():
    """Every case of the recorded files where they are here, else those next to this test, cut to few steps."""
    cases = json.loads(OWN_COPY.read_text())["cases"]
    for path in sorted(RECORDED.glob("opt_*.json")):
        cases += [dict(c, id=f"recorded_{c['id']}") for c in json.loads(path.read_text())["cases"]]
    return cases


CASES = all_cases()
SAME = [c for c in CASES if c["tpu"].get("same_maths", True)]
OTHER = [c for c in CASES if not c["tpu"].get("same_maths", True)]


def tolerance(case, dtype):
    """Of |difference|/(1 + |value|)."""
    if dtype == "float64":
        return 1e-12
    return case.get("rel_tol_hint", 1e-5) if case["dtype"] == "float32" else 1e-5


def non_lazy(case):
    params = case["tpu"]["params"]
    return params.get("use_non_lazy_adam", False) or params.get("use_non_lazy_lion", False)


def arrays(state, case):
    """Weights, then slots: the CPU's slots are recorded in the order that TPU embedding has."""
    return [np.array(state[key], case["dtype"]) for key in case["init"]]


def dim_of(case):
    return np.shape(case["init"]["var"])[1]


def rate(step, case):
    """TPU embedding corrects no bias of Adam: its user puts it into the learning rate."""
    if case.get("hyper", {}).get("mode") != "bias_corrected":
        return step["lr"]
    params = case["tpu"]["params"]
    return step["lr"] * np.sqrt(1 - params["beta2"] ** step["t"]) / (1 - params["beta1"] ** step["t"])


def worst_error(case):
    """Largest relative error of the equations in NumPy, in the case's dtype, over its steps."""
    parts = arrays(case["init"], case)
    params = tuple(case["tpu"]["params"].items())
    rule = UpdateRule(case["tpu"]["field"], len(parts) - 1, params, non_lazy=non_lazy(case))
    worst = 0.0
    for step in case["steps"]:
        ids = np.array(step["indices"], np.int64)
        g = np.array(step["grad"], case["dtype"]).reshape(len(ids), dim_of(case))
        if rule.non_lazy:
            whole = np.zeros_like(parts[0])
            whole[ids] = g
            ids, g = np.arange(len(whole)), whole
        lr = g.dtype.type(rate(step, case))
        weights, slots = update(Ops(np), rule, lr, g, parts[0][ids], tuple(p[ids] for p in parts[1:]))
        for part, new, wanted in zip(parts, (weights, *slots), arrays(step["post"], case), strict=True):
            part[ids] = new
            worst = max(worst, (np.abs(part - wanted) / (1 + np.abs(wanted))).max())
    return worst


@pytest.mark.parametrize("case", SAME, ids=[c["id"] for c in SAME])
def test_the_equations_in_numpy_equal_tensorflow(case):
    assert worst_error(case) <= tolerance(case, case["dtype"])


@pytest.mark.parametrize("case", OTHER, ids=[c["id"] for c in OTHER])
def test_rules_that_differ_from_tensorflows_cpu_kernels_differ(case):
    # update_slots=false and an epsilon outside the root have no counterpart in TPU embedding.
    # An epsilon of 1e-7 moves a float32 weight by its last bit only.
    assert worst_error(case) > 0


def engine_of(case, mesh):
    """An engine whose configuration says what the case does, in TensorFlow's own message."""
    rows, dim = np.shape(case["init"]["var"])
    message = TPUEmbeddingConfiguration(mode=TPUEmbeddingConfiguration.TRAINING)
    table = message.table_descriptor.add(name="t", vocabulary_size=rows, dimension=dim)
    parameters = table.optimization_parameters
    parameters.learning_rate.dynamic.SetInParent()
    own = getattr(parameters, case["tpu"]["field"])
    own.SetInParent()
    for name, value in case["tpu"]["params"].items():
        setattr(own, name, value)
    return Engine(EmbeddingConfig.from_proto(message), mesh)


@pytest.mark.parametrize("case", SAME, ids=[c["id"] for c in SAME])
@pytest.mark.promise("An engine updates rows as TensorFlow does")
def test_the_engine_equals_tensorflow(case, mesh_of):
    # Devices in turn: what they share is the same on any number of them, see test_updates_engine.py.
    engine = engine_of(case, mesh_of(1 + 3 * (CASES.index(case) % 2)))
    weights, *slots = arrays(case["init"], case)
    names = list(engine.slots("t"))
    assert names == case["tpu"].get("slot_order", names)
    engine.load_parameters("t", weights, **dict(zip(names, slots, strict=True)))
    limit = tolerance(case, "float32")
    for step in case["steps"]:
        ids = np.array(step["indices"], np.int64)
        grads = np.array(step["grad"], np.float32).reshape(len(ids), dim_of(case))
        engine.apply({"t": (ids, grads)}, learning_rates=[rate(step, case)])
        got = engine.retrieve_parameters("t").values()
        for part, wanted in zip(got, arrays(step["post"], case), strict=True):
            assert (np.abs(part - wanted) <= limit * (1 + np.abs(wanted))).all()
