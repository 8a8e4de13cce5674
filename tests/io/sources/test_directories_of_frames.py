"""Directories of any files give the same in runs as where every batch is decoded and every frame is pushed alone."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from ipc import write

import penstock as ps
from penstock.base.errors import InputError
from penstock.checkpoint.commit_session import CommitSession

ROWS, DIM = 30, 2


def write_files(folder, rng):
    """Files of several tables, with and without steps, in batches of any size."""
    folder.mkdir()
    step = 0
    for number in range(rng.integers(1, 5)):
        sizes = rng.choice([1, 1, 2, 3, 5, 17], rng.integers(1, 60))
        steps = step + np.cumsum(
            rng.choice([0, 1, 1, 1, 1, 2, -3], len(sizes), p=[0.1, 0.2, 0.2, 0.2, 0.2, 0.08, 0.02])
        )
        step, num_rows = int(steps[-1]), int(sizes.sum())
        columns = {"step": pa.array(np.repeat(steps, sizes))} if rng.random() < 0.7 else {}
        ids = rng.integers(0, ROWS, num_rows)
        values = rng.standard_normal((num_rows, DIM)).astype(np.float32)
        if rng.random() < 0.2:
            values[rng.integers(num_rows)] = np.nan
        if rng.random() < 0.2:
            ids[rng.integers(num_rows)] = rng.choice([-1, ROWS])
        log = batch(ids, values, DIM, **columns)
        log = log.replace_schema_metadata({"penstock.table": str(rng.choice(["t", "t", "u"]))})
        edges = [0, *sorted(rng.integers(0, num_rows + 1, rng.integers(0, 9)).tolist()), num_rows]
        parts = [log.slice(begin, end - begin) for begin, end in itertools.pairwise(edges)]
        write(folder / f"{number}.arrows", parts)


def outcomes(source, folder, limit, num_required, reduction, **options):
    """What a run leaves behind that was limited and resumed."""
    config = ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(ROWS, DIM, optimizer=ps.Adagrad(0.1), name=name) for name in ("t", "u")]
    )
    engine, results = ps.Engine(config, num_required=num_required, reduction=reduction), []
    for resumed in (False, True):
        options |= {"checkpoint": folder, "resume": resumed, "limit": None if resumed else limit}
        try:
            report = engine.run(source, **options)
            results.append((report.rows, report.frames, report.stale, report.pending, report.steps, report.dropped))
        except InputError as error:
            results.append(str(error))
        state = engine.core.gate.get_state(), engine.session.positions.get_state(), dict(engine.watch.updated)
        results.append((engine.state_hash(), *state))
        engine = ps.Engine.restore(folder)
    return results


@pytest.mark.sampled("0", "3", "6", "9", "12", "15", "18", "21")
@pytest.mark.parametrize("seed", range(25))
def test_runs_of_frames_leave_what_each_frame_alone_leaves(tmp_path, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    write_files(tmp_path / "log", rng)
    commits, begin = [], CommitSession.begin

    def begin_and_finish(self):
        commits.append((self._core.global_step, self._core.gate.get_state()))
        begin(self)
        self._notified(self._saver.finish)

    monkeypatch.setattr(CommitSession, "begin", begin_and_finish)
    options = {
        "limit": int(rng.integers(0, 40)),
        "num_required": int(rng.integers(1, 4)),
        "reduction": str(rng.choice(["mean", "sum"])),
        "on_bad_row": str(rng.choice(["error", "drop"])),
        "contribution_rows": [None, None, 3, 7, "batch"][rng.integers(5)],
        "every": int(rng.integers(1, 9)),
        "keep": 1000,
    }
    native = outcomes(tmp_path / "log", tmp_path / "native", **options)
    in_runs = list(commits)
    commits.clear()
    with monkeypatch.context() as patch:
        patch.setattr("penstock.io.decoding.batch_pieces.plain_columns", lambda *_: None)
        wanted = outcomes(tmp_path / "log", tmp_path / "decoded", **options)
    assert native == wanted
    assert in_runs == commits
