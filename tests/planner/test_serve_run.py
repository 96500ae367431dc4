"""What a serving run is asked is checked before anything runs; traces are sorted and bounded."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanError
from planner.serve_run import (
    SERVE_COLUMNS,
    host_sentence,
    parse_serve,
    parse_trace,
    percentile,
    serve_cells,
    serve_headline,
)

MODEL = {"preset": "meta-llama/Llama-3.2-1B"}
ONE = {"arrival_s": 1.0, "prompt_tokens": 10, "new_tokens": 5}
POISSON = {"requests": 200, "rate_per_s": 4.0, "prompt_tokens": [3, 7], "new_tokens": [1, 1]}


def test_a_run_survives_its_json_form() -> None:
    trace = [ONE, {**ONE, "arrival_s": 2.5, "cancel_after": 3}]
    run, _ = parse_serve({"model": MODEL, "trace": trace, "rows": 4})
    assert run.capacity == 15
    assert run.trace[1].cancel_after == 3
    assert parse_serve(run.to_dict())[0] == run


def test_a_poisson_process_has_its_rate_and_lengths() -> None:
    """200 arrivals at 4 a second take 50 s, give or take three standard deviations of 3.5 s."""
    trace = parse_trace(POISSON)
    assert trace == parse_trace(POISSON)
    assert trace != parse_trace({**POISSON, "seed": 1})
    assert 39 < trace[-1].arrival_s < 61
    assert {one.prompt_tokens for one in trace} == {3, 4, 5, 6, 7}
    assert {one.new_tokens for one in trace} == {1}
    assert [one.arrival_s for one in trace] == sorted(one.arrival_s for one in trace)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"trace": [ONE, {**ONE, "arrival_s": 0.5}]},
         "trace[1].arrival_s is 0.5: it must be at least 1, the arrival before it; sort the trace"),
        ({"trace": []}, "trace is a list of 0 values: it must be a list of 1 to 5000 requests."),
        ({"trace": [ONE] * 1_000_000}, "a list of 1000000 values: it must be a list of 1 to 5000"),
        ({"trace": {**POISSON, "requests": 1_000_000}}, "trace.requests is 1000000: it must be an"),
        ({"trace": {**POISSON, "new_tokens": [5, 2]}}, "trace.new_tokens[1] is 2: it must be an int"),
        ({"trace": {"requests": 3}}, "is None: it must be present."),
        ({"trace": [{**ONE, "prompt_tokens": 0}]}, "trace[0].prompt_tokens is 0: it must be an"),
        ({"trace": [{**ONE, "arrival_s": -1}]}, "trace[0].arrival_s is -1: it must be a number from"),
        ({"trace": [{**ONE, "priority": 2}]}, "trace[0] has no field 'priority'"),
        ({"trace": "poisson"}, "trace is 'poisson': it must be a list of requests, or the numbers"),
        ({"trace": [{**ONE, "prompt_tokens": 131072}]}, "with 5 new tokens it passes the 131072 po"),
        ({"pages": 1, "page_size": 16, "trace": [{**ONE, "new_tokens": 7}]},
         "serve.pages is 1: the longest request needs 2 pages of 16 tokens"),
        ({"rows": 0}, "serve.rows is 0: it must be an integer from 1 to 512."),
        ({"dtype": "fp32", "cache_dtype": "fp8"}, "serve.cache_dtype is 'fp8' beside weights in fp32"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_serve({"model": MODEL, "trace": [ONE], **change})
    assert sentence in str(caught.value)


def test_percentiles_lie_between_their_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0], 90) == pytest.approx(1.9)
    assert percentile([7.0], 99) == 7.0


def test_figures_are_told_in_cells() -> None:
    points = {"p50": 0.002, "p90": 0.003, "p99": 1.5}
    measured = {
        "states": {"done": 3, "cancelled": 1},
        "latency": {"ttft_s": points},
        "duration_s": 2.0,
        "tokens_per_s": 1500.0,
        "preemptions": 2,
        "device_share": 0.756,
    }
    assert serve_cells(measured) == [("time to first token", "2 ms", "3 ms", "1.5 s")]
    assert len(SERVE_COLUMNS) == 4
    assert serve_headline(measured) == (
        "3 done, 1 cancelled in 2 s: 1.5 k tokens/s, 2 preemptions, device busy 76 % of the time"
    )


def test_a_host_s_time_is_told_in_shares_where_it_was_noted() -> None:
    spent = {"wait": 3.0, "launch": 0.5, "schedule": 0.25, "idle": 1.25}
    assert host_sentence({"host_time_s": spent}) == (
        "The host's time: 60 % waiting for the GPU, 10 % starting its work, 5 % scheduling, 25 % between "
        "requests; prompts are token ids, so none goes to a tokenizer."
    )
    assert host_sentence({}) is None
