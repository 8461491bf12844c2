"""Headless Chromium for tests of pages: run a script in a page, dump its DOM, take pictures."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")  # fmt: skip
SAY = "<script>const say = found => { document.title = btoa(unescape(encodeURIComponent(JSON.stringify(found)))); };"


def browse(page: Path, *options: str) -> str:
    """Open the page in headless Chromium and return standard output. Skips the test without a browser."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.skip("no Chromium on the PATH (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        done = subprocess.run([found, *QUIET, f"--user-data-dir={profile}", *options, page.as_uri()],
                              capture_output=True, text=True, timeout=1200)  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def ask(page: Path, script: str, probe: Path, *options: str) -> Any:
    """Run the script after the page's own in a copy, `probe`; return the value that it passes to `say`."""
    text = page.read_text(encoding="utf-8").replace("</body>", f"{SAY}\n{script}</script></body>")
    probe.write_text(text, encoding="utf-8")
    title = re.search(r"<title>(.*?)</title>", browse(probe, *options, "--dump-dom"), re.DOTALL)
    assert title is not None
    return json.loads(base64.b64decode(title[1]))
