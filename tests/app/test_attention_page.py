"""The Attention page: variants at the plan's shape, kernels and algorithms apart, runs queued."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import attention_job, attention_rows
from app.components.problems import OUR_FAULT
from db import repository
from planner.attention.answer import answer
from planner.attention.problem import AttentionProblem, Variant
from planner.hardware import resolve_gpu
from planner.units import format_bytes
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
PAGE = "app_pages/attention.py"
LLAMA = AttentionProblem(
    batch=1, heads=32, kv_heads=8, head_dim=128, sequence_length=8192, causal=True
)
H200 = resolve_gpu("h200")


def page(opened: Opened, **query: str) -> AppTest:
    app = opened(**query)
    app.switch_page(PAGE).run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def table(app: AppTest) -> Any:
    return next(frame.value for frame in app.dataframe if "exact or not" in frame.value)


def test_every_variant_is_shown_at_the_plans_shape_exact_ones_first(opened: Opened) -> None:
    app = page(opened, seq="8192")
    shown = table(app)
    assert list(shown["variant"]) == [
        *("eager", "sdpa", "ours"),
        *("window", "global + local", "block-sparse", "linear"),
    ]
    assert list(shown["kind"])[2:4] == ["kernel, exact", "algorithm, changes the model"]
    assert shown["forward peak"][0] == "20.25 GiB"
    said = texts(app)
    assert "**Eager** stores the scores: 32.31 GiB" in said
    assert "does not fit beyond **16,995 tokens**" in said
    assert "No GPU is attached. With one, every variant is run here" in said
    assert "not exact: a query sees keys less than 4,096 tokens before it" in said
    # Time, memory, FLOPs, traffic, two curves, roofline.
    charts = [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]
    assert len(charts) >= 7
    ends = [t for chart in charts for t in chart["data"] if t.get("name") == "eager out of memory"]
    assert ends[0]["x"] == [16995]


def test_the_shape_can_be_changed_and_a_wrong_one_is_one_sentence(opened: Opened) -> None:
    app = page(opened, seq="8192")
    app.number_input(key="attention_kv_heads_8").set_value(5).run()
    assert [error.value for error in app.error] == [
        "attention.kv_heads is 5: it must be a divisor of attention.heads."
    ]
    app.number_input(key="attention_kv_heads_8").set_value(32).run()
    app.segmented_control(key="attention_causal_causal").set_value("full").run()
    assert not app.error
    assert "Linear attention is causal here" in texts(app)
    assert "linear" not in list(table(app)["variant"])


def test_a_link_brings_its_shape_and_variants(opened: Opened) -> None:
    app = page(opened, at_sequence_length="2048", at_variants="triton,window", at_window="100")
    assert app.number_input(key="attention_sequence_length_4096").value == 2048
    assert list(table(app)["variant"]) == ["ours", "window"]
    assert "keys less than 100 tokens before it" in texts(app)


def test_a_link_that_cannot_be_used_and_a_gpu_without_a_rate_are_told(opened: Opened) -> None:
    app = page(opened, gpu="custom", at_dtype="int3", at_window="x")
    assert [warning.value for warning in app.warning] == [
        "The link says `at_dtype` is `'int3'`, which cannot be used: bf16 is shown.",
        "The link says `at_window` is `'x'`, which cannot be used: 1024 is shown.",
    ]
    # The form's GPU has a rate for bf16 alone, and linear attention computes in tf32.
    assert "peak_dense_flop_s.tf32 is missing: this attention computes in tf32" in texts(app)
    assert list(table(app)["variant"])[-1] == "block-sparse"


def test_a_run_is_queued_with_its_prediction(opened: Opened) -> None:
    small = {"at_sequence_length": "128", "at_heads": "4", "at_kv_heads": "2"}
    app = page(opened, **small)
    app.button(key="attention_measure").click().run()
    assert "is queued" in texts(app)
    queued = repository.list_runs(attention_rows.services.database())[0]
    detail = repository.get_run(attention_rows.services.database(), queued.id)
    assert detail is not None and detail.prediction is not None
    assert detail.spec["kind"] == "attention" and detail.spec["world"] == "cpu"
    assert detail.spec["attention"]["kernels"] == ["eager", "sdpa"]
    assert detail.spec["attention"]["sequence_length"] == 128
    assert detail.prediction["variants"][0]["variant"] == "eager"


def test_what_the_host_cannot_hold_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 2**30

    monkeypatch.setattr(attention_job.psutil, "virtual_memory", Memory)
    found = answer(LLAMA, (Variant.EAGER,), H200)
    reason = attention_job.too_big_for_host(found)
    assert reason is not None and "this host can give 819.20 MiB" in reason
    tiny = answer(replace(LLAMA, sequence_length=64), (Variant.EAGER,), H200)
    assert attention_job.too_big_for_host(tiny) is None


def test_recorded_benchmarks_of_the_shape_are_found_at_any_batch() -> None:
    wide = replace(LLAMA, batch=4)
    seen = attention_rows.at_problem(wide, attention_rows._benches())
    assert seen[Variant.TRITON].gpu == "NVIDIA H200" and not seen[Variant.TRITON].here
    assert seen[Variant.TRITON].forward_s is not None
    lines = attention_rows.table_rows(answer(wide, tuple(Variant), H200), seen)
    ours = next(line for line in lines if line["variant"] == "ours")
    assert ours["measured on"] == "NVIDIA H200" and ours["forward measured ms"] > 0
    assert attention_rows.at_problem(LLAMA, attention_rows._benches()) == {}


def test_findings_compare_ours_with_eager_and_name_what_algorithms_give_up() -> None:
    eager, ours, algorithms = attention_rows.findings(
        answer(LLAMA, tuple(Variant), H200), format_bytes
    )
    assert eager.startswith("**Eager** stores the scores: 32.31 GiB")
    # 34,695,282,688 over 306,184,192 bytes.
    assert "113 times less" in ours and "0.55 TFLOP forward" in ours
    # 25,167,872 of 33,558,528 pairs.
    assert "window 75.0 %" in algorithms
    assert attention_rows.findings(answer(LLAMA, (Variant.SDPA,), H200), format_bytes) == []


def test_a_recorded_run_shows_its_variants(opened: Opened) -> None:
    app = opened()
    rows = attention_rows._stored(attention_rows.services.database_url())
    assert rows and not rows[0].here
    app.query_params["row"] = rows[0].row
    app.switch_page("app_pages/run.py").run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    shown = table(app)
    assert "sdpa" in list(shown["variant"])
    assert shown["forward measured ms"].notna().any()
