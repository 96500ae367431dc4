"""The runs that prove the Serving page: their specs, and what no run here proves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app import serving_job
from app.serving_rows import TraceChoice, own_point
from db.engine import open_database
from db.repository import get_run
from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.serving_levers import ServingPoint
from planner.workload import KvDtype, WeightsDtype


def served(model: str = "llama-3.2-1b", **workload: Any) -> tuple[Plan, ServingPoint]:
    plan = parse_plan(
        {
            "job": "serve",
            "model": {"preset": model},
            "hardware": {"preset": "h200"},
            "workload": {"context_length": 8192, "sequences": 16, **workload},
            "parallelism": {"world_size": 1},
        }
    )
    return plan, own_point(plan)


def test_the_batch_is_decoded_as_the_page_shows_it() -> None:
    """A prompt of a quarter of 8,192 tokens, and of 256 answered ones the 64 that tell a step's time."""
    plan, point = served(kv_dtype="fp8")
    spec = serving_job.decode_spec(plan, point, "solo")
    asked = spec["decode"]
    assert (spec["kind"], spec["world"]) == ("decode", "solo")
    assert (asked["batch"], asked["context"], asked["new_tokens"]) == (16, 2048, 64)
    assert (asked["cache"], asked["cache_dtype"], asked["dtype"]) == ("paged", "fp8", "bf16")
    on_cpu = serving_job.decode_spec(plan, point, "cpu")["decode"]
    assert (on_cpu["cache_dtype"], on_cpu["dtype"]) == ("model", "fp32")
    assert on_cpu["attention"] == "torch"


def test_the_trace_is_served_with_no_more_pages_than_its_rows_fill() -> None:
    """Prompts of up to 3,072 and answers of up to 384 tokens: 54 pages of 64 for each of 32 rows."""
    plan, point = served()
    asked = serving_job.serve_spec(plan, point, TraceChoice(requests=5), "solo")["serve"]
    assert len(asked["trace"]) == 5
    assert asked["rows"] == 32
    longest = max(one["prompt_tokens"] + one["new_tokens"] for one in asked["trace"])
    assert longest <= 3456 and asked["pages"] == 32 * -(-longest // 64)
    text = '[{"arrival_s": 0, "prompt_tokens": 100, "new_tokens": 5}]'
    own = serving_job.serve_spec(plan, point, TraceChoice(text=text), "solo")["serve"]
    assert (len(own["trace"]), own["pages"]) == (1, 32 * 2)
    unsorted = '[{"arrival_s": 2, "prompt_tokens": 1, "new_tokens": 1}, {"arrival_s": 1, "prompt_tokens": 1, "new_tokens": 1}]'
    with pytest.raises(PlanError, match="sort the trace by arrival"):
        serving_job.serve_spec(plan, point, TraceChoice(text=unsorted), "solo")


def test_a_trace_larger_than_a_page_takes_is_refused_before_it_is_read() -> None:
    plan, point = served()
    with pytest.raises(
        PlanError, match="more than 1,000,000 characters: the page takes up to 2,000"
    ):
        serving_job.serve_spec(plan, point, TraceChoice(text=" " * 1_000_001), "solo")


def test_what_no_run_here_proves_is_said() -> None:
    _, point = served()
    assert serving_job.unprovable(point, "solo") is None
    for changed, said in (
        ({"weights_dtype": WeightsDtype.INT4}, "Weights in int4 are planned, not proven"),
        ({"weights_dtype": WeightsDtype.FP32}, "A cache in bf16 beside weights in fp32"),
        ({"tensor_parallel": 2}, "Several GPUs for one copy are planned"),
    ):
        assert said in (serving_job.unprovable(replace(point, **changed), "solo") or "")
    assert serving_job.unprovable(replace(point, kv_dtype=KvDtype.INT8), "solo") is None
    _, large = served("llama-3.1-405b")
    assert "Without a GPU the CPU would hold about 1," in (
        serving_job.unprovable(large, "cpu") or ""
    )


def test_a_key_queues_once(database_url: str) -> None:
    plan, point = served()
    database = open_database(database_url)
    spec = serving_job.decode_spec(plan, point, "solo")
    first = serving_job.queue(database, spec, key="one")
    assert serving_job.queue(database, spec, key="one") == first
    found = get_run(database, first)
    assert found is not None and found.spec["decode"]["batch"] == 16
    database.close()
