"""The product in a real browser: the main job, shapes of attention, every tensor, the run behind an error."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

# One server and one worker for all: in one file, so that one process of pytest runs them.
pytestmark = [pytest.mark.browser, pytest.mark.slow]

RUN_TIMEOUT_MS = 240_000
CONFIG = (
    '{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, '
    '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, '
    '"tie_word_embeddings": false}'
)


def test_a_pasted_model_is_predicted_proved_and_measured(page: Page, product: str) -> None:
    page.goto(f"{product}/?source=config&seq=64&gpus=2&zero=2")
    box = page.get_by_label("or paste config.json")
    box.fill(CONFIG)
    box.press("Control+Enter")

    expect(page.get_by_role("heading", name=re.compile("FITS"))).to_be_visible()
    breakdown = page.locator(".st-key-breakdown_card")
    expect(breakdown.locator(".legendtext", has_text="parameters")).to_be_visible()
    expect(page).to_have_url(re.compile(r"config="))

    page.get_by_test_id("stBaseButton-primary").click()
    page.get_by_role("link", name="Open the run").click()
    expect(page).to_have_url(re.compile(r"/run\?.*run=[0-9a-f]{16}"))

    compared = page.locator(".st-key-comparison_card")
    expect(compared).to_be_visible(timeout=RUN_TIMEOUT_MS)
    expect(compared.locator(".legendtext", has_text="measured")).to_be_visible()
    # Embedding 512 x 64, untied head and norm 64, two layers of 64 x 64 q and o, 32 x 64 k and v,
    # three 128 x 64 and two norms: 65,536 + 64 + 2 x 36,992 parameters of 2 bytes.
    parameters_kib = 2 * (2 * 512 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 128))
    label = f"{parameters_kib / 1024:.2f} KiB"
    expect(compared.locator(".bartext", has_text=label)).to_have_count(2)
    expect(page.get_by_text("done", exact=True).first).to_be_visible()

    page.goto(f"{product}/runs")
    expect(page.get_by_test_id("stDataFrame")).to_be_visible()


def test_a_shape_is_compared_measured_and_shared(page: Page, product: str) -> None:
    page.goto(f"{product}/attention?seq=8192")
    expect(page.get_by_text("1 × 8,192 tokens", exact=True)).to_be_visible()
    expect(page.get_by_text("16,995 tokens").first).to_be_visible()
    time = page.locator(".st-key-attention_time_card")
    expect(time.get_by_text("algorithms: another result")).to_be_visible()
    curves = page.locator(".st-key-attention_memory_curves_card")
    expect(curves.locator(".legendtext", has_text="eager out of memory")).to_be_visible()

    page.get_by_text("Change shape and patterns").click()
    for label, value in (("Tokens", "64"), ("Query heads", "4"), ("Key-value heads", "2")):
        box = page.get_by_role("spinbutton", name=label, exact=True)
        box.fill(value)
        box.press("Enter")
    expect(page.get_by_text("1 × 64 tokens", exact=True)).to_be_visible()
    # The shape is in the address: a reload or a shared link opens the same.
    expect(page).to_have_url(re.compile(r"at_sequence_length=64"))

    page.get_by_role("button", name="Measure").click()
    page.locator(".st-key-attention_run").get_by_role("link", name="Open the run").click()
    expect(page).to_have_url(re.compile(r"/run\?.*run=[0-9a-f]{16}"))
    expect(page.get_by_text("done", exact=True).first).to_be_visible(timeout=RUN_TIMEOUT_MS)
    expect(page.get_by_text("Measured on a CPU: its errors compare")).to_be_visible()


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


def test_a_dot_of_the_accuracy_chart_opens_its_run(
    few_rows: tuple[Path, int], page: Page, product: str
) -> None:
    page.goto(f"{product}/accuracy")
    dots = page.locator(".st-key-residual_strips_card .point")
    # The server first predicts for the measurements, beside the page.
    expect(dots.first).to_be_visible()
    assert dots.count() >= few_rows[1]
    dots.first.click(force=True)
    expect(page).to_have_url(re.compile(r"/run\?.*row=[0-9a-f]{16}"))
    expect(page.get_by_text("recorded elsewhere")).to_be_visible()
    compared = page.locator(".st-key-comparison_card")
    expect(compared.locator(".legendtext", has_text="measured")).to_be_visible()
