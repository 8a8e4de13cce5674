"""What the tests of rollbacks share: configurations of every kind of table, frames for them, and their bits."""

import numpy as np
from engines import stored
from openings import hashed

import penstock as ps

ROWS, DIM = 40, 4
ADMITTED = {"min_count": 2, "forget_after": 5}
POLICIES = {
    "lru": ps.Dynamic(expire_after=4, evict="lru", **ADMITTED),
    "lfu": ps.Dynamic(evict="lfu", half_life=3),
    "chance": ps.Dynamic(probability=0.5, expire_after=6, evict="lru"),
    "time": ps.Dynamic(expire_after=17, evict="lru", clock="time"),
}


def table(name, **settings):
    """A small table."""
    return ps.TableConfig(ROWS, DIM, name=name, **{"optimizer": ps.Adagrad(0.1), **settings})


def _config(kind):
    if kind in POLICIES:
        tables = [table("user", dynamic=POLICIES[kind]), table("item", optimizer=ps.SGD(0.5))]
    elif kind in ("host", "cached"):
        placement = ps.Placement(kind, *([5 * 32] if kind == "cached" else []))
        tables = [table("user", placement=placement)]
        tables += [table("key", dynamic=POLICIES["lru"], placement=placement)]
    elif kind == "kept apart":
        tables = [table("user", optimizer=ps.SGD(0.5, use_gradient_accumulation=False)), table("item")]
    elif kind == "not lazy":
        tables = [table("user", optimizer=ps.Adam(0.1, lazy_adam=False)), table("item")]
    else:
        tables = [table("user"), table("item", optimizer=ps.FTRL(0.1))]
    config = ps.EmbeddingConfig.from_tables(tables)
    return stored(config, ["user"] if kind == "16 bits" else (), "MOD" if kind == "mod" else "DIV")


KINDS = ["plain", "mod", "16 bits", "kept apart", "not lazy", "host", "cached", *POLICIES]
CONFIGS = {kind: _config(kind) for kind in KINDS}


def rows_of_frame(config, number):
    """Table → ids and gradients of a frame, the same whenever it is asked for. Keys come and go."""
    rng, rows = np.random.default_rng(number), {}
    for spec in config.tables:
        ids = rng.integers(0, ROWS, 12)
        if spec.dynamic is not None:
            ids = hashed(number * 3 + rng.integers(0, 30, 12))
        rows[spec.name] = ids, rng.standard_normal((12, DIM)).astype(np.float32)
    return rows


def push(engine, numbers, **options):
    """Apply frames, which are never stale."""
    for number in numbers:
        time = 100 + 3 * number if engine.config.needs_time else None
        assert engine.apply(rows_of_frame(engine.config, number), time=time, **options)


def bits(engine):
    """All that a rollback brings back: weights, slots, keys and what decides about these, without the step."""
    return engine.core.tables.hash(0)


def next_clock(engine):
    """The clock of the next step of tables whose clocks are steps."""
    return engine.global_step - engine.core.clock_offset


def trained(kind, folder, num_required=2, **arguments):
    """An engine at step 12 with a frame in its gate; tag "good" names step 6, and the last commit is of step 10."""
    engine = ps.Engine(CONFIGS[kind], num_required=num_required, **arguments)
    for first in range(0, 12, 4):
        push(engine, range(first, first + 4))
        engine.save(folder)
    engine.tag("good")
    push(engine, range(12, 16))
    engine.save(folder)
    push(engine, range(16, 20))
    engine.save(folder)
    push(engine, range(20, 25))
    assert (engine.global_step, engine.core.gate.num_accumulated) == (12, 1)
    return engine


def check_continues(engine, folder):
    """The engine has the bits of the tag, and training on from there has those of training on from the tag."""
    good = ps.Engine.restore(folder, version="good")
    assert bits(engine) == bits(good)
    assert next_clock(engine) == good.global_step == 6
    if engine.core.tables.table("user").layout.bfloat16:
        return  # they are rounded by the step
    for number in range(30, 60, 6):
        push(engine, range(number, number + 6))
        push(good, range(number, number + 6))
        assert bits(engine) == bits(good)
    assert engine.global_step - good.global_step == engine.core.clock_offset
