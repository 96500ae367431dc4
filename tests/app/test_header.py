"""The line above a page: the plan it is about, or quietly the plan beside it."""

from __future__ import annotations

import pytest

from app import state
from app.components.header import headline

PLAN = "Llama-3.1-8B · train 1 × 4,096 tokens"


@pytest.mark.parametrize("page", ["Ledger", "Sweep", "ZeRO", "Attention"])
def test_a_page_about_the_plan_is_headed_by_it(page: str) -> None:
    assert headline(state.values_from({}, {}), page).startswith(f"**{PLAN}")


@pytest.mark.parametrize(
    "page", ["Compare", "Claims", "Runs", "Experiments", "Accuracy", "Hardware"]
)
def test_a_page_about_something_else_says_whose_plan_it_is(page: str) -> None:
    line = headline(state.values_from({}, {}), page)
    assert line.startswith(f":gray[Your plan: {PLAN}")
    assert line.endswith("]")


def test_serving_is_headed_by_model_and_gpu_and_a_run_by_itself() -> None:
    values = state.values_from({}, {})
    assert headline(values, "Serving") == "**Llama-3.1-8B · h200-sxm5-141gb**"
    assert headline(values, "Run") == ""
