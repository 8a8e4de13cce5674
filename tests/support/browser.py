"""Pages as Chromium shows them; without it their tests are skipped."""

import html
import json
import re
import shutil
import subprocess

import pytest
from limits import HANG_S

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt install chromium)")

# A page in a frame of a width that no window of a browser is limited to, and what it became.
FRAME = """<!doctype html><meta charset=utf-8><iframe width={width} height=900 srcdoc="{page}"></iframe><script>
onload = () => setTimeout(() => {{
  const page = document.querySelector("iframe").contentDocument;
  const result = {{ overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth }};
  for (const tag of ["polyline", "circle"]) result[tag] = page.querySelectorAll(tag).length;
  result.text = page.body.innerText;
  const shown = document.createElement("pre");
  shown.textContent = JSON.stringify(result);
  document.body.replaceChildren(shown);
}}, 500);
</script>"""


def dumped(url, folder):
    """The document of a page after its scripts ran for 2.5 seconds."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2500"]
    command = [CHROMIUM, *flags, f"--user-data-dir={folder}/chromium", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S).stdout


def rendered(page, width, folder):
    """The text of a page, its numbers of lines and dots, and by how many pixels it is wider than a width."""
    file = folder / f"frame{width}.html"
    file.write_text(FRAME.format(width=width, page=html.escape(page)), encoding="utf-8")
    (result,) = re.findall("<pre>(.*)</pre>", dumped(file.as_uri(), folder), re.DOTALL)
    return json.loads(html.unescape(result))
