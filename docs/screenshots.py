"""The live page and the report of a run, as a browser shows them: ``python docs/screenshots.py``.

It writes docs/screenshots/, and needs Chromium; nothing else does, so a page may be newer than its picture.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_suffix("")
WIDTH, HEIGHT, QUALITY = 1000, 930, 60
ROWS, FRAME_ROWS, PAUSE_S = 2_000_000, 20_000, 0.1
sys.path.append(str(ROOT / "tests" / "support"))

from browser import CHROMIUM, Browser, Tab  # noqa: E402


def main() -> int:
    if CHROMIUM is None:
        print("docs/screenshots.py: no browser: install chromium; the pictures stay as they are", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    browser = Browser()
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)  # so that the pages show short names
            size = ["--rows", str(ROWS), "--rows-per-step", str(FRAME_ROWS), "--vocabulary", "100000", "--tables", "3"]
            penstock("synth", "log.arrows", *size)
            live(browser)
            penstock("replay", "log.pbtxt", "log.arrows", "--report", "report")
            take(browser.open(Path("report/index.html").resolve(), WIDTH), "report")
            os.chdir(ROOT)
    finally:
        browser.close()
    return 0


def penstock(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "penstock", *words], check=True, stdout=subprocess.DEVNULL)


def live(browser: Browser) -> None:
    """Feed a replay slowly, so that its page has curves, and look at it before the last frame."""
    command = [sys.executable, "-m", "penstock", "replay", "log.pbtxt", "-", "--ui"]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    with (
        subprocess.Popen([*command, "--num-required", "2"], **pipes) as replay,
        pa.ipc.open_stream("log.arrows") as frames,
    ):
        url = replay.stderr.readline().decode().split()[1]
        page = browser.open(url, WIDTH)
        with pa.ipc.new_stream(replay.stdin, frames.schema.remove_metadata()) as writer:
            for batch in frames:
                if batch.num_rows:
                    writer.write_batch(batch)
                    replay.stdin.flush()
                    time.sleep(PAUSE_S)
            page.until("document.body.dataset.ready === 'yes' && document.querySelectorAll('polyline').length >= 2")
            take(page, "live_page")
        replay.stdin.close()


def take(page: Tab, name: str) -> None:
    """Write the first screen of a page."""
    page.call("Page.bringToFront")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
    picture = page.call("Page.captureScreenshot", format="webp", quality=QUALITY, clip=clip, captureBeyondViewport=True)
    path = FOLDER / f"{name}.webp"
    path.write_bytes(base64.b64decode(picture["data"]))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
