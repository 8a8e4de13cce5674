"""Rollbacks of an engine and of a folder: the bits of the version, one step later, and training on from there."""

import json
import shutil

import numpy as np
import pytest
from batches import batch
from checkpoints import commits
from dynamic import engine_of as dynamic_engine
from dynamic import push as push_keys
from rollbacks import CONFIGS, KINDS, bits, check_continues, next_clock, push, rows_of_frame, trained

import penstock as ps
from penstock.api.deltas import Deltas
from penstock.checkpoint.manifests import digest_of
from penstock.checkpoint.rollbacks import roll_back_folder
from penstock.checkpoint.store import Folder
from penstock.contrib.pages.metrics import Metrics
from penstock.model.options import DeltaOptions


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.mark.sampled("plain", "16 bits", "not lazy", "cached", "lfu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.promise("A rollback has the bits of its version, and followers apply it like a step")
def test_a_rollback_has_the_bits_of_the_version_and_so_has_training_on(kind, folder):
    engine = trained(kind, folder)
    assert bits(engine) != bits(ps.Engine.restore(folder, version="good"))
    assert engine.rollback("good") == 13
    assert (engine.global_step, engine.core.gate.num_accumulated) == (13, 0)
    check_continues(engine, folder)


@pytest.mark.sampled("plain")
@pytest.mark.parametrize("kind", ["plain", "16 bits", "lru", "cached"])
def test_tables_on_devices_that_xla_updates_roll_back_too(kind, folder, mesh_of):
    engine = trained(kind, folder, mesh=mesh_of(3), variant="xla")
    assert engine.rollback("good") == 13
    good = ps.Engine.restore(folder, version="good", mesh=mesh_of(3))
    assert bits(engine) == bits(good)
    engine.save(folder)
    assert bits(ps.Engine.restore(folder, mesh=mesh_of(3))) == bits(good)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_of_a_folder_is_that_of_an_engine(kind, folder, tmp_path):
    engine = trained(kind, folder)
    engine.save(folder)
    shutil.copytree(folder, tmp_path / "copy")
    done = roll_back_folder(tmp_path / "copy", "good")
    assert (done.step, done.target.step, done.num_frames) == (13, 6, 1)
    engine.rollback(6)
    engine.save(folder)
    restored = ps.Engine.restore(tmp_path / "copy")
    assert restored.state_hash() == engine.state_hash()
    left, right = (Folder(path).newest() for path in (folder, tmp_path / "copy"))
    assert left.files == right.files  # the same bytes
    assert json.dumps(left.contents, sort_keys=True) == json.dumps(right.contents, sort_keys=True)
    check_continues(restored, tmp_path / "copy")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_of_deltas_just_applies_a_rollback(kind, folder):
    """Deltas of every step, with the slots; those of dynamic tables also say when each key occurred last."""
    config = CONFIGS[kind]
    has_keys = any(spec.dynamic is not None for spec in config.tables)
    engine = ps.Engine(config)
    deltas = Deltas(engine.core, DeltaOptions(numbered=True, slots=True, per_steps=1, last=has_keys))
    follower = Follower(engine)
    for number in range(5):
        push(engine, [number])
        follower.take(deltas.due())
    engine.save(folder)
    for number in range(5, 20):
        push(engine, [number])
        follower.take(deltas.due())
    assert follower.step == 20
    engine.rollback(5)
    follower.take(deltas.due())
    assert follower.step == 21
    follower.check(engine)
    push(engine, range(20, 23))
    follower.take(deltas.due())
    follower.check(engine)


def test_a_key_of_which_only_the_clock_went_back_is_part_of_the_delta(folder):
    engine = dynamic_engine(ps.Dynamic(), optimizer=ps.SGD(0.1))
    deltas = Deltas(engine.core, DeltaOptions(numbered=True, last=True))
    push_keys(engine, [1, 2])
    engine.save(folder)
    push_keys(engine, [2, 3], value=0.0)
    assert len(list(deltas.take())) == 1
    engine.rollback(1)
    (delta,) = deltas.take()
    assert (delta["id"].to_pylist(), delta["op"].to_pylist()) == ([2, 3], ["upsert", "delete"])
    assert (delta["last"].to_pylist(), delta["clock"].to_pylist()) == ([0, None], [0, 0])


class Follower:
    """The rows of all tables with their slots, as deltas say them: table → id → bytes. last : of keys"""

    def __init__(self, engine):
        self.step, self.rows, self.last = 0, {}, {}
        self.names = {name: list(engine.core.tables.parts(name)) for name in engine.config.table_names}
        for name in engine.config.table_names:
            if name not in engine.core.tables.dynamic:
                self.rows[name] = self.now(engine, name, np.arange(engine.config.table(name).vocabulary_size))
            else:
                self.rows[name] = {}

    def take(self, batches):
        before = self.step
        for delta in batches:
            assert delta["parent"][0].as_py() == before
            for row in delta.to_pylist():
                name, rows = row["table"], self.rows[row["table"]]
                columns = ["row", *self.names[name][1:]]
                if row.get("op") == "delete":
                    rows.pop(row["id"], None)
                    self.last.pop((name, row["id"]), None)
                    continue
                rows[row["id"]] = b"".join(np.array(row[column], np.float32).tobytes() for column in columns)
                self.last[name, row["id"]] = row.get("last")
            self.step = delta["step"][0].as_py()

    def now(self, engine, name, ids, rows=None):
        table = engine.core.tables.table(name)
        rows = ids if rows is None else rows
        parts = [table.read(rows, part) for part in range(len(self.names[name]))]
        return {id_: b"".join(part[n].tobytes() for part in parts) for n, id_ in enumerate(ids.tolist())}

    def check(self, engine):
        for name in engine.config.table_names:
            if (dynamic := engine.core.tables.dynamic.get(name)) is None:
                assert self.rows[name] == self.now(engine, name, np.arange(len(self.rows[name])))
                continue
            state = dynamic.directory.state()
            assert self.rows[name] == self.now(engine, name, state["key"], state["row"].astype(np.int64))
            last = dict(zip(state["key"].tolist(), state["last"].tolist(), strict=True))
            assert {key: clock for (table, key), clock in self.last.items() if table == name} == last


# ---- versions


def test_rollbacks_go_back_and_forth(folder):
    engine = trained("lru", folder)
    later = bits(ps.Engine.restore(folder))
    engine.rollback("good")
    engine.save(folder)
    good = bits(engine)
    engine.tag("rolled")
    push(engine, range(40, 44))
    assert engine.rollback(10) == 16  # which undoes the rollback
    assert bits(engine) == later
    assert engine.rollback("good") == 17
    assert engine.rollback("rolled") == 18
    engine.save(folder)
    assert bits(engine) == bits(ps.Engine.restore(folder)) == good
    assert [entry.step for entry in map(Folder(folder).load, Folder(folder).numbers())] == [10, 13, 18]
    check_continues(engine, folder)


def test_a_rollback_to_the_current_commit_takes_a_step_and_changes_no_row(folder):
    engine = trained("lru", folder)
    engine.flush()
    engine.save(folder)
    before, deltas = bits(engine), Deltas(engine.core, DeltaOptions(numbered=True, per_steps=1))
    assert engine.rollback(engine.global_step) == 14
    assert bits(engine) == before
    assert list(deltas.due()) == []
    assert engine.core.changed_step == 13
    engine.save(folder)
    digests = [Folder(folder).load(number).digests for number in Folder(folder).numbers()]
    assert len(set(digests)) == len(digests)
    push(engine, range(40, 42))
    (batch, *_) = deltas.due()
    assert (batch["parent"][0].as_py(), batch["step"][0].as_py()) == (13, 15)


def test_a_version_ahead_of_the_step_can_be_rolled_back_to(folder):
    """The engine went back; a tag of what came afterwards is still there."""
    trained("lru", folder)
    ps.tag(folder, "later", 10)
    for number in Folder(folder).numbers()[1:]:
        (folder / f"{number:08}.commit").unlink()
    engine = ps.Engine.restore(folder)
    assert engine.global_step == 6
    later = ps.Engine.restore(folder, version="later")
    assert engine.rollback("later") == 7
    assert (bits(engine), next_clock(engine)) == (bits(later), 10)
    engine.save(folder)
    for restored in (engine, ps.Engine.restore(folder)):
        push(restored, range(40, 44))
        push(later, range(40, 44))
        assert bits(restored) == bits(later)
        later = ps.Engine.restore(folder, version="later")


def test_an_engine_resumes_at_the_commit_before_a_rollback(folder):
    engine = trained("lru", folder)
    before = ps.Engine.restore(folder)
    engine.rollback("good")
    engine.save(folder)
    (folder / f"{Folder(folder).numbers()[-1]:08}.commit").unlink()
    restored = ps.Engine.restore(folder)
    assert restored.state_hash() == before.state_hash()
    push(restored, range(30, 40))
    push(before, range(30, 40))
    restored.save(folder)
    assert ps.Engine.restore(folder).state_hash() == before.state_hash()


REFUSED = {
    "a step without a commit": (7, "no commit of step 7; the nearest: 6 .* and 8"),
    "an unknown tag": ("goood", "no tag 'goood'; did you mean 'good'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_version_is_refused(name, folder):
    version, message = REFUSED[name]
    engine = trained("plain", folder)
    state = engine.state_hash()
    with pytest.raises(ps.StateError, match=message):
        engine.rollback(version)
    with pytest.raises(ps.StateError, match=message):
        roll_back_folder(folder, version)
    assert (engine.state_hash(), engine.core.gate.num_accumulated) == (state, 1)


def test_a_damaged_version_changes_nothing(folder):
    engine = trained("plain", folder)
    state, before = engine.state_hash(), commits(folder)
    base = folder / "00000001.base"
    base.write_bytes(base.read_bytes()[:-3] + b"xyz")
    with pytest.raises(ps.StateError, match=r"00000001\.base: its digest does not fit"):
        engine.rollback("good")
    with pytest.raises(ps.StateError, match=r"00000001\.base: its digest does not fit"):
        roll_back_folder(folder, "good")
    assert (engine.state_hash(), commits(folder)) == (state, before)
    push(engine, [25])


def test_an_engine_without_a_commit_is_refused():
    with pytest.raises(ps.StateError, match="rollback: this engine has no commit yet; save it"):
        ps.Engine(CONFIGS["plain"]).rollback("good")


def other(**table):
    tables = [ps.TableConfig(table.pop("rows", 40), table.pop("dim", 4), name=table.pop("name", "user"), **table)]
    return ps.EmbeddingConfig.from_tables(tables, ps.Adagrad(0.1))


OTHERS = {
    "another table": (other(name="item"), "table '(item|user)' is (gone now|not there)"),
    "another dim": (other(dim=2), "table 'user' has dim 2 there and 4 now"),
    "another optimizer": (other(optimizer=ps.FTRL(0.1)), "table 'user' has optimizer FTRL there and Adagrad now"),
    "fewer rows": (other(rows=30), "table 'user' has vocabulary_size 30 there and 40 now"),
    "keys": (other(dynamic=ps.Dynamic()), "table 'user' has dynamic .* there and none now"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_version_with_other_tables_is_refused_by_name(name, folder, tmp_path):
    config, message = OTHERS[name]
    ps.Engine(config).save(folder)
    ps.tag(folder, "other")
    engine = ps.Engine(other())
    engine.save(tmp_path / "new")
    push(engine, [0])
    engine.save(tmp_path / "new")
    for path in folder.iterdir():  # the tag of another engine, with its files under numbers of their own
        if path.suffix != ".commit":
            shutil.copy(path, tmp_path / "new" / path.name.replace("00000001", "00000009"))
    tag = tmp_path / "new" / "other.tag"
    text = tag.read_text().rpartition("\n")[0].rpartition("\n")[0].replace("00000001.base", "00000009.base")
    tag.write_text(f"{text}\n{digest_of(text.encode())}\n")
    with pytest.raises(ps.StateError, match=f"commit 1: {message}; a rollback changes rows and keys only"):
        engine.rollback("other")
    with pytest.raises(ps.StateError, match=message):
        roll_back_folder(tmp_path / "new", "other")
    assert engine.global_step == 1


def test_a_version_before_a_change_of_tables_is_refused_and_one_after_it_keeps_the_change(folder):
    engine = ps.Engine(other())
    engine.save(folder)
    ps.tag(folder, "before")
    push(engine, range(3))
    engine.save(folder)
    renamed = ps.Engine.restore(folder, config=other(name="member"), rename={"user": "member"})
    renamed.save(folder)
    renamed.tag("after")
    push(renamed, range(3, 6))
    renamed.save(folder)
    for roll_back in (renamed.rollback, lambda name: roll_back_folder(folder, name)):
        with pytest.raises(ps.StateError, match=r"table '(user' is gone now|member' is not there)"):
            roll_back("before")
    changes = Folder(folder).newest().contents["table_changes"]
    roll_back_folder(folder, "after")
    restored = ps.Engine.restore(folder)
    assert bits(restored) == bits(ps.Engine.restore(folder, version="after"))
    assert Folder(folder).newest().contents["table_changes"] == changes
    assert renamed.rollback("after") == restored.global_step == 7
    assert bits(renamed) == bits(restored)


# ---- what continues


def test_frames_with_an_older_step_are_stale_and_frames_without_one_are_taken(folder):
    engine = trained("plain", folder)
    engine.rollback("good")
    rows = rows_of_frame(engine.config, 99)
    assert not engine.apply(rows, local_step=12)
    assert engine.apply(rows)
    assert engine.apply(rows, local_step=13)
    assert engine.global_step == 14


def test_schedules_see_the_new_step(folder):
    seen = []
    rate = ps.SGD(lambda step: seen.append(int(step)) or 0.1)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(40, 4, name="user", optimizer=rate)]))
    engine.save(folder)
    push(engine, range(3))
    engine.rollback(0)
    push(engine, range(2))
    assert seen == [0, 1, 2, 4, 5]


def test_a_schedule_cannot_roll_back(folder):
    engines, errors = [], []

    def rate(step):
        if step == 1:
            with pytest.raises(ps.UsageError, match="the gate cannot be changed by what runs inside it"):
                engines[0].rollback(0)
            errors.append(step)
        return 0.1

    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(40, 4, name="user", optimizer=ps.SGD(rate))])
    engines.append(ps.Engine(config))
    engines[0].save(folder)
    push(engines[0], range(3))
    assert (errors, engines[0].global_step) == ([1], 3)


def frames(numbers):
    """The same frames as a source without steps."""
    return [
        batch(ids, rows, table=name)
        for number in numbers
        for name, (ids, rows) in rows_of_frame(CONFIGS["plain"], number).items()
    ]


def test_a_rollback_in_a_run_drops_the_frames_in_the_gate_and_counts_them(folder, small_blocks):
    """Every frame of the run is applied, dropped or pending. A resumed run skips all of them."""
    engine = ps.Engine(CONFIGS["plain"], num_required=4)
    push(engine, range(4))
    engine.save(folder)
    engine.tag("good")
    good, seen = bits(engine), []

    def source():
        yield from frames(range(4, 13))  # 18 frames, of which two stay in the gate
        engine.rollback("good")
        seen.append(bits(engine))
        yield from frames(range(13, 16))

    report = engine.run(source(), checkpoint=folder, every=1, resume=True)
    assert seen == [good]
    assert report.rolled_back == 2
    assert report.frames == 4 * report.steps + report.rolled_back + report.pending
    assert "rollbacks dropped 2 of 24 frames, which were in the gate" in report.notes
    assert Metrics(engine).plain()["penstock_rolled_back_frames_total"] == 2
    restored = ps.Engine.restore(folder)
    assert restored.state_hash() == engine.state_hash()
    assert restored.session.ledger.totals.rolled_back == 2
    again = restored.run(frames(range(4, 18)), checkpoint=folder, resume=True)
    assert (again.skipped, again.frames, again.rolled_back) == (24, 4, 0)


def test_keys_add_up_over_a_rollback(folder):
    engine = trained("lru", folder)
    engine.core.start_counting()
    before = len(engine.core.tables.dynamic["user"].directory)
    push(engine, range(30, 40))
    engine.rollback("good")
    push(engine, range(40, 50))
    keys = engine.core.table_reports()["user"].keys
    assert keys.rolled_back != 0
    assert min(keys.admitted, keys.evicted + keys.expired) > 0
    assert before + keys.admitted - keys.expired - keys.evicted + keys.rolled_back == keys.keys
    assert Metrics(engine).plain()["penstock_table_rolled_back_keys"]["user"] == keys.rolled_back
