"""``tag``, ``log`` and ``branch``, and DIR@VERSION wherever a command reads a checkpoint."""

import os

import pyarrow.parquet
import pytest
from checkpoints import LOG, config_of
from ipc import write
from versions import check_tags, rewrite, saved

import penstock as ps

CONFIG = config_of()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "run", range(3))
    return "run"


def test_tag_log_and_branch_print_what_they_did(folder, call):
    text, result = call(0, "tag", folder, "good", "--step", 2, "--note", "before  Monday")
    assert text == "tagged    good: step 2, commit 2 of run\n"
    assert result == {"tag": "good", "global_step": 2, "commit": 2, "note": "before Monday"}
    text, result = call(0, "log", folder)
    assert "run: 3 commits, 1 tag\n  commit 3: step 3, 5 rows, " in text
    assert "  tag good: step 2, pins 0 bytes: before Monday\n" in text
    assert [(entry["commit"], entry["step"], entry["tags"]) for entry in result["commits"]] == [
        (3, 3, []),
        (2, 2, ["good"]),
        (1, 1, []),
    ]
    text, result = call(0, "branch", folder, "new", "--at", "good")
    assert text == f"branched  new: step 2, commit 2 of run\nversion   {result['version']}\n"
    text, branch = call(0, "log", "new")
    assert "branch of version 2\n" in text
    assert (branch["version"], branch["parent"]["version"]) == (result["version"], "2")
    assert call(0, "tag", folder, "--delete", "good")[0] == "deleted   good\n"
    assert call(0, "log", folder)[1]["tags"] == []


def test_rollback_prints_what_it_did(folder, call, refused):
    ps.tag(folder, "good", 2)
    text, result = call(0, "rollback", folder, "--to", "good")
    assert text == "rolled back  run: step 4, with the rows of step 2\n"
    assert result == {"global_step": 4, "to_step": 2, "rolled_back": 0}
    assert call(1, "diff", folder, f"{folder}@good")[1]["differences"] == {"global_step": [4, 2]}
    assert [entry["step"] for entry in call(0, "log", folder)[1]["commits"]] == [4, 3, 2, 1]
    assert "run: no commit of step 9; the nearest: 4 (commit 4)" in refused(5, "rollback", folder, "--to", 9)
    assert "version 'no tag!': expected a tag or a step" in refused(2, "rollback", folder, "--to", "no tag!")
    assert "absent: no such checkpoint" in refused(5, "rollback", "absent", "--to", "good")
    assert not os.path.exists("absent")
    assert "--to" in refused(2, "rollback", folder)


def test_log_counts_the_rows_of_deltas_and_the_bytes_that_only_tags_need(folder, call):
    ps.tag(folder, "first", 1)
    base = os.path.getsize("run/00000001.base")
    (pin,) = call(0, "log", folder)[1]["tags"]
    assert (pin["bytes"], pin["pinned_bytes"]) == (base, 0)
    engine = ps.Engine.restore(folder)
    for number in range(60, 63):
        rewrite(engine)
        saved(folder, [number], engine=engine)
    saved(folder, range(2), engine=engine)
    result = call(0, "log", folder)[1]
    assert result["tags"][0]["pinned_bytes"] == base
    (old,) = [entry for entry in result["commits"] if entry["only_tagged"]]
    assert (old["tags"], old["base"], old["rows"]) == (["first"], True, 67)
    assert [entry["rows"] for entry in result["commits"] if not entry["base"]] == [5, 67]


def test_every_command_that_reads_a_checkpoint_reads_a_version(folder, call):
    ps.tag(folder, "good", 1)
    assert call(1, "diff", folder, "run@good")[1]["differences"]["global_step"] == [3, 1]
    assert call(0, "diff", "run@1", "run@good")[1]["equal"]
    assert call(0, "inspect", "run@good")[1]["global_step"] == 1
    assert call(0, "export", "run@good", "out")[1]["global_step"] == 1
    call(0, "branch", "run@good", "new")
    assert call(0, "tag", "run@good", "same")[1]["commit"] == 1
    rows = pyarrow.parquet.read_table("out/user.parquet")["row"].to_pylist()
    assert rows == ps.Engine.restore("new").lookup("user", range(60)).tolist()


def test_a_branch_is_resumed_from_its_commit(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", LOG)
    line = ["replay", config, log, "--num-required", 3, "--flush"]
    whole = call(0, *line)[1]["state_hash"]
    call(0, *line[:-1], "--checkpoint", tmp_path / "run", "--limit", 14)
    call(0, "branch", tmp_path / "run", tmp_path / "new")
    report = call(0, *line, "--checkpoint", tmp_path / "new", "--resume")[1]
    assert (report["skipped"], report["state_hash"]) == (14, whole)


@pytest.mark.evidence
def test_replays_in_passes_continue_a_folder_with_tags(config, tmp_path, call):
    logs = [write(tmp_path / f"{number}.arrows", LOG[18 * number : 18 * number + 18]) for number in range(2)]
    line = ["passes", config, logs[0], "--num-required", 3, "--checkpoint", tmp_path / "run", "--passes", 2]
    half = call(0, *line)[1]["state_hash"]
    ps.tag(tmp_path / "run", "half")
    for _ in range(4):
        report = call(0, *line[:3], logs[1], *line[3:], "--resume")[1]
    assert report["skipped"] == 36
    assert ps.Engine.restore(tmp_path / "run", version="half").state_hash() == half
    assert check_tags(tmp_path / "run")["half"][0] == 6


@pytest.mark.parametrize(
    ("code", "words", "text"),
    [
        (2, ["tag", "run"], "name a tag, or one to delete"),
        (2, ["tag", "run", "a", "--delete", "b"], "name a tag, or one to delete"),
        (2, ["tag", "run", "a/b"], "tag 'a/b': expected a letter, then letters, digits"),
        (2, ["tag", "run", "12"], "at most 64 characters; a number is a step"),
        (2, ["tag", "run", "good"], "run: tag 'good' names step 1 already; give --move"),
        (2, ["tag", "run", "a", "--note", "x" * 1001], "note: expected a text of at most 1000 characters"),
        (2, ["tag", "run", "a", "--step=-1"], "expected at least 0"),
        (5, ["tag", "run", "a", "--step", "7"], "run: no commit of step 7; the nearest: 3 (commit 3)"),
        (5, ["tag", "run", "--delete", "b"], "run: no tag 'b'; there are: good"),
        (5, ["tag", "nowhere", "a"], "nowhere: no such checkpoint"),
        (5, ["tag", "nowhere", "--delete", "a"], "nowhere: no such checkpoint"),
        (5, ["log", "nowhere"], "nowhere: no such checkpoint"),
        (5, ["export", "run@godo", "out"], "run: no tag 'godo'; did you mean 'good'?"),
        (5, ["diff", "run", "run@8"], "run: no commit of step 8; the nearest: 3 (commit 3)"),
        (5, ["inspect", "run@god"], "run: no tag 'god'; did you mean 'good'?"),
        (5, ["branch", "run", "new", "--at", "8"], "run: no commit of step 8"),
        (2, ["branch", "run", "new", "--at", "a@b"], "version 'a@b': expected a tag or a step"),
        (2, ["branch", "run", "run@good"], "nothing is written to a version; penstock branch run NEWDIR --at good"),
        (2, ["branch", "run", "run"], "run: holds a checkpoint; give a new or empty folder"),
        (2, ["branch", "run"], "NEWDIR"),
    ],
)
def test_an_error_is_one_line(folder, refused, code, words, text):
    ps.tag(folder, "good", 1)
    assert text in refused(code, *words)
    assert not os.path.exists("new")


def test_a_replay_does_not_commit_to_a_version(config, folder, tmp_path, refused):
    log = write(tmp_path / "log.arrows", LOG)
    line = refused(2, "replay", config, log, "--checkpoint", "run@2", "--resume")
    assert "run@2: version 2 of a checkpoint, and nothing is written to a version" in line


# ---- several processes at once
