"""A real server and a real worker on a database of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from db.engine import open_database

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = os.environ.get("PEAKMARK_CHROMIUM", "/usr/bin/chromium")
START_TIMEOUT_S = 90.0
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
DRAW_TIMEOUT_MS = 180_000


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_until_healthy(base: str) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        try:
            with urlopen(f"{base}/_stcore/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.3)
    raise TimeoutError(f"no server at {base} after {START_TIMEOUT_S:.0f} s")


@pytest.fixture
def chromium() -> str:
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"{CHROMIUM} is not installed")
    return CHROMIUM


@pytest.fixture
def few_rows(tmp_path: Path) -> int:
    """Make the database of `product` with a dozen of the recorded training steps; return how many.

    For all of them a server predicts minutes on a busy core. Ask for it before `product`.
    """
    lines = (ROOT / "recorded" / "h200-two-gpus-times.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [row for row in rows if row["kind"] == "train_step" and row["outcome"] == "done"][:12]
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    (recorded / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    open_database(f"sqlite:///{tmp_path / 'browser.db'}", recorded=recorded).close()
    return len(kept)


@pytest.fixture
def product(tmp_path: Path) -> Iterator[str]:
    """Start server and worker; give the server's address; stop both."""
    port = _free_port()
    environment = {
        **os.environ,
        "PEAKMARK_DATABASE_URL": f"sqlite:///{tmp_path / 'browser.db'}",
        "OMP_NUM_THREADS": "1",
    }
    server = [sys.executable, "-m", "streamlit", "run", "app/streamlit_app.py"]
    commands = (
        [*server, "--server.port", str(port), "--server.headless", "true"],
        [sys.executable, "-m", "runners.worker"],
    )
    running = [
        subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(timeout=60)


@pytest.fixture
def page(chromium: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.set_default_timeout(DRAW_TIMEOUT_MS)
        expect.set_options(timeout=DRAW_TIMEOUT_MS)
        yield page
        browser.close()
