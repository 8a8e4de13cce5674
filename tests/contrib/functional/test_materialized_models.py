"""Flax and Keras models to deploy: the results of the trained model, and in a process without penstock."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import penstock as ps
from penstock.contrib.functional import EmbeddingTables

pytestmark = [
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),  # Keras 3.15 with jax 0.12
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),  # Keras, on saving
]

# What a process without penstock runs before it loads a model.
WITHOUT_PENSTOCK = """
import os, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "penstock":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import numpy as np
path, arrays = sys.argv[1:]
inputs = np.load(arrays)
"""
FEATURES = ("clicked", "bought", "seen", "last")
IDS = {
    "clicked": [[1, 2], [], [10], [1, 1, 4]],
    "bought": [[3], [4, 5], [0], []],
    "seen": [[6], [5, 4, 4], [], [0]],
    "last": [[1], [2, 3], [], [4, 5]],
}
WEIGHTS = {
    "clicked": [[0.5, 2.0], [], [3.0], [1.0, -1.0, 0.25]],
    "bought": [[2.0], [1.0, -1.0], [0.0], []],
    "seen": [[3.0], [0.5, 0.25, 1.0], [], [-1.0]],
    "last": None,
}
DENSE = np.random.default_rng(0).random((4, 2), np.float32)


def embedding_tables(quantization_config=None):
    """Tables of every combiner and a sequence, two features of which share one, trained for a few steps."""
    item, user, page = (
        ps.TableConfig(rows, 3, name=name, combiner=combiner, quantization_config=quantization_config)
        for rows, name, combiner in ((11, "item", "mean"), (7, "user", "sqrtn"), (9, "page", "sum"))
    )
    features = {
        "clicked": ps.FeatureConfig(item, name="clicked"),
        "bought": ps.FeatureConfig(user, name="bought"),
        "seen": ps.FeatureConfig(page, name="seen"),
        "last": ps.FeatureConfig(item, max_sequence_length=2, name="last"),
    }
    config = ps.EmbeddingConfig.from_features(features, 4, ps.Adagrad(0.5))
    return EmbeddingTables(config, Mesh(jax.devices()[:1], ("shard",)), halves=False)


def padded(lists, length=3, fill=-1, dtype=np.int32):
    return np.array([[*each, *[fill] * (length - len(each))] for each in lists], dtype)


def arrays_of(ids):
    return {name: padded(lists, 2 if name == "last" else 3) for name, lists in ids.items()}


def weight_arrays():
    # A weight where there is no id counts for nothing.
    return {name: None if lists is None else padded(lists, 3, 7.0, np.float32) for name, lists in WEIGHTS.items()}


def served(code, path, tmp_path, **arrays):
    """The result of a model in a process that cannot import penstock. code : sets ``result``"""
    np.savez(tmp_path / "inputs.npz", **arrays)
    program = f"{WITHOUT_PENSTOCK}{code}\nnp.save(path + '.npy', result)"
    subprocess.run([sys.executable, "-c", program, str(path), str(tmp_path / "inputs.npz")], check=True)
    return np.load(f"{path}.npy")


# ---- Flax NNX


@pytest.fixture
def flax():
    return pytest.importorskip("flax.nnx")


def flax_model(nnx, tables):
    from penstock.functional.nnx_embedding import Embedding

    class Model(nnx.Module):
        def __init__(self):
            self.embedding = Embedding(tables, seed=3)
            self.again = self.embedding
            self.dense, self.drop = nnx.Linear(17, 1, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, features, dense):
            parts = self.embedding(features)
            rows = [parts[name].reshape(dense.shape[0], -1) for name in FEATURES]
            return self.drop(self.dense(jnp.concatenate([*rows, dense], 1)))

    model = Model()
    uses = tables.preprocess(IDS)
    model.embedding.update(uses, jax.tree.map(lambda rows: rows * 0.1, model.embedding(uses)))
    model.eval()
    return model


def test_a_flax_model_has_the_same_results_as_a_program_of_a_process_without_penstock(flax, tmp_path):
    from penstock.functional.nnx_embedding import materialized

    tables = embedding_tables()
    model = flax_model(flax, tables)
    deployed, ids = materialized(model), arrays_of(IDS)
    expected = model(tables.preprocess(IDS), DENSE)
    np.testing.assert_allclose(deployed(ids, DENSE), expected, rtol=1e-6, atol=1e-7)
    batch = jax.export.symbolic_shape("batch")[0]
    shapes = [jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype) for array in (*ids.values(), DENSE)]
    function = jax.jit(lambda *arrays: deployed(dict(zip(ids, arrays, strict=False)), arrays[-1]))
    (tmp_path / "model").write_bytes(jax.export.export(function)(*shapes).serialize())
    code = """
import jax
order = ["clicked", "bought", "seen", "last", "dense"]
result = jax.export.deserialize(open(path, "rb").read()).call(*[inputs[name] for name in order])
"""
    twice = {name: np.concatenate([array, array]) for name, array in {**ids, "dense": DENSE}.items()}
    result = served(code, tmp_path / "model", tmp_path, **twice)
    np.testing.assert_allclose(result, np.concatenate([expected, expected]), rtol=1e-6, atol=1e-7)


def test_a_checkpoint_of_a_flax_model_is_read_in_a_process_without_penstock(flax, tmp_path):
    pytest.importorskip("orbax.checkpoint")
    import orbax.checkpoint

    from penstock.functional.nnx_embedding import materialized

    tables = embedding_tables()
    model = flax_model(flax, tables)
    state = flax.to_pure_dict(flax.state(materialized(model).embedding, flax.Param))
    orbax.checkpoint.PyTreeCheckpointer().save(tmp_path / "model", state)
    code = """
import orbax.checkpoint
from flax import nnx
state = orbax.checkpoint.PyTreeCheckpointer().restore(path)
embed = nnx.Embed(11, 3, rngs=nnx.Rngs(0))
embed.embedding[...] = state["tables"]["item"]["embedding"]
result = embed(inputs["ids"])
"""
    result = served(code, tmp_path / "model", tmp_path, ids=np.arange(11))
    np.testing.assert_array_equal(result, tables.lookup(model.embedding.tables, "item", range(11)))


def test_a_flax_copy_is_apart_and_keeps_what_modules_share(flax):
    from penstock.functional.nnx_embedding import materialized

    tables = embedding_tables()
    model = flax_model(flax, tables)
    deployed, ids = materialized(model), arrays_of(IDS)
    assert deployed.again is deployed.embedding
    before = deployed(ids, DENSE)

    @flax.jit(donate_argnums=0)
    def step(model, uses):
        model.embedding.update(uses, model.embedding(uses))
        model.dense.kernel[...] = model.dense.kernel * 2

    step(model, tables.preprocess(IDS))
    np.testing.assert_array_equal(deployed(ids, DENSE), before)
    assert not np.array_equal(model(tables.preprocess(IDS), DENSE), before)


@pytest.mark.parametrize("quantization", [None, ps.QuantizationConfig(5, -0.5, 0.5)])
def test_flax_weights_and_quantization_count_as_before(flax, quantization):
    from penstock.functional.nnx_embedding import Embedding, materialized

    tables = embedding_tables(quantization)
    embedding = Embedding(tables)
    got = materialized(embedding)(arrays_of(IDS), weight_arrays())
    expected = embedding(tables.preprocess(IDS, WEIGHTS))
    np.testing.assert_array_equal(got["last"], expected["last"])  # of a sequence, nothing is added
    for name, rows in expected.items():
        np.testing.assert_allclose(got[name], rows, rtol=1e-6, atol=1e-7)
    assert (set(np.unique(got["last"])) <= {-0.5, -0.25, 0.0, 0.25, 0.5}) is (quantization is not None)


def test_a_flax_embedding_takes_one_id_per_sample_and_reads_nan_beyond_its_table(flax):
    from penstock.functional.nnx_embedding import Embedding, materialized

    tables = embedding_tables()
    embedding = Embedding(tables)
    ids = arrays_of(IDS) | {"clicked": np.array([1, -1, 10, 11])}
    activations = materialized(embedding)(ids)
    rows = tables.lookup(embedding.tables, "item", [1, 10])
    np.testing.assert_array_equal(activations["clicked"][:3], [rows[0], np.zeros(3), rows[1]])
    assert np.isnan(activations["clicked"][3]).all()


def test_what_a_flax_copy_cannot_take_is_refused(flax):
    from penstock.functional.nnx_embedding import Embedding, materialized

    with pytest.raises(ps.UsageTypeError, match=r"materialized: expected a flax\.nnx\.Module, got dict"):
        materialized({})

    class Doubled(Embedding):
        def __call__(self, uses):
            return jax.tree.map(lambda rows: rows * 2, super().__call__(uses))

    tables = embedding_tables()
    with pytest.raises(
        ps.UsageTypeError, match="Doubled replaces the __call__ of Embedding, which the copy would lack"
    ):
        materialized(Doubled(tables))
    deployed, ids = materialized(Embedding(tables)), arrays_of(IDS)
    for features, problem in [
        ({"clicked": ids["clicked"]}, "features: expected a mapping with the features' keys"),
        (
            ids | {"clicked": ids["clicked"][..., None]},
            r"'clicked': expected ids of 1 axes, or one more, got .*4, 3, 1",
        ),
        (ids | {"last": ids["last"][:, 0]}, r"feature 'last': expected ids of 2 axes, got shape \[4\]"),
    ]:
        with pytest.raises(ps.UsageError, match=problem):
            deployed(features)
    weights = weight_arrays()
    with pytest.raises(ps.UsageError, match=r"weights of feature 'seen': expected shape \[4, 3\], that of its ids"):
        deployed(ids, {**weights, "seen": weights["seen"][:, :2]})
    with pytest.raises(ps.UsageError, match="weights of feature 'last': expected none for a sequence"):
        deployed(ids, {**weights, "last": np.ones((4, 2), np.float32)})
    with pytest.raises(ValueError, match="integer"):
        deployed({**ids, "seen": ids["seen"].astype(np.float32)})


# ---- Keras


@pytest.fixture
def keras():
    return pytest.importorskip("keras")


def keras_model(keras, form="dictionary", policy=None, quantization=None):
    """A trained model and its layer of tables. form : of the model's inputs"""
    from penstock.functional.keras_embedding import Embedding

    layer = Embedding(embedding_tables(quantization), 3, name="tables", dtype=policy)
    lookups, dense = layer.inputs(), keras.Input((2,), name="dense_features")
    parts = layer(lookups)
    rows = [keras.layers.Flatten()(parts[name]) if name == "last" else parts[name] for name in FEATURES]
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4)(keras.layers.Concatenate()([*rows, dense])))
    score = keras.layers.Dense(1)(keras.layers.BatchNormalization()(hidden))
    if form == "dictionary":
        return keras.Model({"lookups": lookups, "dense_features": dense}, {"score": score}), layer
    return keras.Model((lookups, dense), score), layer


def in_form(form, lookups):
    return {"lookups": lookups, "dense_features": DENSE} if form == "dictionary" else (lookups, DENSE)


def fit(keras, model, layer, form="dictionary"):
    model.compile(keras.optimizers.SGD(0.1), "mse")
    batch = in_form(form, layer.preprocess(IDS)), np.arange(4.0)[:, None]
    model.fit((batch for _ in range(3)), steps_per_epoch=3, shuffle=False, verbose=0)


@pytest.mark.parametrize(("form", "policy"), [("dictionary", None), ("tuple", "mixed_bfloat16")])
def test_a_keras_model_has_the_same_results_loaded_in_a_process_without_penstock(keras, form, policy, tmp_path):
    from penstock.functional.keras_embedding import materialized

    model, layer = keras_model(keras, form, policy)
    fit(keras, model, layer, form)
    deployed = materialized(model)
    expected = model.predict_on_batch(in_form(form, layer.preprocess(IDS)))
    result = deployed.predict_on_batch(in_form(form, arrays_of(IDS)))
    deployed.save(tmp_path / "model.keras")
    code = """
os.environ["KERAS_BACKEND"] = "jax"
import keras
model = keras.saving.load_model(path)
ids, dense = {name: inputs[name] for name in ("clicked", "bought", "seen", "last")}, inputs["dense"]
"""
    if form == "dictionary":
        expected, result = expected["score"], result["score"]
        code += "result = model.predict_on_batch({'lookups': ids, 'dense_features': dense})['score']"
    else:
        code += "result = model.predict_on_batch((ids, dense))"
    np.testing.assert_allclose(result, expected, rtol=1e-5 if policy is None else 1e-2, atol=1e-6)
    arrays = {**arrays_of(IDS), "dense": DENSE}
    np.testing.assert_array_equal(served(code, tmp_path / "model.keras", tmp_path, **arrays), result)


def test_a_keras_copy_is_apart_and_takes_batches_of_any_size(keras):
    from penstock.functional.keras_embedding import materialized

    model, layer = keras_model(keras)
    deployed = materialized(model)
    arrays = in_form("dictionary", arrays_of(IDS))
    before = deployed.predict_on_batch(arrays)["score"]
    fit(keras, model, layer)
    np.testing.assert_array_equal(deployed.predict_on_batch(arrays)["score"], before)
    twice = jax.tree.map(lambda array: np.concatenate([array, array, array[:1]]), arrays)
    result = deployed.predict_on_batch(twice)["score"]
    np.testing.assert_allclose(result, np.concatenate([before, before, before[:1]]), rtol=1e-5, atol=1e-6)


def test_a_frozen_table_stays_frozen_in_a_keras_copy(keras):
    from penstock.functional.keras_embedding import Embedding, materialized

    word, user = (ps.TableConfig(11, 3, name=name, trainable=name == "user") for name in ("word", "user"))
    features = {table.name: ps.FeatureConfig(table, name=table.name) for table in (word, user)}
    config = ps.EmbeddingConfig.from_features(features, 4, ps.SGD(0.1))
    layer = Embedding(EmbeddingTables(config, Mesh(jax.devices()[:1], ("shard",)), halves=False))
    inputs = layer.inputs()
    activations = layer(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(activations["word"] + activations["user"]))
    assert [weight.trainable for weight in layer.weights] == [True, False]  # by name
    deployed = materialized(model)
    deployed.compile(keras.optimizers.SGD(0.1), "mse")
    deployed.fit(dict.fromkeys(features, arrays_of(IDS)["clicked"]), np.ones((4, 1)), verbose=0)
    for name in features:
        rows = deployed.get_layer(f"{layer.name}_{name}").get_weights()[0]
        assert np.array_equal(rows, layer.embedding_tables.lookup(layer.tables, name, range(11))) == (name == "word")


@pytest.mark.parametrize("quantization", [None, ps.QuantizationConfig(5, -0.5, 0.5)])
def test_keras_weights_and_quantization_count_as_before(keras, quantization):
    from penstock.functional.keras_embedding import materialized

    model, layer = keras_model(keras, quantization=quantization)
    ids, weights = arrays_of(IDS), weight_arrays()
    pairs = {name: array if weights[name] is None else (array, weights[name]) for name, array in ids.items()}
    result = materialized(model, weighted=True).predict_on_batch(in_form("dictionary", pairs))["score"]
    expected = model.predict_on_batch(in_form("dictionary", layer.preprocess(IDS, WEIGHTS)))["score"]
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_keras_model_of_two_layers_whose_outputs_are_activations_is_materialized(keras):
    from penstock.functional.keras_embedding import Embedding, materialized

    layers = [Embedding(embedding_tables(), seed, name=name) for seed, name in enumerate(("first", "second"))]
    inputs = {layer.name: layer.inputs() for layer in layers}
    outputs = [layer(inputs[layer.name]) for layer in layers]
    model = keras.Model(inputs, [outputs[0]["bought"], outputs[1]["clicked"], outputs[1]["last"]])
    expected = model.predict_on_batch({layer.name: layer.preprocess(IDS) for layer in layers})
    results = materialized(model).predict_on_batch(dict.fromkeys(("first", "second"), arrays_of(IDS)))
    for result, rows in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, rows, rtol=1e-6, atol=1e-7)


def test_what_no_keras_copy_exists_for_is_refused(keras):
    from penstock.functional.keras_embedding import Embedding, materialized

    model, layer = keras_model(keras)
    deployed = materialized(model)
    inputs = layer.inputs()
    nested = keras.Model(inputs, model({"lookups": inputs, "dense_features": keras.ops.zeros((4, 2))}))
    torn = keras.Model([*keras.tree.flatten(inputs), keras.Input((1,))], layer(inputs)["seen"])

    class Doubled(Embedding):
        def call(self, uses):
            return jax.tree.map(lambda rows: rows * 2, super().call(uses))

    doubled = Doubled(embedding_tables())
    inputs = doubled.inputs()
    cases = [
        (3, ps.UsageTypeError, "expected a functional model.* got int"),
        (keras.Sequential([keras.layers.Dense(1)]), ps.UsageTypeError, "expected a functional model.* got Sequential"),
        (deployed, ps.UsageError, "has no layer of tables; call layers of tables in the model itself"),
        (nested, ps.UsageError, "has layer 'tables' inside of another one; call"),
        (torn, ps.UsageError, r"expected the inputs\(\) of layer 'tables', nested as they are, as inputs of model"),
        (keras.Model(inputs, doubled(inputs)["seen"]), ps.UsageTypeError, "Doubled replaces the call of Embedding"),
    ]
    for refused, error, problem in cases:
        with pytest.raises(error, match=f"materialized: .*{problem}|materialized: {problem}"):
            materialized(refused)
