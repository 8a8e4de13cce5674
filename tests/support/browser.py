"""Pages as Chromium shows them, at any width, in light and dark, for the fixture ``browser``.

The DevTools protocol over a pipe: https://chromedevtools.github.io/devtools-protocol.
"""

import base64
import json
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from limits import HANG_S, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NARROW, WIDE = 400, 1400
WIDTHS = [NARROW, WIDE]
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--disable-extensions"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]


class Browser:
    """A browser that runs until ``close``; every page is a tab of it."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.pipe, far = socket.socketpair()
        self.pipe.settimeout(HANG_S)
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self.folder.name}"]
        pipes = f'exec "$0" "$@" 3<&{far.fileno()} 4>&{far.fileno()}'  # it reads descriptor 3 and writes 4
        self.process = subprocess.Popen(
            ["bash", "-c", pipes, *command], pass_fds=[far.fileno()], stderr=subprocess.DEVNULL
        )
        far.close()
        self.buffer, self.number, self.events = b"", 0, []

    def call(self, method, session=None, **parameters):
        """Return the answer to a command; the events that arrive before it are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self.pipe.sendall(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _message(self):
        while b"\0" not in self.buffer:
            received = self.pipe.recv(1 << 20)
            assert received, "the browser has ended"
            self.buffer += received
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, page, width=WIDE, dark=False):
        """Return a tab with a page, an address or a file, once it has loaded."""
        return Tab(self, page.as_uri() if isinstance(page, Path) else page, width, dark)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.folder.cleanup()


class Tab:
    """A page in a window of a width."""

    def __init__(self, browser, url, width, dark):
        self.browser = browser
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]  # a separate storage
        self.target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def call(self, method, **parameters):
        return self.browser.call(method, self.session, **parameters)

    def value(self, expression):
        """Return the value of an expression of JavaScript, as data."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def until(self, expression):
        until(lambda: self.value(expression))

    def count(self, selector):
        return self.value(f"document.querySelectorAll({json.dumps(selector)}).length")

    @property
    def text(self):
        return self.value("document.body.innerText")

    @property
    def overflow(self):
        """By how many pixels the page is wider than its window, without a scrollbar."""
        page = "document.scrollingElement"
        return self.value(f"{page}.scrollWidth - {page}.clientWidth")

    @property
    def errors(self):
        """What a console would show as errors."""
        events = [event for event in self.browser.events if event.get("sessionId") == self.session]
        shown = [event["params"]["entry"] for event in events if event["method"] == "Log.entryAdded"]
        thrown = [event["params"] for event in events if event["method"] == "Runtime.exceptionThrown"]
        called = [event["params"] for event in events if event["method"] == "Runtime.consoleAPICalled"]
        return (
            [entry["text"] for entry in shown if entry["level"] == "error"]
            + [str(exception["exceptionDetails"]) for exception in thrown]
            + [str(entry["args"]) for entry in called if entry["type"] == "error"]
        )

    def picture(self, path, height=900):
        """Write a PNG file of the first pixels of the page, to be looked at."""
        self.call("Page.bringToFront")
        clip = {"x": 0, "y": 0, "width": self.value("innerWidth"), "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
