"""Random batches: recv_activations and send_gradients do what a plain NumPy engine written from the contract does."""

from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import lookup_oracle
import numpy as np
import pyarrow as pa
import pytest
from drawn import RATES, WEIGHTS, assert_same_state, configurations
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps

BATCH = 3
VALUES = [1.0, -1.0, 0.1, -0.7, 3.3, 0.0, -0.0, 1e-42, 1e-20, 12345.678]


class Batch(NamedTuple):
    """Of one feature: a list of ids per sample, in a sequence None where a position has none, and a form for them."""

    ids: list
    weights: list | None
    form: str
    order: list  # of the lookups, where the form has one


@st.composite
def batches(draw, configuration, gaps):
    """{feature: Batch}"""
    actual = {}
    for feature in configuration.features:
        good = st.integers(0, configuration.table(feature.table).rows - 1)
        if gaps and feature.length:
            good = st.one_of(good, good, st.none())
        forms = ["dense", "lists", "arrow", "coordinates", "positions", "sparse", "ragged"]
        form = draw(st.sampled_from(["positions", "sparse"] if gaps and feature.length else forms))
        if form == "dense":
            size = draw(st.integers(1, 3))
            ids = draw(st.lists(st.lists(good, min_size=size, max_size=size), min_size=BATCH, max_size=BATCH))
        else:
            ids = draw(st.lists(st.lists(good, max_size=4), min_size=BATCH, max_size=BATCH))
        weights = None
        if not feature.length and draw(st.booleans()):
            weights = [draw(st.lists(st.sampled_from(WEIGHTS), min_size=len(row), max_size=len(row))) for row in ids]
        order = draw(st.permutations(range(sum(i is not None for row in ids for i in row))))
        actual[feature.name] = Batch(ids, weights, form, order)
    return actual


def given_as(batch):
    """(ids, weights) of a Batch as recv_activations takes them."""
    places = [(s, p) for s, row in enumerate(batch.ids) for p, i in enumerate(row) if i is not None]
    flat = np.array([batch.ids[s][p] for s, p in places], np.int64)
    weights = None if batch.weights is None else np.array([batch.weights[s][p] for s, p in places], np.float32)
    place = np.array(places, np.int64).reshape(-1, 2)
    if batch.form == "dense":
        return np.array(batch.ids), None if weights is None else weights.reshape(BATCH, -1)
    if batch.form == "lists":
        return batch.ids, batch.weights
    if batch.form == "arrow":
        listed = None if batch.weights is None else pa.array(batch.weights, pa.list_(pa.float32()))
        return pa.array(batch.ids, pa.list_(pa.int64())), listed
    if batch.form == "positions":
        order = np.array(batch.order, np.int64)
        return ps.CooIds(place[order], flat[order], None if weights is None else weights[order]), None
    if batch.form == "coordinates":  # in any order of samples; the ids of one keep theirs
        samples = place[np.array(batch.order, np.int64), 0]
        order = np.empty(len(flat), np.int64)
        order[np.argsort(samples, kind="stable")] = np.arange(len(flat))
        return ps.CooIds(samples, flat[order], None if weights is None else weights[order]), None
    if batch.form == "sparse":
        shape = np.array([BATCH, max((len(row) for row in batch.ids), default=0)])
        both = [SimpleNamespace(indices=place, values=values, dense_shape=shape) for values in (flat, weights)]
    else:
        splits = np.cumsum([0, *(len(row) for row in batch.ids)])
        both = [SimpleNamespace(flat_values=values, row_splits=splits) for values in (flat, weights)]
    return both[0], None if weights is None else both[1]


class Received(NamedTuple):
    """A batch that was received and whose gradients are not sent yet."""

    step: int
    uses: dict
    dedup: object


def nested(configuration, by_name):
    return by_name if configuration.nested else list(by_name.values())


def receive(engine, wanted, configuration, batch):
    taken = {name: given_as(item) for name, item in batch.items()}
    ids, weights = ({name: both[n] for name, both in taken.items()} for n in (0, 1))
    if all(weight is None for weight in weights.values()):
        got, dedup = engine.recv_activations(nested(configuration, ids))
    else:
        got, dedup = engine.recv_activations(nested(configuration, ids), nested(configuration, weights))
    got = dict(zip(batch, got.values() if configuration.nested else got, strict=True))
    looked, truncated = {}, 0
    for feature in wanted.features:
        first = batch[feature.name]
        looked[feature.name], beyond = lookup_oracle.uses(feature, first.ids, first.weights)
        truncated += beyond
        table = wanted.tables[feature.table].weights
        total, size = lookup_oracle.activations(feature, table, BATCH, looked[feature.name])
        ours = np.asarray(got[feature.name])
        assert (ours.dtype, ours.shape) == (np.float32, total.shape)
        whole = size < 3e38  # beyond, a partial sum may be infinite in float32
        assert (np.abs(ours[whole] - total[whole]) <= 8 * 2.0**-24 * size[whole] + 1e-40).all(), feature
    assert dedup.truncated == truncated
    return Received(wanted.global_step, looked, dedup)


@st.composite
def gradients_of(draw, configuration):
    actual = {}
    for feature in configuration.features:
        dim = configuration.table(feature.table).dim
        shape = (BATCH, feature.length, dim) if feature.length else (BATCH, dim)
        if draw(st.integers(0, 7)) == 7:
            actual[feature.name] = None
            continue
        values = draw(st.lists(st.sampled_from(VALUES), min_size=1, max_size=7))
        actual[feature.name] = np.resize(np.array(values, np.float32), shape)
    return actual


def spoiled(data, configuration, gradients, rates):
    """Gradients and rates of which one thing is wrong, and what the error says."""
    feature = data.draw(st.sampled_from(configuration.features)).name
    g = gradients[feature]
    faults = ["rates", "count"] if g is None else ["rates", "count", "nan", "shape", "dtype"]
    fault = data.draw(st.sampled_from(faults))
    changed = dict(gradients)
    if fault == "rates":
        return changed, [*(rates or [0.5] * configuration.num_tags), 0.5]
    if fault == "count":
        changed["other"] = np.zeros((BATCH, 1), np.float32)
    elif fault == "nan":
        changed[feature] = g.copy()
        changed[feature].flat[-1] = np.nan
    elif fault == "shape":
        changed[feature] = g[:-1]
    else:
        changed[feature] = g.astype(np.float64)
    return changed, rates


def is_late(wanted, configuration, entry):
    return wanted.global_step - entry.step > (1 if configuration.pipelined else 0)


def send(engine, wanted, configuration, entry, gradients, rates, library):
    late = is_late(wanted, configuration, entry)
    rows = lookup_oracle.gradient_rows(wanted.features, entry.uses, gradients)
    finite = all(np.isfinite(g).all() for of_table in rows.values() for _, g in of_table)
    value = {name: None if g is None else library.asarray(g) for name, g in gradients.items()}
    arguments = nested(configuration, value), rates, entry.dedup
    if not finite or (late and wanted.num_required == 1):
        with pytest.raises(ps.PenstockError):
            engine.send_gradients(*arguments)
        return False
    assert engine.send_gradients(*arguments) is not late
    if not late:
        wanted.push(rows, dict(enumerate(rates or [])))
    return True


@pytest.mark.parametrize("gaps", [False, True], ids=["whole", "sequences with gaps"])
@examples(150, 20, report_multiple_bugs=False)
@given(data=st.data())
def test_random_batches(mesh_of, gaps, data):
    configuration = data.draw(configurations())
    configuration.nested, configuration.pipelined = data.draw(st.booleans()), data.draw(st.booleans())
    engine = configuration.engine(BATCH, mesh=mesh_of(data.draw(st.sampled_from([1, 3]))))
    wanted = configuration.oracle()
    waiting, sent = [], []
    for _ in range(data.draw(st.integers(1, 6))):
        if not waiting or data.draw(st.booleans()):
            batch = data.draw(batches(configuration, gaps))
            waiting.append(receive(engine, wanted, configuration, batch))
            continue
        item = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        gradients = data.draw(gradients_of(configuration))
        rates = None
        if configuration.tags and not (configuration.schedules and data.draw(st.booleans())):
            rates = [data.draw(st.sampled_from(RATES)) for _ in range(configuration.num_tags)]
        if data.draw(st.integers(0, 3)) == 3:
            wrong, wrong_rates = spoiled(data, configuration, gradients, rates)
            with pytest.raises(ps.PenstockError):
                engine.send_gradients(nested(configuration, wrong), wrong_rates, item.dedup)
            assert_same_state(engine, wanted)
        if data.draw(st.booleans()):
            item = item._replace(dedup=ps.DeduplicationData.unpack(engine.config, *item.dedup.pack()))
        if send(engine, wanted, configuration, item, gradients, rates, data.draw(st.sampled_from([np, jnp]))):
            sent.append(item)
        assert_same_state(engine, wanted)
    for item in sent:
        zeros = nested(configuration, {feature.name: None for feature in configuration.features})
        arguments = zeros, [0.5] * configuration.num_tags, item.dedup
        if is_late(wanted, configuration, item) and wanted.num_required > 1:
            assert engine.send_gradients(*arguments) is False
        else:
            with pytest.raises(ps.PenstockError):
                engine.send_gradients(*arguments)
    assert_same_state(engine, wanted)
