"""recv_activations and send_gradients: combiners, sequences, every form of input, the way back, one step behind."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import reference
from lookups import RAGGED, config_of, engine_of

import penstock as ps
from penstock.model import combiners
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration


def change(engine, send):
    before = engine.lookup("t", range(6))
    assert send() is True
    return before - engine.lookup("t", range(6))


# ---- forward


@pytest.mark.parametrize(
    "value",
    [
        RAGGED,
        [np.array(row, np.int32) for row in RAGGED],
        pa.array(RAGGED, pa.list_(pa.int32())),
        pa.array([[0, 2], None, [4], [1, 1, 3]], pa.large_list(pa.int64())),
        pa.chunked_array([pa.array(RAGGED[:1]), pa.array(RAGGED[1:])]),
        pa.array([[9], *RAGGED, [9]])[1:5],
    ],
    ids=["lists", "arrays", "arrow", "arrow with null", "chunked", "sliced"],
)
def test_ragged_input_may_come_in_any_form(value):
    (activations,), dedup = engine_of(combiner="sum").recv_activations([value])
    assert activations[:, 0].tolist() == [4, 0, 8, 10]
    assert dedup.ids(0, "t").tolist() == [0, 2, 4, 1, 1, 3]


@pytest.mark.parametrize("kind", [np.array, jnp.array, lambda ids: pa.array(np.asarray(ids).tolist())])
def test_dense_and_multi_hot_input(kind):
    engine = engine_of(combiner="sum")
    assert engine.recv_activations([kind([1, 2, 3, 0])])[0][0][:, 0].tolist() == [2, 4, 6, 0]
    assert engine.recv_activations([kind([[1, 2], [3, 3], [0, 0], [5, 0]])])[0][0][:, 0].tolist() == [6, 12, 0, 10]


def test_lists_may_be_nested_like_an_input_shape_of_several_axes():
    table = ps.TableConfig(6, 2, name="t", combiner="sum")
    for length, shape in ((0, (2, 3)), (2, (2, 3, 2))):
        feature = ps.FeatureConfig(table, name="f", output_shape=shape, max_sequence_length=length)
        engine = ps.Engine(ps.EmbeddingConfig.from_features([feature], None, ps.SGD(1.0)))
        flat, nested = [[1], [2, 3], [], [], [1], [5]], [[[1], [2, 3], []], [[], [1], [5]]]
        actual = [engine.recv_activations([value])[0][0] for value in (flat, nested)]
        assert actual[0].shape == (*shape, 2)
        assert actual[0].tobytes() == actual[1].tobytes()


def test_weights_so_small_that_one_over_their_sum_is_infinite_still_give_a_mean():
    engine = engine_of(combiner="mean")
    weights = [[[1e-45, 1e-45], [], [1e-40], [2e-40, 2e-40, 4e-40]]]
    (activations,), dedup = engine.recv_activations([RAGGED], weights)
    np.testing.assert_allclose(activations[:, 0], [2, 0, 8, 4], rtol=1e-3)
    assert engine.send_gradients([np.ones((4, 2), np.float32)], deduplication_data=dedup)


def test_weights_that_nearly_cancel_overflow_without_a_warning():
    engine = engine_of(combiner="mean")
    (activations,), _ = engine.recv_activations([[[0, 0, 2], [1], [], []]], weights=[[[1, -1, 1e-40], [1], [], []]])
    assert not np.isfinite(activations[0]).any()
    assert activations[1:, 0].tolist() == [2, 0, 0]


def test_a_sequence_keeps_its_ids_apart_and_is_cut_and_counted():
    engine = engine_of(max_sequence_length=2)
    (activations,), dedup = engine.recv_activations([[[1, 2, 3], [], [5], [4, 4]]])
    assert activations[:, :, 0].tolist() == [[2, 4], [0, 0], [10, 0], [8, 8]]
    assert dedup.truncated == dedup.features[0].truncated == 1


def test_quantization_is_seen_forward_and_gradients_pass_straight_through():
    engine = engine_of(combiner="sum", table={"quantization_config": ps.QuantizationConfig(3, 0.0, 8.0)})
    (activations,), dedup = engine.recv_activations([np.array([0, 1, 2, 5])])
    assert activations.tolist() == [[0, 0], [4, 4], [4, 4], [8, 8]]
    gradient = np.arange(8, dtype=np.float32).reshape(4, 2)
    moved = change(engine, lambda: engine.send_gradients([gradient], deduplication_data=dedup))
    assert moved[[0, 1, 2, 5]].tolist() == gradient.tolist()


@pytest.mark.parametrize("weights", [None, [[[1.0], [0.5, 1.0], [], []]]])
def test_gradients_with_an_infinite_sum_are_refused_whole_and_can_be_sent_again(weights):
    engine = engine_of(combiner="sum")
    _, dedup = engine.recv_activations([[[3], [1, 1], [], []]], weights=weights)
    gradient = np.full((4, 2), 3e38, np.float32)
    message = "of id 1 of table '.*' is not"

    def refused():
        with pytest.raises(ps.InputError, match=message) as error:
            engine.send_gradients([gradient], deduplication_data=dedup)
        return error.value.reason == "sum_not_finite"

    assert not change(engine, refused).any()
    assert engine.send_gradients([gradient / 4], deduplication_data=dedup)


def test_nesting_is_kept_and_tables_may_be_shared():
    user, item = ps.TableConfig(5, 2, name="user"), ps.TableConfig(7, 3, name="item")
    features = {"b": (ps.FeatureConfig(user), [ps.FeatureConfig(item)]), "a": ps.FeatureConfig(item)}
    engine = ps.Engine(ps.EmbeddingConfig.from_features(features, 2, ps.SGD()))
    value = {"a": [[0], [1, 2]], "b": (np.array([4, 4]), [np.array([6, 0])])}
    activations, dedup = engine.recv_activations(value)
    assert jax.tree.map(np.shape, activations) == {"a": (2, 3), "b": ((2, 2), [(2, 3)])}
    assert dedup.unique_ids["item"].tolist() == [0, 1, 2, 6]
    assert engine.send_gradients(jax.tree.map(jnp.ones_like, activations), deduplication_data=dedup)


def test_features_of_a_file_go_by_name(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    engine = ps.Engine(ps.EmbeddingConfig.load(tmp_path / "c.pbtxt"))
    activations, _ = engine.recv_activations({"f": RAGGED})
    assert activations["f"].shape == (4, 2)


def test_a_legacy_configuration_has_one_activation_per_table():
    message = TPUEmbeddingConfiguration(batch_size_per_tensor_core=6, mode=2, num_hosts=1, num_tensor_cores=2)
    for name, dim, num_features in (("a", 4, 2), ("b", 8, 3)):
        table = message.table_descriptor.add(
            name=name, vocabulary_size=10, dimension=dim, num_features=num_features
        ).optimization_parameters
        table.stochastic_gradient_descent.SetInParent()
        table.learning_rate.constant = 0.5
    engine = ps.Engine(ps.EmbeddingConfig.from_proto(message))
    activations, _ = engine.recv_activations([np.zeros(12, int), np.zeros(18, int)])
    assert [a.shape for a in activations] == [(12, 4), (18, 8)]


# ---- backward


def test_a_gradient_of_none_is_zeros_of_rows_that_were_touched():
    engine = ps.Engine(config_of("sum", optimizer=ps.Momentum(1.0, momentum=0.5)))
    engine.load_parameters("t", np.zeros((6, 2)), momenta=np.ones((6, 2)))
    _, dedup = engine.recv_activations([RAGGED])
    assert engine.send_gradients([None], deduplication_data=dedup)
    assert engine.retrieve_parameters("t")["momenta"][:, 0].tolist() == [0.5, 0.5, 0.5, 0.5, 0.5, 1]


def test_several_frames_may_open_the_gate_together():
    engine = ps.Engine(config_of(combiner="sum"), num_required=2, reduction="sum")
    engine.load_parameters("t", np.zeros((6, 2)))
    first, second = (engine.recv_activations([np.array([0, 1, 2, 3])])[1] for _ in range(2))
    late = engine.recv_activations([np.array([0, 1, 2, 3])])[1]
    ones = [np.ones((4, 2), np.float32)]
    assert engine.send_gradients(ones, deduplication_data=first)
    assert engine.send_gradients(ones, deduplication_data=second)
    assert engine.lookup("t", [0]).tolist() == [[-2, -2]]
    assert not engine.send_gradients(ones, deduplication_data=late)  # stale, as the gate has it


def test_rates_of_dynamic_tags_come_with_the_gradients():
    engine = ps.Engine(config_of("sum", optimizer=ps.SGD(lambda: 0.25)))
    engine.load_parameters("t", np.zeros((6, 2)))
    ones = [np.ones((4, 2), np.float32)]
    _, dedup = engine.recv_activations([np.array([0, 1, 2, 3])])
    engine.send_gradients(ones, [0.5], dedup)
    _, dedup = engine.recv_activations([np.array([0, 1, 2, 3])])
    engine.send_gradients(ones, deduplication_data=dedup)
    assert engine.lookup("t", [0]).tolist() == [[-0.75, -0.75]]


# ---- pipelining


def test_pipelined_gradients_may_be_one_step_behind_and_no_more():
    table = ps.TableConfig(6, 2, name="t", combiner="sum")
    config = ps.EmbeddingConfig.from_features(
        [ps.FeatureConfig(table, name="f")], 4, ps.SGD(1.0), pipeline_execution_with_tensor_core=True
    )
    engine = ps.Engine(config)
    engine.load_parameters("t", np.zeros((6, 2)))
    ids, ones, seen, waiting = [np.zeros(4, int)], [np.ones((4, 2), np.float32)], [], []
    for _ in range(4):  # forward n+1 before backward n
        (activations,), dedup = engine.recv_activations(ids)
        seen.append(activations[0, 0])
        waiting.append(dedup)
        if len(waiting) == 2:
            engine.send_gradients(ones, deduplication_data=waiting.pop(0))
    assert seen == [0, 0, -4, -8]  # each misses exactly the update of the step before
    engine.recv_activations(ids)
    engine.send_gradients(ones, deduplication_data=waiting[0])
    with pytest.raises(ps.StateError, match="of step 2, and the engine's step is 4"):
        engine.send_gradients(ones, deduplication_data=waiting[0])


def test_the_same_gradients_are_not_applied_twice():
    engine = ps.Engine(config_of("sum"), num_required=2)
    _, dedup = engine.recv_activations([RAGGED])
    engine.send_gradients([None], deduplication_data=dedup)
    with pytest.raises(ps.StateError, match="sent before"):
        engine.send_gradients([None], deduplication_data=dedup)


# ---- twins


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_expansion_equals_its_twin_bit_for_bit(combiner):
    rng = np.random.default_rng(3)
    samples = np.sort(rng.integers(0, 7, 40))
    weights = rng.normal(size=40).astype(np.float32)
    weights[samples == 2] *= np.float32(1e-40)
    rows, gradients = rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=(7, 3)).astype(np.float32)
    by = reference.gains(samples, weights, 7, combiner)
    np.testing.assert_array_equal(combiners.gains(samples, weights, 7, combiner), by)
    np.testing.assert_array_equal(combiners.combine(rows, samples, by, 7), reference.combine(rows, samples, by, 7))
    ones = np.ones(40, np.float32)
    plain = combiners.gains(samples, None, 7, combiner)
    np.testing.assert_array_equal(ones if plain is None else plain, reference.gains(samples, ones, 7, combiner))
    gradients[3, 1] = np.inf
    written = reference.row_gradients(gradients, samples, by)
    np.testing.assert_array_equal(combiners.not_finite(gradients, samples, by), ~np.isfinite(written).all(axis=1))
