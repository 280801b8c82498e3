"""A real browser without a window, driven through its debugging pipe, which needs no package."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# a browser reads requests from descriptor 3 and writes replies to 4
MOVE = """
import os, sys
for number, end in enumerate(sys.argv[1:3], 3):
    os.dup2(int(end), number)
os.execv(sys.argv[3], sys.argv[3:])
"""
SECONDS = 60  # after which it is ended, and what waits for it fails
# What a reader cannot see: what ends beyond the window, or beyond what cuts it off, unless something around it scrolls.
CUT = """
[...document.querySelectorAll("table, pre, figure, svg, img, p, h1, h2")].filter((element) => {
  const box = element.getBoundingClientRect();
  if (!box.width || !element.checkVisibility()) return false;
  for (let around = element.parentElement; around; around = around.parentElement) {
    const { overflowX, position } = getComputedStyle(around);
    if (position === "fixed") return false;
    if (["auto", "scroll"].includes(overflowX) && around !== document.scrollingElement) return false;
    if (overflowX !== "visible" && box.right > around.getBoundingClientRect().right + 1) return true;
  }
  return box.right > document.documentElement.clientWidth + 1;
}).map((element) => element.outerHTML.slice(0, 200))
"""
MISSING = "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.src)"


class Browser:
    """One page of a browser that runs."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._number, self._session, self.events = 0, {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _read(self):
        """Read one message, which ends with a zero byte."""
        message = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, f"the browser ended, or took more than {SECONDS} s"
            message += byte
        return json.loads(message)

    def call(self, method, **parameters):
        """Return the result of a method of Chrome's debugging protocol."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters} | self._session
        self._to.write(json.dumps(request).encode() + b"\0")
        self._to.flush()
        while (message := self._read()).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, message["error"]
        return message["result"]

    def evaluate(self, script):
        """Return the value of a script in the page, a promise's where it is one."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def open(self, url, width):
        """Load a page at a width in CSS pixels, as a phone does where it is small."""
        self.events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())
        self.evaluate("document.fonts.ready.then(() => new Promise((ready) => setTimeout(ready, 200)))")

    def list_faults(self):
        """Return what a reader of the open page would miss, what scripts threw, and what the browser calls an error."""
        wider = self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        faults = [f"{wider} pixels wider than the window"] if wider > 0 else []
        faults += self.evaluate(CUT) + self.evaluate(MISSING)
        faults += [event for event in self.events if event["method"] == "Runtime.exceptionThrown"]
        entries = [event["params"]["entry"] for event in self.events if event["method"] == "Log.entryAdded"]
        return faults + [entry for entry in entries if entry["level"] == "error"]


@contextmanager
def start_browser(folder):
    """Run a browser whose own files are in a folder."""
    (request, to_browser), (from_browser, reply) = os.pipe(), os.pipe()
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={folder}")
    inherited = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (request, reply)]  # beside those that it moves them to
    command = [sys.executable, "-c", MOVE, *map(str, inherited), PROGRAM, *flags]
    process = subprocess.Popen(command, pass_fds=inherited, stderr=subprocess.DEVNULL)
    for end in (request, reply, *inherited):
        os.close(end)
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        with open(to_browser, "wb") as requests, open(from_browser, "rb") as replies:
            yield Browser(requests, replies)
    finally:
        process.terminate()
        process.wait()
        timer.cancel()
