"""A real browser without a window, and what a reader of a page would miss in it."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FRAME = Path(__file__).with_name("frame.html")  # says what is looked for


def look_at(page, width, folder):
    """Load a file, so many CSS pixels wide, in a browser whose own files are in a folder.

    Returns the tables of the page, the drawn figures that are wide enough to be read, and its faults: what a reader
    would miss, and the errors of scripts.
    """
    frame = folder / "frame.html"
    html = FRAME.read_text(encoding="utf-8").replace("URL", page.as_uri()).replace("WIDTH", str(width))
    frame.write_text(html, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files --enable-logging=stderr --dump-dom"
    sizes = [f"--user-data-dir={folder / 'browser'}", f"--window-size={max(width, 600)},1000"]
    command = [PROGRAM, *flags.split(), *sizes, "--virtual-time-budget=3000", frame.as_uri()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    tables, drawn, faults = json.loads(unescape(re.search("<pre>(.+)</pre>", run.stdout)[1]))
    return tables, drawn, faults + re.findall(r"CONSOLE.*Uncaught (.*)", run.stderr)
