"""Dynamic tables with weights of 16 bits: rounded by key, so equal to static tables wherever rows lie."""

import numpy as np
import pytest
from dynamic import ALL_POLICIES, churning_steps, config_of, cut, log_of
from engines import stored
from evidence import IS_EVIDENCE, examples, more_as_evidence
from hypothesis import Phase, example, given
from hypothesis import strategies as st

import penstock as ps
from penstock.rows.bridge.stochastic_rounding import key_of, stochastic, words_of

OPTIMIZERS = {
    "sgd": ps.SGD(0.5),
    "adagrad": ps.Adagrad(0.1),
    "adam": ps.Adam(0.01, lazy_adam=True),
    "row-wise": ps.RowWiseAdagrad(0.1),
    "partially row-wise": ps.PartialRowWiseAdam(0.1),
}


def engine_of(dynamic=None, mesh=None, **options):
    names = ("rows", "dim", "optimizer")
    config = config_of(dynamic, **{name: options.pop(name) for name in names if name in options})
    return ps.Engine(stored(config, ["user"]), mesh, **options)


@given(
    optimizer=st.sampled_from([*OPTIMIZERS]),
    steps=st.lists(st.lists(st.integers(0, 12), max_size=20), min_size=1, max_size=8),
    num_required=st.integers(1, 3),
    form=st.sampled_from([("plain", 3), ("tiled", 2)]),
)
@example(optimizer="adam", steps=[[0, 3, 3], [], [5, 12, 3], [0, 5]], num_required=2, form=("tiled", 2))
@examples(10, 1, phases=[Phase.generate] if IS_EVIDENCE else [Phase.explicit])
def test_rows_slots_and_deltas_are_those_of_a_static_table(optimizer, steps, num_required, form, mesh_of):
    layout, devices = form
    table = ps.TableConfig(26, 4, name="user", optimizer=OPTIMIZERS[optimizer])
    static = stored(ps.EmbeddingConfig.from_tables([table]), ["user"])
    dynamic = stored(config_of(rows=26, optimizer=OPTIMIZERS[optimizer]), ["user"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_LAYOUT", layout)
        engines = [ps.Engine(config, mesh_of(devices), num_required=num_required) for config in (static, dynamic)]
        deltas = []
        for engine in engines:
            batches = list(engine.stage([log_of(steps)], numbered=False, slots=True, op=True))
            columns = [name for name in batches[0].schema.names if name != "clock"] if batches else []
            deltas.append([batch.select(columns).to_pylist() for batch in batches])
            engine.flush()
    assert deltas[0] == deltas[1]
    rows = [engine.lookup("user", range(13)) for engine in engines]  # those of absent keys, too
    assert rows[0].tobytes() == rows[1].tobytes()
    assert not (rows[1].view(np.uint32) & np.uint32(0xFFFF)).any()
    for part in range(1, 1 + len(engines[0].slots("user"))):
        of_slot = [tables.read(np.arange(13), part) for tables in (static_of(engines[0]), dynamic_of(engines[1]))]
        assert of_slot[0].tobytes() == of_slot[1].tobytes()


def static_of(engine):
    return engine.core.tables.table("user")


def dynamic_of(engine):
    return engine.core.tables.dynamic["user"]


def test_the_row_of_a_key_and_a_larger_table_change_no_bit(tmp_path):
    keys = np.array([5, -7, 2**40 + 5, 10**18])
    grads = np.random.default_rng(0).standard_normal((6, 4, 4), np.float32) * np.float32(0.01)
    first, second = engine_of(rows=8), engine_of(rows=8)
    first.apply({"user": (np.array([3, 4]), grads[0, :2])})
    second.apply({"user": (np.array([4]), grads[0, :1])})
    for engine in (first, second):
        for step in range(1, 3):
            engine.apply({"user": (keys, grads[step])})
    assert first.rows("user", keys).tolist() != second.rows("user", keys).tolist()
    assert first.lookup("user", keys).tobytes() == second.lookup("user", keys).tobytes()
    first.save(tmp_path)
    larger = ps.Engine.restore(tmp_path, config=stored(config_of(rows=20_000), ["user"]))
    assert larger.rows("user", keys).tolist() != first.rows("user", keys).tolist()
    for engine in (first, larger):
        for step in range(3, 6):
            engine.apply({"user": (keys, grads[step])})
    assert larger.lookup("user", keys).tobytes() == first.lookup("user", keys).tobytes()


def test_keys_that_share_their_lower_half_are_rounded_each_by_itself():
    high = np.arange(40_000, dtype=np.int64) << 32
    values = np.full(len(high), np.float32(1.0) + np.float32(0.3 / 128)).view(np.uint32)
    rounded = stochastic(np, values, key_of("t", 5, 0), words_of(high), np.zeros(len(high), np.uint32))
    assert abs((rounded.view(np.float32) > 1).mean() - 0.3) < 0.01
    small = np.array([0, 1, 2**31, 2**32 - 1])
    assert words_of(small).tolist() == small.tolist()
    assert len(set(words_of(np.array([-1, 2**32 - 1, 2**63 - 1, -(2**63), 0])).tolist())) == 5


@more_as_evidence
@pytest.mark.sampled("lru")
@pytest.mark.parametrize(
    "dynamic", [ALL_POLICIES, ps.Dynamic(probability=0.4, evict="lfu", half_life=4)], ids=["lru", "lfu"]
)
def test_one_hash_whatever_cuts_the_work(dynamic, mesh_of, monkeypatch):
    log, states = log_of(churning_steps(40)), set()
    forms = [("plain", 3, [1, 100]), ("tiled", 2, [24, 3]), ("plain", 1, [10_000]), ("tiled", 8, [24, 3])]
    for layout, devices, sizes in forms if IS_EVIDENCE else forms[:2]:
        monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
        engine = engine_of(dynamic, mesh_of(devices), rows=32, num_required=2)
        engine.run(cut(log, sizes), flush=True)
        states.add((engine.state_hash(), dynamic_of(engine).directory.counts["evicted"]))
    assert len(states) == 1
    assert states.pop()[1] > 20
