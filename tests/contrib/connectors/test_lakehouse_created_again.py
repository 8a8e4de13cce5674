"""Tables with versions that were removed and created again: no position in the former one continues in the latter."""

import re
import signal

import pytest
from cli import started
from lakehouse import FRAMES, KINDS, VERSIONS, new_table
from limits import HANG_S, suspend, until
from services import config_of, replayed

import penstock as ps
from penstock.base.errors import StateError
from penstock.checkpoint.store import Folder

CREATED_AGAIN = "the table was deleted and created again (expected "


@pytest.fixture(params=KINDS)
def table(request, tmp_path, monkeypatch):
    return new_table(request.param, tmp_path, monkeypatch)


@pytest.mark.parametrize("stop", [3, 4, None])  # inside a version, at the end of one, and at the end
@pytest.mark.parametrize("num_versions", [1, 3, 5], ids=["shorter", "equal", "longer"])
def test_a_table_that_was_created_again_is_refused(table, tmp_path, stop, num_versions):
    for numbers in VERSIONS[:3]:
        table.append(numbers)
    ps.Engine(config_of()).run(table.spelling, limit=stop, checkpoint=tmp_path / "c")
    table.create_again()
    for numbers in VERSIONS[-num_versions:]:
        table.append(numbers)
    engine = ps.Engine.restore(tmp_path / "c")
    with pytest.raises(StateError, match=re.escape(CREATED_AGAIN)) as raised:
        engine.run(table.spelling, checkpoint=tmp_path / "c", resume=True)
    assert str(raised.value).startswith(f"{table.spelling}: version ")
    assert str(raised.value).endswith("; use another checkpoint, or the former table")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[: stop or 8]).state_hash()


def test_a_replay_that_follows_ends_when_its_table_is_created_again(table, tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    table.append(VERSIONS[0])
    saving = ("--checkpoint", tmp_path / "c", "--every", 1)
    process = started("replay", tmp_path / "tables.pbtxt", table.spelling, "--follow", *saving)
    until(lambda: Folder(tmp_path / "c").numbers() and ps.Engine.restore(tmp_path / "c").global_step == 3)
    suspend(process)
    table.create_again()
    for numbers in VERSIONS:
        table.append(numbers)
    process.send_signal(signal.SIGCONT)
    _, error = process.communicate(timeout=HANG_S)
    assert (process.returncode, CREATED_AGAIN in error.decode()) == (5, True), error
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:3]).state_hash()
