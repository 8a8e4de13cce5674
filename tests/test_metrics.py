"""Metrics: what a scrape says during a run, and that it ends as the report does."""

import argparse
import http.client
import json
import logging
import math
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from limits import HANG_S
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import penstock as ps
from penstock.cli import main
from penstock.cli.http_server import PLAIN, TEXT, Server, address_of
from penstock.cli.monitoring import Watching
from penstock.errors import UsageError
from penstock.metrics import Metrics, quantile
from penstock.stats import ProcessReport, TableReport

METRICS_PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
UNITS = ("total", "seconds", "bytes", "ratio", "frames", "steps", "ids", "rows", "per_second")
# Every number of the report, and the metric that says it; what is left says no number.
METRIC_OF = {
    "rows": "penstock_rows_total",
    "frames": "penstock_frames_total",
    "stale": "penstock_stale_frames_total",
    "pending": "penstock_pending_frames",
    "steps": "penstock_steps_total",
    "global_step": "penstock_global_steps",
    "seconds": "penstock_run_seconds",
    "rows_per_s": "penstock_rows_per_second",
    "dropped": "penstock_dropped_rows_total",
    "tables": ("penstock_table_rows_total", "penstock_table_distinct_ids"),
    "learning_rates": "penstock_learning_rate_ratio",
    "held_bytes": "penstock_held_bytes",
    "skipped": "penstock_skipped_frames_total",
    "truncated": "penstock_truncated_ids_total",
    "stale_rows": "penstock_stale_rows_total",
}
NO_NUMBERS = {"verified", "unverified", "state_hash", "notes", "processes"}  # processes: test_distributed_status.py
CONFIG = """
table_descriptor {
  name: "user" vocabulary_size: 50 dimension: 2
  optimization_parameters { adagrad {} learning_rate { constant: 0.1 } gradient_accumulation_status: ENABLED }
}
mode: TRAINING
"""


def config():
    tables = [ps.TableConfig(50, 2, name="user"), ps.TableConfig(9, 2, name='it"em')]
    return ps.EmbeddingConfig.from_tables(tables, optimizer=ps.Adagrad(ps.DynamicLearningRate(0)))


def batches(num=12):
    """Frames of four rows; every fifth is stale, and each has one bad row."""
    for at in range(num):
        ids = pa.array([1, 2, 1, 99])
        values = pa.array(np.ones(8, np.float32))
        step = at // 2 - 2 if at % 5 == 4 else 10**6
        yield pa.RecordBatch.from_pydict(
            {
                "id": ids,
                "gradient": pa.FixedSizeListArray.from_arrays(values, 2),
                "table": pa.array(["user"] * 4),
                "step": pa.array([step] * 4),
                "contributor": pa.array([at] * 4),
                "learning_rates": pa.array([[0.5]] * 4, pa.list_(pa.float32())),
            }
        )


def parsed(text):
    """Prometheus' text → {sample: value}."""
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {sample: float(value) for sample, value in lines}


def described(text):
    """Prometheus' text → {name: (type, names of its labels)}, as its own parser reads it."""
    found = {}
    for family in text_string_to_metric_families(text):
        labels = frozenset(label for sample in family.samples for label in sample.labels)
        found[family.name + "_total" * (family.type == "counter")] = family.type, labels
    return found


def documented():
    """The tables of docs/metrics.md → {name: (type, names of its labels)}."""
    rows = [line.split("|") for line in METRICS_PAGE.read_text().splitlines() if line.startswith("| `penstock_")]
    return {
        name.strip(" `"): (kind.strip(), frozenset(re.findall(r"`(\w+)`", labels)))
        for _, name, kind, labels, *_ in rows
    }


def scraped(url):
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        assert answer.headers["Content-Type"] == TEXT
        return parsed(answer.read().decode())


def same_as_report(values, report):
    """Every number of the report is a metric."""
    assert values["penstock_rows_total"] == report["rows"]
    assert values["penstock_frames_total"] == report["frames"]
    assert values["penstock_stale_frames_total"] == report["stale"]
    assert values["penstock_stale_rows_total"] == report["stale_rows"]
    assert values["penstock_steps_total"] == report["steps"]
    assert values["penstock_pending_frames"] == report["pending"]
    assert values["penstock_global_steps"] == report["global_step"]
    assert values["penstock_held_bytes"] == report["held_bytes"]
    assert values["penstock_skipped_frames_total"] == report["skipped"]
    assert values["penstock_truncated_ids_total"] == report["truncated"]
    assert values["penstock_run_seconds"] == pytest.approx(report["seconds"], rel=0.5, abs=0.1)
    for reason, number in report["dropped"].items():
        assert values[f'penstock_dropped_rows_total{{reason="{reason}"}}'] == number
    for name, table in report["tables"].items():
        escaped = name.replace('"', '\\"')
        assert values[f'penstock_table_rows_total{{table="{escaped}"}}'] == table["rows"]
        assert values[f'penstock_table_distinct_ids{{table="{escaped}"}}'] == table["distinct"]
    for tag, rate in enumerate(report["learning_rates"] or ()):
        assert values[f'penstock_learning_rate_ratio{{tag="{tag}"}}'] == pytest.approx(rate)


def test_a_scrape_during_a_run_counts_what_came_and_at_the_end_equals_the_report():
    engine = ps.Engine(config(), num_required=2)
    metrics = Metrics(engine)
    server, during = Server(("127.0.0.1", 0), {"/metrics": (TEXT, metrics.text)}), []

    def watched():
        for batch in batches():
            during.append(scraped(server.url + "/metrics"))
            yield batch

    try:
        report = engine.run(watched(), on_bad_row="drop").to_dict()
        after = scraped(server.url + "/metrics")
    finally:
        server.close()
    rows = [values["penstock_rows_total"] for values in during]
    assert rows == sorted(rows)
    assert 0 == rows[0] < rows[-1] < report["rows"]
    assert any(values["penstock_pending_frames"] == 1 for values in during)
    assert report["stale"] > 0
    assert report["dropped"] == {"id_out_of_range": 12}
    same_as_report(after, report)
    stale = {name: n for name, n in after.items() if name.startswith("penstock_stale_lateness")}
    assert sum(stale.values()) == report["stale"]
    assert after['penstock_table_unique_ratio{table="user"}'] == report["steps"] * 2 / report["tables"]["user"]["rows"]


def test_lateness_is_counted_in_powers_of_two_however_late_one_producer_is():
    engine = ps.Engine(config(), num_required=1)
    one = {"user": (np.array([3]), np.ones((1, 2), np.float32))}
    for _ in range(100):
        engine.apply(one, learning_rates=[0.1])
    for step in range(100):  # 100 to 1 steps behind
        engine.apply(one, local_step=step, learning_rates=[0.1])
    values = parsed(Metrics(engine).text())
    name = "penstock_stale_lateness_frames_total"
    assert {sample: n for sample, n in values.items() if sample.startswith(name)} == {
        f'{name}{{steps_behind="{most}"}}': n
        for most, n in {1: 1, 2: 1, 4: 2, 8: 4, 16: 8, 32: 16, 64: 32, 128: 36}.items()
    }
    assert engine.gate.stale.by_lateness[3] == 1  # in Python as it was


def test_head_gets_what_get_does_but_the_body():
    server = Server(("127.0.0.1", 0), {"/metrics": (TEXT, lambda: "one 1\n"), "/health": (PLAIN, refuse)})
    address = server.url.removeprefix("http://")
    try:
        for path, status in (("/metrics", 200), ("/health", 503), ("/other", 404)):
            answers = {}
            for method in ("GET", "HEAD"):
                connection = http.client.HTTPConnection(address, timeout=HANG_S)
                connection.request(method, path)
                answer = connection.getresponse()
                headers = {key: value for key, value in answer.getheaders() if key != "Date"}
                answers[method] = answer.status, headers, answer.read()
                connection.close()
            assert answers["HEAD"] == (status, answers["GET"][1], b""), path
            assert answers["GET"][0] == status
            assert len(answers["GET"][2]) == int(answers["GET"][1]["Content-Length"]) > 0
    finally:
        server.close()


def refuse():
    raise ps.StateError("the device has gone")


class EngineOfJob(ps.Engine):
    """An engine that reports two processes, each with a value for every label."""

    @property
    def processes(self):
        one = ProcessReport(dropped={"id_out_of_range": 1}, tables={"user": TableReport(3, 2)}, stage_s={"read": 0.5})
        return (one, one)


def test_a_scrape_has_the_names_types_and_labels_of_the_docs_and_no_others(tmp_path):
    engine = EngineOfJob(config(), num_required=2)
    engine.run(batches(), on_bad_row="drop", checkpoint=tmp_path / "c")
    engine.watch.queued_rows = lambda: 0  # as a service sets it
    assert described(Metrics(engine).text()) == documented()
    assert len(documented()) > 30
    assert all(name.endswith(UNITS) for name in documented())


def test_a_collector_goes_into_the_registry_of_a_program():
    engine, registry = ps.Engine(config()), CollectorRegistry(auto_describe=True)
    registry.register(Metrics(engine))
    engine.apply({"user": (np.array([3]), np.ones((1, 2), np.float32))}, learning_rates=[0.1])
    assert registry.get_sample_value("penstock_rows_total") == 1
    assert registry.get_sample_value("penstock_table_rows_total", {"table": "user"}) == 1
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(Metrics(engine))


def test_every_number_of_the_report_is_a_metric():
    assert set(METRIC_OF) | NO_NUMBERS == set(ps.Report.__dataclass_fields__)
    exposed = set(described(Metrics(ps.Engine(config())).text()))
    for names in METRIC_OF.values():
        assert exposed.issuperset([names] if isinstance(names, str) else names), names


def test_what_a_resumed_run_left_out_and_what_examples_had_too_many_of_are_metrics(tmp_path):
    table = ps.TableConfig(9, 2, name="t", combiner="mean")
    features = [ps.FeatureConfig(table, max_sequence_length=2, name="f")]
    options = ps.EmbeddingConfig.from_features(features, batch_size=1, optimizer=ps.SGD(0.1))
    column = pa.StructArray.from_arrays(
        [pa.array([[1], [1, 2, 3]]), pa.array([[1.0] * 4] * 2, pa.list_(pa.float32(), 4))], ["ids", "gradient"]
    )
    source = pa.table({"f": column, "step": pa.array([0, 1])})
    ps.Engine(options).run(source, checkpoint=tmp_path / "c", limit=1)
    engine = ps.Engine.restore(tmp_path / "c")
    report = engine.run(source, checkpoint=tmp_path / "c", resume=True).to_dict()
    assert (report["skipped"], report["truncated"]) == (1, 1)
    same_as_report(parsed(Metrics(engine).text()), report)


def test_health_is_503_and_says_why_once_no_step_can_be_made():
    def fetched(server):
        with urllib.request.urlopen(server.url + "/health", timeout=HANG_S) as answer:
            return answer.read().decode()

    words = {"ui": None, "metrics": "127.0.0.1:0", "metrics_file": None, "report": None, "command": "replay"}
    engine = ps.Engine(config())
    with Watching(argparse.Namespace(**words), engine) as watching:
        assert fetched(watching.servers[0]) == "ok, step 0\n"
        engine.core.failed = "OSError: the device has gone"
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            fetched(watching.servers[0])
        assert "the device has gone" in refused.value.read().decode()


def test_a_new_run_begins_anew_and_what_is_applied_without_one_counts(tmp_path):
    engine = ps.Engine(config(), num_required=2)
    metrics = Metrics(engine)
    engine.run(batches(), on_bad_row="drop")
    report = engine.run(batches(4), on_bad_row="drop")
    assert metrics.plain()["penstock_rows_total"] == report.rows
    engine.apply({"user": (np.array([3]), np.ones((1, 2), np.float32))}, learning_rates=[0.1])
    assert metrics.plain()["penstock_rows_total"] == report.rows + 1


def test_a_checkpoint_has_an_age_and_a_size(tmp_path):
    engine = ps.Engine(config(), num_required=2)
    assert "penstock_checkpoint_bytes" not in Metrics(engine).plain()
    engine.run(batches(), on_bad_row="drop", checkpoint=tmp_path / "run1")
    told = Metrics(engine).plain()
    size = sum(path.stat().st_size for path in (tmp_path / "run1").glob("*.base"))
    assert told["penstock_checkpoint_bytes"] == size
    assert told["penstock_checkpoint_steps"] == engine.global_step
    assert 0 <= told["penstock_checkpoint_age_seconds"] < 60
    assert told["penstock_stage_seconds_total"]["save"] > 0


def test_steps_are_timed_and_a_steady_state_compiles_nothing():
    engine = ps.Engine(config(), num_required=2)
    metrics = Metrics(engine)
    engine.run(batches(), on_bad_row="drop")
    before = metrics.plain()
    report = engine.run(batches(), on_bad_row="drop")
    after = metrics.plain()
    assert after["penstock_step_seconds_count"] == report.steps
    assert 0 < after["penstock_step_seconds"]["0.5"] <= after["penstock_step_seconds"]["0.99"]
    assert after["penstock_compiles_total"] == before["penstock_compiles_total"]


def test_quantiles_are_values_that_occurred():
    assert quantile([], 0.5) is math.nan
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.5, 0.9, 1.0)] == [2.0, 4.0, 4.0]
    assert quantile([7.0], 0.01) == 7.0


def test_names_of_others_cannot_break_the_format():
    tables = [ps.TableConfig(9, 2, name='a"b\\c\nd')]
    text = Metrics(ps.Engine(ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.1)))).text()
    assert 'penstock_table_rows_total{table="a\\"b\\\\c\\nd"} 0.0\n' in text


@pytest.mark.parametrize("address", ["9090", "localhost", "h:x", "h:70000", "h:-1", "h:²"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        address_of(address, "--metrics")


def test_a_browser_that_leaves_in_the_middle_of_an_answer_is_no_word_on_stderr(capfd):
    server = Server(("127.0.0.1", 0), {"/": ("text/plain", lambda: "x" * 50_000_000)})
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as browser:
        browser.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert browser.recv(1)  # what is left unread is a reset when it closes
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join()
    server.close()
    assert capfd.readouterr().err == ""


def test_an_address_in_use_is_exit_6_and_one_line(tmp_path, capsys):
    (tmp_path / "tables.pbtxt").write_text(CONFIG)
    write_log(tmp_path / "log.arrows")
    server = Server(("127.0.0.1", 0), {})
    try:
        address = server.url.removeprefix("http://")
        files = [str(tmp_path / "tables.pbtxt"), str(tmp_path / "log.arrows")]
        assert main(["replay", *files, "--metrics", address]) == 6
        assert capsys.readouterr().err.startswith(f"penstock: {address}: cannot listen: address already in use")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + "/other", timeout=HANG_S)
    finally:
        server.close()


def write_log(path):
    batch = pa.RecordBatch.from_pydict(
        {
            "id": pa.array([1, 2, 1]),
            "gradient": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(6, np.float32)), 2),
        }
    )
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        for _ in range(5):
            writer.write_batch(batch)


def test_the_command_serves_metrics_while_it_reads_and_writes_them_to_a_file(tmp_path):
    (tmp_path / "tables.pbtxt").write_text(CONFIG)
    write_log(tmp_path / "log.arrows")
    words = ["replay", "tables.pbtxt", "-", "--num-required", "2", "--json"]
    words += ["--metrics", "127.0.0.1:0", "--metrics-file", "metrics.jsonl"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-m", "penstock", *words], cwd=tmp_path, **pipes) as done:
        url = done.stderr.readline().decode().split()[1]
        assert scraped(url)["penstock_rows_total"] == 0  # it waits for its input
        out, _ = done.communicate((tmp_path / "log.arrows").read_bytes(), timeout=HANG_S)
    report = json.loads(out)
    assert done.returncode == 0
    assert url.endswith("/metrics")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["penstock_rows_total"] == 0
    assert (lines[-1]["penstock_rows_total"], lines[-1]["penstock_pending_frames"]) == (
        report["rows"],
        report["pending"],
    )
    assert lines[-1]["penstock_table_distinct_ids"] == {"user": report["tables"]["user"]["distinct"]}


def test_a_metrics_file_that_cannot_be_written_is_exit_6_before_the_work(tmp_path, capsys):
    (tmp_path / "tables.pbtxt").write_text(CONFIG)
    write_log(tmp_path / "log.arrows")
    files = [str(tmp_path / "tables.pbtxt"), str(tmp_path / "log.arrows")]
    assert main(["replay", *files, "--metrics-file", str(tmp_path)]) == 6
    assert "cannot write: is a directory" in capsys.readouterr().err


def test_a_tracer_gets_a_span_for_the_run_and_for_every_step():
    began = []

    class Tracer:
        @contextmanager
        def start_as_current_span(self, name):
            began.append(name)
            yield

    engine = ps.Engine(config(), num_required=2)
    engine.watch.tracer = Tracer()
    report = engine.run(batches(), on_bad_row="drop")
    assert began == ["penstock.run", *["penstock.step"] * report.steps]


def test_runs_are_told_to_the_standard_librarys_logging(caplog):
    engine = ps.Engine(config(), num_required=2)
    with caplog.at_level(logging.INFO, logger="penstock"):
        report = engine.run(batches(), on_bad_row="drop")
        with pytest.raises(ps.InputError):
            engine.run(batches())
    began, ended, _, failed = caplog.records
    assert (began.message, ended.message) == ("run began", "run ended")
    assert ended.penstock["rows"] == report.rows
    assert failed.levelno == logging.WARNING
    assert "run ended by InputError" in failed.message


def test_whoever_sets_no_logging_up_hears_nothing():
    code = "import penstock.telemetry as w; w.log.warning('run ended by a bug')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
