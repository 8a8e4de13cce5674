"""``penstock serve --ui --metrics``: the page and the metrics show what producers got acknowledged."""

import json
import platform
import re
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S
from scrapes import fetched
from services import VOCABULARY, config_of, frame

import penstock as ps
from penstock.serving.flight import connect


@pytest.fixture
def serving(tmp_path):
    """(uri, url of the page, url of the metrics, folder) of a service in a separate process."""
    config_of().save(tmp_path / "tables.pbtxt")
    words = ["serve", "tables.pbtxt", "--ui", "--metrics", "127.0.0.1:0", "--metrics-file", "metrics.jsonl"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "penstock", *words], cwd=tmp_path, **pipes) as process:
        page, metrics = (process.stderr.readline().split()[1] for _ in range(2))
        uri = process.stdout.readline().split()[1].rstrip(",")
        yield uri, page, metrics, tmp_path
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0


def test_metrics_and_page_count_accepted_and_refused_frames(serving):
    uri, page, metrics, folder = serving
    bad = pa.record_batch({"id": [VOCABULARY], "gradient": frame(0).column("gradient").slice(0, 1)})
    with connect(uri) as client:
        client.put([frame(n) for n in range(6)], "trainer")
        with pytest.raises((flight.FlightError, ValueError), match="id_out_of_range"):
            client.put([bad], "other")
        status = client.status()
    numbers = dict(re.findall(r"^(penstock_[a-z_]+) ([\d.e+]+)$", fetched(metrics), re.MULTILINE))
    for name, counted in (("rows", "rows"), ("frames", "frames"), ("steps", "steps")):
        assert float(numbers[f"penstock_{name}_total"]) == status[counted] > 0
    assert float(numbers["penstock_queued_rows"]) == 0  # every frame that came is whole
    assert float(numbers["penstock_queued_bytes"]) == 0
    assert float(numbers["penstock_producers"]) == 1  # a refused frame makes none
    assert float(numbers["penstock_refused_calls_total"]) == 0
    build = f'penstock_build_info{{python="{platform.python_version()}",version="{ps.__version__}"}} 1.0'
    assert build in fetched(metrics)
    assert fetched(metrics.replace("/metrics", "/health")) == f"ok, step {status['steps']}\n"
    live = json.loads(fetched(page + "live.json"))
    assert live["metrics"]["penstock_frames_total"] == 6
    assert any("id_out_of_range" in error for error in live["errors"])
    assert len(live["hot"]) > 0
    assert "<html" in fetched(page)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["penstock_frames_total"] == 0
