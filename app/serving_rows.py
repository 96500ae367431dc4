"""What the Serving page shows, as plain data: points, levers, curves, simulations, measured rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import streamlit as st

from app import services
from db.database import display_name, resolve_url
from db.measurements import measurements
from db.types import Origin, RunKind
from planner.calibration import sheet_of
from planner.decode_run import AttentionBackend, CacheDtype, check_positions, parse_decode
from planner.errors import PlanError
from planner.plan import Plan
from planner.records import Kind
from planner.serve_run import TraceRequest, padded_tokens, parse_trace
from planner.serving.capacity import CAPACITY_COLUMNS, Capacity, ServingEngine, capacity_cells
from planner.serving.fitted import SERVE_ROWS
from planner.serving.runs import TODAY, RanAs
from planner.serving_levers import (
    Lever,
    ServingAnswer,
    ServingPoint,
    answer,
    capacity_curve,
    capacity_of,
    check_point,
    levers,
    speed_curve,
    step_times,
)
from planner.simulation.continuous import simulate
from planner.simulation.runs import COMPARED, compare_latency, simulated_row
from planner.simulation.server import Server, sliding_window
from planner.simulation.static import simulate_static
from planner.simulation.steps import RememberedSteps
from planner.simulation.tally import Simulation
from planner.units import format_seconds
from planner.workload import KvDtype, ServingWorkload

MEASURED_TTL_S = 20
# A page answers at once: longer traces are simulated from the command line.
PAGE_REQUESTS, PAGE_STEPS = 2000, 60_000
MAX_TRACE_CHARACTERS = 1_000_000
RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
RATE_REQUESTS = 96
CONTEXTS_SHOWN = (1024, 8192, 32_768)


def own_point(plan: Plan) -> ServingPoint:
    """Return the plan's requests: a prompt of a quarter of its length, an answer of an eighth of that."""
    workload = plan.workload
    assert isinstance(workload, ServingWorkload)
    return ServingPoint(
        spec=plan.model,
        gpu=plan.hardware,
        prompt_tokens=max(1, workload.context_length // 4),
        new_tokens=max(1, workload.context_length // 32),
        batch=workload.sequences,
        weights_dtype=workload.weights_dtype,
        kv_dtype=workload.kv_dtype,
        utilization=workload.utilization,
        longest_tokens=workload.context_length,
    )


# A point is frozen and hashes by what it holds; the model's configuration is not part of that.
@st.cache_data(max_entries=64, show_spinner=False, hash_funcs={ServingPoint: hash})
def answer_of(point: ServingPoint) -> ServingAnswer:
    """Return a point's answer. Raises PlanError."""
    return answer(point)


@st.cache_data(max_entries=64, show_spinner=False, hash_funcs={ServingPoint: hash})
def levers_of(point: ServingPoint) -> list[Lever]:
    """Return a point's levers."""
    return levers(point)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of an answer: its name, the field, and whether more of it is better."""

    label: str
    field: str
    is_more_better: bool


MEASURES = (
    Measure(label="Requests that fit", field="max_requests", is_more_better=True),
    Measure(label="First token", field="ttft_s", is_more_better=False),
    Measure(label="Time per token", field="decode_s", is_more_better=False),
    Measure(label="Tokens/s when full", field="full_tokens_per_s", is_more_better=True),
)


def figure_words(field: str, value: float | None) -> str:
    """Return a figure of an answer for people."""
    if value is None:
        return "does not fit"
    return (
        format_seconds(value) if field.endswith("_s") and "per_s" not in field else f"{value:,.0f}"
    )


def lever_bars(found: ServingAnswer, changes: Sequence[Lever], field: str) -> list[dict[str, Any]]:
    """Return the rows of the levers' figure: how many times today's value each gives."""
    base = getattr(found, field)
    rows = []
    for lever in changes:
        value = getattr(lever.answer, field)
        factor = value / base if base and value else None
        rows.append({"name": lever.name, "kind": lever.kind, "value": value, "factor": factor})
    return rows


def lever_table(found: ServingAnswer, changes: Sequence[Lever]) -> list[dict[str, Any]]:
    """Return one line per lever and one for today's choice."""
    lines = [{"lever": "as chosen", "kind": "", **_figures(found), "note": "", "a step's time": ""}]
    return lines + [
        {
            "lever": one.name,
            "kind": one.kind,
            **_figures(one.answer),
            "note": one.note,
            "a step's time": one.limit,
        }
        for one in changes
    ]


def _figures(found: ServingAnswer) -> dict[str, str]:
    return {one.label: figure_words(one.field, getattr(found, one.field)) for one in MEASURES}


def capacity_lines(point: ServingPoint) -> dict[str, list[tuple[int, int]]]:
    """Return capacity over length: as chosen, with a cache of one byte, and that over two GPUs."""
    changed = {f"cache {point.kv_dtype}": point}
    if point.kv_dtype is not KvDtype.FP8:
        changed["cache fp8"] = replace(point, kv_dtype=KvDtype.FP8)
    shards = 2 * point.tensor_parallel
    divided = replace(point, kv_dtype=KvDtype.FP8, tensor_parallel=shards)
    with suppress(PlanError):  # a model that is not divided has no such line
        check_point(divided)
        changed[f"cache fp8, {shards} GPUs"] = divided
    return {name: capacity_curve(one) for name, one in changed.items()}


@st.cache_data(max_entries=32, show_spinner=False, hash_funcs={ServingPoint: hash})
def engines_of(point: ServingPoint) -> list[Capacity]:
    """Return what each engine's rule leaves for the cache, in requests at their end.

    Ours has graphs for as many as fit half way through their answers, as `answer` counts them.
    """
    length = point.prompt_tokens + point.new_tokens
    rows = max(1, capacity_of(point).max_sequences)
    return [
        capacity_of(point, one, length=length, rows=rows if one is ServingEngine.PEAKMARK else None)
        for one in ServingEngine
    ]


def engine_table(found: Sequence[Capacity]) -> list[dict[str, Any]]:
    """Return one line per engine."""
    return [dict(zip(CAPACITY_COLUMNS, cells, strict=True)) for cells in capacity_cells(found)]


def speed_lines(point: ServingPoint) -> dict[str, list[tuple[int, float, bool]]]:
    """Return a step's time over the batch at the point's length and at three others."""
    times = step_times(point)
    lengths = sorted({*CONTEXTS_SHOWN, point.mean_tokens})
    return {
        f"{length:,} tokens each": speed_curve(
            replace(point, prompt_tokens=length, new_tokens=0, paged=True), times
        )
        for length in lengths
        if length <= point.spec.max_positions
    }


def measured_speeds(point: ServingPoint, lines: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return stored decode steps of this model, cache and GPU, named by the nearest line's length."""
    lengths = {name: int(name.split()[0].replace(",", "")) for name in lines}
    return [
        row | {"what": min(lengths, key=lambda name: abs(lengths[name] - row["context"]))}
        for row in _stored_decodes(display_name(resolve_url(None)))
        if row["model"] == point.spec.name
        and row["gpu"] == point.gpu.id
        and row["kv_dtype"] == str(point.kv_dtype)
        and row["weights_dtype"] == str(point.weights_dtype)
        and point.tensor_parallel == 1
    ]


@st.cache_data(max_entries=4, ttl=MEASURED_TTL_S, show_spinner=False)
def _stored_decodes(url: str) -> list[dict[str, Any]]:
    found = []
    for row in measurements(services.database(), kinds=[RunKind.DECODE]):
        with suppress(PlanError):
            run, spec = parse_decode(row.spec.get("decode"))
            gpu = sheet_of(row.environment or {})
            if gpu is None or "decode_time_s" not in row.measured:
                continue
            if run.attention is not AttentionBackend.PEAKMARK or not (run.graphs and run.fused):
                continue
            is_own = run.cache_dtype is CacheDtype.MODEL
            here = row.origin is Origin.HERE
            found.append(
                {
                    "model": spec.name,
                    "gpu": gpu.id,
                    "batch": run.batch,
                    "context": run.context,
                    "kv_dtype": str(run.dtype if is_own else run.cache_dtype),
                    "weights_dtype": str(run.dtype),
                    "cache": str(run.cache),
                    "decode_s": row.measured["decode_time_s"],
                    "prefill_s": row.measured["prefill_time_s"],
                    "here": here,
                    "place": f"{'measured here' if here else 'recorded elsewhere'} on {gpu.name}",
                }
            )
    return found


@st.cache_data(max_entries=4, ttl=MEASURED_TTL_S, show_spinner=False)
def compared_traces(url: str) -> list[dict[str, Any]]:
    """Return percentiles of every stored run that was served as today, simulated beside measured."""
    rows = []
    for row in measurements(services.database(), kinds=[RunKind.SERVE]):
        found = simulated_row(row.spec, row.environment, row.measured)
        # What a constant was fitted to is no evidence for it.
        if found is None or row.id in SERVE_ROWS or RanAs.of(Kind.SERVE, row.measured) != TODAY:
            continue
        name = found.model.name.rsplit("/", 1)[-1]
        what = f"{name}, {len(found.run.trace)} requests"
        rows += [
            {
                "row": row.id,
                "what": what,
                "quantity": COMPARED[one.quantity],
                "percentile": one.percentile,
                "predicted_s": one.predicted_s,
                "measured_s": one.measured_s,
                "error_percent": one.error_percent,
            }
            for one in compare_latency(found, row.measured)
        ]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """What the page's trace is drawn from, or its text, and the server it meets."""

    requests: int = 64
    rate_per_s: float = 4.0
    seed: int = 0
    chunk_tokens: int = 512
    rows: int = 32
    text: str | None = None


def poisson_of(point: ServingPoint, choice: TraceChoice) -> dict[str, Any]:
    """Return the Poisson process of a choice: lengths from half to one and a half of the point's."""
    return {
        "requests": choice.requests,
        "rate_per_s": choice.rate_per_s,
        "prompt_tokens": _around(point.prompt_tokens),
        "new_tokens": _around(point.new_tokens),
        "seed": choice.seed,
    }


def _around(tokens: int) -> list[int]:
    return [max(1, tokens // 2), max(1, 3 * tokens // 2)]


def trace_of(point: ServingPoint, choice: TraceChoice) -> tuple[TraceRequest, ...]:
    """Return the trace of a choice, checked against the model. Raises PlanError."""
    given = poisson_of(point, choice) if choice.text is None else _read(choice.text)
    trace = parse_trace(given, max_requests=PAGE_REQUESTS)
    longest = max(trace, key=lambda one: one.prompt_tokens + one.new_tokens)
    check_positions("trace", longest.prompt_tokens, longest.new_tokens, point.spec)
    return trace


def _read(text: str) -> object:
    if len(text) > MAX_TRACE_CHARACTERS:
        sentence = (
            f"The trace is a file of more than {MAX_TRACE_CHARACTERS:,} characters: the page takes up to "
            f"{PAGE_REQUESTS:,} requests, `peakmark serve --simulate --trace` takes more."
        )
        raise PlanError("trace", "the file", "a smaller file", sentence=sentence)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        sentence = f"The trace cannot be read as JSON: {type(error).__name__}."
        raise PlanError("trace", "the file", "a JSON list of requests", sentence=sentence) from None


def server_of_point(point: ServingPoint, choice: TraceChoice) -> Server:
    """Return a server with as many pages as the point's cache has room for."""
    held = capacity_of(point, rows=choice.rows)
    return Server(
        rows=choice.rows,
        pages=held.pool_bytes // (point.page_size * held.token_bytes),
        page_size=point.page_size,
        chunk_tokens=choice.chunk_tokens,
        window=sliding_window(point.spec),
    )


@st.cache_data(max_entries=32, show_spinner=False, hash_funcs={ServingPoint: hash})
def simulations(point: ServingPoint, choice: TraceChoice) -> dict[str, Simulation]:
    """Return the trace served by continuous and by static batching. Raises PlanError."""
    trace, server = trace_of(point, choice), server_of_point(point, choice)
    times = RememberedSteps(step_times(point), padded_tokens(choice.chunk_tokens))
    return {
        "continuous": simulate(trace, server, times, PAGE_STEPS),
        "static": simulate_static(trace, server, times, PAGE_STEPS),
    }


@st.cache_data(max_entries=16, show_spinner=False, hash_funcs={ServingPoint: hash})
def rate_rows(point: ServingPoint, choice: TraceChoice) -> list[dict[str, Any]]:
    """Return latencies at rates around the chosen one, of at most RATE_REQUESTS requests each."""
    times = RememberedSteps(step_times(point), padded_tokens(choice.chunk_tokens))
    server = server_of_point(point, choice)
    rows = []
    for factor in RATE_FACTORS:
        number = min(choice.requests, RATE_REQUESTS)
        changed = replace(choice, rate_per_s=choice.rate_per_s * factor, requests=number, text=None)
        trace = trace_of(point, changed)
        for way, serve in (("continuous", simulate), ("static", simulate_static)):
            found = serve(trace, server, times, PAGE_STEPS)
            rows.append({"rate_per_s": changed.rate_per_s, "way": way, **_latencies(found)})
    return rows


def _latencies(found: Simulation) -> dict[str, float]:
    return {
        f"{name}_{percentile}": value
        for name, percentiles in found.latency.items()
        for percentile, value in percentiles.items()
    } | {"tokens_per_s": found.tokens_per_s}
