"""Attention in a real browser: choose a shape, see what is exact, measure it, find it again."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.slow]

RUN_TIMEOUT_MS = 240_000


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
