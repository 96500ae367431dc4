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
from playwright.sync_api import Browser, Page, expect, sync_playwright

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


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A database with a dozen of the recorded training steps, and how many.

    For all of them a server predicts minutes on a busy core.
    """
    folder = tmp_path_factory.mktemp("browser")
    lines = (ROOT / "recorded" / "h200-two-gpus-times.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    kept = [row for row in rows if row["kind"] == "train_step" and row["outcome"] == "done"][:12]
    recorded = folder / "recorded"
    recorded.mkdir()
    (recorded / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    path = folder / "browser.db"
    open_database(f"sqlite:///{path}", recorded=recorded).close()
    return path, len(kept)


@pytest.fixture(scope="module")
def product(few_rows: tuple[Path, int]) -> Iterator[str]:
    """Start server and worker; give the server's address; stop both."""
    port = _free_port()
    environment = {
        **os.environ,
        "PEAKMARK_DATABASE_URL": f"sqlite:///{few_rows[0]}",
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of a visitor of its own."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000})
    context.set_default_timeout(DRAW_TIMEOUT_MS)
    expect.set_options(timeout=DRAW_TIMEOUT_MS)
    yield context.new_page()
    context.close()
