"""Runs that read ahead: their cached tables know the uses of the next openings, and nothing else of the run changes."""

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from ipc import log, stream

import penstock as ps
from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.sources.seekable_source import SeekableSource
from penstock.model.frames import FrameRun

SETS = {
    "near": ps.Placement("cached", device_bytes=400, look_ahead=1),
    "far": ps.Placement("cached", device_bytes=400, look_ahead=4),
    "blind": ps.Placement("cached", device_bytes=400, look_ahead=0),
    "plain": ps.Placement(),
}


CLOSE = {"near": 1, "far": 4}


def config_of(optimizer=None, dynamic=None):
    optimizer = optimizer or ps.Adagrad(0.1)
    tables = [
        ps.TableConfig(500, 2, name=name, placement=placement, dynamic=dynamic) for name, placement in SETS.items()
    ]
    return ps.EmbeddingConfig.from_tables(tables, optimizer)


def batches(num_steps=12, workers=1, seed=0):
    """Frames of random tables; of several workers the last lags behind now and then, so that its frames are stale."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        for worker in range(workers):
            late = 3 * (worker > 0 and worker == workers - 1 and step % 5 == 4)
            for name in np.array(list(SETS))[rng.random(len(SETS)) < 0.7]:
                ids = rng.integers(0, 500, rng.integers(1, 30))
                yield batch(ids, step=step - late, table=name, contributor=f"w{worker}")


class Uses:
    """Records the uses that tables expect, and those that then happen."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.happened, self.known = engine, {name: [] for name in SETS}, []
        self.uses_ahead = {name: [] for name in SETS}
        tables = engine.core.tables
        apply, foresee, forget = tables.apply, tables.foresee, tables.forget_foreseen
        self.num_forgotten = 0

        def applied(coalesced, rates, step):
            # The uses of each table that are foreseen at this step, and have not happened yet.
            self.known.append({name: [*uses_ahead] for name, uses_ahead in self.uses_ahead.items()})
            for name, several in coalesced.items():
                uses = [np.concatenate([part.ids for part in item.summed]).tolist() for item in several]
                self.happened[name].append(uses)
                del self.uses_ahead[name][: len(uses)]
            return apply(coalesced, rates, step)

        def foreseen(name, rows):
            self.uses_ahead[name].append(rows.tolist())
            foresee(name, rows)

        def forgotten():
            self.num_forgotten += 1
            for uses_ahead in self.uses_ahead.values():
                uses_ahead.clear()
            forget()

        for name, spied in (("apply", applied), ("foresee", foreseen), ("forget_foreseen", forgotten)):
            monkeypatch.setattr(tables, name, spied)

    def assert_known(self, steps=None):
        """At every step each table knew the uses of as many openings as it looks ahead, and no others."""
        num_steps = len(self.known)
        assert num_steps > 3
        for step in range(num_steps) if steps is None else steps:
            for name in SETS:
                end = step + CLOSE[name] + 1 if name in CLOSE else step
                expected = [use for opening in self.happened[name][step:end] for use in opening]
                assert [sorted(use) for use in self.known[step][name]] == [sorted(use) for use in expected]


def ran(monkeypatch, source, config=None, num_required=1, quarantines=None, **options):
    """The uses of a run and its report, which are those of a run that does not look ahead.

    quarantines : a folder for their bad rows
    """
    plainly, ahead = (
        {"on_bad_row": f"quarantine={quarantines / item}"} if quarantines else {} for item in ("plain", "ahead")
    )
    engine, plain = (ps.Engine(config or config_of(), num_required=num_required) for _ in range(2))
    monkeypatch.setattr("penstock.api.run.looked_ahead", lambda _: {})
    expected = plain.run(source(), **options, **plainly)
    monkeypatch.undo()
    uses = Uses(engine, monkeypatch)
    report = engine.run(source(), **options, **ahead)
    assert engine.state_hash() == plain.state_hash()
    same = ("rows", "frames", "stale", "stale_rows", "pending", "steps", "dropped", "truncated", "notes")
    assert [getattr(report, name) for name in same] == [getattr(expected, name) for name in same]
    tables = [[(table.rows, table.distinct) for table in batch_.tables.values()] for batch_ in (report, expected)]
    assert tables[0] == tables[1]
    assert uses.num_forgotten == 0
    if quarantines:
        assert (quarantines / "ahead").read_bytes() == (quarantines / "plain").read_bytes()
    return uses, report


@pytest.mark.parametrize("num_required", [1, 4])
@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("flush", [True, False])
def test_tables_know_the_uses_of_as_many_openings_as_they_look_ahead(monkeypatch, num_required, accumulate, flush):
    config = config_of(ps.Adagrad(0.1, use_gradient_accumulation=accumulate))
    uses, report = ran(monkeypatch, lambda: list(batches(22)), config, num_required, flush=flush)
    uses.assert_known()
    assert bool(report.pending) is (num_required == 4 and not flush)


@pytest.mark.parametrize("kind", ["stream", "file", "parquet", "several", "table"])
def test_every_container_is_read_ahead(monkeypatch, tmp_path, kind):
    actual = list(batches(20))
    table = pa.Table.from_batches(actual)
    if kind == "parquet":
        pa.parquet.write_table(table, tmp_path / "log", row_group_size=50)
    elif kind != "table":
        (tmp_path / "log").write_bytes(log(actual) if kind == "stream" else stream(actual, make=pa.ipc.new_file))
    sources = {"several": [tmp_path / "log"] * 2, "table": table}
    options = {"merge": "step"} if kind == "several" else {}
    uses, _ = ran(monkeypatch, lambda: sources.get(kind, tmp_path / "log"), **options)
    uses.assert_known()


def test_stale_frames_are_stale_ahead_too(monkeypatch):
    uses, report = ran(monkeypatch, lambda: list(batches(20, workers=3)), num_required=3)
    assert report.stale > 2
    uses.assert_known()


@pytest.mark.parametrize("mode", ["drop", "quarantine"])
def test_bad_rows_are_dropped_ahead_too_and_counted_when_their_frame_is_applied(monkeypatch, tmp_path, mode):
    def bad():
        for number, batch_ in enumerate(batches(20)):
            if number % 4 == 2:
                yield batch([7, 600, 8], step=batch_["step"][0].as_py(), table="far", contributor="w0")
                yield batch([7, 9], step=batch_["step"][0].as_py(), table="near", values=np.nan, contributor="w0")
            yield batch_

    counts = []

    def progress(counters, *_):
        counts.append((counters.frames, counters.num_dropped))

    how = {"on_bad_row": "drop"} if mode == "drop" else {"quarantines": tmp_path}
    uses, report = ran(monkeypatch, lambda: list(bad()), progress=progress, **how)
    uses.assert_known()
    assert sorted(report.dropped) == ["gradient_not_finite", "id_out_of_range"]
    half = len(counts) // 2
    assert counts[:half] == counts[half:]  # without looking ahead, and with


def test_an_error_ahead_ends_the_run_when_the_frames_before_it_are_applied(monkeypatch, tmp_path):
    actual = list(batches(10))
    actual[-3] = batch([9999], step=actual[-3]["step"][0].as_py(), table="far", contributor="w0")
    hashes, frames = [], []
    for is_ahead in (False, True):
        engine = ps.Engine(config_of())
        if is_ahead:
            monkeypatch.undo()
            Uses(engine, monkeypatch)
        else:
            monkeypatch.setattr("penstock.api.run.looked_ahead", lambda _: {})
        with pytest.raises(InputError, match="9999"):
            engine.run(actual, checkpoint=tmp_path / str(is_ahead), every=2)
        hashes.append(engine.state_hash())
        frames.append((engine.global_step, engine.session.positions.num_frames))
    assert hashes[0] == hashes[1]
    assert frames[0] == frames[1]


def test_nothing_is_read_ahead_behind_a_bad_row_that_ends_the_run():
    class Counted(list):
        num_read = 0

        def __iter__(self):
            for batch_ in super().__iter__():
                self.num_read += 1
                yield batch_

    source = Counted(batch([600 if step == 20 else 3], step=step, table="far") for step in range(200))
    with pytest.raises(InputError, match="600"):
        ps.Engine(config_of()).run(source)
    assert source.num_read < 25


def test_a_run_that_is_limited_reads_no_further(monkeypatch):
    uses, report = ran(monkeypatch, lambda: list(batches(20)), limit=9)
    assert report.frames == 9
    uses.assert_known()


def test_a_run_continues_with_the_frames_in_the_gate(monkeypatch):
    engine = ps.Engine(config_of(), num_required=4)
    monkeypatch.setattr("penstock.api.run.looked_ahead", lambda _: {})
    assert engine.run(list(batches(6))).pending == 2
    monkeypatch.undo()
    uses = Uses(engine, monkeypatch)
    engine.run(list(batches(20, seed=1)))
    uses.assert_known()


def test_frames_of_other_producers_are_surprises_after_which_everything_is_known_again(monkeypatch):
    engine = ps.Engine(config_of(), num_required=2)
    uses, applied = Uses(engine, monkeypatch), []

    def progress(counters, *_):
        if counters.frames == 20:
            applied.append(len(uses.known))
            engine.apply({"far": ([1, 2], np.ones((2, 2))), "near": ([3], np.ones((1, 2)))})

    engine.run(list(batches(40)), progress=progress)
    assert uses.num_forgotten == 1
    (step,) = applied
    uses.assert_known([*range(step - 4), *range(step + 1, len(uses.known))])


def test_a_share_foresees_its_own_rows_by_their_numbers(monkeypatch):
    engine = ps.Engine(config_of(), share=(1, 3))
    uses = Uses(engine, monkeypatch)
    engine.run(list(batches(20)))
    uses.assert_known()


def test_keys_are_foreseen_by_the_rows_that_they_have_now(monkeypatch):
    config = config_of(dynamic=ps.Dynamic(min_count=2, expire_after=6, evict="lru"))
    engine, slow, actual = ps.Engine(config), ps.Engine(config), list(batches(20))
    uses, row_lists = Uses(engine, monkeypatch), []
    foresee = engine.core.tables.foresee

    def spied(name, rows):
        row_lists.extend([sorted(rows.tolist())] if name == "far" else [])
        foresee(name, rows)

    monkeypatch.setattr(engine.core.tables, "foresee", spied)
    engine.run(actual)
    expected, known = [], 0
    for step in range(20):
        while known <= min(step + 4, 19):
            keys = [
                batch_["id"]
                for batch_ in actual
                if (batch_["step"][0].as_py(), batch_["table"][0].as_py()) == (known, "far")
            ]
            if keys:
                rows = slow.rows("far", np.unique(keys[0]))
                expected.append(sorted(rows[rows >= 0].tolist()))
            known += 1
        slow.run(iter([batch_ for batch_ in actual if batch_["step"][0].as_py() == step]))
    assert row_lists == expected
    assert any(row_lists)
    assert len(uses.known) > 15


def test_a_generator_is_never_read_ahead(monkeypatch):
    engine = ps.Engine(config_of())
    uses, steps = Uses(engine, monkeypatch), []

    def live():
        for batch_ in batches(10):
            steps.append(engine.global_step)
            yield batch_

    engine.run(live())
    assert max(steps) >= 8
    assert all(not row_lists for known in uses.known for row_lists in known.values())


class Topic(SeekableSource):
    """A source that grows by bursts, with pauses between them; a message without a frame is in each."""

    shortest_pause_s, pause_s = 0.001, 0.004

    def __init__(self, engine, bursts):
        super().__init__("kafka://topic", lambda: iter(()), is_ready=True)
        self.engine, self.bursts, self.number, self.pauses, self.seen = engine, bursts, 0, 0, []

    creation = note = None

    def seek(self, position, creation=None):
        self.number = position[0] if position else 0

    def fix_end(self):
        self.pauses += 1

    def frames(self, options, first_bad):
        if self.pauses % 4:  # no news
            self.seen.append((self.number, self.engine.session.positions.num_frames))
            return
        if self.bursts:
            reader = FrameReader(self.bursts.pop(0), ReadOptions(**{**vars(options), "follow": False}))
            for _, frame in reader.numbered():
                self.number += 1
                frame.position = (self.number,)
                yield FrameRun.of(frame)


def test_a_pause_of_a_live_source_holds_back_no_frame(monkeypatch):
    engine = ps.Engine(config_of(), num_required=2)
    uses, actual = Uses(engine, monkeypatch), list(batches(40))
    topic = Topic(engine, [actual[:30], actual[30:32], actual[32:80], actual[80:]])
    engine.run(topic, follow=True, limit=30)
    assert engine.global_step == 15
    before_pauses = dict(topic.seen)  # of each end, after the last pause there
    assert len(before_pauses) == 3
    assert all(number == applied for number, applied in before_pauses.items())
    assert len(uses.known) == 15
    assert uses.num_forgotten == 0


def test_progress_and_first_bad_rows_belong_to_applied_frames(monkeypatch, tmp_path):
    actual = [batch([step, 600 if step == 15 else 3], step=step, table="far") for step in range(20)]
    (tmp_path / "log").write_bytes(log(actual))
    engine, seen = ps.Engine(config_of()), []
    Uses(engine, monkeypatch)

    def progress(counters, gate, fraction):
        seen.append((counters.frames, fraction, dict(engine.watch.first_bad)))

    report = engine.run(tmp_path / "log", on_bad_row="drop", progress=progress)
    assert [frames for frames, _, _ in seen] == list(range(1, 21))
    assert [bool(bad) for _, _, bad in seen] == [False] * 15 + [True] * 5
    fractions = [fraction for _, fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.2
    assert engine.watch.fraction() == 1.0
    assert any("600" in note for note in report.notes)


def test_deltas_of_a_stage_come_one_by_one(monkeypatch, tmp_path):
    (tmp_path / "log").write_bytes(log(list(batches(12))))
    engine = ps.Engine(config_of())
    uses = Uses(engine, monkeypatch)
    with engine.stage(tmp_path / "log") as deltas:
        for number, _ in enumerate(deltas):
            assert engine.global_step == number + 1
    assert number == 11
    uses.assert_known()
