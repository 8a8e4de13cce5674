"""Replays in passes: one share of the rows after the other, with the result of one run over all of them."""

import contextlib
import io
import os
import shutil

import checkpoints
import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from deltas import bytes_of
from dynamic import ALL_POLICIES
from ipc import log

import penstock as ps
from penstock.cli.main import main
from penstock.contrib.passes.multi_pass import MultiPass
from penstock.contrib.passes.pass_folder import PassFolder
from penstock.pyx.keys.key_owners import owners

VISITOR = ps.TableConfig(20_000, 2, name="visitor", optimizer=ps.Adam(0.1), dynamic=ALL_POLICIES)
SWEPT = ps.TableConfig(3, 4, name="swept", optimizer=ps.Adam(0.05, lazy_adam=False))
PLACED = ps.TableConfig(900, 2, name="placed", optimizer=ps.PartialRowWiseAdam(0.1), placement=ps.Placement("host"))
GATE = ("--num-required", "3", "--flush")
REPLAY, PASSES = ("replay", *GATE), ("passes", *GATE)


@pytest.fixture
def replay(tmp_path, call):
    """replay(name, flags…) → (what --json prints, bytes of the deltas, bytes of every table) of a replay of the log."""
    config = checkpoints.config_of(more=[VISITOR, SWEPT, PLACED])
    config.save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(batches()))

    def run(name, *flags, source="log.arrows", code=0):
        places = ["--out", tmp_path / f"{name}-out", "--deltas", tmp_path / f"{name}-deltas", "--delta-slots", "all"]
        command = PASSES if "--passes" in flags else REPLAY
        words = [*command, tmp_path / "tables.pbtxt", tmp_path / source, *places, *flags]
        printed = call(code, *words)[1]
        tables = {path.name: path.read_bytes() for path in sorted((tmp_path / f"{name}-out").glob("*"))}
        return printed, deltas_in(tmp_path / f"{name}-deltas"), tables

    return run


def batches():
    """Frames of three workers with stale ones in between, and rows of every table but ``swept``."""
    actual = []
    for step, worker in ((step, worker) for step in range(10) for worker in range(3)):
        rng = np.random.default_rng([step, worker])
        batch = checkpoints.batch(step, worker)
        for name, most in (("visitor", 2**62), ("placed", 900)):
            keys = rng.integers(0, 60, 20) * (most // 60)
            more = {
                "table": [name] * 20,
                "step": pa.array([max(0, step - 4 * (worker == 2)) if step == 7 else step] * 20, pa.int64()),
                "contributor": [f"w{worker}"] * 20,
                "id": pa.array(keys, pa.int64()),
                "gradient": pa.array(list(rng.standard_normal((20, 2)).astype(np.float32)), batch["gradient"].type),
            }
            steps = pa.array([more["step"][0].as_py()] * batch.num_rows, pa.int64())
            batch = batch.set_column(batch.schema.get_field_index("step"), "step", steps)
            batch = pa.concat_batches([batch, pa.RecordBatch.from_pydict(more)])
        actual.append(batch)
    return actual


def deltas_in(path):
    if not path.exists():
        return None
    with pa.ipc.open_stream(path) as reader:
        return bytes_of(batch for batch in reader if batch.num_rows)


def without_time(report):
    aside = ("seconds", "rows_per_s", "held_bytes", "out", "deltas", "passes", "quarantine")
    plain = {name: value for name, value in report.items() if name not in aside}
    for table in plain["tables"].values():  # memory and load are of directories of other sizes
        for name in ("directory_bytes", "load"):
            table.get("keys", {}).pop(name, None)
    return plain


@pytest.mark.sampled("-2", "interval-2")
@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize("flags", [(), ("--devices", 3), ("--delta-steps", 4)], ids=["", "devices", "interval"])
@pytest.mark.promise("No way to scale changes a bit")
def test_any_number_of_passes_gives_one_hash_the_same_deltas_and_files(replay, passes, flags):
    whole = replay("whole", *flags)
    result = replay("passes", "--passes", passes, *flags)
    assert whole[0]["stale"] == 1
    assert result[0]["passes"] == passes
    assert without_time(result[0]) == without_time(whole[0])
    assert result[1:] == whole[1:]


@pytest.mark.sampled("MOD")
@pytest.mark.parametrize("strategy", ["DIV_DEFAULT", "MOD"])
def test_more_passes_than_ids_leave_some_without_rows(replay, tmp_path, strategy, call):
    config = ps.EmbeddingConfig.load(tmp_path / "tables.pbtxt").to_engine_proto()
    embedding = config.tpu_embedding_configuration
    embedding.sharding_strategy = getattr(embedding, strategy)
    ps.EmbeddingConfig.from_proto(config).save(tmp_path / "tables.pbtxt")
    assert replay("passes", "--passes", 4)[1:] == replay("whole")[1:]  # ``swept`` has 3 rows


def test_one_commit_names_the_parts_of_all_passes_and_a_run_continues_it(replay, tmp_path, call):
    whole = replay("whole", "--checkpoint", tmp_path / "whole")
    replay("passes", "--checkpoint", tmp_path / "c", "--passes", 3, "--limit", 12, "--every", 2)
    assert [path.name for path in (tmp_path / "c").glob("*.commit")] == ["00000001.commit"]
    parts = {path.name[8:14] for path in (tmp_path / "c").glob("*.base")}
    assert parts == {"-0of3.", "-1of3.", "-2of3."}
    assert not (tmp_path / "c" / ".passes").exists()
    shutil.copytree(tmp_path / "c", tmp_path / "again")
    shutil.copy(tmp_path / "passes-deltas", tmp_path / "again-deltas")
    result = replay("passes", "--checkpoint", tmp_path / "c", "--resume")
    again = replay("again", "--checkpoint", tmp_path / "again", "--resume", "--passes", 2)
    assert result[1:] == again[1:] == whole[1:]
    assert result[0]["state_hash"] == again[0]["state_hash"] == whole[0]["state_hash"]
    call(0, "diff", tmp_path / "whole", tmp_path / "again")
    restored = ps.Engine.restore(tmp_path / "again", share=(1, 4))
    assert restored.global_step == whole[0]["global_step"]


@pytest.mark.evidence
def test_bad_input_ends_every_pass_where_the_first_meets_it(replay, tmp_path, call):
    frames = batches()
    bad = pa.array([-1, *frames[17]["id"].to_pylist()[1:]], pa.int64())
    broken = [*frames[:17], frames[17].set_column(frames[17].schema.get_field_index("id"), "id", bad), *frames[18:]]
    (tmp_path / "broken.arrows").write_bytes(log(broken))
    words = ["--checkpoint", tmp_path / "c", "--every", 4]
    text = call(3, *PASSES, tmp_path / "tables.pbtxt", tmp_path / "broken.arrows", "--passes", 3, *words)[0]
    assert "batch 17, row 0, column 'id'" in text
    call(3, *REPLAY, tmp_path / "tables.pbtxt", tmp_path / "broken.arrows", "--checkpoint", tmp_path / "whole")
    call(0, "diff", tmp_path / "whole", tmp_path / "c")
    result = replay("rest", "--checkpoint", tmp_path / "c", "--resume", "--passes", 2)
    assert result[0]["skipped"] == 17
    assert result[0]["state_hash"] == replay("whole")[0]["state_hash"]


@pytest.mark.evidence
@pytest.mark.parametrize("mode", ["drop", "quarantine"])
def test_bad_rows_are_counted_and_written_by_the_first_pass(replay, tmp_path, mode):
    frames = batches()
    bad = pa.array([-1, *frames[4]["id"].to_pylist()[1:]], pa.int64())
    broken = [*frames[:4], frames[4].set_column(frames[4].schema.get_field_index("id"), "id", bad), *frames[5:]]
    (tmp_path / "broken.arrows").write_bytes(log(broken))

    def flags(name):
        return ["--on-bad-row", f"quarantine={tmp_path / name}" if mode == "quarantine" else mode]

    whole = replay("whole", *flags("a"), source="broken.arrows")
    result = replay("passes", *flags("b"), "--passes", 3, source="broken.arrows")
    assert result[1:] == whole[1:]
    assert without_time(result[0]) == without_time(whole[0])
    assert result[0]["dropped"] == {"id_out_of_range": 1}
    if mode == "quarantine":
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_of_infinite_sums_are_dropped_in_every_pass_alike_or_end_it(tmp_path, call):
    frames = batches()[:9:3]  # one worker: none is stale
    rows = frames[1].to_pylist()
    for row in (1, 2, 4):
        rows[row] |= {"id": 3, "gradient": [3e38] * len(rows[row]["gradient"])}
    frames[1] = pa.RecordBatch.from_pylist(rows, schema=frames[1].schema)
    checkpoints.config_of(more=[VISITOR, SWEPT, PLACED]).save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(frames))
    words = [tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--num-required"]

    def dropped(num_required, name, *flags, code=0):
        aside = f"quarantine={tmp_path / name}"
        command = "passes" if flags else "replay"
        return call(
            code, command, *words, num_required, "--on-bad-row", aside, "--checkpoint", tmp_path / f"{name}-c", *flags
        )

    whole, result = dropped(1, "a")[1], dropped(1, "b", "--passes", 3)[1]
    assert result["dropped"] == {"sum_not_finite": 2}
    for name in ("dropped", "state_hash", "not_finite", "first_not_finite"):
        assert result[name] == whole[name]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert "of id 3 of table 'user' is not" in dropped(3, "c", "--passes", 3, code=3)[0]


@pytest.mark.evidence
def test_sources_that_change_between_passes_are_refused_and_nothing_is_committed(replay, tmp_path, call, monkeypatch):
    source, end = tmp_path / "log.arrows", PassFolder.end
    content = source.read_bytes()

    def changed(self, rank, fields):
        end(self, rank, fields)
        source.write_bytes(log(checkpoints.log_of(range(10), seed=1)))

    monkeypatch.setattr(PassFolder, "end", changed)
    words = [*PASSES, tmp_path / "tables.pbtxt", source, "--passes", 3, "--checkpoint", tmp_path / "c"]
    words += ["--out", tmp_path / "out", "--deltas", tmp_path / "d"]
    text = call(3, *words)[0]
    assert f"{source}: pass 2 of 3 read other frames than the first; nothing was committed: restore the sources" in text
    assert not list((tmp_path / "c").glob("*.commit"))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "d").exists()
    monkeypatch.undo()
    source.write_bytes(content)
    assert call(0, *words, "--resume")[1]["state_hash"] == replay("whole")[0]["state_hash"]


@pytest.mark.evidence
def test_a_share_that_is_full_in_a_later_pass_ends_the_replay_and_nothing_is_committed(tmp_path, call):
    table = ps.TableConfig(8192, 2, name="t", dynamic=ps.Dynamic(on_full="error"))
    ps.EmbeddingConfig.from_tables([table], ps.SGD(0.1)).save(tmp_path / "tables.pbtxt")
    keys = np.arange(12_000)
    of_last = keys[owners(keys, 0, "t", 8192, 2) == 1][:4097]  # of two shares of 4,096 rows
    several = [batch(ids, step=step) for step, ids in enumerate([keys[:90], of_last[:4000], of_last[4000:], [1]])]
    (tmp_path / "log.arrows").write_bytes(log(several))
    words = [
        "passes",
        tmp_path / "tables.pbtxt",
        tmp_path / "log.arrows",
        "--passes",
        2,
        "--checkpoint",
        tmp_path / "c",
    ]
    words += ["--out", tmp_path / "out", "--deltas", tmp_path / "d", "--every", 1]
    text = call(6, *words)[0]
    assert "pass 2 of 2: table 't': no room for 1 of 97 new keys: 4000 of 4096 rows are in use" in text
    assert f"only begins anew: remove {tmp_path}/c/.passes; nothing was committed" in text
    assert not list((tmp_path / "c").glob("*.commit"))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "d").exists()
    larger = ps.TableConfig(16_384, 2, name="t", dynamic=ps.Dynamic(on_full="error"))
    ps.EmbeddingConfig.from_tables([larger], ps.SGD(0.1)).save(tmp_path / "tables.pbtxt")
    assert "remove this folder" in call(2, *words, "--resume")[0]
    shutil.rmtree(tmp_path / "c" / ".passes")
    plain = call(0, "replay", *words[1:3])[1]["state_hash"]
    assert call(0, *words, "--resume")[1]["state_hash"] == plain


def test_an_interrupted_pass_continues_at_its_position(replay, tmp_path, monkeypatch, capsys):
    whole, seen = replay("whole"), []

    def stops_at(rank):
        def progress(self, number):
            def tell(counters, gate, done):
                seen.append((number, counters.frames))
                if number == rank and counters.frames == 8:
                    raise KeyboardInterrupt

            return tell

        return progress

    words = ["--checkpoint", f"{tmp_path}/c", *["--passes", "3", "--resume", "--every", "2", "--delta-steps", "2"]]
    whole = replay("whole-2", "--delta-steps", 2)
    for rank in range(3):
        monkeypatch.setattr(MultiPass, "_progress", stops_at(rank))
        places = ["--out", f"{tmp_path}/p-out", "--deltas", f"{tmp_path}/p-deltas", "--delta-slots", "all"]
        assert main([*PASSES, f"{tmp_path}/tables.pbtxt", f"{tmp_path}/log.arrows", *places, *words]) == 130
        assert f"its passes are in {tmp_path}/c (--resume continues)" in capsys.readouterr().err
        assert not (tmp_path / "p-deltas").exists()
    monkeypatch.undo()
    result = replay("p", *words)
    assert result[1:] == whole[1:]
    # Each pass was read from its position on: as many frames in all as one run of each.
    assert [len([item for item in seen if item[0] == rank]) for rank in range(3)] == [30, 30, 8]


@pytest.mark.evidence
def test_passes_of_a_commit_that_was_removed_are_not_continued_after_another(replay, tmp_path, call, monkeypatch):
    """After going back to commit 1, another commit 2 takes the number of the one that the passes began with."""
    other = [*batches()[:6], *(batch for batch in reversed(batches()[6:]))]
    (tmp_path / "other.arrows").write_bytes(log(other))
    words = [*GATE, tmp_path / "tables.pbtxt"]
    flags = ["--checkpoint", tmp_path / "c", "--resume"]
    for limit in (6, 12):
        call(0, "replay", *words[:2], words[-1], tmp_path / "log.arrows", *flags, "--limit", limit)

    def stop(self, base):
        raise KeyboardInterrupt

    monkeypatch.setattr(MultiPass, "_publish", stop)
    call(130, "passes", *words, tmp_path / "log.arrows", *flags, "--passes", 3)
    monkeypatch.undo()
    (tmp_path / "c" / "00000002.commit").unlink()
    call(0, "replay", *words[:2], words[-1], tmp_path / "other.arrows", *flags, "--limit", 12)
    state_hash = call(0, "passes", *words, tmp_path / "other.arrows", *flags, "--passes", 3)[1]["state_hash"]
    assert state_hash == replay("whole", source="other.arrows")[0]["state_hash"]


@pytest.mark.evidence
def test_a_replay_in_passes_resumes_only_with_its_flags(replay, tmp_path, call, monkeypatch):
    words = [*GATE, tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--checkpoint", tmp_path / "c"]

    def stop(self, base):
        raise KeyboardInterrupt

    monkeypatch.setattr(MultiPass, "_publish", stop)
    call(130, "passes", *words, "--passes", 3)
    monkeypatch.undo()
    text = call(2, "passes", *words, "--passes", 4, "--resume")[0]
    assert f"{tmp_path}/c/.passes: contains a replay in passes with passes 3, not 4; resume it with the same" in text
    assert "with limit None, not 5" in call(2, "passes", *words, "--passes", 3, "--resume", "--limit", 5)[0]
    text = call(2, "replay", *words, "--resume")[0]
    assert f"{tmp_path}/c: contains an unfinished replay in passes; resume it with penstock passes --passes 3" in text
    assert call(0, "passes", *words, "--passes", 3, "--resume")[1]["state_hash"] == replay("whole")[0]["state_hash"]


def test_all_passes_make_the_change_of_tables_of_the_first_and_a_refused_one_begins_none(tmp_path, call, monkeypatch):
    frames = [batch([1, 2, step], step=step, table="user") for step in range(4)]
    (tmp_path / "log.arrows").write_bytes(log(frames))
    for name in ("user", "member"):
        table = ps.TableConfig(20, 2, name=name, optimizer=ps.Adagrad(0.1))
        ps.EmbeddingConfig.from_tables([table]).save(tmp_path / f"{name}.pbtxt")
    words = [tmp_path / "log.arrows", "--checkpoint", tmp_path / "c"]
    call(0, "replay", tmp_path / "user.pbtxt", *words, "--limit", 3)
    assert "--rename user=" in call(5, "passes", tmp_path / "member.pbtxt", *words, "--resume", "--passes", 2)[0]
    call(0, "replay", tmp_path / "user.pbtxt", *words, "--resume")  # no passes have begun

    def stop(self, rank, record):
        raise KeyboardInterrupt

    words = ["passes", tmp_path / "member.pbtxt", *words, "--resume", "--passes", 2]
    with monkeypatch.context() as patch:
        patch.setattr(PassFolder, "end", stop)
        call(130, *words, "--rename", "user=member")
    text = call(2, *words, "--drop-table", "user", "--new-tables")[0]
    assert "at step 4: 'user' renamed to 'member', not change 1 of the tables, at step 4: 'member' new, 'user'" in text
    renamed = ps.Engine.restore(
        tmp_path / "c", config=ps.EmbeddingConfig.load(tmp_path / "member.pbtxt"), rename={"user": "member"}
    )
    assert call(0, *words, "--rename", "user=member")[1]["state_hash"] == renamed.state_hash()


def test_a_replay_in_passes_that_chose_their_number_is_resumed(tmp_path, replay, call, monkeypatch):
    words = [*PASSES, tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--checkpoint", tmp_path / "c"]
    with monkeypatch.context() as patch:
        patch.setattr(MultiPass, "_publish", lambda self, base: (_ for _ in ()).throw(KeyboardInterrupt))
        call(130, *words)
    assert call(0, *words, "--resume")[1]["state_hash"] == replay("whole")[0]["state_hash"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--passes", 0], "expected at least 1, got 0"),
        (["--passes", "many"], "expected a whole number, got 'many'"),
        (["--passes", 2], "name a folder for the rows, with --checkpoint DIR or --out DIR"),
        (["--passes", 2, "--memory", 9, "--out", "o"], "--memory: belongs to --passes auto"),
    ],
)
def test_flags_that_exclude_each_other_are_refused(replay, tmp_path, refused, flags, problem, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*PASSES, tmp_path / "tables.pbtxt", tmp_path / "log.arrows", *flags]
    code, line = outcome_of(words)
    assert (code, problem in line) == (2, True), line


def outcome_of(words):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main([str(word) for word in words])
    return code, err.getvalue()


@pytest.mark.parametrize("source", ["-", "pipe", "grpc://127.0.0.1:1", "delta:table"])
def test_a_source_that_can_be_read_once_is_refused_by_name(source, tmp_path, replay):
    name = source
    if source == "pipe":
        name = str(tmp_path / "frames.pipe")
        os.mkfifo(name)
    code, line = outcome_of([*PASSES, tmp_path / "tables.pbtxt", name, "--passes", 2, "--out", tmp_path / "out"])
    assert code == 2
    kinds = {"-": "standard input", "pipe": "a pipe", "delta:table": "a topic or a table that grows"}
    kind = kinds.get(source, "a live stream")
    assert f"{name}: is {kind}, which cannot be read several times; give a file or a folder" in line


def test_frozen_tables_and_vectors_are_those_of_one_run(tmp_path, call):
    vectors = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    np.savez(tmp_path / "vectors.npz", keys=np.arange(60) * (2**62 // 60), rows=vectors)
    np.save(tmp_path / "placed.npy", np.tile(vectors, (15, 1)))
    more = [
        ps.TableConfig(
            200, 2, ps.FromFile(tmp_path / "vectors.npz"), ps.Adagrad(0.1), name="visitor", dynamic=ps.Dynamic()
        ),
        SWEPT,
        ps.TableConfig(900, 2, ps.FromFile(tmp_path / "placed.npy"), name="placed", trainable=False),
    ]
    checkpoints.config_of(more=more).save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(batches()))
    results = []
    for words in (REPLAY, (*PASSES, "--passes", "3")):
        out = tmp_path / words[0]
        files = tmp_path / "tables.pbtxt", tmp_path / "log.arrows"
        printed = call(0, *words, *files, "--checkpoint", out)[1]
        results.append((printed["state_hash"], printed["dropped"]))
        counters = ps.Engine.restore(out).session.ledger.totals
        results[-1] += (dict(counters.dropped),)
    assert results[0] == results[1]
    assert results[0][1]["frozen:placed"] > 0
    (tmp_path / "placed.npy").write_bytes(b"")
    words = (*PASSES, "--passes", "2", *files, "--checkpoint", out, "--resume")
    assert "table 'placed' needs the vectors that its rows start from" in call(5, *words)[0]


def test_a_table_that_is_trained_from_a_step_on_is_refused(tmp_path, call):
    table = ps.TableConfig(8, 2, name="user", optimizer=ps.SGD(0.1), trainable=False, until_step=3)
    ps.EmbeddingConfig.from_tables([table]).save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(batches()))
    words = ["passes", tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--checkpoint", tmp_path / "c"]
    assert (
        "table 'user' has until_step 3, which a replay in passes does not support" in call(4, *words, "--passes", 2)[0]
    )
