"""Metrics over HTTP and in files, tracing and logging: what a command shows of a run."""

import json
import logging
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli import ONE_TABLE, frame, started
from ipc import write
from limits import HANG_S
from scrapes import batches, config_of, scraped

import penstock as ps
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.contrib.pages.http_server import Server, address_of

CONFIG = ONE_TABLE


@pytest.fixture
def files(config, tmp_path):
    return [str(config), write(tmp_path / "log.arrows", [frame(None, [1, 2, 1])] * 5)]


@pytest.mark.parametrize("address", ["9090", "localhost", "h:x", "h:70000", "h:-1", "h:²"])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(UsageError, match="expected HOST:PORT"):
        address_of(address, "--metrics")


def test_a_client_that_disconnects_early_prints_nothing(capfd):
    server = Server(("127.0.0.1", 0), {"/": ("text/plain", lambda: "x" * 50_000_000)})
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as browser:
        browser.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert browser.recv(1)  # what is left unread is a reset when it closes
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join()
    server.close()
    assert capfd.readouterr().err == ""


def test_an_address_in_use_is_exit_6_and_one_line(files, capsys):
    server = Server(("127.0.0.1", 0), {})
    try:
        address = server.url.removeprefix("http://")
        assert main(["replay", *files, "--metrics", address]) == 6
        assert capsys.readouterr().err.startswith(f"penstock: {address}: cannot listen: address already in use")
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            urllib.request.urlopen(server.url + "/other", timeout=HANG_S)
        refused.value.close()
    finally:
        server.close()


def test_the_command_serves_metrics_while_it_reads_and_writes_them_to_a_file(files, tmp_path):
    words = ["replay", files[0], "-", "--num-required", "2", "--json"]
    words += ["--metrics", "127.0.0.1:0", "--metrics-file", tmp_path / "metrics.jsonl"]
    with started(*words) as done:
        url = done.stderr.readline().decode().split()[1]
        assert scraped(url)["penstock_rows_total"] == 0  # it waits for its input
        out, _ = done.communicate(Path(files[1]).read_bytes(), timeout=HANG_S)
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


def test_a_metrics_file_that_cannot_be_written_is_exit_6_before_the_work(files, tmp_path, capsys):
    assert main(["replay", *files, "--metrics-file", str(tmp_path)]) == 6
    assert "cannot write: is a directory" in capsys.readouterr().err


def test_a_tracer_gets_a_span_for_the_run_and_for_every_step():
    began = []

    class Tracer:
        @contextmanager
        def start_as_current_span(self, name):
            began.append(name)
            yield

    engine = ps.Engine(config_of(), num_required=2)
    engine.watch.tracer = Tracer()
    report = engine.run(batches(), on_bad_row="drop")
    assert began == ["penstock.run", *["penstock.step"] * report.steps]


def test_runs_are_logged_by_the_logging_module(caplog):
    engine = ps.Engine(config_of(), num_required=2)
    with caplog.at_level(logging.INFO, logger="penstock"):
        report = engine.run(batches(), on_bad_row="drop")
        with pytest.raises(ps.InputError):
            engine.run(batches())
    began, ended, *notes, _, failed = caplog.records
    assert (began.message, ended.message) == ("run began", "run ended")
    assert tuple(note.message for note in notes) == report.notes
    assert ended.penstock["rows"] == report.rows
    assert failed.levelno == logging.WARNING
    assert "run ended by InputError" in failed.message


def test_only_warnings_are_printed_without_logging_configured():
    code = "import penstock.core.telemetry as w; w.log.info('run began'); w.log.warning('2 of 3 frames were stale')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "2 of 3 frames were stale\n")
