"""Pictures of every page in light and dark, at desk and phone size; run by hand.

python tests/browser/screenshots.py http://127.0.0.1:8501 FOLDER [RUN_ID]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = os.environ.get("PEAKMARK_CHROMIUM", "/usr/bin/chromium")
CHROMIUM_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
SIZES: Mapping[str, tuple[int, int]] = {"desk": (1440, 900), "phone": (390, 844)}
SETTLE_MS = 1200


def pages(run_id: str | None) -> dict[str, str]:
    """Return the addresses to visit by the name of their picture."""
    found = {
        "plan": "/",
        "plan_eager": "/?attention=eager&zero=1&seq=16384&gpus=4",
        "plan_serve": "/?job=serve",
        "plan_wrong": "/?engine=fsdp2&zero=0",
        "plan_rare": "/?checkpointing=full&grad_accumulation=2&expandable_segments=true",
        "ledger": "/ledger",
        "ledger_fsdp2": "/ledger?engine=fsdp2&checkpointing=full&seq=16384",
        "ledger_serve": "/ledger?job=serve",
        "sweep": "/sweep",
        "zero": "/zero",
        "zero_measured": "/zero?model=Qwen/Qwen2.5-0.5B&gpus=2",
        "attention": "/attention?seq=8192",
        "runs": "/runs",
        "accuracy": "/accuracy",
        "hardware": "/hardware",
    }
    return found | ({"run": f"/run?run={run_id}"} if run_id else {})


def settle(page: Page) -> None:
    """Wait until the script has run and every figure and table is drawn."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    page.wait_for_function("!document.querySelector('[data-testid=stSkeleton]')")
    page.wait_for_timeout(SETTLE_MS)


def take(browser: Browser, base: str, folder: Path, run_id: str | None) -> None:
    """Write one whole-page picture per page, size and colour scheme."""
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page = context.new_page()
            for name, path in pages(run_id).items():
                page.goto(base + path)
                settle(page)
                page.screenshot(path=folder / f"{name}_{size}_{scheme}.png")
                grow_to_content(page, width)
                page.screenshot(path=folder / f"{name}_{size}_{scheme}_whole.png")
                page.set_viewport_size({"width": width, "height": height})
            context.close()


def grow_to_content(page: Page, width: int) -> None:
    """Make the window as tall as the page's content, which scrolls inside a container."""
    height = page.evaluate(
        "Math.max(...[...document.querySelectorAll('section, [data-testid=stMain],"
        " [data-testid=stSidebarContent]')].map(e => e.scrollHeight))"
    )
    page.set_viewport_size({"width": width, "height": min(int(height) + 80, 9000)})
    page.wait_for_timeout(900)


def main() -> None:
    base, folder = sys.argv[1].rstrip("/"), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        take(browser, base, folder, sys.argv[3] if len(sys.argv) > 3 else None)
        browser.close()


if __name__ == "__main__":
    main()
