"""``progress="tqdm"``: a bar where tqdm is installed, and one line where it is not."""

import sys

import pytest
from batches import batch
from engines import engine_of
from ipc import write

import penstock as ps

BAR = "penstock.contrib.tqdm_bar"


@pytest.fixture
def log(tmp_path):
    return write(tmp_path / "log.arrows", [batch([1, 2, 3], step=step) for step in range(4)])


@pytest.mark.parametrize("call", ["run", "stage"])
def test_a_missing_tqdm_is_one_line_before_anything_is_applied(call, log, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.delitem(sys.modules, BAR, raising=False)
    engine = engine_of()
    wanted = r"^progress='tqdm' needs the package tqdm: pip install 'penstock\[tqdm\]'$"
    with pytest.raises(ModuleNotFoundError, match=wanted):
        getattr(engine, call)(log, progress="tqdm")
    assert engine.global_step == 0


def test_another_text_is_refused(log):
    with pytest.raises(ps.UsageError, match="progress: expected something to call or one of tqdm, got 'bar'"):
        engine_of().run(log, progress="bar")


def test_the_bar_shows_the_share_rows_and_steps_to_the_end(log, capsys):
    pytest.importorskip("tqdm")
    assert engine_of().run(log, progress="tqdm").steps == 4
    last = capsys.readouterr().err.rpartition("\r")[2]
    assert last.startswith("100%")
    assert last.endswith(", 12 rows, step 4\n")


def test_the_bar_counts_rows_where_the_length_is_unknown(capsys):
    pytest.importorskip("tqdm")
    frames = (batch([1, 2, 3], step=step) for step in range(4))
    engine_of().run(frames, progress="tqdm")
    assert capsys.readouterr().err.rpartition("\r")[2].startswith("12.0 rows ")


def test_the_bar_of_a_stage_ends_with_its_reader(log, capsys):
    pytest.importorskip("tqdm")
    assert len(list(engine_of().stage(log, per_steps=1, progress="tqdm"))) == 4
    assert capsys.readouterr().err.endswith("step 4\n")


def test_the_bar_ends_with_an_error(tmp_path, capsys):
    pytest.importorskip("tqdm")
    log = write(tmp_path / "bad.arrows", [batch([1], step=0), batch([99], step=1)])
    with pytest.raises(ps.InputError):
        engine_of().run(log, progress="tqdm")
    assert capsys.readouterr().err.endswith("1 rows, step 1\n")
