"""``--ui``: the page as a browser shows it. Chromium is asked for real; without one these tests are skipped."""

import json
import re
import shutil
import subprocess
import urllib.request

import cli
import pyarrow as pa
import pytest
from cli import started, table
from limits import HANG_S, until

from penstock.cli.pages.monitoring import page_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CONFIG = table() + table("<b>item") + "mode: TRAINING\n"


def test_the_live_page_needs_no_other_file():
    page = page_text().replace('"http://www.w3.org/2000/svg"', "")  # a name, not an address
    assert not re.search(r"""(src|href)=|@import|url\(|//[a-z]+\.[a-z]""", page)
    assert ".innerHTML" not in page  # names of tables are others' words


@pytest.fixture
def replaying(config):
    """A replay in mid-stream: three workers' frames for eleven steps are in, a stale one, two of the next; it waits."""
    words = ["replay", config, "-", "--num-required", "3", "--on-bad-row", "drop", "--ui"]
    with started(*words) as command:
        url = command.stderr.readline().decode().split()[1]
        writer = pa.ipc.new_stream(command.stdin, frame(0).schema)
        for number in range(36):
            writer.write_batch(frame(number // 3, number % 3))
            if number == 32:
                writer.write_batch(frame(0, 9))
        command.stdin.flush()
        until(lambda: live(url)["metrics"]["penstock_frames_total"] == 36)
        yield url
        writer.close()
        command.stdin.close()
        assert command.wait(HANG_S) == 0


def frame(step, worker=0):
    names = pa.array(["user", "user", "user", "<b>item", "user"])
    values = pa.array([[1.0, 1.0]] * 5, pa.list_(pa.float32(), 2))
    return cli.frame(step, [7, 7, 7, 3, 99], contributor=pa.array([worker] * 5), table=names, gradient=values)


def live(url):
    with urllib.request.urlopen(url + "live.json", timeout=HANG_S) as answer:
        return json.load(answer)


def test_live_json_has_the_values_of_the_page(replaying):
    live_values = live(replaying)
    assert live_values["metrics"]["penstock_required_frames"] == 3
    assert live_values["metrics"]["penstock_stale_lateness_frames_total"] == {"16": 1}
    assert live_values["hot"][0][:2] == ["user", "7"]
    assert live_values["hot"][0][2] == pytest.approx(0.75)
    assert live_values["tables"] == ["user", "<b>item"]
    norms = [moment["norms"]["user"] for moment in live_values["moments"] if "user" in moment["norms"]]
    assert all(0 < norm < 1 for norm in norms)
    assert norms
    assert "got 99" in live_values["errors"][0]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt install chromium)")
def test_chromium_renders_the_live_page(replaying, tmp_path):
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2500",
        f"--user-data-dir={tmp_path}/c",
    ]
    done = subprocess.run([CHROMIUM, *flags, "--dump-dom", replaying], capture_output=True, text=True, timeout=HANG_S)
    text = re.sub(r"<[^>]+>", " ", done.stdout.partition("<script>")[0])
    assert 'data-ready="yes"' in done.stdout
    assert 'id="state" class="">live<' in done.stdout
    assert "of 3 frames in" in text
    assert "rows, id_out_of_range" in text
    assert re.search(r"frames, 9 to 16 steps late\s+1", text)
    assert "&lt;b&gt;item" in text  # shown as text, not obeyed
    assert re.search(r"user\s+7\s+75.0 %", text)
    assert re.search(r"an optimizer step takes [\d.]+ [mµ]s", text)
    assert done.stdout.count("<polyline") >= 2
