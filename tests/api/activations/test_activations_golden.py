"""Recorded from TensorFlow: combiners and their gradients, op shapes, apply_gradients.

The recordings are next to the repository, in the project's checkouts only; elsewhere these tests are skipped, and
the decisive cases stand in test_activations.py.
"""

import base64
import json

import numpy as np
import pytest
from recorded_features import from_features

import penstock as ps
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration


@pytest.fixture
def golden(shared):
    return lambda name: json.loads(shared(f"golden/{name}.json").read_text())["cases"]


def engine_with(table, combiner, batch, max_sequence_length=0):
    rows, dim = np.shape(table)
    feature = ps.FeatureConfig(
        ps.TableConfig(rows, dim, name="t", combiner=combiner), max_sequence_length=max_sequence_length, name="f"
    )
    engine = ps.Engine(ps.EmbeddingConfig.from_features([feature], batch, ps.SGD(1.0)))
    engine.load_parameters("t", table)
    return engine


def ragged(case, values):
    """A case's flat values as one list per sample."""
    return [[v for r, v in zip(case["rows"], values, strict=True) if r == b] for b in range(case["batch"])]


@pytest.mark.promise("Activations and gradients are those of TensorFlow's combiners")
def test_activations_and_gradients_are_those_of_tensorflows_combiners(golden):
    cases = [case for case in golden("combiners") if "upstream_gradient" in case]
    for case in cases:
        engine = engine_with(case["table"], case["combiner"], case["batch"])
        weights = case["weights"] and [ragged(case, case["weights"])]
        (activations,), dedup = engine.recv_activations([ragged(case, case["ids"])], weights)
        output = np.zeros_like(activations)  # TensorFlow's stops at the last sample that has an id
        output[: len(case["output"])] = case["output"]
        np.testing.assert_allclose(activations, output, rtol=1e-5, atol=1e-6, err_msg=case["id"])
        upstream = np.zeros_like(activations)
        upstream[: len(case["upstream_gradient"])] = case["upstream_gradient"]
        before = engine.lookup("t", range(len(case["table"])))
        engine.send_gradients([upstream], deduplication_data=dedup)
        moved = before - engine.lookup("t", range(len(case["table"])))
        np.testing.assert_allclose(moved, case["table_gradient_dense"], rtol=1e-5, atol=1e-6, err_msg=case["id"])
    assert len(cases) > 5


def test_ragged_and_sequence_lookups_are_tensorflows(golden):
    cases = [case for case in golden("combiners") if "ragged_ids" in case]
    for case in cases:
        length = case.get("max_sequence_length", 0)
        engine = engine_with(case["table"], case.get("combiner", "mean"), len(case["ragged_ids"]), length)
        weights = case.get("ragged_weights")
        (activations,), _ = engine.recv_activations([case["ragged_ids"]], weights and [weights])
        wanted = case["output_ragged_input"] if length else case["output"]
        np.testing.assert_allclose(activations, wanted, rtol=1e-5, atol=1e-6, err_msg=case["id"])
    assert len(cases) >= 4


def test_zero_and_signed_weights_are_those_of_the_plain_lookup(golden):
    cases = [case for case in golden("combiners") if "output_lookup" in case]
    for case in cases:
        engine = engine_with(case["table"], case["combiner"], case["batch"])
        (activations,), _ = engine.recv_activations([ragged(case, case["ids"])], [ragged(case, case["weights"])])
        wanted = np.zeros_like(activations)
        wanted[: len(case["output_lookup"])] = case["output_lookup"]
        np.testing.assert_allclose(activations, wanted, rtol=1e-5, atol=1e-6, err_msg=case["id"])
    assert len(cases) >= 6


def config_of(case):
    """A case's configuration, which the recording may give without optimizers that can run."""
    return ps.EmbeddingConfig.from_proto(TPUEmbeddingConfiguration.FromString(base64.b64decode(case["config_base64"])))


def shapes_of(config):
    """The shapes that the activations of a configuration should have."""
    return [(*feature.input_shape, config.sizes[feature.table][1]) for feature in config.features]


def test_activations_have_the_shapes_that_the_ops_infer(golden):
    cases = [case for case in golden("op_shapes") if "num_outputs" in case and case["ok"]]
    for case in cases:
        config = config_of(case)
        activations, dedup = ps.Engine(config).recv_activations([np.zeros(s[:-1], int) for s in case["shapes"]])
        assert [list(a.shape) for a in activations] == case["shapes"]
        assert len(dedup.features) == case["num_outputs"]
    assert len(cases) == 6


def test_learning_rates_are_scalars_as_in_the_ops(golden):
    cases = [case for case in golden("op_shapes") if "learning_rate_shapes" in case]
    for case in cases:
        rates = [np.full(shape, 0.5) for shape in case["learning_rate_shapes"]]
        tables = [ps.TableConfig(3, 2, optimizer=ps.SGD(lambda step: 0.5)) for _ in rates] or [ps.TableConfig(3, 2)]
        engine = ps.Engine(ps.EmbeddingConfig.from_features([ps.FeatureConfig(t) for t in tables], 1, ps.SGD()))
        activations, dedup = engine.recv_activations([[0] for _ in tables])
        if case["ok"]:
            assert engine.send_gradients(activations, learning_rates=rates, deduplication_data=dedup)
        else:
            with pytest.raises(ValueError, match="expected scalars"):
                engine.send_gradients(activations, learning_rates=rates, deduplication_data=dedup)
    assert len(cases) == 8


def test_lint_warns_of_the_mode_that_the_partitioner_refuses(golden):
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(5, 2, name="x")], ps.SGD())
    cases = [case for case in golden("op_shapes") if "mode" in case]
    for case in cases:
        message = TPUEmbeddingConfiguration(mode=case["mode"])
        message.table_descriptor.extend(config.to_proto().table_descriptor)
        codes = {finding.code for finding in ps.EmbeddingConfig.from_proto(message).lint()}
        assert ("PS101" in codes) == (not case["ok"])
    assert len(cases) == 4


def test_gradients_are_sent_or_refused_as_by_apply_gradients(golden):
    for case in golden("apply_gradients"):
        if "config" not in case:  # without a forward pass there is nothing to send to
            engine = engine_with([[0.0]], "sum", 1)
            with pytest.raises(RuntimeError, match="recv_activations"):
                engine.send_gradients([np.zeros((1, 1), np.float32)])
            continue
        config = from_features(case["config"])
        engine = ps.Engine(config)
        shapes = shapes_of(config)
        _, dedup = engine.recv_activations([np.zeros(shape[:-1], int) for shape in shapes])
        gradients = [g and np.zeros(g, np.float32) for g in case["gradients"]]
        if case["raises"]:
            with pytest.raises(getattr(__builtins__, case["raises"], ValueError), match="gradient"):
                engine.send_gradients(gradients, deduplication_data=dedup)
            continue
        assert engine.send_gradients(gradients, deduplication_data=dedup)
        assert [list(s) for s in shapes] == case["gradient_shapes"]
        assert list(engine.core.last_rates) == case["learning_rates"]
