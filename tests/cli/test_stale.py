"""Stale frames: the note in the report of a replay, ``--max-stale``, and the counts that ``validate`` predicts."""

import pyarrow as pa
import pytest
from checkpoints import ROWS, batch, commits, config_of, engine_of
from cli import unmarked
from ipc import write

import penstock as ps

FIX = (
    "if several workers send one step each, use --num-required N or --workers; if each source is one worker's log, "
    "--merge step; if each of N files has one table, both, with the files as sources (DIR/*/* in place of DIR)"
)
CONFIG = config_of()
STEPS = 6


@pytest.fixture
def workers(tmp_path):
    """Two workers' logs of the same steps. If they are read in sequence, every frame of the second is stale."""
    return [write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(STEPS)]) for n in range(2)]


# ---- the note


def test_the_report_notes_the_stale_half_of_the_rows_and_the_flags_that_fix_it(config, workers, call):
    output, report = call(0, "replay", config, *workers)
    assert (report["frames"], report["stale"], report["rows"], report["stale_rows"]) == (12, 6, 480, 240)
    assert report["notes"] == [
        "6 of 12 frames were stale (step behind the engine's), with 240 of 480 rows (50.0%): " + FIX
    ]
    assert f"note      {report['notes'][0]}\n" in output
    output, report = call(0, "replay", config, *workers, "--merge", "step", "--num-required", 2)
    assert (report["stale"], report["stale_rows"], report["notes"]) == (0, 0, [])


def test_the_report_notes_a_single_stale_frame_and_its_share_of_the_rows(config, tmp_path, call):
    log = write(tmp_path / "log.arrows", [*(batch(step) for step in range(100)), batch(3, rows=1)])
    _, report = call(0, "replay", config, log)
    assert report["notes"][0].startswith("1 of 101 frames was stale (step behind the engine's), with 1 of 4,001 ")
    assert "4,001 rows (under 0.1%)" in report["notes"][0]


# ---- --max-stale


def test_more_stale_rows_than_allowed_exit_with_3_at_the_end_and_write_no_tables(config, workers, tmp_path, call):
    arguments = ["replay", config, *workers, "--checkpoint", tmp_path / "c", "--deltas", tmp_path / "d"]
    output, result = call(3, *arguments, "--max-stale", 0.49, "--out", tmp_path / "out")
    assert result == {"error": result["error"], "exit_code": 3}
    assert result["error"] == (
        "240 of the 480 rows read are of stale frames (50.0%), more than --max-stale 0.49 (max_stale=) allows; "
        f"{FIX}; --out was not written; committed to {tmp_path / 'c'} at step 6; "
        f"the deltas of every whole frame are in {tmp_path / 'd'}"
    )
    assert output.count("\n") == 1
    assert not (tmp_path / "out").exists()
    expected_engine = engine_of(num_required=1)
    expected_engine.run(workers)
    assert ps.Engine.restore(tmp_path / "c").state_hash() == expected_engine.state_hash()
    with pa.OSFile(str(tmp_path / "d")) as file:
        assert set(pa.ipc.open_stream(file).read_all()["step"].to_pylist()) == set(range(1, STEPS + 1))


def test_just_as_many_stale_rows_as_allowed_are_no_error(config, workers, tmp_path, call):
    call(0, "replay", config, *workers, "--max-stale", 0.5, "--out", tmp_path / "out")
    assert (tmp_path / "out" / "user.parquet").exists()
    call(0, "replay", config, *workers, "--max-stale", 0, "--merge", "step", "--num-required", 2)
    assert "nothing was committed" in call(3, "replay", config, *workers, "--max-stale", 0)[1]["error"]


def test_a_resumed_run_compares_the_stale_rows_with_those_of_the_whole_log(config, workers, tmp_path, call):
    arguments = ["replay", config, *workers, "--checkpoint", tmp_path / "c", "--resume"]
    call(0, *arguments, "--limit", STEPS + 4)
    assert "240 of the 480 rows" in call(3, *arguments, "--max-stale", 0.4)[1]["error"]
    commits_before = commits(tmp_path / "c")
    assert "240 of the 480 rows" in call(3, *arguments, "--max-stale", 0.4)[1]["error"]  # no frame is left to apply
    assert commits(tmp_path / "c") == commits_before
    assert call(0, *arguments, "--max-stale", 0.5)[1]["skipped"] == 2 * STEPS


@pytest.mark.parametrize("share", ["1.01", "-0.1", "nan", "half", "50%"])
def test_a_share_outside_0_to_1_exits_with_2(share, config, workers, call):
    for command in ("replay", "validate"):
        error = call(2, command, config, *workers, f"--max-stale={share}")[1]["error"]
        assert "argument --max-stale: expected a share from 0 to 1" in error


def test_run_and_stage_raise_beyond_max_stale(workers):
    too_many = r"^240 of the 480 rows read are of stale frames \(50\.0%\), more than --max-stale 0\.25"
    with pytest.raises(ps.InputError, match=too_many):
        engine_of(num_required=1).run(workers, max_stale=0.25)
    engine = engine_of(num_required=1)
    deltas = iter(engine.stage(workers, max_stale=0.25))
    steps = {step for _ in range(STEPS) for step in next(deltas)["step"].to_pylist()}
    assert steps == set(range(1, STEPS + 1))  # every delta arrives before the error
    with pytest.raises(ps.InputError, match=too_many):
        next(deltas)
    assert engine.run(workers, max_stale=1.0).stale == 2 * STEPS  # the counts are of this run alone
    for share in (1.5, -1, float("nan"), "0.5", True):
        with pytest.raises(ps.UsageError, match=r"max_stale: expected a share from 0 to 1, got "):
            engine.run(workers, max_stale=share)


def test_an_earlier_run_of_the_same_engine_does_not_count(tmp_path, workers):
    engine = engine_of(num_required=1)
    engine.run(unmarked(batch(step, rows=400)) for step in range(STEPS))
    with pytest.raises(ps.InputError, match="480 of the 480 rows"):
        engine.run(workers, max_stale=0.5, checkpoint=tmp_path / "c")
    with pytest.raises(ps.InputError, match="480 of the 480 rows"):
        ps.Engine.restore(tmp_path / "c").run(workers, max_stale=0.5, checkpoint=tmp_path / "c", resume=True)


# ---- validate


def test_validate_reports_how_many_frames_a_replay_would_drop(config, workers, call):
    output, result = call(0, "validate", config, *workers)
    assert f"6 of 12 frames would be stale (step behind the engine's), with 240 of 480 rows (50.0%): {FIX}\n" in output
    assert f"good      {workers[0]}: 240 rows in 6 frames read\n" in output
    assert f"good      {workers[1]}: 240 rows in 6 frames read, 6 stale\n" in output
    replay_report = call(0, "replay", config, *workers)[1]
    count_names = ("rows", "frames", "stale", "stale_rows", "steps", "pending")
    assert {name: result[name] for name in count_names} == {name: replay_report[name] for name in count_names}
    assert [(source["stale"], source["stale_rows"]) for source in result["sources"]] == [(0, 0), (6, 240)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--merge", "step", "--num-required", "2"],
        ["--merge", "round"],
        ["--num-required", "5"],
        ["--num-required", "5", "--flush"],
        ["--limit", "9"],
        ["--reduction", "sum", "--limit", "0"],
        ["--contribution-rows", "7"],
    ],
    ids=" ".join,
)
def test_validate_counts_what_replay_counts_with_the_same_flags(flags, config, workers, call):
    result, replay_report = (call(0, command, config, *workers, *flags)[1] for command in ("validate", "replay"))
    for name in ("rows", "frames", "stale", "stale_rows", "steps", "pending"):
        assert result[name] == replay_report[name], name


def test_validate_reports_a_source_beyond_the_limit_as_unread(config, workers, call):
    output, _ = call(0, "validate", config, *workers, "--limit", 3)
    assert f"good      {workers[0]}: 120 rows in 3 frames read\n" in output
    assert f"unread    {workers[1]}: --limit ends before it\n" in output


def test_validate_counts_with_the_gate_of_the_configuration(tmp_path, workers, call):
    path = tmp_path / "gate.pbtxt"
    config_of().save(path)
    text = path.read_text()
    assert "tpu_embedding_configuration {" not in text
    path.write_text(f"tpu_embedding_configuration {{ {text} }}\ngate {{ num_required: 2 }}\n")
    result = call(0, "validate", path, *workers, "--merge", "step")[1]
    assert (result["stale"], result["steps"]) == (0, STEPS)


def test_validate_compares_the_stale_rows_with_max_stale(config, workers, call):
    output, result = call(3, "validate", config, *workers, "--max-stale", 0.4)
    (error,) = result["errors"]
    assert error.startswith("240 of the 480 rows read are of stale frames (50.0%), more than --max-stale 0.4")
    assert f"error     {error}\n" in output
    assert call(0, "validate", config, *workers, "--max-stale", 0.5)[1]["errors"] == []


def test_validate_reports_the_errors_of_each_merged_source(config, workers, tmp_path, call):
    bad_log = write(tmp_path / "bad.arrows", [batch(0), batch(1).set_column(3, "id", pa.array([ROWS] * 40))])
    unsorted_log = write(tmp_path / "unsorted.arrows", [batch(3), batch(2)])
    _, result = call(3, "validate", config, workers[0], bad_log, unsorted_log, workers[1], "--merge", "step")
    errors = [source["errors"] for source in result["sources"]]
    assert (errors[0], errors[3]) == ([], [])
    assert [source["frames"] for source in result["sources"]] == [STEPS, 2, 1, STEPS]
    assert result["sources"][1]["bad_rows"] == {"id_out_of_range": 40}
    assert errors[1][0].startswith(f"40 bad rows; first: {bad_log}: batch 1, row 0, column 'id': expected 0 <= id < ")
    assert "--merge step needs sources sorted by step: 2 comes after 3" in errors[2][0]


def test_bad_rows_that_replay_would_drop_are_no_error_of_validate(config, tmp_path, call):
    log = write(tmp_path / "bad.arrows", [batch(0), batch(1).set_column(3, "id", pa.array([ROWS] * 40))])
    quarantine = tmp_path / "aside.arrows"
    for flag in ("drop", f"quarantine={quarantine}"):
        output, result = call(0, "validate", config, log, "--on-bad-row", flag)
        assert (result["sources"][0]["bad_rows"], result["sources"][0]["errors"]) == ({"id_out_of_range": 40}, [])
        assert "dropped   40 bad rows; first: " in output
    assert not quarantine.exists()
    call(3, "validate", config, log)
    assert "expected error, drop or quarantine" in call(2, "validate", config, log, "--on-bad-row", "x")[1]["error"]


def test_validate_refuses_the_learning_rates_that_replay_refuses(config, workers, tmp_path, call):
    for command in ("validate", "replay"):
        assert "tag 3" in call(2, command, config, *workers, "--learning-rate", "3=0.5")[1]["error"]
    path = tmp_path / "tags.pbtxt"
    ps.EmbeddingConfig.from_tables(
        [ps.TableConfig(ROWS, 4, name="user"), ps.TableConfig(ROWS, 2, name="item")],
        optimizer=ps.SGD(ps.DynamicLearningRate(0)),
    ).save(path)
    assert "nothing gives the value of tag 0" in call(4, "replay", path, *workers)[1]["error"]
    _, result = call(4, "validate", path, *workers)
    assert ["nothing gives the value of tag 0" in source["errors"][0] for source in result["sources"]] == [True, True]
    call(0, "validate", path, *workers, "--learning-rate", "0=0.5")
