"""Optax transforms as rules of tables, tables in and out of an Engine, and what EmbeddingTables refuses."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import penstock as ps
from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.model.updates import from_optax
from penstock.rows.bridge import apply

ROWS, DIM, BATCH = 6, 2, 4
RAGGED = [[0, 2], [], [4], [1, 1, 3]]


class Transform(NamedTuple):
    """What optax's transforms are: a pair of functions."""

    init: Any
    update: Any


def counted_momentum(rate):
    """Momentum whose rate falls with the number of steps."""

    def update(g, state, _):
        momentum, count = 0.5 * state[0] + g, state[1] + 1
        return -rate / count * momentum, (momentum, count)

    return Transform(lambda w: (jnp.zeros_like(w), jnp.zeros((), jnp.int32)), update)


def config_of(optimizer=None, batch=BATCH, **of_table):
    table = ps.TableConfig(ROWS, DIM, name="t", combiner="sum", **of_table)
    return ps.EmbeddingConfig.from_features([ps.FeatureConfig(table, name="f")], batch, optimizer or ps.Adagrad(0.5))


def embedding_of(mesh, rule=None, **options):
    return EmbeddingTables(config_of(**options), mesh, {"t": rule} if rule else {})


def step_of(embedding):
    @partial(jax.jit, donate_argnums=0)
    def step(tables, uses):
        (seen,) = embedding.gather(tables, uses)
        return embedding.apply(tables, uses, [2 * (seen - 1)])

    return step


EVERY_ROW = [[0, 1], [2], [3], [4, 5]]


def trains_like_dense(mesh, transform):
    """Every row is looked up in every step, so the transform may as well treat the whole table."""
    embedding = embedding_of(mesh, from_optax(transform))
    tables, step, uses = embedding.create(), step_of(embedding), embedding.preprocess([EVERY_ROW])
    dense = jnp.asarray(embedding.parameters(tables, "t")["parameters"])
    state = transform.init(dense)
    by = np.zeros((BATCH, ROWS), np.float32)
    for sample, ids in enumerate(EVERY_ROW):
        by[sample, ids] = 1
    for _ in range(3):
        tables = step(tables, uses)
        updates, state = transform.update(by.T @ (2 * (by @ dense - 1)), state, dense)
        dense = dense + updates
    np.testing.assert_allclose(embedding.parameters(tables, "t")["parameters"], dense, rtol=1e-4, atol=1e-6)


@pytest.mark.sampled("2-tiled")
@pytest.mark.parametrize("layout", ["plain", "tiled"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_transform_with_slots_and_a_count_updates_rows_as_it_updates_a_dense_table(
    mesh_of, monkeypatch, layout, devices
):
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    trains_like_dense(mesh_of(devices), counted_momentum(0.3))


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "lion", "adamw", "yogi"])
def test_transforms_of_optax_update_rows_as_they_update_a_dense_table(mesh_of, name):
    optax = pytest.importorskip("optax")
    trains_like_dense(mesh_of(1), getattr(optax, name)(0.05))


def test_rows_without_lookups_keep_weights_and_slots_and_the_count_is_the_tables(mesh_of):
    embedding = embedding_of(mesh_of(1), from_optax(counted_momentum(0.3)))
    tables, step = embedding.create(), step_of(embedding)
    tables = step(tables, embedding.preprocess([EVERY_ROW]))
    before = embedding.parameters(tables, "t")
    tables = step(tables, embedding.preprocess([[[5], [], [], []]]))
    after = embedding.parameters(tables, "t")
    for part in ("parameters", "state_0"):
        changed = [row for row in range(ROWS) if before[part][row].tobytes() != after[part][row].tobytes()]
        assert changed == [5]
    assert [int(number) for number in tables["t"].numbers] == [2]


@pytest.mark.parametrize("name", ["clip_by_global_norm", "scale_by_trust_ratio", "clip_by_block_rms"])
def test_transforms_that_mix_rows_are_refused(name):
    optax = pytest.importorskip("optax")
    arguments = (1.0,) if name.startswith("clip") else ()
    transform = optax.chain(getattr(optax, name)(*arguments), optax.sgd(0.1))
    with pytest.raises(ps.UsageError, match="the update of a row depends on other rows"):
        from_optax(transform)


@pytest.mark.evidence
def test_transforms_that_a_row_without_a_finite_gradient_holds_up_are_refused():
    optax = pytest.importorskip("optax")
    with pytest.raises(ps.UsageError, match="the update of a row depends on other rows"):
        from_optax(optax.chain(optax.apply_if_finite(optax.adam(0.1), 3), optax.scale(1.0)))
    assert from_optax(optax.chain(optax.zero_nans(), optax.sgd(0.1))).num_slots == 0


@pytest.mark.parametrize("name", ["MultiSteps", "apply_every"])
def test_transforms_that_postpone_gradients_are_refused(name):
    optax = pytest.importorskip("optax")
    steps = optax.MultiSteps(optax.adam(0.1), 2) if name == "MultiSteps" else optax.apply_every(2)
    transform = steps if name == "MultiSteps" else optax.chain(steps, optax.sgd(0.1))
    with pytest.raises(
        ps.UsageError, match=r"keeps gradients for a later step \(.*updated only in the steps that look"
    ):
        from_optax(transform)


def test_a_transform_is_a_rule_where_jax_promotes_no_types(mesh_of):
    optax = pytest.importorskip("optax")
    with jax.numpy_dtype_promotion("strict"):  # optax's own Adam divides by a power with an integer exponent
        rule = from_optax(optax.adam(0.1))
        EmbeddingTables(config_of(), mesh_of(1), rules={"t": rule})
    assert (rule.num_slots, len(rule.numbers)) == (2, 1)


def mixing(g, state, _):
    return -g / jnp.linalg.norm(g), state


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Transform(lambda w: (), mixing), "depends on other rows, as with clip_by_global_norm"),
        (Transform(lambda w: jnp.zeros(7), lambda g, s, w: (g, s)), r"got float32 \[7\] for weights \[6, 5\]"),
        (Transform(lambda w: w, lambda g, s, w: (g, s)), "got one that depends on the weights"),
        (Transform(lambda w: (), lambda g, s, w: 1 / 0), "fails for a table: ZeroDivisionError: division by zero"),
    ],
)
def test_transforms_without_a_state_by_row_are_refused(transform, message):
    with pytest.raises(ps.UsageError, match=message):
        from_optax(transform)


def test_a_transform_that_looks_at_the_number_of_rows_is_refused(mesh_of):
    """As optax.masked and adamw(mask=) do: their functions would see the rows of a batch."""
    rule = from_optax(Transform(lambda w: (), lambda g, s, w: (-g if w.shape == (ROWS, DIM) else g * 0.0, s)))
    with pytest.raises(ps.UsageError, match="rules, table 't': the transform depends on the number of rows, as with a"):
        embedding_of(mesh_of(1), rule)
    embedding_of(mesh_of(1), from_optax(Transform(lambda w: (), lambda g, s, w: (-g if w.shape[1] > 1 else g, s))))


def test_something_else_than_a_transform_is_refused():
    with pytest.raises(ps.UsageTypeError, match=r"expected an optax\.GradientTransformation, got float"):
        from_optax(0.1)


# ---- to and from an Engine


@pytest.mark.parametrize("devices", [1, 4])
def test_tables_go_from_an_engine_and_back_with_every_bit(mesh_of, devices):
    config = config_of(ps.Adam(0.1))
    engine, embedding = ps.Engine(config, seed=7), EmbeddingTables(config, mesh_of(devices))
    engine.apply({"t": ([1, 4], np.ones((2, DIM), np.float32))})
    parts = engine.retrieve_parameters("t")
    tables = embedding.load(embedding.create(), "t", parts.pop("parameters"), **parts)
    back = embedding.parameters(tables, "t")
    other = ps.Engine(config, seed=1)
    other.load_parameters("t", back.pop("parameters"), **back)
    assert [other.slots("t")[n].tobytes() for n in back] == [engine.slots("t")[n].tobytes() for n in back]
    assert other.table("t").tobytes() == engine.table("t").tobytes()


def test_a_dynamic_rate_is_an_argument_of_the_step(mesh_of):
    config = config_of(ps.SGD(lambda step: 0.1))
    embedding = EmbeddingTables(config, mesh_of(1))
    tables, uses = embedding.create(), embedding.preprocess([RAGGED])
    gradients = [jnp.ones((BATCH, DIM))]
    before = embedding.parameters(tables, "t")["parameters"]
    with pytest.raises(ps.UsageError, match=r"table 't': expected learning_rates\[0\], the rate of its dynamic tag"):
        embedding.apply(tables, uses, gradients)
    after = embedding.parameters(embedding.apply(tables, uses, gradients, [0.5]), "t")["parameters"]
    np.testing.assert_allclose(before[[0, 1, 5]] - after[[0, 1, 5]], [[0.5, 0.5], [1, 1], [0, 0]], atol=1e-6)


# ---- refusals


@pytest.mark.parametrize(
    ("optimizer", "of_table", "message"),
    [
        (None, {"dynamic": ps.Dynamic()}, "it is dynamic"),
        (None, {"placement": ps.Placement("host")}, "it is placed on the host"),
        (None, {"placement": ps.Placement("cached", 9)}, "it is placed on the host"),
        (ps.SGD(0.1, use_gradient_accumulation=False), {}, "it is updated once per gradient"),
        (ps.Adam(lazy_adam=False), {}, "its optimizer changes rows without gradients"),
        (ps.TorchAdagrad(lr_decay=0.5), {}, "its optimizer counts steps"),
    ],
)
def test_tables_that_only_an_engine_can_update_are_refused(mesh_of, optimizer, of_table, message):
    with pytest.raises(ps.UsageError, match=f"table 't': {message}; send its gradients to an Engine"):
        embedding_of(mesh_of(1), optimizer=optimizer, **of_table)


def test_a_table_with_16_bit_weights_is_refused(mesh_of):
    message = config_of().to_engine_proto()
    message.table.add(name="t", storage_dtype=2)
    with pytest.raises(ps.UsageError, match="table 't': its weights have 16 bits; send its gradients to an Engine"):
        EmbeddingTables(ps.EmbeddingConfig.from_proto(message), mesh_of(1))


def test_a_batch_that_devices_cannot_share_evenly_is_refused(mesh_of):
    with pytest.raises(ps.UsageError, match="feature 'f': 4 samples cannot be distributed evenly over 3 devices"):
        embedding_of(mesh_of(3)).preprocess([RAGGED])


def test_arguments_that_do_not_fit_the_table_are_refused(mesh_of):
    embedding = embedding_of(mesh_of(1))
    tables, uses = embedding.create(), embedding.preprocess([RAGGED])
    rule = embedding.rules["t"]
    with pytest.raises(ps.UsageError, match=r"gradient of feature 'f': expected shape \[4, 2\], got \[4, 3\]"):
        embedding.apply(tables, uses, [jnp.ones((4, 3))])
    with pytest.raises(ps.UsageError, match=r"gradients: expected one per feature \(f\), got g"):
        apply(rule, tables["t"], uses["t"], {"g": jnp.ones((4, 2))}, 0.1)
    with pytest.raises(ps.UsageError, match="adagrad: expected a learning_rate, got none"):
        apply(rule, tables["t"], uses["t"], {"f": jnp.ones((4, 2))})
    non_lazy = config_of(ps.Adam(lazy_adam=False)).table("t").rule
    with pytest.raises(ps.UsageError, match="adam with non-lazy updates changes every row"):
        apply(non_lazy, tables["t"], uses["t"], {"f": jnp.ones((4, 2))}, 0.1)
    corrected = config_of(ps.PartialRowWiseAdam()).table("t").rule
    with pytest.raises(ps.UsageError, match=r"partial_row_wise_adam: expected the three rates of rule\.rate_at"):
        apply(corrected, tables["t"], uses["t"], {"f": jnp.ones((4, 2))}, 0.1)
    message = "expected uses of a table of 1024 lines per device, got some for 2048; preprocess them for this table"
    with pytest.raises(ps.UsageError, match=message):
        embedding.gather(tables, {"t": replace(uses["t"], num_lines=2048)})
    with pytest.raises(ps.UsageError, match="no table 'u' in the configuration"):
        embedding.parameters(tables, "u")
    with pytest.raises(ps.UsageError, match="table 't': expected the slots accumulators; got none"):
        embedding.load(tables, "t", np.ones((ROWS, DIM)))
    with pytest.raises(ps.UsageError, match="rules: no table 'u' in the configuration"):
        EmbeddingTables(config_of(), mesh_of(1), {"u": from_optax(counted_momentum(0.1))})
    with pytest.raises(
        ps.UsageTypeError, match=r"rules, table 't': expected a rule of updates\.from_optax, got Transform"
    ):
        EmbeddingTables(config_of(), mesh_of(1), {"t": counted_momentum(0.1)})
    with pytest.raises(ps.UsageError, match="preprocess_steps: expected at least one batch, got none"):
        embedding.preprocess_steps([])


def test_a_configuration_without_features_is_refused(mesh_of):
    with pytest.raises(ps.ConfigError, match="the configuration has no features"):
        EmbeddingTables(ps.EmbeddingConfig.from_tables([ps.TableConfig(4, 2, name="t")], ps.SGD(0.1)), mesh_of(1))
