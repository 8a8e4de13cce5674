"""Commands with dynamic tables: what they print, compare and write, by key; and what they refuse, by name."""

import dataclasses
import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest
from dynamic import ALL_POLICIES, churning_steps, config_of, engine_of, log_of, push, timed
from ipc import write

import penstock as ps
from penstock.cli.output import size_text

SETTINGS = "min_count 2, expire_after 9, evict lru"


def saved(tmp_path, name="run", steps=60, **options):
    engine = engine_of(ALL_POLICIES, rows=32, **options)
    engine.run([log_of(churning_steps(steps))], checkpoint=tmp_path / name)
    return engine


def test_export_writes_the_keys(tmp_path, call):
    engine = saved(tmp_path)
    engine.write_tables(tmp_path / "out")
    call(0, "export", tmp_path / "run", tmp_path / "exported")
    exported, written = (pq.read_table(tmp_path / folder / "user.parquet") for folder in ("exported", "out"))
    assert exported == written
    assert len(exported) == len(engine.keys("user"))


def test_export_to_orbax_is_refused(tmp_path, refused):
    saved(tmp_path)
    line = refused(2, "export", tmp_path / "run", tmp_path / "tree", "--format", "orbax")
    assert "table 'user' is dynamic, and an Orbax checkpoint has no keys; use parquet" in line


def test_diff_compares_by_key(tmp_path, call):
    engine = saved(tmp_path)
    engine.write_tables(tmp_path / "out")
    _, result = call(0, "diff", tmp_path / "run", tmp_path / "out", "--json")
    assert result["equal"]
    key = int(engine.keys("user")[3])
    engine.load_parameters("user", np.full((1, 4), 7, np.float32), ids=[key], accumulators=np.ones((1, 4), np.float32))
    engine.write_tables(tmp_path / "other")
    _, result = call(1, "diff", tmp_path / "run", tmp_path / "other", "--json")
    assert result["differences"]["user"]["parameters"]["rows"] == 1
    assert result["differences"]["user"]["parameters"]["first"]["id"] == key
    saved(tmp_path, "shorter", 50)
    _, result = call(1, "diff", tmp_path / "run", tmp_path / "shorter", "--json")
    assert result["differences"]["user"]["keys"]["only_in_a"] > 0


def test_diff_tells_large_keys_apart_in_tables_of_two_types(tmp_path, call):
    """As floats, to which NumPy brings int64 and uint64, keys near 2^63 would be one key."""
    static = ps.TableConfig(9, 4, name="user", optimizer=ps.Adagrad(0.1))
    engines = {
        "static": (ps.Engine(ps.EmbeddingConfig.from_tables([static])), range(9)),
        "int64": (engine_of(rows=20), [1, 2, 3, -1, 1 - 2**63, 2 - 2**63]),
        "uint64": (
            engine_of(ps.Dynamic(key_type="uint64"), rows=20),
            np.array([1, 2, 3, 2**63 + 1, 2**63 + 2, 2**64 - 1], np.uint64),
        ),
    }
    for name, (engine, keys) in engines.items():
        push(engine, keys)
        engine.write_tables(tmp_path / name)
    for a, b, only_in_a in (("static", "uint64", 6), ("int64", "uint64", 3), ("static", "int64", 6)):
        for item, other, only in ((a, b, (only_in_a, 3)), (b, a, (3, only_in_a))):
            _, result = call(1, "diff", tmp_path / item, tmp_path / other, "--json")
            assert result["differences"] == {"user": {"keys": {"only_in_a": only[0], "only_in_b": only[1]}}}


def test_inspect_names_dynamic_tables(tmp_path, call):
    saved(tmp_path)
    text, result = call(0, "inspect", tmp_path / "run")
    engine = ps.Engine.restore(tmp_path / "run")
    keys = engine.core.table_reports()["user"].keys
    assert f"user: 32 × 4, Adagrad, accumulators, dynamic: {keys.keys} keys, {keys.waiting} waiting; {SETTINGS}" in text
    assert (result["tables"][0]["keys"], result["tables"][0]["waiting"]) == (keys.keys, keys.waiting)
    config_of(ALL_POLICIES).save(tmp_path / "c.pbtxt")
    text, result = call(0, "inspect", tmp_path / "c.pbtxt")
    assert f"table user: 64 × 4, Adagrad, dynamic: {SETTINGS}\n" in text
    assert result["tables"][0]["dynamic"] == dataclasses.asdict(ALL_POLICIES)
    config_of(ps.Dynamic()).save(tmp_path / "plain.pbtxt")
    text, _ = call(0, "inspect", tmp_path / "plain.pbtxt")
    assert text.endswith(", Adagrad, dynamic\n")


def test_expired_keys_that_wait_for_their_sweep_are_not_exported(tmp_path, call):
    engine = engine_of(ps.Dynamic(expire_after=1), rows=8)
    engine.run([log_of([[1], [2], [2], [2]])], checkpoint=tmp_path / "run")
    assert engine.core.table_reports()["user"].keys.expired_waiting == 1
    call(0, "export", tmp_path / "run", tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / "user.parquet")["id"].to_pylist() == [2]


def logged(tmp_path, steps, **settings):
    """The paths of a configuration and of a log."""
    config, log = tmp_path / "tables.pbtxt", tmp_path / "log.arrows"
    config_of(settings.pop("dynamic", ALL_POLICIES), **settings).save(config)
    return config, write(log, [log_of(steps)])


def test_a_replay_prints_what_became_of_the_keys(tmp_path, call):
    text, report = call(0, "replay", *logged(tmp_path, churning_steps(60), rows=32), "--report", tmp_path / "page")
    keys = report["tables"]["user"]["keys"]
    assert "distinct" not in report["tables"]["user"]
    assert keys["admitted"] - keys["expired"] - keys["evicted"] == keys["keys"]
    assert "table     user: 1,440 rows\n" in text
    assert f"keys      user: {keys['keys']} keys ({keys['keys'] / 32:.0%} of the rows), directory " in text
    assert f"directory {size_text(keys['directory_bytes'])}, {keys['expired_waiting']} expired waiting" in text
    assert (
        f"keys      user: {keys['admitted']} admitted, {keys['returned']} returned, {keys['expired']} expired" in text
    )
    assert (
        f"{keys['evicted']} evicted, 0 rejected; {keys['waiting']} waiting, {keys['unadmitted_rows']} rows not" in text
    )
    page = (tmp_path / "page" / "index.html").read_text()
    row = re.search(r"Keys of dynamic tables.*?<tr><td>user(.*?)</tr>", page, re.DOTALL).group(1)
    numbers = ("keys", "admitted", "returned", "expired", "evicted", "rejected", "waiting", "unadmitted_rows")
    assert row.split("<td>")[1:9] == [f"{keys[number]:,}" for number in numbers]
    live = json.loads((tmp_path / "page" / "report.json").read_text())["live"]
    assert live["metrics"]["penstock_table_keys"] == {"user": keys["keys"]}
    assert "penstock_table_distinct_ids" not in live["metrics"]
    assert live["hot"][0][1].lstrip("-").isdigit()  # text: a browser's numbers would round 64 bits


def test_validate_says_what_a_dynamic_table_needs(tmp_path, call):
    for rows, evict in ((32, None), (300_000, "lru"), (70_001, "lfu")):
        dynamic = ps.Dynamic(evict=evict, half_life=3 if evict == "lfu" else None)
        config_of(dynamic, rows=rows).save(tmp_path / "c.pbtxt")
        text, result = call(0, "validate", tmp_path / "c.pbtxt")
        num_bytes = engine_of(dynamic, rows=rows).core.tables.dynamic["user"].directory.nbytes
        assert result["memory"]["user"] == {"weights": 16 * rows, "slots": 16 * rows, "directory": num_bytes}
    assert "memory    at least 2.9 MB on the host: directories of 1 dynamic table\n" in text


@pytest.mark.parametrize(
    "dynamic",
    [
        ALL_POLICIES,
        ps.Dynamic(min_count=2, count="frames", forget_after=5, expire_after=9, evict="lfu", half_life=4),
        ps.Dynamic(probability=0.4, evict="lru"),
    ],
    ids=["lru", "lfu", "chance"],
)
def test_validate_finds_what_a_replay_would_do_to_the_keys(tmp_path, call, dynamic):
    config, log = logged(tmp_path, churning_steps(60), rows=32, dynamic=dynamic)
    _, result = call(0, "validate", config, log, "--num-required", 2, "--flush")
    _, replayed = call(0, "replay", config, log, "--num-required", 2, "--flush")
    keys = result["keys"]["user"]
    assert 24 < keys.pop("most_in_a_step") <= 48
    assert keys == replayed["tables"]["user"]["keys"]
    assert keys["evicted"] > 0
    assert result["key_findings"] == []


def test_validate_finds_a_table_without_room_for_a_step(tmp_path, call, refused):
    config, log = logged(tmp_path, [[1, 2], [3, 4, 5], [6]], rows=4, dynamic=ps.Dynamic())
    problem = "step 1: no room for 1 of 3 new keys: 2 of 4 rows are in use; set a larger vocabulary_size"
    text, result = call(4, "validate", config, log)
    assert f"error     table 'user': {problem}\n" in text
    assert result["key_findings"] == [{"table": "user", "severity": "error", "problem": problem}]
    assert "no room for 1 of 3 new keys: 2 of 4 rows are in use" in refused(6, "replay", config, log)
    config, log = logged(tmp_path, [[1, 2], [3, 4, 5], [6]], rows=4, dynamic=ps.Dynamic(on_full="reject"))
    text, result = call(0, "validate", config, log)
    assert f"warning   table 'user': {problem}\n" in text
    assert result["keys"]["user"]["rejected"] > 0


def test_validate_warns_of_a_table_whose_shards_are_nearly_full(tmp_path, call):
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 7900)
    for dynamic, findings in ((ps.Dynamic(), 1), (ps.Dynamic(evict="lru"), 0)):
        config, log = logged(tmp_path, [keys], rows=8192, dynamic=dynamic)
        _, result = call(0, "validate", config, log)
        assert len(result["key_findings"]) == findings
    config, log = logged(tmp_path, [keys], rows=8192, dynamic=ps.Dynamic())
    text, result = call(0, "validate", config, log)
    assert "7,900 keys leave too little room in 8,192 rows, because virtual shards fill unevenly" in text
    needed = int(re.search(r"set vocabulary_size to at least ([\d,]+), or evict", text).group(1).replace(",", ""))
    assert needed * (1 - 4 / 64) == pytest.approx(7900, abs=1)


def test_a_clock_without_its_column_is_found_before_anything_is_applied(tmp_path, call, refused):
    config, log = logged(tmp_path, [[1]], dynamic=ps.Dynamic(expire_after=3600, clock="time"))
    problem = "; the clock of a dynamic table needs 'time'"
    _, result = call(3, "validate", config, log)
    assert problem in result["sources"][0]["errors"][0]
    assert refused(3, "replay", config, log).endswith(f"{problem}\n")  # 'step' is not suggested
    renamed = timed([1], [5]).rename_columns(["id", "gradient", "step", "ts"])
    other = write(tmp_path / "other.arrows", [renamed])
    call(0, "replay", config, other, "--column", "time=ts")


# ---- a static table becomes dynamic


def static_config(rows=50, optimizer=None):
    table = ps.TableConfig(rows, 4, name="user", optimizer=optimizer or ps.Adagrad(0.1))
    return ps.EmbeddingConfig.from_tables([table])


@pytest.mark.parametrize("every", [None, 1])  # one file, and a chain of them
def test_changed_rows_of_a_static_checkpoint_become_keys(tmp_path, every):
    first, more = [[1, 2], [2, 40], [1]], [[2, 7], [40]]
    static = ps.Engine(static_config())
    static.run([log_of(first)], checkpoint=tmp_path / "c", every=every)
    dynamic = ps.Engine.restore(tmp_path / "c", config=config_of(ps.Dynamic(min_count=3, expire_after=2), rows=8))
    assert dynamic.keys("user").to_pylist() == [1, 2, 40]
    for engine in (static, dynamic):
        engine.run([log_of([[], [], [], *more])])
    assert dynamic.keys("user").to_pylist() == [1, 2, 40]  # 7 waits
    assert dynamic.records("user", [1, 2, 40, 7])["last"].tolist() == [3, 3, 4, 3]
    np.testing.assert_array_equal(dynamic.lookup("user", range(7)), static.lookup("user", range(7)))
    np.testing.assert_array_equal(dynamic.lookup("user", [40]), static.lookup("user", [40]))
    dynamic.save(tmp_path / "c")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == dynamic.state_hash()


def test_a_static_checkpoint_that_does_not_fit_is_refused(tmp_path):
    static = ps.Engine(static_config(), num_required=2)
    static.run([log_of([[1, 2], [3], [3]])], checkpoint=tmp_path / "c")
    with pytest.raises(ps.StateError, match="table 'user' becomes dynamic, which frames in the gate prevent"):
        ps.Engine.restore(tmp_path / "c", config=config_of(rows=8))
    static.flush()
    static.save(tmp_path / "c")
    with pytest.raises(ps.StateError, match="differ from their start become keys: table 'user': no room for 1 of 3"):
        ps.Engine.restore(tmp_path / "c", config=config_of(rows=2))
    engine_of().save(tmp_path / "d")
    with pytest.raises(ps.StateError, match="table 'user' is dynamic in the checkpoint and not in the config"):
        ps.Engine.restore(tmp_path / "d", config=static_config(64))


def test_keys_loaded_before_the_first_step_do_not_expire_in_it(tmp_path):
    dynamic = ps.Dynamic(expire_after=3600, clock="time")
    engine = engine_of(dynamic, rows=8)
    rows = np.ones((2, 4), np.float32)
    engine.load_parameters("user", rows, ids=[1, 2], accumulators=rows)
    engine.save(tmp_path / "c")
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run([timed([1, 3], [1_700_000_000, 1_700_003_600])])
    assert engine.keys("user").to_pylist() == [1, 2, 3]
    engine.run([timed([3], [1_700_003_601], [2])])
    assert engine.keys("user").to_pylist() == [3]


def test_the_first_delta_after_a_static_checkpoint_has_only_the_keys_of_its_step(tmp_path):
    ps.Engine(static_config()).run([log_of([[1, 2], [2, 40], [1]])], checkpoint=tmp_path)
    dynamic = ps.Engine.restore(tmp_path, config=config_of(rows=8))
    (delta,) = dynamic.stage([log_of([[], [], [], [2]])])
    assert dynamic.keys("user").to_pylist() == [1, 2, 40]
    assert delta["id"].to_pylist() == [2]
