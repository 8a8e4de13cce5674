"""The flags that change the tables of a checkpoint, and how ``inspect``, ``diff`` and ``history`` show a change."""

from functools import partial

import engines
import pytest
from cli import SGD, frame, table
from ipc import write

import penstock as ps

CONFIG = table() + table("item", 20, 2, SGD, "constant: 0.5") + "mode: TRAINING\n"
OLD = [frame(step, table=name) for step, name in enumerate(["user", "item", "user", "item"])]
NEW = [frame(step, table=name) for step, name in enumerate(["member", "ad", "member"], start=4)]


def text_of(*tables):
    return "".join(tables) + "mode: TRAINING\n"


MEMBER, AD = table("member"), table("ad", 10)
CHANGED = ("--rename", "user=member", "--drop-table", "item", "--new-tables")


@pytest.fixture
def checkpoint(config, tmp_path, call):
    """A checkpoint of four steps, and the log that it has."""
    log, folder = write(tmp_path / "old.arrows", OLD), tmp_path / "c"
    call(0, "replay", config, log, "--checkpoint", folder)
    return folder, log


def replay(call, config, checkpoint, *flags, code=0, logs=()):
    folder, log = checkpoint
    text, report = call(code, "replay", config, log, *logs, "--checkpoint", folder, "--resume", *flags)
    return text if code else report


def test_each_change_needs_its_flag_and_the_same_command_again_changes_nothing(checkpoint, config, tmp_path, call):
    config.write_text(text_of(MEMBER, AD))
    text = replay(call, config, checkpoint, code=5)
    assert "give --rename user=NEW to keep its rows (rename=), or --drop-table user to remove it" in text
    assert "'item' (--rename item=NEW or --drop-table item), 'member' (--new-tables), 'ad' (--new-tables)" in text
    text = replay(call, config, checkpoint, *CHANGED[:2], code=5)
    assert "give --rename item=ad to keep" in text  # the one table that it could be
    assert text.endswith("; other tables differ too: 'ad' (--new-tables)\n")
    assert "give --new-tables" in replay(call, config, checkpoint, *CHANGED[:4], code=5)
    logs = [write(tmp_path / "new.arrows", NEW)]
    first = replay(call, config, checkpoint, *CHANGED, logs=logs)
    again = replay(call, config, checkpoint, *CHANGED, logs=logs)
    assert (first["skipped"], first["steps"]) == (4, 3)
    assert (again["skipped"], again["state_hash"]) == (7, first["state_hash"])


def test_another_dim_and_another_optimizer_have_flags(checkpoint, config, call):
    adam = table("user", optimizer="adam { beta1: 0.9 beta2: 0.999 epsilon: 1e-7 }")
    config.write_text(text_of(adam, table("item", 20, 3, SGD, "constant: 0.5")))
    text = replay(call, config, checkpoint, code=5)
    assert "or --reset-slots user to keep its weights and start new slots (reset_slots=); other" in text
    assert text.endswith("'item' (--reset-table item)\n")
    assert "or --reset-table item to start it" in replay(call, config, checkpoint, "--reset-slots", "user", code=5)
    flags = ("--reset-slots", "user", "--reset-table", "item")
    first = replay(call, config, checkpoint, *flags)
    assert replay(call, config, checkpoint, *flags)["state_hash"] == first["state_hash"]
    assert "keeps its rows; omit --reset-table user" in replay(
        call, config, checkpoint, "--reset-table", "user", code=5
    )


config_of = partial(engines.config_of, ps.SGD(0.1), rows=20)


def test_flags_in_errors_are_quoted_as_a_shell_needs_it(tmp_path):
    ps.Engine(config_of(["all features", "-x", "user"])).save(tmp_path)
    with pytest.raises(ps.StateError, match=r"give --drop-table 'all features' to .*'-x' \(--drop-table=-x\)"):
        ps.Engine.restore(tmp_path, config=config_of(["user"]))
    with pytest.raises(ps.UsageError, match=r"the configuration has no 'my x'.* omit --rename='-x=my x'"):
        ps.Engine.restore(tmp_path, config=config_of(["user"]), rename={"-x": "my x"})


def test_a_table_that_differs_in_more_than_its_optimizer_starts_anew(tmp_path):
    ps.Engine(config_of(["user"])).save(tmp_path)
    config = engines.config_of(ps.Adagrad(0.1), ["user"])
    with pytest.raises(ps.StateError, match=r"optimizer SGD .* --reset-table user"):
        ps.Engine.restore(tmp_path, config=config)
    ps.Engine.restore(tmp_path, config=config, reset_table="user")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--rename", "user"], "--rename user: expected OLD=NEW"),
        (["--rename", "a=b", "--rename", "a=c"], "--rename a: given twice, as 'b' and as 'c'"),
    ],
)
def test_flags_that_contradict_each_other_are_exit_2(flags, line, checkpoint, config, call):
    assert line in replay(call, config, checkpoint, *flags, code=2)


def test_flags_need_a_commit_to_change(config, tmp_path, call):
    log = write(tmp_path / "old.arrows", OLD)
    fresh = ("--checkpoint", tmp_path / "c", "--resume")
    assert "--drop-table: the tables of a commit" in call(2, "replay", config, log, "--drop-table", "item")[0]
    assert "has no commit with tables to change" in call(2, "replay", config, log, *fresh, "--rename", "a=user")[0]
    call(0, "replay", config, log, *fresh, "--new-tables")


def test_init_without_a_file_of_a_table_needs_the_flag(config, tmp_path, call):
    log = write(tmp_path / "old.arrows", OLD)
    call(0, "replay", config, log, "--out", tmp_path / "t")
    config.write_text(text_of(table(), table("item", 20, 2, SGD, "constant: 0.5"), AD))
    init = (config, log, "--init", tmp_path / "t")
    assert "no file for table 'ad'; there: item.parquet, user.parquet; --new-tables" in call(3, "replay", *init)[0]
    for command in (["replay"], ["passes", "--passes", "2", "--checkpoint", tmp_path / "p"]):
        call(0, *command, *init, "--new-tables")


def test_inspect_diff_and_history_show_a_change(checkpoint, config, tmp_path, capsys, call):
    folder, _ = checkpoint
    call(0, "tag", folder, "before")
    config.write_text(text_of(MEMBER, AD))
    replay(call, config, checkpoint, *CHANGED, logs=[write(tmp_path / "new.arrows", NEW)])
    text, report = call(0, "inspect", folder)
    change = "change 1 of the tables, at step 4: 'ad' new, 'item' dropped, 'user' renamed to 'member'"
    assert f"  {change}\n" in text
    assert "member: 50 × 2, Adagrad, accumulators, drawn as user" in text
    expected = {"number": 1, "step": 4, "new": ["ad"], "dropped": ["item"], "renamed": {"user": "member"}}
    assert report["changes"] == [expected]
    text, report = call(1, "diff", f"{folder}@before", folder)
    assert f"B: {change}\n" in text
    assert report["differences"]["changes"] == [{"only_in": "B", **expected}]
    assert report["differences"]["item"] == {"missing_in": str(folder)}
    assert report["differences"]["ad"] == {"missing_in": f"{folder}@before"}
    assert report["differences"]["member"]["parameters"]["rows"] == 3  # compared with those of "user"
    text, backward = call(1, "diff", folder, f"{folder}@before")
    assert f"A: {change}\n" in text
    assert backward["differences"]["changes"] == [{"only_in": "A", **expected}]
    assert backward["differences"]["member"]["parameters"]["rows"] == 3
    versions = call(0, "history", folder, "--table", "member", "--id", "1")[1]["versions"]
    assert [version["step"] for version in versions] == [4, 7]
    assert versions[0]["row"] != versions[1]["row"] is not None
    assert call(0, "history", folder, "--table", "ad", "--id", "1")[1]["versions"][0]["row"] is None
    assert "no table 'nothing'" in call(2, "history", folder, "--table", "nothing", "--id", "1")[0]


def test_diff_follows_no_table_to_the_name_of_one_that_was_added_after_it_was_dropped(tmp_path, call):
    ps.Engine(config_of("ab")).save(tmp_path)
    call(0, "tag", tmp_path, "before")
    for names, options in (
        ("b", {"drop_table": "a"}),
        ("ab", {"new_tables": True}),
        ("cb", {"rename": {"a": "c"}}),
        ("ca", {"rename": {"b": "a"}}),
    ):
        ps.Engine.restore(tmp_path, config=config_of(names), **options).save(tmp_path)
    for place, other in ((f"{tmp_path}@before", tmp_path), (tmp_path, f"{tmp_path}@before")):
        differences = call(1, "diff", place, other)[1]["differences"]
        assert differences.keys() == {"changes", "c"}  # "a" is compared with the former "b"
        assert "missing_in" in differences["c"]


def test_a_table_that_becomes_dynamic_may_be_renamed_too(checkpoint, config, call):
    before = ps.Engine.restore(checkpoint[0])
    dynamic = 'table { name: "member" dynamic {} }'
    descriptors = "tpu_embedding_configuration {" + text_of(MEMBER) + "}"
    config.write_text(descriptors + dynamic)
    replay(call, config, checkpoint, "--rename", "user=member", "--drop-table", "item")
    after = ps.Engine.restore(checkpoint[0])
    assert after.keys("member").to_pylist() == [1, 2, 3]
    assert after.lookup("member", [1, 2, 3]).tobytes() == before.lookup("user", [1, 2, 3]).tobytes()
