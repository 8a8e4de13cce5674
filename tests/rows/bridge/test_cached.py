"""Cached tables: the bits of tables on the devices, whatever the size of the cache, in runs, passes and checkpoints."""

import cached
import numpy as np
import pytest
from deltas import bytes_of
from every_optimizer import EVERY, named
from ipc import log
from quarantines import read

import penstock as ps
from penstock.rows.bridge.row_format import UNTOUCHED

# Rows on the devices: no step has more than 80 distinct ids of a table.
SIZES = {"one row": 1, "one step": 80, "a tenth": 0.1, "half": 0.5, "all": 1.0}
AHEAD = (0, 1, 4, 16)
# (variant, devices, size, look_ahead); programs of XLA take long to compile, so that these have a part of the grid.
HOST = [
    ("host", devices, size, ahead) for devices in (1, 3, 8) for size, ahead in zip(SIZES, (1, 4, 0, 1, 16), strict=True)
]
PART = [(1, "one step", 0), (1, "a tenth", 16), (3, "one row", 1), (3, "half", 4), (8, "a tenth", 1), (8, "all", 4)]
LOG, SHORT = cached.log_of(), cached.log_of(steps=3, rows=5)  # the latter for a cache of one row


def batches_for(size):
    return SHORT if size == "one row" else LOG


@pytest.fixture(scope="module")
def of_device(mesh_of):
    """of_device(variant, log): hash and deltas of the tables on the devices, once per variant and log."""
    actual = {}

    def run(variant, batches):
        if (variant, len(batches)) not in actual:
            engine = ps.Engine(cached.config_of(), mesh_of(3))
            deltas = bytes_of(engine.stage(batches, slots=True, flush=True))
            actual[variant, len(batches)] = engine.state_hash(), deltas
        return actual[variant, len(batches)]

    return run


@pytest.mark.sampled("host-1-one row-1")
@pytest.mark.parametrize(
    ("variant", "devices", "size", "look_ahead"), [*HOST, *((by, *item) for by in ("xla", "pallas") for item in PART)]
)
def test_a_cache_changes_no_bit_of_tables_and_deltas(
    variant, devices, size, look_ahead, of_device, mesh_of, monkeypatch, tmp_path
):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    wanted_hash, wanted = of_device(variant, batches_for(size))
    engine = ps.Engine(cached.config_of(cached.cached(SIZES[size], look_ahead)), mesh_of(devices))
    assert engine.core.tables.table("plain").backend.variant == variant
    (tmp_path / "log.arrows").write_bytes(log(batches_for(size)))
    assert bytes_of(engine.stage(tmp_path / "log.arrows", slots=True, flush=True)) == wanted
    assert engine.state_hash() == wanted_hash
    assert engine.core.table_reports()["plain"].cache.up > 0


@pytest.fixture
def replay(tmp_path, call):
    """replay(name, config, log, flags…) → (state hash, bytes of the deltas)"""

    def run(name, config, batches, *flags, command="replay"):
        config.save(tmp_path / "tables.pbtxt")
        (tmp_path / "log.arrows").write_bytes(log(batches))
        deltas = tmp_path / f"{name}.arrows"
        words = [command, tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--flush", "--deltas", deltas, *flags]
        printed = call(0, *words, "--delta-slots", "all", "--out", tmp_path / f"{name}-out")[1]
        return printed["state_hash"], bytes_of(batch for batch in read(deltas) if batch.num_rows)

    return run


@pytest.mark.sampled("a tenth-4")
@pytest.mark.parametrize("look_ahead", AHEAD)
@pytest.mark.parametrize("size", SIZES)
def test_passes_of_a_cached_table_give_the_hash_and_the_deltas_of_a_device(size, look_ahead, replay):
    names = ("plain", "keyed")
    batches = [batch for batch in batches_for(size) if batch["table"][0].as_py() in names]
    wanted = replay("device", cached.config_of(names=names), batches)
    config = cached.config_of(cached.cached(SIZES[size], look_ahead), names)
    for passes in (1, 2, 5):
        assert replay(f"of-{passes}", config, batches, "--passes", passes, command="passes") == wanted


PLACEMENTS = {
    "device": lambda spec: ps.Placement(),
    "host": lambda spec: ps.Placement("host"),
    "cached": cached.cached(20, 4),
    "other cache": cached.cached(7, 1),
}


@pytest.mark.sampled("cached-device")
@pytest.mark.parametrize(
    ("before", "after"), [("cached", "device"), ("device", "cached"), ("host", "cached"), ("cached", "other cache")]
)
def test_a_checkpoint_with_rows_in_flight_restores_to_another_placement(
    before, after, mesh_of, tmp_path, small_blocks, of_device
):
    wanted, _ = of_device("auto", LOG)
    first = ps.Engine(cached.config_of(PLACEMENTS[before]), mesh_of(3))
    first.run(LOG, checkpoint=tmp_path / "c", every=1, limit=30)
    assert {path.suffix for path in (tmp_path / "c").iterdir()} >= {".base", ".delta"}
    actual = first.state_hash()
    engine = ps.Engine.restore(tmp_path / "c", mesh_of(2), config=cached.config_of(PLACEMENTS[after]))
    assert engine.state_hash() == actual
    engine.run(LOG, checkpoint=tmp_path / "c", every=2, resume=True, flush=True)
    assert engine.state_hash() == ps.Engine.restore(tmp_path / "c", mesh_of(1)).state_hash() == wanted


def test_rows_are_read_and_loaded_where_they_are_and_none_of_them_moves(mesh_of):
    engines = [ps.Engine(cached.config_of(placement), mesh_of(3)) for placement in PLACEMENTS.values()]
    rng = np.random.default_rng(2)
    for batches in (LOG[:20], LOG[20:]):
        hashes = set()
        rows, ids = rng.standard_normal((60, 3)).astype(np.float32), rng.permutation(300)[:60]
        read_ids = rng.integers(0, 300, 90)
        looked_up = set()
        for engine in engines:
            engine.run(batches)
            before = cached.counts(engine) if engine.core.tables.cached else None
            looked_up.add(engine.lookup("plain", read_ids).tobytes() + engine.lookup("halved", read_ids).tobytes())
            engine.load_parameters("plain", rows, ids=ids, accumulators=np.abs(rows))
            engine.load_parameters("keyed", np.ones((5, 8)), ids=[1, 2, 3, 10**6, -4], accumulators=np.ones((5, 1)))
            looked_up.add(engine.lookup("keyed", [10**6, 3, -4]).tobytes())
            hashes.add(engine.state_hash())
            assert before is None or cached.counts(engine) == before
        assert len(hashes) == 1
        assert len(looked_up) == 2


def test_whole_copies_of_a_cached_table_are_on_the_mesh(mesh_of):
    engine = ps.Engine(cached.config_of(PLACEMENTS["cached"]), mesh_of(3))
    engine.run(LOG)
    copies = {"weights": engine.table("plain"), **engine.slots("plain")}
    wanted = engine.retrieve_parameters("plain")
    for copy, rows in zip(copies.values(), wanted.values(), strict=True):
        assert np.asarray(copy).tobytes() == rows.tobytes()
        assert len(copy.devices()) == 3


def test_every_lazy_optimizer_and_a_program_of_the_user_have_the_bits_of_a_device(mesh_of):
    def grown(gradient, weights, seen):
        return weights - 0.1 * gradient * seen, seen + 1

    optimizers = dict(zip(named(EVERY), EVERY, strict=True))
    optimizers["program"] = ps.UserDefinedProgram(grown, initial_slot_values=[1.0])
    hashes = set()
    for placement in (ps.Placement(), ps.Placement("cached", device_bytes=200)):
        tables = [ps.TableConfig(60, 3, name=n, optimizer=o, placement=placement) for n, o in optimizers.items()]
        engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables), mesh_of(3))
        rng = np.random.default_rng(0)
        for _ in range(4):
            engine.apply({name: (rng.integers(0, 60, 12), rng.standard_normal((12, 3))) for name in optimizers})
        hashes.add(engine.state_hash())
    assert min(table.moved.down for table in engine.core.tables.cached.values()) > 0
    assert len(hashes) == 1


def test_an_optimizer_that_updates_untouched_rows_is_refused():
    table = ps.TableConfig(9, 2, name="t", placement=ps.Placement("cached", 100))
    problem = (
        "table 't': use_non_lazy_adam updates every row once a step, but only some rows of a CACHED table are on the "
        "devices; place the table on DEVICE or HOST, or remove use_non_lazy_adam"
    )
    with pytest.raises(ps.ConfigError, match=problem):
        ps.Engine(ps.EmbeddingConfig.from_tables([table], ps.Adam(lazy_adam=False)))


def test_validate_prints_what_cached_tables_need_on_the_host_and_on_the_devices(tmp_path, call):
    cached.config_of(cached.cached(10)).save(tmp_path / "tables.pbtxt")
    text, printed = call(0, "validate", tmp_path / "tables.pbtxt")
    assert (
        "memory    at least 43.8 kB on the host: weights 23.4 kB, slots 20.4 kB; most for 'halved', 23.4 kB\n" in text
    )
    assert "memory    at least 1.5 kB over all devices: rows of 4 cached tables" in text
    assert printed["memory"]["plain"] == {"weights": 3600, "slots": 3600, "cached": 240}


@pytest.mark.sampled("host")
@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])
def test_a_move_keeps_every_bit_of_numbers_that_are_not_ordinary(variant, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-45, -3e-42, 3.4e38, 1.17549435e-38, 0.1], np.float32)
    special = np.append(special, np.array([UNTOUCHED], np.int32).view(np.float32))
    rng, actual = np.random.default_rng(5), set()
    rows, slots = rng.choice(special, (2, 300, 3))
    steps = [rng.permutation(300)[:30] for _ in range(12)]
    for placement in (PLACEMENTS["device"], cached.cached(20)):
        engine = ps.Engine(cached.config_of(placement, ["plain"]), mesh_of(3), num_required=1)
        engine.load_parameters("plain", rows, accumulators=slots)
        for ids in steps:
            engine.apply({"plain": (ids, np.zeros((30, 3)))})
        actual.add(b"".join(part.tobytes() for part in engine.retrieve_parameters("plain").values()))
    assert len(actual) == 1
