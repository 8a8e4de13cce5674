"""What a job of many processes says of itself: sums over the processes, and each by its number."""

import json

import pyarrow as pa
import pytest
from checkpoints import ROWS, batch, config_of
from ipc import write
from jobs import all_well, together

import penstock as ps
from penstock.distributed.member import Member
from penstock.metrics import Metrics
from penstock.stats import hottest

THREE = {"num_required": 3}


@pytest.fixture
def logs(tmp_path):
    """Of three workers, 320 rows each; of the second one, which process 1 reads, two in forty are bad."""
    frames = [[batch(step, n) for step in range(8)] for n in range(3)]
    frames[1] = [spoilt(frame) for frame in frames[1]]
    return [write(tmp_path / f"{n}.arrows", of) for n, of in enumerate(frames)]


def spoilt(frame):
    return frame.set_column(3, "id", pa.array([ROWS, ROWS, *frame["id"].to_pylist()[2:]], pa.int64()))


def told(logs, count=2):
    """(report, metrics after each frame, metrics at the end) of every process of a job."""

    def work(peers):
        member = Member(peers, config_of(), **THREE)
        metrics, during = Metrics(member), []
        report = member.run(logs, on_bad_row="drop", progress=lambda *_: during.append(metrics.plain()))
        return report, during, metrics.plain()

    return all_well(together(count, work))


def test_the_report_has_what_each_process_read_and_owns_and_the_sums(logs):
    one = ps.Engine(config_of(), **THREE).run(logs, merge="round", on_bad_row="drop")
    assert one.processes == ()
    for report, _, _ in told(logs):
        first, second = report.processes
        assert (report.rows, report.dropped, report.tables) == (one.rows, one.dropped, one.tables)
        assert (first.rows, second.rows) == (640, 320)
        assert (first.dropped, second.dropped) == ({}, {"id_out_of_range": 16})
        assert first.own_rows + second.own_rows == one.rows - 16
        assert min(first.own_rows, second.own_rows, first.sent_bytes, second.sent_bytes) > 0
        assert report.held_bytes == first.held_bytes + second.held_bytes
        assert json.loads(json.dumps(report.to_dict()))["processes"][1]["dropped"] == {"id_out_of_range": 16}


def test_metrics_are_of_the_whole_job_and_by_process_too(logs, monkeypatch):
    monkeypatch.setattr("penstock.distributed.telling.EVERY_S", 0)
    (report, during, end), _ = told(logs)
    assert end["penstock_rows_total"] == report.rows == sum(end["penstock_process_rows_total"].values())
    assert end["penstock_dropped_rows_total"] == {"id_out_of_range": 16}
    assert end["penstock_process_dropped_rows_total"] == {"1,id_out_of_range": 16}
    rows = {name: table.rows for name, table in report.tables.items()}
    assert end["penstock_table_rows_total"] == rows
    assert sum(end["penstock_process_own_rows_total"].values()) == sum(rows.values())
    updated = sum(end["penstock_table_updated_rows_total"].values())
    assert updated == sum(end["penstock_process_updated_rows_total"].values())
    assert end["penstock_held_bytes"] == report.held_bytes
    assert end["penstock_sent_bytes_total"] == sum(end["penstock_process_sent_bytes_total"].values())
    of_second = [values["penstock_process_own_rows_total"]["1"] for values in during]
    assert of_second == sorted(of_second)
    assert 0 < of_second[-1] <= report.processes[1].own_rows  # as it was told last: nobody is asked
    told_at_all = {key.partition(",")[0] for key in end["penstock_process_stage_seconds_total"]}
    assert told_at_all == {"0", "1"}


def test_what_is_updated_is_what_one_process_updates(logs):
    engine = ps.Engine(config_of(), **THREE)
    engine.run(logs, merge="round", on_bad_row="drop")
    (_, _, end), *_ = told(logs, 3)
    assert end["penstock_table_updated_rows_total"] == Metrics(engine).plain()["penstock_table_updated_rows_total"]
    assert end["penstock_table_unique_ratio"] == Metrics(engine).plain()["penstock_table_unique_ratio"]


def test_a_second_run_is_counted_anew(logs):
    def work(peers):
        member = Member(peers, config_of(), **THREE)
        member.run(logs, on_bad_row="drop")
        return member.run([])

    for report in all_well(together(2, work)):
        assert [process.rows for process in report.processes] == [0, 0]
        assert [process.own_rows for process in report.processes] == [0, 0]


def test_hot_ids_are_those_of_all_by_their_ids_in_the_whole_table(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.sampling.ALLOWANCE_S", 60.0)
    ids = [1497] * 20 + [6] * 12 + [7] * 8  # as MOD deals: of process 1, 0 and 1
    log = write(tmp_path / "hot.arrows", [batch(0).set_column(3, "id", pa.array(ids, pa.int64()))])

    def work(peers):
        member = Member(peers, config_of())
        member.watch.look_closer()
        report = member.run(log)
        return [(one, round(share * 40)) for table, one, share in hottest(report.processes, 12) if table == "user"]

    of_users = [sum(n % 3 > 0 for n in places) for places in (range(20), range(20, 32), range(32, 40))]
    for found in all_well(together(2, work)):
        assert found == list(zip((1497, 6, 7), of_users, strict=True))


def test_every_metric_of_a_job_is_in_the_docs(logs):
    from test_metrics import described, documented

    def work(peers):
        member = Member(peers, config_of(), **THREE)
        member.run(logs, on_bad_row="drop")
        return described(Metrics(member).text())

    of_processes = {name: of for name, of in documented().items() if "process" in of[1]}
    for exposed in all_well(together(2, work)):
        assert of_processes.items() <= exposed.items()
        assert exposed.keys() <= documented().keys()
