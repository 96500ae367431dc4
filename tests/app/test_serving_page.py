"""The Serving page: capacity, levers, a simulated trace, and the recorded ones beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import measured
from app.components.problems import OUR_FAULT
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
PAGE = "app_pages/serving.py"


def page(opened: Opened, **query: str) -> AppTest:
    # Its address alone opens it: the start page need not be drawn.
    app = opened(**query)
    app.switch_page(PAGE).run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def test_a_training_plan_s_model_is_served_and_its_own_runs_stand_beside(opened: Opened) -> None:
    app = page(opened, model="meta-llama/Llama-3.1-8B", sv_batch="16", sv_requests="12")
    said = texts(app)
    assert "ZeRO is not the word here" in said
    labels = [metric.label for metric in app.metric]
    assert labels == [
        *("Requests that fit", "First token, alone", "Per token, 16 at once"),
        "Tokens/s when full",
    ]
    # 128 KiB a token; 2,176 tokens of room half way through the answer.
    assert "A token takes 128.00 KiB, a request half way through its answer 2,176 tokens" in said
    figures: list[Any] = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    assert len(figures) == 7
    # Recorded decode steps of the model are dots.
    assert "decode runs of this model and cache are beside them" in said
    assert "**Continuous batching:** 12 done in" in said
    assert "**Static batching:** 12 done in" in said
    assert "stored serving runs, each simulated today with its own trace" in said
    assert {"serving_prove_decode", "serving_prove_serve"} <= {button.key for button in app.button}
    levers = next(frame.value for frame in app.dataframe if "lever" in frame.value)
    assert next(iter(levers["kind"])) == "" and set(levers["kind"]) == {"", "system", "model"}
    command = next(code.value for code in app.code)
    assert command.startswith(
        "peakmark serve --simulate --model llama-3.1-8b --gpu h200-sxm5-141gb"
    )
    assert "--requests 12 --rate 4" in command

    # What cannot be is one sentence, and the rest of the page stays away.
    app.number_input(key="serving_prompt_tokens_2048").set_value(200_000).run()
    assert [error.value for error in app.error] == [
        "A prompt of 200,000 tokens with 256 new ones passes the 131,072 positions of "
        "meta-llama/Llama-3.1-8B: shorten one of them."
    ]


def test_a_model_with_few_positions_is_served_up_to_them(opened: Opened) -> None:
    # GPT-2 has 1,024, the form begins at 8,192, and a training plan has no field to change that.
    app = page(opened, model="openai-community/gpt2", seq="512", sv_requests="4")
    assert [error.value for error in app.error] == []
    assert "prompts of 256, answers of 32 tokens" in texts(app)


def test_a_link_that_says_nonsense_is_told_and_a_trace_too_long_is_one_sentence(
    opened: Opened,
) -> None:
    app = page(opened, model="meta-llama/Llama-3.2-1B", sv_batch="many", sv_requests="2000")
    assert any("`sv_batch` is `'many'`" in warning.value for warning in app.warning)
    app.number_input(key="serving_new_tokens_256").set_value(40_000).run()
    assert any("steps to serve" in error.value for error in app.error)
    # The rest of the page is there all the same.
    assert "Is that true?" in texts(app)


def test_a_served_run_s_page_shows_its_simulation_and_who_else_served(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded row with the preemption-free trace of 64 requests, and a peer put beside it."""
    detail = measured.measurement_detail

    def with_peer(row_id: str) -> dict[str, Any] | None:
        seen = detail(row_id)
        assert seen is not None
        failed = {"outcome": "failed", "message": "ValueError: no such attention"}
        done = {"outcome": "done", "tokens_per_s": 900.0, "tokens_equal": 0.5}
        done |= {"latency": seen["measured"]["latency"]}
        peers = {"transformers": done, "vllm": failed}
        return {**seen, "measured": {**seen["measured"], "peers": peers}}

    monkeypatch.setattr(measured, "measurement_detail", with_peer)
    app = opened(row="df40b0c8d35820ec")
    app.switch_page("app_pages/run.py").run()
    assert not app.exception and not app.error
    simulated = next(frame.value for frame in app.dataframe if "simulated" in frame.value)
    assert list(simulated["measured"][:2]) == ["6.398 ms", "9.883 ms"]
    assert all(text.endswith(" %") for text in simulated["error"])
    peers = next(frame.value for frame in app.dataframe if "who" in frame.value)
    assert list(peers["who"]) == ["peakmark", "transformers", "vllm"]
    assert list(peers["equal tokens"]) == ["-", "50 %", "-"]
    assert "vllm: ValueError: no such attention" in texts(app)
    assert "Llama-3.2-1B" in texts(app)
