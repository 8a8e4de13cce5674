"""Jobs on a Ray cluster: state, deltas and commits of one process, also after actors and nodes have died."""

import argparse
import json
import os
import re
import urllib.request

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from checkpoints import batch, config_of
from cluster.jobs import Nodes
from dynamic import churning_steps
from dynamic import config_of as dynamic_config
from dynamic import log_of as dynamic_log
from ipc import write
from lakehouse import Delta
from limits import HANG_S
from s3_server import serving
from scrapes import described, parsed, same_as_report
from services import config_of as config_of_one

import penstock as ps
from penstock.cli.main import main
from penstock.contrib.pages.metrics import Metrics
from penstock.contrib.pages.monitoring import Watching
from penstock.contrib.ray import Job

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own warnings


@pytest.fixture(scope="module")
def cluster():
    with Nodes(2) as nodes:
        ray.shutdown()  # a command that an earlier test ran in this process leaves its connection
        ray.init(address=nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()


def alone(logs, config, **options):
    engine = ps.Engine(config, num_required=options.pop("num_required", 3))
    return engine.run(logs, merge="round", flush=True, **options), engine.state_hash()


def test_frozen_tables_and_vectors_are_those_of_one_process(cluster, logs, tmp_path):
    (user, item) = config_of().tables
    vectors = np.random.default_rng(0).normal(size=(user.vocabulary_size, user.dim)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    config = ps.EmbeddingConfig.from_tables(
        [
            ps.TableConfig(
                user.vocabulary_size, user.dim, ps.FromFile(tmp_path / "vectors.npy"), name=user.name, trainable=False
            ),
            ps.TableConfig(item.vocabulary_size, item.dim, name=item.name, optimizer=item.optimizer),
        ]
    )
    wanted, state = alone(logs, config)
    options = {"shares": 2, "readers": 2, "num_required": 3, "flush": True, "checkpoint": tmp_path / "c"}
    report = Job(config, logs, **options).run()
    assert report.state_hash == state
    assert report.dropped == wanted.dropped != {}
    np.save(tmp_path / "vectors.npy", vectors + 1)
    with pytest.raises(ps.StateError, match=f"table '{user.name}' needs the vectors that its rows start from"):
        Job(config, logs, **options, resume=True).run()


@pytest.mark.parametrize(("shares", "readers"), [(1, 1), (2, 2), (3, 1), (5, 2)])
def test_a_job_ends_as_one_process_does(cluster, logs, tmp_path, shares, readers):
    wanted, state = alone(logs, config_of(), deltas=tmp_path / "wanted.arrows", slots=True)
    job = Job(
        config_of(), logs, shares=shares, readers=readers, num_required=3, flush=True, rounds_per_block=5,
        checkpoint=tmp_path / "c", every=3, deltas=tmp_path / "got.arrows", slots=True,
    )  # fmt: skip
    report = job.run()
    assert report.state_hash == state
    for name in ("rows", "frames", "steps", "stale", "pending", "tables", "notes", "dropped", "global_step"):
        assert getattr(report, name) == getattr(wanted, name), name
    assert (report.variants, report.device_problems) == (wanted.variants, 0)
    assert (tmp_path / "got.arrows").read_bytes() == (tmp_path / "wanted.arrows").read_bytes()
    assert ps.Engine.restore(tmp_path / "c").state_hash() == state


@pytest.mark.parametrize("num_required", [1, 2])
def test_a_job_with_a_dynamic_table_ends_as_one_process_does(cluster, tmp_path, num_required):
    """With one frame per step, readers send sums."""
    config = dynamic_config(ps.Dynamic(min_count=2, expire_after=9, evict="lru"), rows=16_384)
    logs = [str(write(tmp_path / f"{n}.arrows", [dynamic_log(churning_steps(30, 9000, 800, n))])) for n in range(2)]
    deltas = {"slots": True, "last": True}
    wanted, state = alone(logs, config, num_required=num_required, deltas=tmp_path / "wanted.arrows", **deltas)
    job = Job(
        config, logs, shares=3, num_required=num_required, flush=True, deltas=tmp_path / "got.arrows", **deltas,
        out=tmp_path / "out",
    )  # fmt: skip
    report = job.run()
    assert report.state_hash == state
    keys, expected = report.tables["user"].keys, wanted.tables["user"].keys
    for name in ("keys", "admitted", "expired", "evicted", "returned", "unadmitted_rows", "load"):
        assert getattr(keys, name) == getattr(expected, name), name
    assert (tmp_path / "got.arrows").read_bytes() == (tmp_path / "wanted.arrows").read_bytes()
    assert (tmp_path / "out" / "user.parquet").exists()


def test_a_job_commits_to_s3_and_another_number_of_shares_continues(cluster, logs):
    """All processes of the cluster open the store by the URI alone."""
    _, state = alone(logs, config_of())
    with serving() as buckets:
        uri = buckets("job").uri
        job = Job(config_of(), logs, shares=2, num_required=3, limit=17, rounds_per_block=1, checkpoint=uri, every=2)
        job.run()
        report = Job(config_of(), logs, shares=3, num_required=3, resume=True, flush=True, checkpoint=uri).run()
        assert (report.state_hash, report.skipped) == (state, 17)
        assert ps.Engine.restore(uri).state_hash() == state


def test_one_process_continues_a_job_and_a_job_one_process(cluster, logs, tmp_path):
    _, state = alone(logs, config_of())
    engine = ps.Engine(config_of(), num_required=3)
    engine.run(logs, merge="round", limit=10, checkpoint=tmp_path / "c")
    Job(config_of(), logs, shares=2, num_required=3, resume=True, limit=20, checkpoint=tmp_path / "c").run()
    engine = ps.Engine.restore(tmp_path / "c")
    assert engine.run(logs, merge="round", resume=True, flush=True).skipped == 20
    assert engine.state_hash() == state


def test_a_bad_row_ends_a_job_after_the_frames_before_it(cluster, logs, tmp_path):
    bad = batch(3, 1)
    bad = bad.set_column(3, "id", pa.array([9999, *bad["id"].to_pylist()[1:]]))
    logs[1] = str(write(tmp_path / "bad.arrows", [batch(0, 1), batch(1, 1), bad, batch(4, 1)]))
    with pytest.raises(ps.InputError, match=r"bad\.arrows: batch 2, row 0, column 'id': .*9999"):
        Job(config_of(), logs, shares=2, readers=2, num_required=3, checkpoint=tmp_path / "c").run()
    wanted = ps.Engine(config_of(), num_required=3)
    with pytest.raises(ps.InputError):
        wanted.run(logs, merge="round")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == wanted.state_hash()
    report = Job(
        config_of(), logs, shares=2, num_required=3, resume=True, flush=True, checkpoint=tmp_path / "c",
        on_bad_row=f"quarantine={tmp_path / 'bad_rows.arrows'}",
    ).run()  # fmt: skip
    assert report.dropped == {"id_out_of_range": 1}
    assert "got 9999" in report.notes[0]
    _, state = alone(logs, config_of(), on_bad_row=f"quarantine={tmp_path / 'wanted_rows.arrows'}")
    assert report.state_hash == state
    assert (tmp_path / "bad_rows.arrows").read_bytes() == (tmp_path / "wanted_rows.arrows").read_bytes()


def test_a_row_with_which_a_sum_is_not_finite_is_bad_in_a_job_too(cluster, tmp_path):
    bad = [batch(100, 0), pa.concat_batches([batch(101, 0), *[large_row(101)] * 2])]
    logs = [str(write(tmp_path / "bad.arrows", bad)), str(write(tmp_path / "good.arrows", [batch(100, 1)]))]
    common = {"shares": 2, "readers": 2, "num_required": 1}
    with pytest.raises(ps.InputError, match=r"bad\.arrows: batch 1, row 41, .* of id 3 of table 'user' is not"):
        Job(config_of(), logs, checkpoint=tmp_path / "c", **common).run()
    wanted = ps.Engine(config_of(), num_required=1)
    with pytest.raises(ps.InputError, match="row 41"):
        wanted.run(logs, merge="round")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == wanted.state_hash()
    options = {"checkpoint": tmp_path / "c", "on_bad_row": f"quarantine={tmp_path / 'bad_rows.arrows'}"}
    report = Job(config_of(), logs, resume=True, **options, **common).run()
    of_one, state = alone(logs, config_of(), num_required=1, on_bad_row=f"quarantine={tmp_path / 'wanted.arrows'}")
    assert (report.dropped, report.state_hash) == ({"sum_not_finite": 1}, state)
    assert (report.not_finite, report.first_not_finite) == (of_one.not_finite, of_one.first_not_finite)
    assert (tmp_path / "bad_rows.arrows").read_bytes() == (tmp_path / "wanted.arrows").read_bytes()


def large_row(step):
    """One row of the table user that is larger than half of what float32 holds."""
    row = batch(step, 0, rows=2).slice(1)
    gradient = pa.array([[3e38] * len(row["gradient"][0])], row["gradient"].type)
    return row.set_column(3, "id", pa.array([3])).set_column(4, "gradient", gradient)


def test_a_share_without_room_ends_a_job_at_its_last_commit(cluster, tmp_path):
    config = dynamic_config(ps.Dynamic(), rows=16_384)
    steps = churning_steps(40, 30_000, 900)
    logs = [str(write(tmp_path / "log.arrows", [dynamic_log(steps)]))]
    with pytest.raises(ps.CapacityError, match=r"table 'user': no room for \d+ of \d+ new keys"):
        Job(config, logs, shares=3, checkpoint=tmp_path / "c", every=4, rounds_per_block=2).run()
    kept = ps.Engine.restore(tmp_path / "c")
    wanted = ps.Engine(config)
    wanted.run(logs, limit=kept.global_step)
    assert kept.global_step >= 4
    assert kept.state_hash() == wanted.state_hash()


def killing_an_owner(job, at_step):
    """Kill an owner once, at a step, and let Ray start another; return the list of the steps at which it was killed."""
    killed = []

    def kill(counters, step):
        if step == at_step and not killed:
            killed.append(step)
            ray.kill(job.actors.owners[1], no_restart=False)

    job.progress = kill
    return killed


def test_a_job_without_a_checkpoint_begins_anew_after_an_actor_has_died(cluster, logs):
    _, state = alone(logs, config_of())
    job = Job(config_of(), logs, shares=2, num_required=3, flush=True, rounds_per_block=1)
    killed = killing_an_owner(job, at_step=4)
    report = job.run()
    assert (killed, report.state_hash, report.frames) == ([4], state, 36)


@pytest.mark.parametrize("num_required", [1, 3])
def test_the_metrics_of_a_job_are_those_of_one_process(cluster, logs, tmp_path, num_required):
    """With one frame per step, readers send sums."""
    engine = ps.Engine(config_of(), num_required=num_required)
    wanted = Metrics(engine)
    wanted.look_closer()
    engine.run(logs, merge="round", checkpoint=tmp_path / "wanted")
    job = Job(config_of(), logs, shares=3, readers=2, num_required=num_required, checkpoint=tmp_path / "c", every=3)
    metrics = job.metrics()
    metrics.look_closer()
    assert metrics.plain()["penstock_rows_total"] == 0
    job.run()
    assert described(metrics.text()) == described(wanted.text())
    actual, expected = metrics.plain(), wanted.plain()
    for name, item in expected.items():
        if not re.search("seconds|bytes|compiles|per_second|penstock_step|update_norm", name):
            assert actual[name] == item, name
    assert actual["penstock_step_seconds_count"] == 3 * expected["penstock_steps_total"]
    assert all(actual["penstock_stage_seconds_total"][stage] > 0 for stage in ("read", "sum", "step", "save"))


def test_a_job_that_went_back_counts_frames_once_in_its_metrics(cluster, logs, tmp_path, caplog):
    job = Job(config_of(), logs, shares=2, num_required=3, rounds_per_block=1, checkpoint=tmp_path / "c", every=3)
    metrics = job.metrics()
    killing_an_owner(job, at_step=7)
    report = job.run()
    (line,) = (record.message for record in caplog.records)
    assert re.fullmatch(r"owner 1 died or cannot be reached; the job continues from commit [12]", line)
    assert (report.frames, metrics.plain()["penstock_frames_total"]) == (36, 36)
    same_as_report(parsed(metrics.text()), report.to_dict())


def test_the_command_runs_a_job(cluster, logs, tmp_path, capsys):
    config_of().save(tmp_path / "c.pbtxt")
    _, state = alone(logs, config_of())
    line = ["job", tmp_path / "c.pbtxt", *logs, "--ray", cluster.address, "--shares", 2, "--readers", 2]
    line += ["--num-required", 3, "--flush", "--json", "--out", tmp_path / "out", "--checkpoint", tmp_path / "c"]
    watching = ["--ui", "--metrics", "127.0.0.1:0", "--metrics-file", tmp_path / "metrics.jsonl"]
    assert main([*map(str, [*line, *watching])]) == 0
    captured = capsys.readouterr()
    actual = json.loads(captured.out)
    assert (actual["state_hash"], actual["frames"]) == (state, 36)
    assert [line.split()[0] for line in captured.err.splitlines()[:2]] == ["ui", "metrics"]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["penstock_frames_total"], last["penstock_checkpoint_steps"]) == (36, actual["global_step"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["item.parquet", "user.parquet"]
    assert main([*map(str, line)]) == 2
    assert "holds a checkpoint; resume it (--resume)" in capsys.readouterr().err
    missing = [*map(str, line[:-1]), str(tmp_path / "c2"), str(tmp_path / "missing.arrows")]
    assert main(missing) == 3
    assert "missing.arrows" in capsys.readouterr().err


def test_the_deltas_of_a_job_go_to_standard_output_and_nothing_else_does(cluster, logs, tmp_path, capsysbinary):
    config_of().save(tmp_path / "c.pbtxt")
    alone(logs, config_of(), deltas=tmp_path / "wanted.arrows")
    line = ["job", tmp_path / "c.pbtxt", *logs, "--ray", cluster.address, "--shares", 2, "--num-required", 3]
    assert main([*map(str, line), "--flush", "--deltas", "-"]) == 0
    captured = capsysbinary.readouterr()
    with pa.ipc.open_stream(captured.out) as stream, pa.ipc.open_stream(tmp_path / "wanted.arrows") as wanted:
        assert stream.read_all() == wanted.read_all()
    assert b"state     " in captured.err


def test_the_page_of_a_job_shows_all_its_shares(cluster, logs):
    job, pages = Job(config_of(), logs, shares=2, num_required=3, rounds_per_block=1), []
    words = {"ui": "127.0.0.1:0", "metrics": None, "metrics_file": None, "report": None, "command": "job"}
    with Watching(argparse.Namespace(**words), job) as watching:

        def look(counters, step):
            with urllib.request.urlopen(watching.servers[0].url + "/live.json", timeout=HANG_S) as answer:
                pages.append(json.load(answer))

        job.progress = look
        job.run()
        last = watching.live()
        assert watching.health() == "ok, step 12\n"
    assert any(0 < page["metrics"]["penstock_frames_total"] < 36 for page in pages)
    assert [moment["frames"] for moment in last["moments"]] == [*range(1, 37)]
    assert {name for moment in last["moments"] for name in moment["norms"]} == {"item", "user"}
    assert {int(item) % 2 for _, item, _ in last["hot"]} == {0, 1}  # of both owners


def test_more_stale_rows_than_allowed_end_a_job_without_tables(cluster, logs, tmp_path):
    options = {"shares": 2, "checkpoint": tmp_path / "c", "max_stale": 0.4, "out": tmp_path / "out"}
    with pytest.raises(ps.InputError, match="960 of the 1,440 rows read are of stale frames"):
        Job(config_of(), logs, **options).run()
    with pytest.raises(ps.InputError, match="960 of the 1,440 rows read are of stale frames"):
        Job(config_of(), logs, **options, resume=True).run()
    assert not (tmp_path / "out").exists()
    assert ps.Engine.restore(tmp_path / "c").global_step == 12


@pytest.mark.parametrize("merge", ["round", None])
def test_a_job_refuses_the_commits_of_tables_that_grow_in_one_line(cluster, tmp_path, merge):
    tables = [Delta(tmp_path / name) for name in "ab"]
    for table in tables:
        table.append(range(4))
    sources, options = [table.spelling for table in tables], {"checkpoint": tmp_path / "c"}
    ps.Engine(config_of_one()).run(sources, merge=merge, **options)
    line = "without --merge round" if merge is None else "a topic or a table with versions is read by one process"
    with pytest.raises(ps.PenstockError, match=line):
        Job(config_of_one(), sources, shares=2, resume=True, **options).run()


def test_a_dataset_of_ray_is_a_source(cluster, tmp_path):
    log = pa.Table.from_batches([batch(step) for step in range(12)])
    for number in range(3):
        pa.parquet.write_table(log.slice(number * 160, 160), tmp_path / f"{number}.parquet")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    data = ray.data.read_parquet(str(tmp_path))
    wanted = ps.Engine(config_of(), num_required=3)
    wanted.run(log)
    for source in (data, lambda: log):
        report = Job(config_of(), source, shares=2, num_required=3).run()
        assert report.state_hash == wanted.state_hash()
