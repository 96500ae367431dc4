"""The Serving page's choices: the plan's requests, changes to them, and the trace to simulate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app.serving_rows import MAX_TRACE_CHARACTERS, PAGE_REQUESTS, TraceChoice, own_point
from planner.decode_run import PAGE_SIZES
from planner.errors import describe_value
from planner.plan import MAX_COUNT, Plan
from planner.serve_run import MAX_ROWS
from planner.serving_levers import TENSOR_PARALLEL, ServingPoint
from planner.workload import KvDtype, WeightsDtype

PREFIX = "sv_"
WIDTH_PX = 140
MAX_TOKENS = 2**24
NUMBERS: Mapping[str, tuple[str, str]] = {
    "prompt_tokens": ("Prompt, tokens", "What each request asks with."),
    "new_tokens": ("Answer, tokens", "What each request gets."),
    "batch": ("Requests at once", "How many are decoded together in a step."),
    "longest_tokens": ("Longest request", "Without paging each request gets so much room."),
}
TRACE: Mapping[str, tuple[str, int]] = {
    "requests": ("Requests", PAGE_REQUESTS),
    "chunk_tokens": ("Prompt tokens a step", MAX_TOKENS),
    "rows": ("Requests at once, most", MAX_ROWS),
    "seed": ("Seed", 2**31),
}


def choose_point(plan: Plan) -> ServingPoint:
    """Draw the requests and how they are served, the plan's where nothing is changed."""
    own = own_point(plan)
    # Above the form, which is folded: what a link says and the form cannot take must be seen.
    told = st.container()
    with st.expander("Change requests, precision and GPUs", icon=":material/tune:"):
        with st.grid(4, min_column_width=WIDTH_PX):
            numbers: dict[str, Any] = {
                name: _number(name, *NUMBERS[name], own, told) for name in NUMBERS
            }
        with st.grid(4, min_column_width=WIDTH_PX):
            choices: dict[str, Any] = {
                "weights_dtype": _choice(
                    "weights_dtype", "Weights", tuple(WeightsDtype), own, told
                ),
                "kv_dtype": _choice("kv_dtype", "Key-value cache", tuple(KvDtype), own, told),
                "tensor_parallel": _choice(
                    "tensor_parallel", "GPUs for one copy", TENSOR_PARALLEL, own, told
                ),
                "page_size": _choice("page_size", "Tokens of a page", PAGE_SIZES, own, told),
            }
    point = replace(own, **numbers, **choices)
    st.markdown(point_line(point))
    return point


def point_line(point: ServingPoint) -> str:
    """Return a point in one line."""
    gpus = f"{point.tensor_parallel} × " if point.tensor_parallel > 1 else ""
    return (
        f"**{point.batch:,} requests at once** · prompts of {point.prompt_tokens:,}, answers of "
        f"{point.new_tokens:,} tokens · weights {point.weights_dtype}, cache {point.kv_dtype} in pages "
        f"of {point.page_size} · {gpus}{point.gpu.name} · {100 * point.utilization:.0f} % of its memory"
    )


def _number(name: str, label: str, help_text: str, own: ServingPoint, told: DeltaGenerator) -> int:
    value = getattr(own, name)
    most = MAX_COUNT if name == "batch" else MAX_TOKENS
    return st.number_input(
        label,
        min_value=1,
        max_value=most,
        value=_number_from_link(name, value, most, told),
        step=1,
        key=f"serving_{name}_{value}",
        help=help_text,
    )


def _number_from_link(name: str, own: int, most: int, told: DeltaGenerator, least: int = 1) -> int:
    text = st.query_params.get(PREFIX + name)
    if text is None:
        return own
    if text.isdigit() and least <= int(text) <= most:
        return int(text)
    _tell_refused(name, text, own, told)
    return own


def _choice(
    name: str, label: str, options: Sequence[Any], own: ServingPoint, told: DeltaGenerator
) -> Any:
    value = getattr(own, name)
    asked = st.query_params.get(PREFIX + name)
    by_text = {str(option): option for option in options}
    if asked is not None and asked not in by_text:
        _tell_refused(name, asked, value, told)
    chosen = st.selectbox(
        label,
        list(by_text),
        index=list(by_text).index(asked if asked in by_text else str(value)),
        key=f"serving_{name}_{value}",
    )
    return by_text[chosen]


def _tell_refused(name: str, text: str, own: object, told: DeltaGenerator) -> None:
    given = describe_value(text).replace("`", "'")
    told.warning(
        f"The link says `{PREFIX}{name}` is `{given}`, which cannot be used: {own} is shown.",
        icon=":material/link_off:",
    )


def choose_trace() -> TraceChoice:
    """Draw what arrives and the server that it meets."""
    default = TraceChoice()
    told = st.container()
    with st.grid(5, min_column_width=WIDTH_PX):
        rate = st.number_input(
            "Requests a second",
            min_value=0.01,
            max_value=100_000.0,
            value=_rate_from_link(default.rate_per_s, told),
            key="serving_rate_per_s",
            help="Of a Poisson process: the mean, the gaps are random.",
        )
        numbers = {
            name: st.number_input(
                label,
                min_value=0 if name == "seed" else 1,
                max_value=most,
                value=_number_from_link(
                    name, getattr(default, name), most, told, 0 if name == "seed" else 1
                ),
                step=1,
                key=f"serving_{name}_{getattr(default, name)}",
            )
            for name, (label, most) in TRACE.items()
        }
    with st.popover("A trace of your own", icon=":material/upload_file:", type="tertiary"):
        st.caption(
            "A JSON list of requests by arrival, each with `arrival_s`, `prompt_tokens`, `new_tokens`: the "
            "file that `peakmark serve --trace` takes."
        )
        file = st.file_uploader("Trace", type="json", key="serving_trace_file")
    text = None if file is None else file.read(MAX_TRACE_CHARACTERS + 1).decode(errors="replace")
    return replace(default, rate_per_s=rate, text=text, **numbers)


def _rate_from_link(own: float, told: DeltaGenerator) -> float:
    text = st.query_params.get(PREFIX + "rate_per_s")
    if text is None:
        return own
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if 0.01 <= rate <= 100_000:
        return rate
    _tell_refused("rate_per_s", text, own, told)
    return own


def link_of(plan: Plan, point: ServingPoint, choice: TraceChoice) -> dict[str, str]:
    """Return the parameters of the page's address for what differs from the plan's requests."""
    own = own_point(plan)
    names = (*NUMBERS, "weights_dtype", "kv_dtype", "tensor_parallel", "page_size")
    changed = {
        name: getattr(point, name) for name in names if getattr(point, name) != getattr(own, name)
    }
    default = TraceChoice()
    changed |= {
        name: getattr(choice, name)
        for name in ("rate_per_s", *TRACE)
        if getattr(choice, name) != getattr(default, name)
    }
    return {PREFIX + name: str(value) for name, value in changed.items()}
