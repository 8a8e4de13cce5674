"""A checkpoint that is read while a run commits to it."""

import shutil

import pytest
from checkpoints import LOG, engine_of

import penstock as ps
from penstock.checkpoint import store as folders
from penstock.cli.main import main


@pytest.fixture
def replaced(tmp_path, monkeypatch):
    """A checkpoint, its writer, and ``after``: the writer commits when the next call of a method of Folder ends.

    Every commit is a base and only one is kept: the next one removes every file of the last one.
    """
    monkeypatch.setattr(folders, "MAX_DELTAS", 0)
    path, writer = tmp_path / "run", engine_of()
    writer.run(iter(LOG[:3]), checkpoint=path, keep=1)

    def commit():
        writer.run(iter(LOG[: 3 * writer.global_step + 3]), checkpoint=path, keep=1, resume=True)

    def after(name, times=1):
        real, calls = getattr(folders.Folder, name), []

        def method(self, *arguments):
            value = real(self, *arguments)
            if len(calls) < times:
                calls.append(name)
                with monkeypatch.context() as undone:
                    undone.setattr(folders.Folder, name, real)
                    commit()
            return value

        monkeypatch.setattr(folders.Folder, name, method)

    return path, writer, after


@pytest.mark.parametrize("moment", ["numbers", "load", "checked"])
def test_a_restore_whose_commit_is_removed_takes_the_newer_one(replaced, moment):
    path, writer, after = replaced
    after(moment)
    restored = ps.Engine.restore(path)
    assert restored.global_step == writer.global_step == 2
    assert restored.state_hash() == writer.state_hash()


def test_a_restore_that_is_slower_than_the_commits_reports_it(replaced):
    path, _, after = replaced
    after("checked", 5)
    with pytest.raises(
        ps.StateError, match=r"run: 5 commits were removed while they were read: .*; wait .*, or raise its keep="
    ):
        ps.Engine.restore(path)


@pytest.mark.parametrize("command", ["inspect", "export", "diff"])
@pytest.mark.parametrize("moment", ["numbers", "load", "checked"])
def test_a_command_that_reads_a_commit_that_is_removed(replaced, moment, command, tmp_path, capsys):
    path, writer, after = replaced
    same = tmp_path / "same"
    rest = {"inspect": [], "export": [str(tmp_path / "out")], "diff": [str(same)]}[command]
    shutil.copytree(path, same)
    after(moment)
    code = main([command, str(path), *rest])
    output = capsys.readouterr().err
    assert code in {0, 1, 5}, output
    if code == 5:
        assert "was removed while it was read" in output
    else:
        assert writer.global_step == 2


def test_a_file_missing_without_a_concurrent_commit_is_damage(replaced):
    path, _, _ = replaced
    (path / "00000001.base").unlink()
    with pytest.raises(ps.StateError, match=r"00000001.base: is missing; copy the folder anew"):
        ps.Engine.restore(path)
