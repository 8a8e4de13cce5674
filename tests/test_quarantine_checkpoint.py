"""A quarantine beside a checkpoint: whatever ends a run, a resumed one neither loses nor repeats a bad row."""

import errno
import json

import pyarrow as pa
import pyarrow.ipc
import pytest

import penstock as ps
from penstock.cli import main
from penstock.io.storage import atomic_files

CONFIG = """
table_descriptor {
  name: "user" vocabulary_size: 50 dimension: 2
  optimization_parameters { adagrad {} learning_rate { constant: 0.5 } gradient_accumulation_status: ENABLED }
}
mode: TRAINING
"""
NUM_FRAMES = 12


class Killed(BaseException):
    """The process is gone: nothing of it runs any more."""


@pytest.fixture
def files(tmp_path):
    """The configuration and a log of which every frame has a bad row, numbered by its id."""
    (tmp_path / "tables.pbtxt").write_text(CONFIG)
    batches = [
        pa.RecordBatch.from_pydict(
            {
                "id": pa.array([step, 1000 + step, 3], pa.int64()),
                "gradient": pa.array([[1.0, float(step)]] * 3, pa.list_(pa.float32(), 2)),
                "step": pa.array([step] * 3, pa.int64()),
            }
        )
        for step in range(NUM_FRAMES)
    ]
    with pa.ipc.new_stream(str(tmp_path / "log.arrows"), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return str(tmp_path / "tables.pbtxt"), str(tmp_path / "log.arrows")


@pytest.fixture
def replay(files, tmp_path, capsys):
    def run(*words):
        code = main(["replay", *files, "--json", "--checkpoint", str(tmp_path / "saved"), "--every", "2", *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def ids_in(path):
    data = path.read_bytes()
    opened = pa.ipc.open_file(data) if data.startswith(b"ARROW1") else pa.ipc.open_stream(data)
    return opened.read_all().column("id").to_pylist()


EVERY = [1000 + step for step in range(NUM_FRAMES)]


@pytest.mark.parametrize("name", ["bad.arrows", "bad.arrow"])
@pytest.mark.parametrize("limit", [0, 1, 5, 12])
def test_a_run_in_two_halves_puts_aside_what_one_run_does(name, limit, replay, tmp_path):
    file = tmp_path / name
    code, _ = replay("--limit", str(limit), "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY[:limit])
    code, report = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY)
    assert report["dropped"] == ({"id_out_of_range": NUM_FRAMES - limit} if limit < NUM_FRAMES else {})
    # Of what is left out nothing is told again.
    assert [f"got {1000 + limit} [" in note for note in report["notes"]] == [True] * (limit < NUM_FRAMES)


@pytest.mark.parametrize("limit", [1, 5, 12])
@pytest.mark.parametrize("devices", ["1", "3"])
def test_values_that_only_the_sums_see_are_put_aside_once(limit, devices, files, replay, tmp_path, capsys):
    """Ids and values are looked at while they are summed; frames that are left out are looked at all the same."""
    batches = [
        pa.RecordBatch.from_pydict(
            {
                "id": pa.array([step, 20 + step, 3], pa.int64()),
                "gradient": pa.array([[1.0, 2.0], [float("nan"), 1.0], [3.0, 4.0]], pa.list_(pa.float32(), 2)),
                "step": pa.array([step] * 3, pa.int64()),
            }
        )
        for step in range(NUM_FRAMES)
    ]
    with pa.ipc.new_stream(files[1], batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    assert main(["replay", *files, "--json", "--on-bad-row", "drop"]) == 0
    unbroken = json.loads(capsys.readouterr().out)["state_hash"]
    words = ["--on-bad-row", f"quarantine={tmp_path / 'bad.arrows'}"]
    replay("--limit", str(limit), *words)
    code, report = replay("--resume", "--devices", devices, *words)
    assert (code, ids_in(tmp_path / "bad.arrows")) == (0, [20 + step for step in range(NUM_FRAMES)])
    left = NUM_FRAMES - limit
    assert (report["state_hash"], report["dropped"]) == (unbroken, {"gradient_not_finite": left} if left else {})
    assert [f"batch {limit}, row 1" in note for note in report["notes"]] == [True] * bool(left)


@pytest.mark.parametrize("name", ["bad.arrows", "bad.arrow"])
def test_a_run_killed_at_any_operation_is_gone_on_with(name, files, tmp_path, monkeypatch):
    config, log = ps.EmbeddingConfig.load(files[0]), files[1]
    for number in range(1, 200, 3):
        folder, file = tmp_path / f"saved-{number}", tmp_path / str(number) / name

        def run(engine, folder=folder, file=file, **more):
            engine.run(log, on_bad_row=f"quarantine={file}", checkpoint=folder, every=2, **more)

        killed = kill_at(number, monkeypatch, lambda run=run: run(ps.Engine(config)))
        if not killed:
            assert number > 30
            return
        begun = folder.is_dir() and list(folder.glob("*.commit"))
        run(ps.Engine.restore(folder) if begun else ps.Engine(config), resume=True)
        assert ids_in(file) == EVERY
    raise AssertionError("no run got through")


def kill_at(number, monkeypatch, work):
    """Do the work until the n-th file operation; from there on nothing reaches the disk."""

    class Dead(atomic_files.Operations):
        calls = 0

    def counted(name):
        def call(self, *args):
            Dead.calls += 1
            if Dead.calls >= number:
                raise Killed
            return getattr(atomic_files.Operations, name)(self, *args)

        return call

    for name in ("make_folder", "create", "resume", "write", "sync", "sync_folder", "rename", "remove"):
        setattr(Dead, name, counted(name))
    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", Dead())
        try:
            work()
        except Killed:
            return True
        except OSError:  # of the thread that writes commits: it was killed before us
            return True
    return False


def test_where_bad_rows_cannot_be_put_aside_nothing_more_is_committed(replay, tmp_path, monkeypatch):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")

    class Full(atomic_files.Operations):
        def write(self, descriptor, data):
            if b"id_out_of_range" in bytes(data):
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "operations", Full())
        code, said = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, "space" in said["error"]) == (6, True)
    code, _ = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, ids_in(file)) == (0, EVERY)


def test_a_lost_file_is_said_and_nothing_is_applied(replay, tmp_path):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")
    file.unlink()
    code, said = replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert (code, "the quarantine of the checkpoint cannot be read" in said["error"]) == (5, True)
    assert not file.exists()
    assert replay("--resume")[0] == 3  # without a quarantine the bad row is an error again


def test_a_run_without_quarantine_in_between_keeps_the_place(replay, tmp_path):
    file = tmp_path / "bad.arrows"
    replay("--limit", "4", "--on-bad-row", f"quarantine={file}")
    replay("--limit", "6", "--resume", "--on-bad-row", "drop")
    replay("--resume", "--on-bad-row", f"quarantine={file}")
    assert ids_in(file) == EVERY[:4] + EVERY[6:]


def test_a_usage_error_leaves_no_file(replay, tmp_path):
    replay("--limit", "1", "--on-bad-row", "drop")
    code, _ = replay("--on-bad-row", f"quarantine={tmp_path / 'bad.arrows'}")  # --resume is missing
    assert (code, list(tmp_path.glob("*bad*"))) == (2, [])
