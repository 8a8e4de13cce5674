"""Features are called by their names or key paths, and nested lists and tuples are not mixed up."""

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps

Pair = namedtuple("Pair", "left right")


def config_of(nested, batch=2, **options):
    """A table per feature, filled with 1, 2, … by the letters that ``nested`` has for features."""
    tables = {name: ps.TableConfig(6, 2, name=f"t_{name}", combiner="sum") for name in "abc"}
    features = jax.tree.map(lambda name: ps.FeatureConfig(tables[name]), nested)
    return ps.EmbeddingConfig.from_features(features, batch, ps.SGD(1.0), **options)


NESTED = {"user": {"clicks": "b", "views": ["a", "c"]}, "item": "a"}
IDS = {"user": {"clicks": [[1], [2]], "views": [[[3], []], [[4, 5], [0]]]}, "item": [[0], [1]]}
PATHS = ["item", "user/clicks", "user/views/0", "user/views/1"]


# ---- what features are called


@pytest.mark.parametrize(
    ("nested", "paths"),
    [
        (NESTED, PATHS),
        (["a", "b"], ["0", "1"]),
        (("a", {"x": "b"}), ["0", "1/x"]),
        (Pair("a", ["b"]), ["left", "right/0"]),
        ("a", ["0"]),
    ],
)
def test_features_without_names_are_called_by_their_key_paths(nested, paths):
    config = config_of(nested)
    assert [feature.path for feature in config.features] == paths
    assert [feature.name for feature in config.to_proto().feature_descriptor] == [""] * len(paths)


def test_a_given_name_stays_where_no_other_feature_has_it():
    table = ps.TableConfig(6, 2, name="t")
    names = {"a": "b", "b": None, "c": "twice", "d": "twice", "e": "clicks"}
    features = {key: ps.FeatureConfig(table, name=name) for key, name in names.items()}
    config = ps.EmbeddingConfig.from_features(features, 2, ps.SGD())
    assert [feature.path for feature in config.features] == ["b", "b#1", "c", "d", "clicks"]
    assert [feature.name for feature in config.to_proto().feature_descriptor] == ["b", "", "twice", "twice", "clicks"]


def test_features_of_a_file_are_called_by_their_names_or_places(tmp_path):
    table = ps.TableConfig(6, 2, name="t")
    features = {"x": ps.FeatureConfig(table), "y": ps.FeatureConfig(table, name="named")}
    ps.EmbeddingConfig.from_features(features, 2, ps.SGD()).save(tmp_path / "c.pbtxt")
    again = ps.EmbeddingConfig.load(tmp_path / "c.pbtxt")
    assert [feature.path for feature in again.features] == ["0", "named"]


def test_an_unknown_shape_names_the_key_path():
    with pytest.raises(ps.ConfigError, match="feature 'item': its shape is not fully known"):
        config_of(NESTED, None)


# ---- deduplication data


def test_deduplication_data_is_asked_by_key_path():
    engine = ps.Engine(config_of(NESTED))
    _, dedup = engine.recv_activations(IDS)
    assert list(dedup.features) == PATHS
    assert dedup.ids("user/clicks", "t_b").tolist() == [1, 2]
    assert dedup.ids("user/views/1", "t_c").tolist() == [4, 5, 0]
    assert dedup.features["user/views/0"].samples.tolist() == [0]
    assert "user/views" not in dedup.features
    again = ps.DeduplicationData.unpack(engine.config, *dedup.pack())
    assert {path: uses.rows.tolist() for path, uses in again.features.items()} == {
        path: uses.rows.tolist() for path, uses in dedup.features.items()
    }


@pytest.mark.parametrize("key", [0, 1, np.int64(2), "user", "clicks", None])
def test_an_unknown_key_path_is_refused_with_the_known_ones(key):
    _, dedup = ps.Engine(config_of(NESTED)).recv_activations(IDS)
    paths = "'item', 'user/clicks', 'user/views/0', 'user/views/1'"
    with pytest.raises(ps.UsageError, match=f"no feature .*; ask by name or key path: {paths}"):
        dedup.features[key]
    assert dedup.features.get(key) is None


def test_features_of_one_list_are_found_by_their_places_too():
    _, dedup = ps.Engine(config_of(["a", "b"])).recv_activations([[[1], [2]], [[3], []]])
    assert dedup.features[1] is dedup.features["1"]
    assert dedup.ids(0, "t_a").tolist() == [1, 2]
    for key in (2, -1, "2"):
        with pytest.raises(ps.UsageError, match=r"no feature .*: '0', '1'"):
            dedup.features[key]


# ---- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"item": [[6], []]}, "^feature 'item': expected 0 <= id < 6, got 6"),
        ({"item": [[1]]}, "^feature 'item': expected ids for 2 samples"),
        ({"user": {"clicks": [[1], [9]], "views": IDS["user"]["views"]}}, "^feature 'user/clicks': expected 0 <= id"),
        ({"user": {"clicks": [[1], []], "views": [[[1], []], [["x"], []]]}}, "^feature 'user/views/1': expected int"),
        (
            {"user": {"clicks": [[1], []]}},
            r"^features at 'user': expected a mapping .*\(clicks, views\), got keys",
        ),
        ({"user": {"clicks": [[1], []], "views": [[[1], []]]}}, "^features at 'user/views': expected 2 entries"),
    ],
)
def test_bad_features_are_named_by_their_key_path(change, message):
    with pytest.raises(ValueError, match=message):
        ps.Engine(config_of(NESTED)).recv_activations(IDS | change)


def test_bad_weights_and_gradients_are_named_by_their_key_path():
    engine = ps.Engine(config_of(NESTED))
    no_weights = {"user": {"clicks": None, "views": [None, None]}, "item": None}
    weights = no_weights | {"user": {"clicks": None, "views": [[[1, 1], []], None]}}
    with pytest.raises(ps.UsageError, match=r"^feature 'user/views/0': sample 0 has 1 ids and 2 weights"):
        engine.recv_activations(IDS, weights)
    _, dedup = engine.recv_activations(IDS)
    gradients = {"user": {"clicks": None, "views": [None, np.zeros((2, 3), np.float32)]}, "item": None}
    with pytest.raises(ps.UsageError, match=r"^gradient of feature 'user/views/1': expected shape \[2, 2\]"):
        engine.send_gradients(gradients, deduplication_data=dedup)
    with pytest.raises(ps.UsageError, match=r"^gradients at 'user': expected a mapping"):
        engine.send_gradients(gradients | {"user": None}, deduplication_data=dedup)


# ---- lists and tuples

LIST, TUPLE = [[[1], []], [[2], []]], ([[1], []], [[2], []])


@pytest.mark.parametrize(
    ("nested", "right", "wrong", "message"),
    [
        (["a", "b"], LIST, TUPLE, "expected a list of 2, nested like the features, got a tuple"),
        (("a", "b"), TUPLE, LIST, "expected a tuple of 2, nested like the features, got a list"),
        (("a", "b"), TUPLE, Pair(*TUPLE), "expected a tuple of 2, nested like the features, got a Pair"),
        (Pair("a", "b"), Pair(*TUPLE), TUPLE, r"expected a named tuple \(left, right\) of 2, .*, got a tuple"),
        ({"x": ["a", "b"]}, {"x": LIST}, {"x": TUPLE}, "at 'x': expected a list of 2, nested like the features"),
    ],
)
def test_lists_tuples_and_named_tuples_are_not_one_another(nested, right, wrong, message):
    engine = ps.Engine(config_of(nested))
    with pytest.raises(TypeError, match=f"^features.* {message}|^features:? ?{message}"):
        engine.recv_activations(wrong)
    with pytest.raises(TypeError, match=message):
        engine.recv_activations(right, weights=wrong)
    activations, dedup = engine.recv_activations(right)
    assert jax.tree.structure(activations) == jax.tree.structure(config_of(nested).feature_structure)
    of_wrong = jax.tree.map(lambda _: np.zeros((2, 2), np.float32), wrong, is_leaf=lambda v: v in LIST)
    with pytest.raises(TypeError, match=message):
        engine.send_gradients(of_wrong, deduplication_data=dedup)
    assert engine.global_step == 0
    assert engine.send_gradients(activations, deduplication_data=dedup)


# ---- inside jit


def test_a_call_inside_jit_says_what_to_do():
    engine = ps.Engine(config_of(["a"]))
    _, dedup = engine.recv_activations([[[1], [2]]])
    ones = np.ones((2, 2), np.float32)
    wanted = "was called inside jax.jit, where it would run once and not at every step: call it outside"

    def received(ids):
        return engine.recv_activations([ids])[0]

    with pytest.raises(ps.UsageError, match=f"recv_activations {wanted}, and pass its activations"):
        jax.jit(received)(jnp.array([1, 2]))
    with pytest.raises(ps.UsageError, match=f"recv_activations {wanted}"):
        jax.jit(lambda x: x * received(np.array([1, 2]))[0])(1.0)
    with pytest.raises(ps.UsageError, match=f"recv_activations {wanted}"):
        jax.lax.scan(lambda carry, ids: (carry, received(ids)), 0, jnp.ones((3, 2), int))
    for gradient in (lambda g: g, lambda _: ones):
        with pytest.raises(ps.UsageError, match=f"send_gradients {wanted}, and return the gradients"):
            jax.jit(lambda g, entry=gradient: engine.send_gradients([entry(g)], deduplication_data=dedup))(
                jnp.ones((2, 2))
            )
    assert engine.global_step == 0


def test_a_callback_of_a_jitted_function_and_a_function_under_grad_may_receive():
    engine = ps.Engine(config_of(["a"]))
    engine.load_parameters("t_a", np.ones((6, 2)))
    shape = jax.ShapeDtypeStruct((2, 2), np.float32)

    def received(ids):
        return np.asarray(engine.recv_activations([np.asarray(ids)])[0][0])

    assert jax.jit(lambda ids: jax.pure_callback(received, shape, ids))(jnp.array([1, 2])).tolist() == [[1, 1], [1, 1]]
    assert jax.grad(lambda w: (w * received([[1, 4], [2, 3]])).sum())(1.0) == 8
