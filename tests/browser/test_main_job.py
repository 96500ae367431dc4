"""The main job in a real browser: enter a model, see the prediction, prove it, see the measured."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

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
