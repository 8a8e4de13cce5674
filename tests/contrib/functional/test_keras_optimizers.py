"""What the optimizer and the policy of a Keras model do to tables: nothing, or they are refused at the first batch."""

from functools import cache

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import penstock as ps
from penstock.contrib.functional import EmbeddingTables

keras = pytest.importorskip("keras")

from penstock.contrib.functional.keras_embedding import Embedding, PreparedBatches  # noqa: E402

# Keras 3.15 asks jax for values of 64 bits, of which jax 0.12 warns.
pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")

IDS, LABELS = {"c": [[7, 3, 7], [7]]}, np.full((2, 1), -1.0)  # bfloat16 would round the gains of a mean of three rows


@pytest.fixture(autouse=True)
def policy():
    yield
    keras.config.set_dtype_policy("float32")


def one_device(optimizer=None):
    table = ps.TableConfig(8, 2, ps.Constant(-1.0), optimizer or ps.SGD(0.5), combiner="mean", name="t")
    config = ps.EmbeddingConfig.from_features({"c": ps.FeatureConfig(table, name="c")}, 2)
    return EmbeddingTables(config, Mesh(jax.devices()[:1], ("shard",)), halves=False)


class Subclassed(keras.Model):
    def __init__(self, layer, dense):
        super().__init__()
        self.layer, self.dense = layer, dense

    def call(self, lookups):
        return self.dense(self.layer(lookups)["c"])


def compiled(optimizer, subclassed=False, calls=1, dtype=None):
    """Return a model and its layer. calls : of the layer; dtype : of the layer, None for that of the policy"""
    layer = Embedding(one_device(), name="layer", dtype=dtype)
    dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.7))
    if subclassed:
        model = Subclassed(layer, dense)
    else:
        inputs = layer.inputs()
        model = keras.Model(inputs, dense(sum(layer(inputs)["c"] for _ in range(calls))))
    model.compile(optimizer, "mse")
    return model, layer


def rows_of(layer):
    return layer.embedding_tables.parameters(layer.tables, "t")["parameters"]


def trained(model, layer, num_steps=3):
    model.fit(PreparedBatches(layer, [(IDS, LABELS)] * num_steps), shuffle=False, verbose=0)
    return rows_of(layer)


def sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


@cache
def expected_rows():
    """Return the rows after three steps by an optimizer that leaves the loss as it is."""
    return trained(*compiled(sgd()))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: sgd(gradient_accumulation_steps=2), "accumulates gradients.*leave out gradient_accumulation_steps"),
        (
            lambda: keras.optimizers.LossScaleOptimizer(sgd(momentum=0.9, gradient_accumulation_steps=2)),
            "accumulates gradients",
        ),
        (lambda: sgd(use_ema=True), "averages variables, and rows have no average; leave out use_ema"),
        (lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2), "leave out use_ema"),
        (lambda: keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd())), "use one optimizer"),
    ],
)
def test_an_optimizer_that_would_change_updated_rows_is_refused_before_the_first_batch(optimizer, message):
    model, layer = compiled(optimizer())
    with pytest.raises(ps.UsageError, match=f"layer 'layer', optimizer '.*': it .*{message}"):
        trained(model, layer)
    assert (rows_of(layer) == -1).all()


@pytest.mark.sampled("static", "dynamic")
@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        (lambda: sgd(loss_scale_factor=1024.0), {}),
        (lambda: keras.optimizers.LossScaleOptimizer(sgd(), dynamic_growth_steps=2), {}),
        (lambda: sgd(loss_scale_factor=1024.0), {"run_eagerly": True}),
        (lambda: sgd(loss_scale_factor=1024.0), {"steps_per_execution": 2}),
    ],
    ids=["static", "dynamic", "eager", "steps"],
)
def test_a_scaled_loss_moves_rows_by_the_gradients_of_the_loss(scaling, options):
    model, layer = compiled(None)
    model.compile(scaling(), "mse", **options)
    rows = trained(model, layer)
    assert (rows[0] == -1).all()
    assert (rows[7] != -1).all()
    # Without a compiler, products are not fused with sums.
    np.testing.assert_allclose(rows, expected_rows(), rtol=1e-6 if "run_eagerly" in options else 0)


def test_a_gradient_that_overflows_by_its_scale_skips_the_step_although_the_table_clips():
    layer = Embedding(one_device(ps.SGD(0.5, clipvalue=0.1)))
    inputs = layer.inputs()
    model = keras.Model(inputs, keras.ops.sum(layer(inputs)["c"], axis=1, keepdims=True) * 100.0)
    model.compile(keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0**120), "mse")
    assert (trained(model, layer, num_steps=1) == -1).all()
    assert (trained(model, layer, num_steps=12)[[3, 7]] != -1).all()


@pytest.mark.sampled("mixed_float16-functional", "mixed_bfloat16-subclassed")
@pytest.mark.parametrize("subclassed", [False, True], ids=["functional", "subclassed"])
@pytest.mark.parametrize("name", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_a_policy_leaves_tables_in_float32_and_gives_activations_its_compute_dtype(name, subclassed):
    keras.config.set_dtype_policy(name)
    model, layer = compiled(sgd(), subclassed)
    lookups = layer.preprocess(IDS)
    assert (layer(lookups)["c"].dtype, model(lookups).dtype) == (layer.compute_dtype, layer.compute_dtype)
    rows = trained(model, layer)
    assert {array.dtype for array in layer.tables["t"].arrays} == {np.dtype("float32")}
    np.testing.assert_array_equal(rows, trained(*compiled(sgd(), subclassed, dtype="float32")))
    keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(rows, expected_rows(), rtol=0.01)


def test_a_mean_of_rows_in_a_subclassed_model_has_gains_that_no_policy_rounds():
    layer = Embedding(one_device(), dtype="float32")

    class Model(keras.Model):
        def call(self, lookups):
            return layer(lookups)["c"]

    lookups = layer.preprocess(IDS)
    expected = Model()(lookups)
    keras.config.set_dtype_policy("mixed_bfloat16")
    np.testing.assert_array_equal(Model()(lookups), expected)


# ---- steps that a user writes


def test_a_loss_of_the_user_without_the_layers_own_is_refused_if_it_is_scaled():
    model, layer = compiled(sgd())
    model.compute_loss = lambda x, y, y_pred, sample_weight, training: keras.ops.mean((y_pred - y) ** 2)
    np.testing.assert_array_equal(trained(model, layer), expected_rows())
    model.compile(sgd(loss_scale_factor=1024.0))
    with pytest.raises(ps.UsageError, match=r"lacks the layer's own loss, .* add sum\(model.losses\)"):
        trained(model, layer)


def step_of(model, optimizer, return_losses):
    """Return the step of Keras's guide to training loops in JAX, and its state."""
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, others, optimizer_variables, lookups, labels):
        outputs, others, *rest = model.stateless_call(trainable, others, lookups, return_losses=return_losses)
        loss = keras.ops.mean((outputs - labels) ** 2) + sum(rest[0] if rest else ())
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, optimizer_variables, strict=True))):
            return optimizer.scale_loss(loss), others

    @jax.jit
    def step(state, lookups, labels):
        trainable, others, optimizer_variables = state
        gradients, others = jax.grad(loss_of, has_aux=True)(*state, lookups, labels)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, gradients, trainable)
        return trainable, others, optimizer_variables

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    return step, tuple([variable.value for variable in group] for group in groups)


@pytest.mark.sampled("1024.0-True", "1024.0-False")
@pytest.mark.parametrize("return_losses", [True, False])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_loop_of_the_user_trains_rows_or_says_what_its_loss_lacks(scale, return_losses):
    model, layer = compiled(sgd())
    step, state = step_of(model, sgd(loss_scale_factor=scale), return_losses)
    if scale and not return_losses:
        with pytest.raises(ps.UsageError, match=r"stateless_call\(…, return_losses=True\)"):
            step(state, layer.preprocess(IDS), LABELS)
        return
    for _ in range(3):
        state = step(state, layer.preprocess(IDS), LABELS)
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    np.testing.assert_array_equal(rows_of(layer), expected_rows())


def test_a_loop_of_the_user_with_an_optimizer_that_accumulates_is_refused():
    model, layer = compiled(sgd())
    with pytest.raises(ps.UsageError, match="it accumulates gradients"):
        step_of(model, sgd(gradient_accumulation_steps=2), return_losses=True)
    np.testing.assert_array_equal(trained(model, layer), expected_rows())


def test_a_layer_that_is_called_twice_in_a_step_is_refused_and_may_predict():
    model, layer = compiled(sgd(), calls=2)
    batches = PreparedBatches(layer, [(IDS, LABELS)])
    assert model.predict(batches, verbose=0).shape == (2, 1)
    with pytest.raises(ps.UsageError, match="the layer was called twice in one step"):
        model.fit(batches, verbose=0)


@pytest.mark.evidence
def test_a_model_that_is_computed_again_in_the_backward_pass_trains_as_any_other():
    with keras.RematScope(mode="full"):
        model, layer = compiled(sgd())
    np.testing.assert_array_equal(trained(model, layer), expected_rows())


def test_a_model_as_a_whole_is_frozen_and_thawed_and_keeps_no_tracer():
    model, layer = compiled(sgd())
    for trainable in (False, True):
        model.trainable = trainable
        model.compile(sgd(), "mse")
        with jax.checking_leaks():
            assert (trained(model, layer)[[3, 7]] == -1).all() != trainable


def test_a_distribution_over_several_devices_is_refused():
    layer = Embedding(one_device())
    with keras.distribution.DataParallel(
        devices=keras.distribution.list_devices()[:2], auto_shard_dataset=False
    ).scope():
        for distribute in (lambda: layer.preprocess(IDS), lambda: Embedding(one_device())):
            with pytest.raises(ps.UsageError, match="DataParallel distributes each batch over several; call keras"):
                distribute()


@pytest.mark.evidence
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # Keras, on saving
def test_a_model_with_a_mixed_policy_is_saved_and_continues(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    model, layer = compiled(sgd())
    expected = trained(model, layer)
    model.save(tmp_path / "model.keras")
    loaded_model = keras.saving.load_model(tmp_path / "model.keras")
    loaded_layer = loaded_model.get_layer("layer")
    np.testing.assert_array_equal(rows_of(loaded_layer), expected)
    assert loaded_layer.compute_dtype == "float16"
    np.testing.assert_array_equal(trained(loaded_model, loaded_layer), trained(model, layer))
