"""Tables in the host's memory: the bits of tables on the devices, whichever tables and devices there are."""

import jax
import numpy as np
import pytest
from batches import batch, lists
from deltas import bytes_of
from device_table import addresses_of
from engines import stored

import penstock as ps

HOST, DEVICE = ps.Placement("host"), ps.Placement()
OPTIMIZERS = {
    "plain": ps.Adagrad(0.1),
    "swept": ps.Adam(0.05, lazy_adam=False),
    "keyed": ps.RowWiseAdagrad(0.1),
    "halved": ps.Momentum(0.1),
}
ALL = tuple(OPTIMIZERS)


def config_of(on_host=(), rows=600):
    tables = [
        ps.TableConfig(
            rows,
            3 + 5 * number,
            name=name,
            optimizer=optimizer,
            dynamic=ps.Dynamic(evict="lru") if name == "keyed" else None,
            placement=HOST if name in on_host else DEVICE,
        )
        for number, (name, optimizer) in enumerate(OPTIMIZERS.items())
    ]
    return stored(ps.EmbeddingConfig.from_tables(tables, num_required=2), ["halved"])


def log_of(frames=10, rows=120):
    """Frames that contain rows of every table, of more keys than the dynamic table has rows."""
    batches, rng = [], np.random.default_rng(0)
    for step in range(frames):
        for number, name in enumerate(OPTIMIZERS):
            ids = rng.integers(0, 2000 if name == "keyed" else 600, rows)
            grads = rng.standard_normal((rows, 3 + 5 * number)).astype(np.float32)
            batches.append(batch(ids, table=name, step=step, gradient=lists(grads)))
    return batches


def parts_of(engine, name):
    ids = engine.keys(name) if name == "keyed" else np.arange(600)
    tables = engine.core.tables
    numbers = engine.rows(name, ids).astype(np.int64) if name == "keyed" else ids
    return [tables.table(name).read(numbers, part).tobytes() for part in tables.parts(name).values()]


@pytest.mark.sampled("plain-swept-keyed-halved-1", "halved-plain-8")
@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("on_host", [ALL, ("plain", "keyed"), ("swept",), ("halved", "plain")], ids="-".join)
@pytest.mark.promise("No way to scale changes a bit")
def test_placement_changes_no_bit_of_tables_and_deltas(on_host, devices, mesh_of, tmp_path):
    cpu, placed = ps.Engine(config_of(), mesh_of(1)), ps.Engine(config_of(on_host), mesh_of(devices))
    wanted, actual = (bytes_of(engine.stage(log_of(), slots=True, flush=True)) for engine in (cpu, placed))
    assert actual == wanted
    assert placed.state_hash() == cpu.state_hash()
    assert cpu.global_step == 5
    for name in on_host:
        table = placed.core.tables.table(name)
        if table.backend.variant == "host":
            assert [type(array) for array in table.backend.arrays] == [np.ndarray]
        else:
            assert [array.devices() for array in table.backend.arrays] == [{jax.devices()[0]}] * len(
                table.backend.arrays
            )


@pytest.mark.sampled("xla")
@pytest.mark.parametrize("variant", ["xla", "pallas"])
def test_the_variant_of_the_devices_leaves_a_table_of_the_host_its_bits(variant, mesh_of, monkeypatch):
    cpu = ps.Engine(config_of(), mesh_of(1))
    cpu.run(log_of())
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    placed = ps.Engine(config_of({"plain", "keyed"}), mesh_of(2))
    placed.run(log_of())
    assert placed.core.tables.table("plain").backend.variant == "host"
    assert placed.core.tables.table("swept").backend.variant == variant
    for name in ("plain", "keyed"):
        assert parts_of(placed, name) == parts_of(cpu, name)


def test_an_update_on_the_host_is_in_place_and_compiles_nothing(mesh_of, compilations):
    engine = ps.Engine(config_of({"plain", "keyed"}), mesh_of(8))
    engine.run(log_of())
    before = [addresses_of(engine.core.tables.table(name)) for name in OPTIMIZERS]
    compilations.clear()
    engine.run(log_of())
    assert [addresses_of(engine.core.tables.table(name)) for name in OPTIMIZERS] == before
    assert compilations == []


@pytest.mark.sampled("('plain', 'swept', 'keyed', 'halved')-()")
@pytest.mark.parametrize(("before", "after"), [(ALL, ()), ((), ALL), (("plain",), ("swept", "keyed"))], ids=str)
def test_a_checkpoint_restores_to_another_placement(before, after, mesh_of, tmp_path):
    whole = ps.Engine(config_of(), mesh_of(1))
    whole.run(log_of(), flush=True)
    ps.Engine(config_of(before), mesh_of(8)).run(log_of(), checkpoint=tmp_path / "c", every=2, limit=5)
    engine = ps.Engine.restore(tmp_path / "c", mesh_of(3), config=config_of(after))
    assert {name for name in ALL if engine.core.tables.table(name).layout.num_devices == 1} == set(after)
    engine.run(log_of(), checkpoint=tmp_path / "c", every=2, resume=True, flush=True)
    again = ps.Engine.restore(tmp_path / "c", mesh_of(2))
    assert engine.state_hash() == again.state_hash() == whole.state_hash()
    assert {name for name in ALL if again.core.tables.table(name).layout.num_devices == 1} == set(after)


def test_rows_of_the_host_are_read_and_loaded_like_others_and_cross_to_the_mesh_on_request(mesh_of):
    engine = ps.Engine(config_of({"plain"}), mesh_of(8))
    rows, slot = np.random.default_rng(1).standard_normal((2, 600, 3)).astype(np.float32)
    engine.load_parameters("plain", rows, accumulators=slot)
    assert engine.lookup("plain", [599, 0, 599]).tobytes() == rows[[599, 0, 599]].tobytes()
    copies = {"weights": engine.table("plain"), **engine.slots("plain")}
    for copy, value in zip(copies.values(), (rows, slot), strict=True):
        assert np.asarray(copy).tobytes() == value.tobytes()
        assert copy.devices() == set(jax.devices()[:8])  # 600 rows, 75 on each
        assert {shard.data.shape for shard in copy.addressable_shards} == {(75, 3)}


def test_a_placement_is_part_of_the_configuration_and_not_of_the_message_of_tensorflow(tmp_path):
    config = config_of({"plain", "keyed"})
    config.save(tmp_path / "t.pbtxt")
    assert "placement {\n    where: HOST\n  }" in (tmp_path / "t.pbtxt").read_text()
    loaded = ps.EmbeddingConfig.load(tmp_path / "t.pbtxt")
    assert [spec.placement for spec in loaded.tables] == [HOST, DEVICE, HOST, DEVICE]
    cached = ps.TableConfig(4, 2, name="t", placement=ps.Placement("cached", device_bytes=np.int64(2**40)))
    ps.EmbeddingConfig.from_tables([cached], ps.SGD(0.1)).save(tmp_path / "c.pbtxt")
    assert "where: CACHED\n    device_bytes: 1099511627776\n    look_ahead: 4" in (tmp_path / "c.pbtxt").read_text()
    loaded = ps.EmbeddingConfig.load(tmp_path / "c.pbtxt").table("t")
    assert loaded.placement == ps.Placement("cached", 2**40, look_ahead=4)
    table = ps.TableConfig(4, 2, name="t", placement=HOST)
    assert b"placement" not in ps.EmbeddingConfig.from_tables([table], ps.SGD(0.1)).to_proto().SerializeToString()


BYTES = "device_bytes of a cached table must be an int from 1 to 9223372036854775807, got {}"


@pytest.mark.parametrize(
    ("problem", "arguments"),
    [
        ("where must be one of device, host, cached, got 'gpu'", ["gpu"]),
        ("device_bytes is of the placement cached, and where is host; remove it", ["host", 1]),
        ("look_ahead is of the placement cached, and where is device; remove it", ["device", None, 0]),
        *((BYTES.format(value), ["cached", value]) for value in (None, 8e9, 0, True, 2**63)),
        ("look_ahead of a cached table must be an int from 0 to 2147483647, got -1", ["cached", 1, -1]),
    ],
)
def test_a_placement_that_does_not_exist_is_refused(problem, arguments):
    with pytest.raises(ps.ConfigError, match=problem):
        ps.Placement(*arguments)
    with pytest.raises(ps.ConfigError, match=r"placement must be a Placement, such as Placement\('host'\), got 'host'"):
        ps.TableConfig(4, 2, placement="host")


def test_only_tables_that_xla_updates_on_the_host_need_the_cpu_of_jax(monkeypatch, mesh_of):
    def refuse(*args, backend=None, **kwargs):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "local_devices", refuse)
    ps.Engine(config_of({"plain", "swept", "keyed"}), mesh_of(1)).run(log_of())
    problem = (
        "tables in the host's memory that XLA updates need jax's platform cpu, and JAX_PLATFORMS is 'cuda'; add ',"
    )
    with pytest.raises(ps.ConfigError, match=problem):
        ps.Engine(config_of({"halved"}), mesh_of(1))  # with weights of 16 bits
