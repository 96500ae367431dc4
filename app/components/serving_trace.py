"""A trace simulated: percentiles by continuous and static batching, every request, queue and cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import streamlit as st

from app import serving_rows
from app.charts import serving as charts
from app.components.figure import show_figure, show_table
from app.serving_rows import TraceChoice
from db.database import display_name, resolve_url
from planner.serve_run import SERVE_COLUMNS, serve_cells
from planner.serving_levers import ServingPoint
from planner.simulation.server import Server
from planner.simulation.tally import REQUEST_COLUMNS, SAMPLE_COLUMNS, Simulation
from planner.simulation.words import simulated_headline, simulated_rest
from planner.workload import KvDtype

MOST_BARS = 64
QUANTITIES: Mapping[str, str] = {
    "First token": "ttft_s",
    "Time per token": "tpot_s",
    "End to end": "e2e_s",
}


def show_trace(point: ServingPoint, choice: TraceChoice) -> None:
    """Draw what the requests of a trace see on the point's server, both ways of batching."""
    found = serving_rows.simulations(point, choice)
    server = serving_rows.server_of_point(point, choice)
    _ways(found)
    _requests(found["continuous"])
    left, right = st.columns(2)
    with left:
        _course(found["continuous"], server)
    with right:
        _rates(point, choice)
    st.caption(
        "The same on the command line, and for real with a GPU at hand (without `--simulate`):"
    )
    st.code(command_line(point, choice, server), language="sh", wrap_lines=True)


def _ways(found: Mapping[str, Simulation]) -> None:
    left, right = st.columns(2)
    for place, (way, words) in zip((left, right), WAYS.items(), strict=True):
        counted = found[way].to_dict()
        with place, st.container(border=True, key=f"serving_{way}", height="stretch"):
            st.markdown(f"**{way.capitalize()} batching:** {simulated_headline(counted)}")
            st.dataframe(
                [dict(zip(SERVE_COLUMNS, cells, strict=True)) for cells in serve_cells(counted)],
                hide_index=True,
                alt=f"Percentiles of the requests' times, {way} batching",
            )
            st.caption(f"{words} {simulated_rest(counted)}")


WAYS: Mapping[str, str] = {
    "continuous": "Requests join and leave between two steps; where pages run out, the last one gives its "
    "own back. Rules of the engine in `runners/serving`.",
    "static": "A batch is what waits when the last one is done; its rows stay until its longest answer is.",
}


def request_rows(found: Simulation) -> list[dict[str, Any]]:
    """Return the kept requests by arrival, as plain lines."""
    rows = [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in found.requests]
    return sorted(rows, key=lambda row: row["arrival_s"])


def _requests(found: Simulation) -> None:
    rows = request_rows(found)
    shown = rows[:MOST_BARS]
    said = f" The first {len(shown)} of {len(rows):,}." if len(rows) > len(shown) else ""
    show_figure(
        charts.timeline_figure(shown),
        key="serving_timeline",
        title="Every request, from its arrival to its last token",
        caption="Simulated, continuous batching. Waits: for a row and pages. Prompt: from its row to the "
        f"first token, in chunks, others' among them. Tokens: the rest, one a step.{said}",
        rows=rows,
    )


def _course(found: Simulation, server: Server) -> None:
    samples = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in found.samples]
    show_figure(
        charts.course_figure(samples, server.rows, server.pages),
        key="serving_course",
        title="Queue and cache over time",
        caption=f"Simulated, continuous batching, step by step (thinned out where there are many). The cache "
        f"has {server.pages:,} pages of {server.page_size} tokens, as many as fit the GPU.",
        rows=samples,
    )


def _rates(point: ServingPoint, choice: TraceChoice) -> None:
    label = st.segmented_control(
        "Over the rate",
        list(QUANTITIES),
        default=next(iter(QUANTITIES)),
        required=True,
        key="serving_quantity",
        label_visibility="collapsed",
    )
    rows = serving_rows.rate_rows(point, choice)
    name = QUANTITIES[label]
    drawn = [
        {
            "rate_per_s": row["rate_per_s"],
            "way": row["way"],
            "p50_s": row[f"{name}_p50"],
            "p90_s": row[f"{name}_p90"],
        }
        for row in rows
        if f"{name}_p50" in row
    ]
    show_figure(
        charts.rates_figure(drawn, label.lower()),
        key="serving_rates",
        title=f"{label} when more arrive",
        caption="Simulated at a quarter to four times the rate, lengths drawn as above. Where the queue grows "
        "without end, the first token waits for it, and the trace's length decides how long.",
        rows=rows,
    )


def command_line(point: ServingPoint, choice: TraceChoice, server: Server) -> str:
    """Return the command that simulates the same trace, for what the command can say."""
    drawn = serving_rows.poisson_of(point, choice)
    preset = point.spec.name.rsplit("/", 1)[-1].lower()
    trace = (
        "--trace TRACE.json"
        if choice.text is not None
        else f"--requests {choice.requests} --rate {choice.rate_per_s:g} --seed {choice.seed} "
        f"--prompt-tokens {_pair(drawn['prompt_tokens'])} --new-tokens {_pair(drawn['new_tokens'])}"
    )
    return (
        f"peakmark serve --simulate --model {preset} --gpu {point.gpu.id} {trace} --rows {server.rows} "
        f"--pages {server.pages} --page-size {server.page_size} --chunk-tokens {server.chunk_tokens}"
        + _cache_dtype(point)
    )


def _cache_dtype(point: ServingPoint) -> str:
    is_one_byte = point.kv_dtype in (KvDtype.FP8, KvDtype.INT8)
    return f" --cache-dtype {point.kv_dtype}" if is_one_byte else ""


def _pair(values: Sequence[int]) -> str:
    return ",".join(str(value) for value in values)


def show_compared() -> None:
    """Draw every stored serving run's percentiles, simulated beside measured."""
    rows = serving_rows.compared_traces(display_name(resolve_url(None)))
    st.markdown("### Is that true?")
    if not rows:
        st.caption(
            "No stored run served a trace on a known GPU. `peakmark serve` runs one and keeps it."
        )
        return
    compared = [row for row in rows if row["percentile"] in ("p50", "p90")]
    errors = [abs(row["error_percent"]) for row in compared if row["quantity"] != "end to end"]
    show_figure(
        charts.compared_figure(compared),
        key="serving_compared",
        title="Simulated beside measured",
        caption=f"p50 and p90 of {len({row['row'] for row in rows})} stored serving runs, each simulated "
        f"today with its own trace, cache and GPU. Error of first token and time per token: "
        f"{fmean(errors):.0f} % on average, {max(errors):.0f} % at worst.",
        rows=rows,
    )
    with st.expander("Every percentile", icon=":material/table_rows:"):
        shown = [
            {
                "trace": row["what"],
                "of a request": row["quantity"],
                "percentile": row["percentile"],
                "simulated ms": round(1e3 * row["predicted_s"], 2),
                "measured ms": round(1e3 * row["measured_s"], 2),
                "error %": round(row["error_percent"], 1),
            }
            for row in rows
        ]
        show_table(shown, key="serving_compared_table", title="Simulated beside measured")
