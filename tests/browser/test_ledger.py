"""From the plan to every tensor behind it, and from an error to the run behind it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_plans_tensors_are_found_filtered_and_taken_away(
    page: Page, product: str, tmp_path: Path
) -> None:
    page.goto(f"{product}/?model=Qwen/Qwen3-0.6B&seq=1024&zero=0&gpus=1")
    expect(page.get_by_role("heading", name=re.compile("FITS"))).to_be_visible()
    page.get_by_role("link", name="Every tensor, and why this is the peak").click()

    expect(page.get_by_text("Why is this the peak?")).to_be_visible()
    # The plan came along, and its address too: a reload or a shared link opens the same.
    expect(page).to_have_url(re.compile(r"/ledger\?.*seq=1024"))
    expect(page.get_by_text("train 1 × 1,024 tokens")).to_be_visible()
    expect(page.locator(".st-key-timeline_card .legendtext", has_text="predicted")).to_be_visible()
    tiles = page.locator(".st-key-treemap_card .treemaplayer .slice")
    expect(tiles.first).to_be_visible()

    page.get_by_role("textbox", name="Search").fill("master float32")
    page.get_by_role("textbox", name="Search").press("Enter")
    expect(page.get_by_text(re.compile(r"^3 of \d+ kinds of tensors"))).to_be_visible()
    # The words come before the button's new file does: the script has to end first.
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Ledger as CSV").click()
    path = tmp_path / "ledger.csv"
    waiting.value.save_as(path)
    rows = list(csv.DictReader(path.open()))
    # Qwen3-0.6B, tied: 151,936 x 1,024 embedding; q and o of 16 x 128, k and v of 8 x 128 heads,
    # three 3,072 inner projections, norms of 2 x 1,024 and 2 x 128; the final norm. fp32 each.
    layer = 1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    sizes = {row["name"]: int(row["bytes"]) for row in rows}
    assert sizes == {
        "embedding master weights": 4 * 151936 * 1024,
        "layer master weights": 4 * 28 * layer,
        "head master weights": 4 * 1024,
    }


def test_a_dot_of_the_accuracy_chart_opens_its_run(few_rows: int, page: Page, product: str) -> None:
    page.goto(f"{product}/accuracy")
    dots = page.locator(".st-key-residual_strips_card .point")
    # The server first predicts for the measurements, beside the page.
    expect(dots.first).to_be_visible()
    assert dots.count() >= few_rows
    dots.first.click(force=True)
    expect(page).to_have_url(re.compile(r"/run\?.*row=[0-9a-f]{16}"))
    expect(page.get_by_text("recorded elsewhere")).to_be_visible()
    compared = page.locator(".st-key-comparison_card")
    expect(compared.locator(".legendtext", has_text="measured")).to_be_visible()
