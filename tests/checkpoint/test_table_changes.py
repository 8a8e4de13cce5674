"""Tables that come, go and change between a commit and the configuration that resumes it.

The oracle is an engine per table, which has the table's first name and receives the rows of that table only.
"""

import numpy as np
import pyarrow as pa
import pytest
from batches import batch, lists
from ipc import write

import penstock as ps
from penstock.checkpoint.store import Folder

DIM = 4


def table(name, rows=40, dim=DIM, optimizer=None, **more):
    return ps.TableConfig(rows, dim, name=name, optimizer=optimizer or ps.Adagrad(0.1), **more)


def config_of(*tables):
    return ps.EmbeddingConfig.from_tables(tables)


USER, ITEM, AD = table("user"), table("item", dim=2), table("ad", dim=3)
BEFORE = config_of(USER, ITEM)
# Name of a change → the configuration after it, and the options that permit it.
CHANGES = {
    "new": (config_of(USER, ITEM, AD), {"new_tables": True}),
    "dropped": (config_of(USER), {"drop_table": ["item"]}),
    "renamed": (config_of(table("member"), ITEM), {"rename": {"user": "member"}}),
    "slots": (config_of(table("user", optimizer=ps.SGD(0.5)), ITEM), {"reset_slots": ["user"]}),
    "anew": (config_of(USER, table("item", dim=5)), {"reset_table": ["item"]}),
}


class Oracle:
    """What an engine should hold: an engine per table. tables : name → its configuration"""

    def __init__(self, tables):
        self.engines = {each.name: ps.Engine(config_of(each)) for each in tables}
        self.first_names = {each.name: each.name for each in tables}

    def apply(self, frame):
        for name, engine in self.engines.items():
            engine.apply({self.first_names[name]: frame[name]} if name in frame else {})

    def start(self, each, step):
        self.engines[each.name], self.first_names[each.name] = ps.Engine(config_of(each)), each.name
        self.engines[each.name].gate.set_global_step(step)

    def drop(self, name):
        del self.engines[name], self.first_names[name]

    def rename(self, old, new):
        self.engines[new], self.first_names[new] = self.engines.pop(old), self.first_names.pop(old)

    def reset_slots(self, each):
        """each : the table with its other optimizer"""
        before, first_name = self.engines[each.name], self.first_names[each.name]
        after = ps.Engine(config_of(table(first_name, each.vocabulary_size, each.dim, each.optimizer)))
        slots = {key: rows for key, rows in after.retrieve_parameters(first_name).items() if key != "parameters"}
        after.load_parameters(first_name, before.retrieve_parameters(first_name)["parameters"], **slots)
        after.gate.set_global_step(before.global_step)
        self.engines[each.name] = after

    def rows(self):
        return {
            name: {key: rows.tobytes() for key, rows in engine.retrieve_parameters(self.first_names[name]).items()}
            for name, engine in self.engines.items()
        }


def rows_of(engine):
    return {
        name: {key: rows.tobytes() for key, rows in engine.retrieve_parameters(name).items()}
        for name in engine.config.table_names
    }


def frame_of(rng, tables):
    """Rows of some of the tables."""
    return {
        each.name: (rng.integers(0, each.vocabulary_size, 9), rng.standard_normal((9, each.dim)).astype(np.float32))
        for each in tables
        if rng.random() < 0.8
    }


def saved(folder, config=BEFORE, num_frames=3, **arguments):
    """An engine after some frames, committed to the folder."""
    engine, rng = ps.Engine(config, **arguments), np.random.default_rng(0)
    for _ in range(num_frames):
        engine.apply(frame_of(rng, [USER, ITEM]))
    engine.save(folder)
    return engine


def manifest(folder):
    return Folder(folder).newest().contents


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_needs_its_option_which_the_error_names(change, tmp_path):
    config, options = CHANGES[change]
    saved(tmp_path)
    (option,) = options
    with pytest.raises(ps.StateError) as caught:
        ps.Engine.restore(tmp_path, config=config)
    assert f"{option}=" in str(caught.value)
    assert f"--{option.replace('_', '-')}" in str(caught.value)
    others = {"new_tables": True} if change != "new" else {}
    with pytest.raises(ps.StateError, match=f"{option}="):
        ps.Engine.restore(tmp_path, config=config, **others)
    restored = ps.Engine.restore(tmp_path, config=config, **options)
    assert restored.global_step == 3


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_options_after_the_change_change_nothing(change, tmp_path):
    config, options = CHANGES[change]
    saved(tmp_path)
    given_up = ps.Engine.restore(tmp_path, config=config, **options)  # as one that is killed before its commit
    engine = ps.Engine.restore(tmp_path, config=config, **options)
    assert engine.state_hash() == given_up.state_hash()
    engine.save(tmp_path)
    engine.apply({name: ([1, 2], np.ones((2, config.sizes[name][1]))) for name in config.table_names})
    engine.save(tmp_path)
    for again in (options, {}):
        restored = ps.Engine.restore(tmp_path, config=config, **again)
        assert restored.state_hash() == engine.state_hash()
        restored.save(tmp_path)
        assert len(manifest(tmp_path)["table_changes"]) == 1
    assert ps.Engine.restore(tmp_path).state_hash() == engine.state_hash()  # with the saved configuration


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("placement", ["default", "two devices", "cached"])
def test_random_changes_leave_the_tables_of_the_oracle(placement, seed, tmp_path, mesh_of):
    rng = np.random.default_rng([seed, len(placement)])
    more = {"placement": ps.Placement("cached", device_bytes=600)} if placement == "cached" else {}
    mesh = mesh_of(2) if placement == "two devices" else None
    tables = {name: table(name, int(rng.integers(10, 40)), dim, **more) for name, dim in (("a", 4), ("b", 2), ("c", 3))}
    oracle = Oracle(tables.values())
    engine = ps.Engine(config_of(*tables.values()), mesh)
    engine.save(tmp_path)
    numbers = iter(range(100))
    for _ in range(4):
        for _ in range(int(rng.integers(0, 4))):
            frame = frame_of(rng, tables.values())
            engine.apply(frame)
            oracle.apply(frame)
        engine.save(tmp_path)
        options, touched = {"new_tables": True, "rename": {}}, set()
        for kind in rng.permutation(["new", "drop", "rename", "slots", "anew", "grow"])[:3]:
            name = str(rng.choice(sorted(tables)))
            if kind == "new":
                new = table(f"t{next(numbers)}", dim=int(rng.integers(1, 5)), **more)
                tables[new.name] = new
                oracle.start(new, engine.global_step)
                touched.add(new.name)
            elif name in touched or len(tables) < 2:
                continue
            elif kind == "drop":
                del tables[name]
                oracle.drop(name)
                options.setdefault("drop_table", []).append(name)
            elif kind == "rename":
                before, new_name = tables.pop(name), f"t{next(numbers)}"
                tables[new_name] = table(new_name, before.vocabulary_size, before.dim, before.optimizer, **more)
                oracle.rename(name, new_name)
                options["rename"][name] = new_name
                touched.add(new_name)
            elif kind == "slots":
                optimizer = ps.SGD(0.3) if isinstance(tables[name].optimizer, ps.Adagrad) else ps.Adagrad(0.2)
                tables[name] = table(name, tables[name].vocabulary_size, tables[name].dim, optimizer, **more)
                oracle.reset_slots(tables[name])
                options.setdefault("reset_slots", []).append(name)
            elif kind == "anew":
                tables[name] = table(name, 25, tables[name].dim + 1, **more)
                oracle.start(tables[name], engine.global_step)
                options.setdefault("reset_table", []).append(name)
            touched.add(name)
        config = config_of(*rng.permutation(list(tables.values())))
        steps = engine.global_step
        engine = ps.Engine.restore(tmp_path, mesh, config=config, **options)
        assert engine.global_step == steps
        assert rows_of(engine) == oracle.rows()
        engine.save(tmp_path)
        again = ps.Engine.restore(tmp_path, mesh, config=config, **options)
        assert again.state_hash() == engine.state_hash()


def test_a_renamed_table_draws_rows_and_hashes_keys_by_its_first_name(tmp_path):
    dynamic = ps.Dynamic(min_count=1, evict="lru", missing="initial")
    names = ("user", "member", "guest")
    first, second, third = (table(name, 20_000, optimizer=ps.Adagrad(0.1), dynamic=dynamic) for name in names)
    rng = np.random.default_rng(1)
    keys = [rng.integers(-(2**62), 2**62, 3000) for _ in range(12)]
    frames = [(frame_keys, rng.standard_normal((3000, DIM)).astype(np.float32)) for frame_keys in keys]
    engine, unchanged = (ps.Engine(config_of(first)) for _ in range(2))
    for number, frame in enumerate(frames):
        if number == 4:
            engine.save(tmp_path)
            engine = ps.Engine.restore(tmp_path, config=config_of(second), rename={"user": "member"})
        if number == 8:  # with its rows in shares, which own keys by their hashes
            engine.save(tmp_path)
            options = {"config": config_of(third), "rename": {"member": "guest"}}
            shares = [ps.Engine.restore(tmp_path, share=(rank, 2), **options) for rank in range(2)]
            for share in shares:
                share.apply({"guest": frame})
            engine = ps.Engine.restore(tmp_path, **options)
        name = engine.config.table_names[0]
        engine.apply({name: frame})
        unchanged.apply({"user": frame})
        assert engine.keys(name).to_pylist() == unchanged.keys("user").to_pylist()
    assert manifest(tmp_path)["tables"][0]["drawn_as"] == "user"
    keys = unchanged.keys("user").to_numpy()
    absent = np.arange(100)
    for ids in (keys, absent):
        assert engine.lookup("guest", ids).tobytes() == unchanged.lookup("user", ids).tobytes()
    kept = [set(share.keys("guest").to_pylist()) for share in shares]
    assert all(kept)
    assert not kept[0] & kept[1]


def test_a_static_table_that_was_renamed_grows_with_rows_of_its_first_name(tmp_path):
    engine = ps.Engine(config_of(USER))
    engine.save(tmp_path)
    grown = ps.Engine.restore(tmp_path, config=config_of(table("member", 60)), rename={"user": "member"})
    fresh = ps.Engine(config_of(table("user", 60)))
    assert grown.lookup("member", range(60)).tobytes() == fresh.lookup("user", range(60)).tobytes()


def test_rounding_of_a_renamed_table_stays_that_of_its_first_name(tmp_path, mesh_of):
    def of(name):
        return config_of(table(name, dtype="bfloat16", optimizer=ps.SGD(0.1)))

    engine, unchanged = (ps.Engine(of("user"), mesh_of(1)) for _ in range(2))
    engine.save(tmp_path)
    engine = ps.Engine.restore(tmp_path, mesh_of(1), config=of("member"), rename={"user": "member"})
    values = np.random.default_rng(2).standard_normal((40, DIM)).astype(np.float32)
    for _ in range(5):
        engine.apply({"member": (range(40), values)})
        unchanged.apply({"user": (range(40), values)})
    assert engine.lookup("member", range(40)).tobytes() == unchanged.lookup("user", range(40)).tobytes()


def test_frames_in_the_gate_stay_but_for_the_sums_of_rows_that_are_gone(tmp_path, caplog):
    engine = ps.Engine(BEFORE, num_required=3)
    rows = {"user": ([1, 2, 1], np.ones((3, DIM))), "item": ([7, 8], np.ones((2, 2)))}
    engine.apply(rows, local_step=0)
    engine.apply(rows, local_step=0)
    engine.save(tmp_path)
    config = config_of(table("member"), AD)
    options = {"rename": {"user": "member"}, "drop_table": "item", "new_tables": True}
    restored = ps.Engine.restore(tmp_path, config=config, **options)
    assert "'item' dropped (2 sums of the gate dropped)" in caplog.text
    assert restored.gate.num_accumulated == 2
    restored.save(tmp_path)
    assert manifest(tmp_path)["table_changes"][0]["lost_sums"] == {"item": 2}
    for each, name in ((engine, "user"), (restored, "member")):
        each.apply({name: ([1], np.ones((1, DIM)))}, local_step=0)
        assert each.global_step == 1
    assert restored.lookup("member", [1, 2]).tobytes() == engine.lookup("user", [1, 2]).tobytes()
    assert restored.lookup("ad", [1]).tobytes() == ps.Engine(config_of(AD)).lookup("ad", [1]).tobytes()


@pytest.mark.parametrize(
    ("config", "options", "error", "text"),
    [
        (BEFORE, {"drop_table": "item"}, ps.UsageError, "drop table 'item': the configuration has it"),
        (BEFORE, {"drop_table": "ad"}, ps.StateError, "drop table 'ad': the checkpoint has no such table"),
        (config_of(USER), {"rename": {"item": "user"}}, ps.StateError, "to 'user': the checkpoint has both"),
        (BEFORE, {"rename": {"user": "item"}}, ps.UsageError, "the configuration still has 'user'"),
        (config_of(ITEM), {"rename": {"user": "member"}}, ps.UsageError, "the configuration has no 'member'"),
        (BEFORE, {"rename": {"ad": "user"}}, ps.StateError, "rename table 'ad' to 'user': the checkpoint has no such"),
        (BEFORE, {"reset_slots": "user"}, ps.StateError, "it fits the configuration, and keeps its rows"),
        (BEFORE, {"reset_table": "user"}, ps.StateError, "it fits the configuration, and keeps its rows"),
        (BEFORE, {"reset_table": "ad"}, ps.UsageError, "table 'ad' anew: the configuration has no such table"),
        (CHANGES["anew"][0], {"reset_slots": "item"}, ps.StateError, "it fits the configuration"),
        (BEFORE, {"reset_table": "ad", "drop_table": "ad"}, ps.UsageError, "table 'ad': has 2 changes of tables"),
        (BEFORE, {"rename": {"user": "x", "item": "x"}}, ps.UsageError, "table 'x': has 2 changes of tables"),
        (BEFORE, {"drop_table": 7}, TypeError, "drop_table: expected the names of tables, got 7"),
        (BEFORE, {"rename": ["a"]}, TypeError, "rename: expected a mapping"),
        (BEFORE, {"drop_tables": "a"}, TypeError, "unknown argument 'drop_tables'; did you mean 'drop_table'?"),
        (
            config_of(table("user", rows=30), ITEM),
            {},
            ps.StateError,
            "a table may grow, not shrink.*--reset-table user",
        ),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(config, options, error, text, tmp_path):
    saved(tmp_path)
    with pytest.raises(error, match=text):
        ps.Engine.restore(tmp_path, config=config, **options)


def test_commits_before_a_change_are_restored_with_their_tables_or_changed_in_turn(tmp_path):
    before = saved(tmp_path / "c")
    ps.tag(tmp_path / "c", "old")
    config, options = CHANGES["renamed"]
    engine = ps.Engine.restore(tmp_path / "c", config=config, **options)
    engine.tag("also-old")  # of the last commit, which has not changed
    engine.save(tmp_path / "c")
    for name in ("old", "also-old"):
        assert ps.Engine.restore(f"{tmp_path / 'c'}@{name}").state_hash() == before.state_hash()
        changed = ps.Engine.restore(tmp_path / "c", version=name, config=config, **options)
        assert changed.state_hash() == engine.state_hash()


# ---- runs over files


def log_of(steps, names=("user", "item")):
    """A frame per step, with rows of the tables by these names."""
    batches = []
    for step in steps:
        rng = np.random.default_rng(step)
        values = [rng.standard_normal(DIM if n % 2 else 2).astype(np.float32) for n in range(12)]
        columns = {
            "table": [names[0] if n % 2 else names[1] for n in range(12)],
            "step": pa.array([step] * 12),
            "id": pa.array(rng.integers(0, 40, 12)),
            "gradient": lists(value.tolist() for value in values),
        }
        batches.append(pa.RecordBatch.from_pydict(columns))
    return batches


def test_a_run_skips_frames_of_tables_that_are_gone_and_compares_those_after_the_change(tmp_path):
    old = write(tmp_path / "1.arrows", log_of(range(4)))
    new = write(tmp_path / "2.arrows", log_of(range(4, 8), ("member", "ad")))
    other = write(tmp_path / "3.arrows", log_of(range(5, 9), ("member", "ad")))
    options = {"rename": {"user": "member"}, "drop_table": "item", "new_tables": True}
    config, folder = config_of(table("member"), table("ad", dim=2)), tmp_path / "c"
    oracle = Oracle([USER, ITEM])
    ps.Engine(BEFORE).run([old], checkpoint=folder)
    for path, names in ((old, ("user", "item")), (new, ("member", "ad"))):
        if path == new:
            oracle.rename("user", "member")
            oracle.drop("item")
            oracle.start(table("ad", dim=2), 4)
        for each in pa.ipc.open_stream(path):
            rows = {name: ([], []) for name in names}
            for name, row_id, gradient in zip(
                *(each[key].to_pylist() for key in ("table", "id", "gradient")), strict=True
            ):
                rows[name][0].append(row_id)
                rows[name][1].append(gradient)
            oracle.apply(rows)
    engine = ps.Engine.restore(folder, config=config, **options)
    report = engine.run([old, new], checkpoint=folder, resume=True, limit=6)
    assert (report.skipped, report.steps, report.dropped) == (4, 2, {})
    engine = ps.Engine.restore(folder, config=config, **options)
    with pytest.raises(ps.StateError, match="are not those that the checkpoint holds"):
        engine.run([old, other], checkpoint=folder, resume=True)
    engine = ps.Engine.restore(folder, config=config, **options)
    assert engine.run([old, new], checkpoint=folder, resume=True).skipped == 6
    assert rows_of(engine) == oracle.rows()
    assert manifest(folder)["global_step"] == 8


def test_frames_of_a_table_that_is_gone_are_bad_rows_after_the_change(tmp_path):
    path = write(tmp_path / "1.arrows", log_of(range(6)))
    ps.Engine(BEFORE).run([path], checkpoint=tmp_path / "c", limit=3)
    for mode in ("error", "drop"):
        engine = ps.Engine.restore(tmp_path / "c", config=config_of(USER), drop_table="item")
        if mode == "drop":
            report = engine.run([path], checkpoint=tmp_path / "c", resume=True, on_bad_row="drop")
            assert (report.steps, report.dropped) == (3, {"unknown_table": 18})
        else:
            with pytest.raises(ps.InputError, match="got 'item'"):
                engine.run([path], resume=True)


def test_a_run_without_frames_commits_a_change(tmp_path):
    path = write(tmp_path / "1.arrows", log_of(range(3)))
    ps.Engine(BEFORE).run([path], checkpoint=tmp_path / "c")
    config, options = CHANGES["renamed"]
    engine = ps.Engine.restore(tmp_path / "c", config=config, **options)
    engine.run([path], checkpoint=tmp_path / "c", resume=True)
    assert [entry["name"] for entry in manifest(tmp_path / "c")["tables"]] == ["member", "item"]
    numbers = Folder(tmp_path / "c").numbers()
    engine.save(tmp_path / "elsewhere")
    engine.run([path], checkpoint=tmp_path / "c", resume=True)  # there is nothing new to commit
    assert Folder(tmp_path / "c").numbers() == numbers
    assert ps.Engine.restore(tmp_path / "c").state_hash() == engine.state_hash()


def test_deltas_after_a_change_begin_another_file(tmp_path):
    path, folder = write(tmp_path / "1.arrows", log_of(range(6))), tmp_path / "c"
    ps.Engine(BEFORE).run([path], checkpoint=folder, limit=3, deltas=tmp_path / "d1")
    config, options = config_of(USER, ITEM, AD), {"new_tables": True}
    with pytest.raises(ps.UsageError, match="d1: exists; it is never written over"):
        ps.Engine.restore(folder, config=config, **options).run(
            [path], checkpoint=folder, resume=True, deltas=tmp_path / "d1"
        )
    for limit in (5, None):
        engine = ps.Engine.restore(folder, config=config, **options)
        engine.run([path], checkpoint=folder, resume=True, deltas=tmp_path / "d2", limit=limit)
    steps = [step for each in pa.ipc.open_stream(tmp_path / "d2") for step in each["step"].unique().to_pylist()]
    assert sorted(set(steps)) == [4, 5, 6]


def test_a_folder_of_tables_without_a_file_needs_the_same_option(tmp_path):
    engine = saved(tmp_path / "c")
    engine.write_tables(tmp_path / "t")
    more = ps.Engine(CHANGES["new"][0])
    with pytest.raises(ps.InputError, match="no file for table 'ad'; there: item"):
        more.read_tables(tmp_path / "t")
    more.read_tables(tmp_path / "t", new_tables=True)
    assert rows_of(more) == rows_of(engine) | {"ad": rows_of(ps.Engine(config_of(AD)))["ad"]}
    with pytest.raises(ps.InputError, match="no file for any table"):
        ps.Engine(config_of(AD)).read_tables(tmp_path / "t", new_tables=True)


def test_shared_tables_are_those_after_the_change(tmp_path):
    engine = saved(tmp_path / "c", shared=tmp_path / "s")
    reader = ps.Reader(tmp_path / "s")
    assert reader.tables == ("user", "item")
    del engine
    config, options = CHANGES["anew"]
    engine = ps.Engine.restore(tmp_path / "c", config=config, shared=tmp_path / "s", **options)
    assert reader.lookup("item", [3]).shape == (1, 5)
    assert reader.lookup("user", [3]).tobytes() == engine.lookup("user", [3]).tobytes()


def test_frames_of_another_dim_are_skipped_before_the_change_and_bad_after_it(tmp_path):
    def log(steps, dim):
        return [batch(range(8), np.full((8, dim), step, np.float32), step=step) for step in steps]

    old, new = write(tmp_path / "1.arrows", log(range(5), 2)), write(tmp_path / "2.arrows", log(range(5, 9), 3))
    before, after = (config_of(table("user", 20, dim, ps.SGD(0.1))) for dim in (2, 3))
    ps.Engine(before).run([old], checkpoint=tmp_path / "c", limit=4)
    engine = ps.Engine.restore(tmp_path / "c", config=after, reset_table="user")
    with pytest.raises(ps.InputError, match="expected 3 floats"):
        engine.run([old, new], checkpoint=tmp_path / "c", resume=True)
    engine = ps.Engine.restore(tmp_path / "c", config=after)
    report = engine.run([old, new], checkpoint=tmp_path / "c", resume=True, on_bad_row="drop")
    assert (report.skipped, report.dropped, engine.global_step) == (4, {"length_mismatch": 8}, 9)
    expected = ps.Engine(after)
    expected.run(iter(log(range(5, 9), 3)))
    assert rows_of(engine) == rows_of(expected)


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True)])
def test_new_slots_that_take_gradients_otherwise_lose_the_sums_of_frames_in_the_gate(before, after, tmp_path, caplog):
    def config(optimizer):
        return config_of(table("user", optimizer=optimizer), ITEM)

    engine = ps.Engine(config(ps.Adagrad(0.1, use_gradient_accumulation=before)), num_required=3)
    rows = {"user": ([1, 2, 1], np.ones((3, DIM))), "item": ([7, 8], np.ones((2, 2)))}
    for _ in range(2):
        engine.apply(rows, local_step=0)
    engine.save(tmp_path)
    same_slots = config(ps.Adagrad(0.1, use_gradient_accumulation=after))
    with pytest.raises(ps.StateError, match=r"table 'user' has another gradient_accumulation_status .* --flush them"):
        ps.Engine.restore(tmp_path, config=same_slots)
    sgd = config(ps.SGD(0.1, use_gradient_accumulation=after))
    restored = ps.Engine.restore(tmp_path, config=sgd, reset_slots="user")
    assert "'user' with new slots (" in caplog.text
    restored.save(tmp_path)
    for each in (engine, restored):
        each.apply({"user": ([5], np.ones((1, DIM)))}, local_step=0)
    assert restored.lookup("item", range(40)).tobytes() == engine.lookup("item", range(40)).tobytes()
    expected = ps.Engine(sgd)
    expected.load_parameters("user", ps.Engine(config(ps.Adagrad(0.1))).retrieve_parameters("user")["parameters"])
    expected.apply({"user": ([5], np.ones((1, DIM)))})
    assert restored.lookup("user", range(40)).tobytes() == expected.lookup("user", range(40)).tobytes()
