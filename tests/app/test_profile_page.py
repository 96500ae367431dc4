"""Where a step's time goes: figure, Run page and what the command line refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.charts.profile import profile_figure
from planner.time_shares import ceilings

Run = Callable[..., tuple[int, str, str]]

MEASURED: dict[str, Any] = {
    "work": "requests",
    "clock": "gpu",
    "step_time_s": 0.010,
    "step_time_statistics": {"median_s": 0.010, "p10_s": 0.009, "p90_s": 0.012, "n": 5},
    "traced_time_s": 0.02,
    "tokens_per_s": 1600.0,
    "base_s": 0.010,
    "busy_s": 0.006,
    "shared_s": 0.001,
    "host_s": 0.004,
    "parts": {
        "attention": {"calls": 16, "time_s": 0.001, "alone_s": 0.0005},
        "matmul": {"calls": 64, "time_s": 0.0055, "alone_s": 0.0045},
    },
    "phases": {"decode": {"attention": 0.001, "matmul": 0.0055}},
    "kernel_columns": ["name", "part", "calls", "time_s"],
    "kernels": [["nvjet_sm90", "matmul", 64, 0.0055], ["decode_kernel", "attention", 16, 0.001]],
    "kernels_seen": 80,
    "world_moves_data": True,
    "data": {"time_s": 0.0, "tokens": 16, "tokens_per_s": None, "tokenizer": None},
}


def test_bars_are_filled_where_a_part_runs_alone_and_end_with_what_it_could_bring() -> None:
    figure = profile_figure(ceilings(MEASURED))
    alone, beside = figure.data
    assert list(alone.y) == ["Matrix products", "Host gaps", "Attention"]
    assert list(alone.x) == pytest.approx([4.5, 4.0, 0.5])
    assert list(beside.x) == pytest.approx([1.0, 0.0, 0.5])
    # 10 / (10 - 4.5), 10 / (10 - 4), 10 / (10 - 0.5), each at the end of its own bar.
    assert [a or b for a, b in zip(alone.text, beside.text, strict=True)] == [
        " 1.82x",
        " 1.67x",
        " 1.05x",
    ]


def page(run: dict) -> None:  # type: ignore[type-arg]
    """What the Run page draws of a profile."""
    from app.components.profile_view import show_profile

    show_profile(run)


def test_a_profile_s_page_says_where_the_time_goes() -> None:
    app = AppTest.from_function(
        page, kwargs={"run": {"measured": MEASURED}}, default_timeout=300
    ).run()
    assert not app.exception and not app.error
    assert any("Changing attention will not help" in text.value for text in app.markdown)
    table = next(frame.value for frame in app.dataframe if "made free" in frame.value)
    assert list(table["made free"]) == ["1.82x", "1.67x", "1.05x"]
    labels = [metric.label for metric in app.metric]
    assert labels == ["Time", "Tokens per second", "Attention made free", "Host gaps"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("profile", "--world", "shared"), "--world is 'shared', which is not honest for time"),
        (("profile", "--world", "mars"), "--world is 'mars': it must be one of"),
        (("decode", "--tokenizer", "/x"), "--tokenizer counts in a profile only"),
        (("decode", "--profile", "--peer", "static"), "--peer is a comparison of times"),
    ],
)
def test_what_cannot_be_profiled_is_one_sentence(
    run: Run, decoding_config: str, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run(*arguments, "--config", decoding_config)
    assert code == 2
    assert sentence in err
