"""Models in Flax and Keras with penstock's tables: on next-word pairs, they train as with dense embeddings."""

import copy
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from device_table import addresses
from jax.sharding import Mesh
from scripts import ROOT, loaded

import penstock as ps
from penstock.contrib.functional import EmbeddingTables
from penstock.model.updates import from_optax

EXAMPLES = ROOT / "examples"
# Keras 3.15 asks jax for values of 64 bits, of which jax 0.12 warns.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")

LIBRARIES = {"flax": "examples/next_word_flax.py", "keras": "examples/next_word_keras.py"}


@pytest.fixture(params=LIBRARIES)
def example(request, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    pytest.importorskip(request.param)
    pytest.importorskip("optax")
    return loaded(LIBRARIES[request.param])


def test_the_loss_of_every_epoch_equals_that_of_dense_embeddings(example):
    losses, reference = example.train(epochs=10)
    assert len(losses) == 10
    assert losses[0] > 6.9  # a uniform guess among 1,083 words has ln 1083 = 6.99
    assert losses[-1] < 6.1
    np.testing.assert_allclose(losses, reference, rtol=1e-4)


@pytest.mark.evidence
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_step_of_an_example_compiles_for_a_tpu_in_place(library):
    pytest.importorskip(library)
    pytest.importorskip("libtpu")
    command = [sys.executable, LIBRARIES[library], "--compile-for", "v5e"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    assert "tables copied: none\nin place; atomic operations: none\n" in result.stdout


# ---- the modules


def config_of(optimizer=None):
    table = ps.TableConfig(11, 3, name="t", combiner="sum")
    return ps.EmbeddingConfig.from_features({"f": ps.FeatureConfig(table, name="f")}, 4, optimizer or ps.Adagrad(0.5))


BATCH = {"f": [[1, 2], [], [10], [1, 1]]}


def on_one_device(optimizer=None, **options):
    return EmbeddingTables(config_of(optimizer), Mesh(jax.devices()[:1], ("shard",)), **options)


def test_the_flax_module_updates_its_tables_in_place_and_trains_no_parameter(mesh_of):
    nnx = pytest.importorskip("flax.nnx")
    from penstock.contrib.functional.nnx_embedding import Embedding

    tables = EmbeddingTables(config_of(), mesh_of(2))
    module, lookups = Embedding(tables), tables.preprocess(BATCH)
    expected = jax.jit(lambda states: tables.apply(states, lookups, tables.gather(states, lookups)))(tables.create())
    assert jax.tree.leaves(nnx.state(module, nnx.Param)) == []

    @nnx.jit(donate_argnums=0)
    def step(module, lookups):
        module.update(lookups, module(lookups))

    addresses_before = addresses(module.tables)
    step(module, lookups)
    assert addresses(module.tables) == addresses_before
    for part, values in tables.parameters(module.tables, "t").items():
        np.testing.assert_array_equal(values, tables.parameters(expected, "t")[part])


def test_a_copy_of_a_flax_model_keeps_its_rows_while_the_model_trains():
    """As a target network does."""
    nnx = pytest.importorskip("flax.nnx")
    from penstock.contrib.functional.nnx_embedding import Embedding

    tables = on_one_device()
    module, lookups = Embedding(tables), tables.preprocess(BATCH)
    copied, initial_rows = copy.deepcopy(module), tables.parameters(module.tables, "t")
    nnx.jit(lambda module: module.update(lookups, module(lookups)), donate_argnums=0)(module)
    assert (tables.parameters(module.tables, "t")["parameters"] != initial_rows["parameters"]).any()
    assert_same_rows(tables.parameters(copied.tables, "t"), initial_rows)


def test_a_flax_model_that_is_created_in_a_traced_function_is_refused_in_a_sentence():
    nnx = pytest.importorskip("flax.nnx")
    from penstock.contrib.functional.nnx_embedding import Embedding

    tables = on_one_device()
    for create in (lambda: nnx.eval_shape(lambda: Embedding(tables)), nnx.jit(lambda: Embedding(tables))):
        with pytest.raises(ps.UsageTypeError, match=r"create: .*outside, and pass them to the function"):
            create()


@pytest.mark.parametrize(
    ("make_tables", "message"),
    [
        (
            lambda: EmbeddingTables(config_of(), Mesh(jax.devices()[:2], ("shard",))),
            "on one device, got 2; choose one: EmbeddingTables",
        ),
        (lambda: on_one_device(ps.SGD(lambda step: 0.1)), "table 't': a Keras layer needs a constant learning rate"),
        (lambda: on_one_device(rules={"t": from_optax(counting_adam())}), "cannot count the steps of its optax rule"),
    ],
)
def test_the_keras_layer_refuses_tables_that_it_cannot_train(keras_layer, make_tables, message):
    with pytest.raises(ps.UsageError, match=message):
        keras_layer(make_tables())


def test_the_keras_layer_refuses_tables_that_store_halves_of_words(keras_layer, monkeypatch):
    monkeypatch.setenv("PENSTOCK_LAYOUT", "tiled")
    with pytest.raises(
        ps.UsageError, match=r"halves of words have no gradient; use EmbeddingTables\(…, halves=False\)"
    ):
        keras_layer(on_one_device(ps.SGD(0.1)))
    assert keras_layer(on_one_device(ps.SGD(0.1), halves=False)).trainable_weights


@pytest.fixture
def keras_layer():
    pytest.importorskip("keras")
    from penstock.contrib.functional.keras_embedding import Embedding

    return Embedding


def test_an_export_of_a_model_with_tables_is_refused_in_a_sentence(keras_layer):
    pytest.importorskip("keras")
    jax_export = pytest.importorskip("jax.export")
    layer = keras_layer(on_one_device(halves=False), name="first")
    uses = layer.preprocess(BATCH)
    size = jax_export.symbolic_shape("n")[0]
    of_any_size = jax.tree.map(lambda array: jax.ShapeDtypeStruct((*array.shape[:-1], size), array.dtype), uses)
    with pytest.raises(ps.UsageTypeError, match="layer 'first': lookups of any size cannot be exported; export"):
        jax_export.export(jax.jit(layer.call))(of_any_size)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # Keras, on saving
@pytest.mark.parametrize("frozen_by", ["layer", "constructor"])
def test_a_frozen_keras_layer_keeps_its_rows_and_learns_again_once_it_is_thawed(keras_layer, frozen_by, tmp_path):
    model = two_layers(keras_layer, trainable=frozen_by != "constructor")
    if frozen_by == "layer":
        model.first.trainable = False
    initial_rows = rows_of(model)
    fit(model)
    trained_rows = rows_of(model)
    assert_same_rows(trained_rows["first"], initial_rows["first"])
    assert (trained_rows["second"]["parameters"] != initial_rows["second"]["parameters"]).any()

    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    loaded_model = two_layers(keras_layer, seed=7)
    loaded_model.load_weights(path)
    for layer, rows in rows_of(loaded_model).items():
        assert_same_rows(rows, trained_rows[layer])

    model.first.trainable = True
    fit(model)
    fit(loaded_model)
    thawed_rows = rows_of(model)
    assert (thawed_rows["first"]["parameters"] != trained_rows["first"]["parameters"]).any()
    for layer, rows in rows_of(loaded_model).items():
        assert_same_rows(rows, thawed_rows[layer])


def two_layers(keras_layer, seed=0, trainable=True):
    """Return a model of two layers, ``first`` and ``second``. trainable : whether ``first`` is trainable"""
    keras = pytest.importorskip("keras")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras_layer(on_one_device(ps.FTRL(0.5), halves=False), seed, trainable=trainable)
            self.second = keras_layer(on_one_device(halves=False), seed + 1)
            self.scores = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, lookups):
            return self.scores(self.first(lookups)["f"] * 0.5 + self.second(lookups)["f"])

    model = Model()
    model(model.first.preprocess(BATCH))
    return model


def fit(model):
    import keras

    model.compile(keras.optimizers.SGD(0.1), "mse")
    batch = model.first.preprocess(BATCH), np.arange(4.0)[:, None]
    model.fit((batch for _ in range(4)), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0)


def rows_of(model):
    layers = {"first": model.first, "second": model.second}
    return {name: layer.embedding_tables.parameters(layer.tables, "t") for name, layer in layers.items()}


def assert_same_rows(rows, expected):
    assert rows.keys() == expected.keys()
    for part, values in rows.items():
        np.testing.assert_array_equal(values, expected[part])


PAGE = (ROOT / "docs" / "functional.md").read_text()


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # Keras, on saving
@pytest.mark.parametrize("library", ["orbax.checkpoint", "optax", "flax", "keras"])
def test_the_pages_code_of_a_library_runs_after_that_of_jax(library, tmp_path, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("optax")
    namespace = {}
    codes = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    codes += [
        code
        for code in re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
        if f"import {library}" in code or f"from {library}" in code
    ]
    assert len(codes) >= 2
    for code in codes:
        exec(compile(code, "docs/functional.md", "exec"), namespace)


# ---- what a user of Keras expects of a layer


TWO_TABLES = [[[1, 2], [], [10], [1, 1]], [[3], [4, 5], [0], []]]


def functional_model(keras_layer, seed=0):
    """Return a functional model of two tables, with features nested in a tuple and a dictionary, and its layer."""
    import keras

    first, second = (ps.TableConfig(rows, 3, name=name, combiner="sum") for name, rows in (("t", 11), ("u", 7)))
    features = ({"f": ps.FeatureConfig(first, name="f")}, ps.FeatureConfig(second, name="g"))
    config = ps.EmbeddingConfig.from_features(features, 4, ps.Adagrad(0.5))
    mesh = Mesh(jax.devices()[:1], ("shard",))
    layer = keras_layer(EmbeddingTables(config, mesh, halves=False), seed, name="tables")
    inputs = layer.inputs()
    activations, other = layer(inputs)
    joined = keras.layers.Concatenate()([activations["f"], other])
    keras.utils.set_random_seed(1)
    return keras.Model(inputs, keras.layers.Dense(1)(joined)), layer


def nested(batch):
    return {"f": batch[0]}, batch[1]


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # Keras, on saving
def test_a_functional_model_trains_and_is_saved_and_loaded_whole(keras_layer, tmp_path):
    keras = pytest.importorskip("keras")
    from penstock.contrib.functional.keras_embedding import PreparedBatches

    model, layer = functional_model(keras_layer)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    labels = np.arange(4.0)[:, None]
    batches = PreparedBatches(layer, [(nested(TWO_TABLES), labels)] * 6, workers=2)
    losses = model.fit(batches, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert losses[1] < losses[0]
    model.save(tmp_path / "model.keras")
    loaded_model = keras.saving.load_model(tmp_path / "model.keras")
    loaded_layer = loaded_model.get_layer("tables")
    for name in ("t", "u"):
        rows, expected = (each.embedding_tables.parameters(each.tables, name) for each in (loaded_layer, layer))
        assert_same_rows(rows, expected)
    lookups = loaded_layer.preprocess(nested(TWO_TABLES))
    np.testing.assert_array_equal(model.predict_on_batch(lookups), loaded_model.predict_on_batch(lookups))
    assert loaded_model.fit(batches, verbose=0).history["loss"][0] < losses[1]  # continues with its slots
    layer.save_own_variables(store := {})
    with pytest.raises(ps.UsageError, match="the file has arrays of shapes"):
        keras_layer(on_one_device(halves=False)).load_own_variables(store)


def test_the_parameters_of_a_model_are_its_rows_in_id_order(keras_layer):
    model, layer = functional_model(keras_layer)
    assert layer.count_params() == 2 * 3 * (11 + 7)  # weights and accumulators, without padding
    dense = 6 + 1
    assert sum(int(np.prod(each.shape)) for each in model.trainable_weights) == 3 * (11 + 7) + dense
    lines = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    assert f"Trainable params: {3 * (11 + 7) + dense} " in "\n".join(lines)
    weights = layer.get_weights()
    np.testing.assert_array_equal(weights[0], layer.embedding_tables.lookup(layer.tables, "t", range(11)))
    layer.set_weights([np.zeros((11, 3)), *weights[1:]])
    assert not layer.embedding_tables.lookup(layer.tables, "t", range(11)).any()
    np.testing.assert_array_equal(layer.get_weights()[1], weights[1])


def test_fit_with_ids_in_place_of_lookups_is_refused_in_a_sentence(keras_layer):
    keras = pytest.importorskip("keras")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = keras_layer(on_one_device(halves=False), name="first")

        def call(self, features):
            return self.first(features)["f"]

    model = Model()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    ids = {"f": np.array([[1, 2], [3, 4], [5, 6], [7, 8]])}
    sentence = r"layer 'first': expected the lookups of a batch.*PreparedBatches.*preprocess\(features\)"
    with pytest.raises(ps.UsageTypeError, match=sentence):
        model.fit(ids, np.ones((4, 3)), batch_size=4, verbose=0)


def test_prepared_batches_are_those_of_the_layer_and_go_where_combine_says(keras_layer):
    keras = pytest.importorskip("keras")
    from penstock.contrib.functional.keras_embedding import PreparedBatches

    layer = keras_layer(on_one_device(halves=False))
    dense, labels = np.ones((4, 2)), np.arange(4.0)

    class Source(keras.utils.PyDataset):
        ended = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return BATCH, dense, labels

        def on_epoch_end(self):
            self.ended += 1

    source = Source()
    batches = PreparedBatches(layer, source, lambda lookups, dense, labels: ((lookups, dense), labels), workers=2)
    (lookups, got), got_labels = batches[2]
    for part, array in layer.preprocess(BATCH)["t"].items():
        np.testing.assert_array_equal(lookups["t"][part], array)
    assert len(batches) == 3
    assert (got is dense, got_labels is labels) == (True, True)
    batches.on_epoch_end()
    assert source.ended == 1
    with pytest.raises(ps.UsageError, match="use threads"):
        PreparedBatches(layer, source, use_multiprocessing=True)
    with pytest.raises(ps.UsageTypeError, match="a sequence or a PyDataset of batches, got generator; give fit"):
        PreparedBatches(layer, (batch for batch in [(BATCH, labels)]))


def test_a_layer_that_no_file_can_hold_says_so(keras_layer):
    pytest.importorskip("optax")
    with pytest.raises(ps.UsageError, match=r"table 't': its optax rule is a Python function.*load_weights"):
        keras_layer(on_one_device(rules={"t": from_optax(plain_sgd())}, halves=False)).get_config()


def plain_sgd():
    import optax

    return optax.sgd(0.1)


def counting_adam():
    optax = pytest.importorskip("optax")
    return optax.adam(0.1)
