"""The Serving page: how many requests, how soon the first token, how fast the rest, which lever helps."""

from __future__ import annotations

from typing import Any

import streamlit as st

from app import services, serving_rows
from app.charts import serving as charts
from app.charts.style import size_text
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import metric_row, show_figure, show_table
from app.components.header import current_values, unit
from app.components.problems import told_in_one_sentence
from app.components.serving_form import choose_point, choose_trace, link_of
from app.components.serving_run import show_serving_run
from app.components.serving_trace import show_compared, show_trace
from app.serving_rows import MEASURES, TraceChoice
from planner.errors import PlanError
from planner.plan import Plan, parse_model
from planner.serving_levers import ServingAnswer, ServingPoint
from planner.units import format_count, format_seconds

WHAT_IT_IS = (
    "Serving has three sides. **Prefill** runs a prompt and gives the first token: it computes. **Decode** "
    "gives one more token to every request at once: it reads all weights and the whole cache each time. "
    "**Capacity** is how many requests' keys and values fit beside the weights. ZeRO is not the word here: "
    "it divides what training keeps for an update, and a server keeps no gradients and no optimizer. What "
    "divides a served model is tensor parallelism; what multiplies it are replicas."
)
SERVED = ("sequences", "weights_dtype", "kv_dtype", "utilization")


def show_serving_page() -> None:
    """Draw capacity, speed, levers and a simulated trace for the plan's model and GPU."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info("Give a model on the Plan page to see it served.", icon=":material/info:")
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(served_document(document))
        _tell_refused_training(document)
        st.caption(WHAT_IT_IS)
        point = choose_point(plan)
        _served(plan, point)


def _tell_refused_training(document: dict[str, Any]) -> None:
    """Say what an address asks of training that cannot be: only its model and GPU are used here."""
    try:
        services.check_plan(document)
    except PlanError as problem:
        # A default that the model cannot have was asked for by nobody.
        if str(problem.value) in st.query_params.to_dict().values():
            st.warning(f"{problem} This page takes only the plan's model and GPU.")


def served_document(document: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as one that serves: a training plan's model and GPU with the form's requests."""
    values = current_values()
    context = values["context"]
    if values["job"] != "serve":
        # Nobody chose it: a model with fewer positions is served up to what it has.
        model, _ = parse_model(document["model"])
        context = min(context, model.max_positions)
    return {
        **document,
        "job": "serve",
        "workload": {
            "context_length": context,
            **{name: values[name] for name in SERVED},
        },
        "parallelism": {"world_size": values["gpus"] if values["job"] == "serve" else 1},
    }


def _served(plan: Plan, point: ServingPoint) -> None:
    try:
        found = serving_rows.answer_of(point)
    except services.PROBLEMS:
        keep_plan_in_url(link_of(plan, point, TraceChoice()))
        raise
    _metrics(point, found)
    _findings(point, found)
    _levers(point, found)
    left, right = st.columns(2)
    with left:
        _capacity(point)
    with right:
        _speed(point)
    _engines(point)
    st.markdown("### Requests that arrive over time")
    choice = choose_trace()
    keep_plan_in_url(link_of(plan, point, choice))
    with told_in_one_sentence():
        show_trace(point, choice)
    show_serving_run(plan, point, choice)
    show_compared()


def _metrics(point: ServingPoint, found: ServingAnswer) -> None:
    does_not = "does not fit"
    with metric_row():
        st.metric("Requests that fit", f"{found.max_requests:,}", border=True)
        st.metric("First token, alone", format_seconds(found.ttft_s), border=True)
        each = does_not if found.decode_s is None else format_seconds(found.decode_s)
        st.metric(f"Per token, {point.batch:,} at once", each, border=True)
        full = found.full_tokens_per_s
        st.metric(
            "Tokens/s when full", does_not if full is None else format_count(full), border=True
        )


def _findings(point: ServingPoint, found: ServingAnswer) -> None:
    chosen = unit()
    each = "each GPU holds" if point.tensor_parallel > 1 else "the GPU holds"
    with st.container(border=True, key="serving_findings"):
        st.markdown(
            f"**Capacity.** Of what an engine may take {each} {size_text(found.weights_bytes, chosen)} of "
            f"weights, which leaves {size_text(found.pool_bytes, chosen)} for caches. A token takes "
            f"{size_text(found.token_bytes, chosen)}, a request half way through its answer "
            f"{point.held_tokens:,} tokens of room: **{found.max_requests:,} requests fit**."
        )
        st.markdown(
            f"**First token.** A prompt of {point.prompt_tokens:,} tokens, with nobody else there, takes "
            f"{format_seconds(found.ttft_s)}. What waits in a queue is below."
        )
        st.markdown(_rest(point, found))
        st.caption(f"Predicted. Step times: {found.source}.")


def _rest(point: ServingPoint, found: ServingAnswer) -> str:
    if found.decode_s is None or found.tokens_per_s is None:
        return (
            f"**The rest.** {point.batch:,} requests at once do not fit: at most "
            f"{found.max_requests:,} do."
        )
    text = (
        f"**The rest.** A step gives each of {point.batch:,} requests a token in "
        f"{format_seconds(found.decode_s)}: {format_count(found.tokens_per_s)} tokens a second"
    )
    if found.full_decode_s is None or found.full_tokens_per_s is None:
        return f"{text}."
    return (
        f"{text}. With all {found.max_requests:,} that fit it is {format_seconds(found.full_decode_s)} and "
        f"{format_count(found.full_tokens_per_s)}: more at once share the reading of the weights, and each "
        "waits longer."
    )


def _levers(point: ServingPoint, found: ServingAnswer) -> None:
    changes = serving_rows.levers_of(point)
    label = st.segmented_control(
        "What a lever changes",
        [one.label for one in MEASURES],
        default=MEASURES[0].label,
        required=True,
        key="serving_measure",
    )
    measure = next(one for one in MEASURES if one.label == label)
    rows = serving_rows.lever_bars(found, changes, measure.field)
    better = "more" if measure.is_more_better else "less"
    left_out = [row["name"] for row in rows if row["factor"] is None]
    said = f" Does not fit: {', '.join(left_out)}." if left_out else ""
    show_figure(
        charts.levers_figure(rows, lambda value: serving_rows.figure_words(measure.field, value)),
        key="serving_levers",
        title=f"Lever by lever: {measure.label.lower()}",
        caption=f"Predicted, one change at a time against the choice above ({better} is better). A **system** "
        "lever gives the same model's answers, but for rounding; a **model** lever is another model, which "
        "must be trained so. A one-byte cache halves the bytes, not the time: each token and head has a scale. Weights of "
        f"fewer than 16 bits and several GPUs are worked out, no run measured them.{said}",
        rows=rows,
    )
    st.markdown("### All levers")
    show_table(serving_rows.lever_table(found, changes), key="serving_table", title="Levers")


def _capacity(point: ServingPoint) -> None:
    lines = serving_rows.capacity_lines(point)
    show_figure(
        charts.capacity_figure(lines, point.held_tokens),
        key="serving_capacity",
        title="How many requests fit",
        caption="Predicted: device bytes that the engine may take, less weights, a chunk's activations, "
        "CUDA graphs and the CUDA context, over the cache of a request that holds so many tokens. The dotted "
        "line is the request above, half way through its answer.",
        rows=[
            {"choice": name, "tokens": tokens, "requests": most}
            for name, points in lines.items()
            for tokens, most in points
        ],
    )


def _engines(point: ServingPoint) -> None:
    found = serving_rows.engines_of(point)
    st.markdown("### What an engine keeps for itself")
    show_table(serving_rows.engine_table(found), key="serving_engines", title="Capacity by engine")
    notes = dict.fromkeys(note for one in found for note in one.notes)
    st.caption(
        f"Predicted, on each GPU, for requests of {found[0].length:,} tokens (prompt and whole answer), in pages "
        f"of {found[0].page_tokens} tokens here and of {found[-1].page_tokens} in vLLM. Graphs here are for as "
        "many as fit half way through their answers. A release of vLLM stands for those until the next one "
        f"named. {' '.join(notes)}"
    )


def _speed(point: ServingPoint) -> None:
    lines = serving_rows.speed_lines(point)
    measured = serving_rows.measured_speeds(point, lines)
    said = (
        f"{len(measured)} decode runs of this model and cache are beside them (dots: recorded elsewhere, "
        "squares: measured here), in the colour of the nearest length."
        if measured
        else "No stored run decoded this model with this cache on this GPU."
    )
    show_figure(
        charts.speed_figure(lines, measured),
        key="serving_speed",
        title="How long a step takes",
        caption="Predicted (hollow): one token for every request, all of one length. A cross ends the line "
        f"where twice as many do not fit. {said}",
        rows=[
            {"length": name, "batch": batch, "step_s": step_s, "fits": fits}
            for name, points in lines.items()
            for batch, step_s, fits in points
        ]
        + measured,
    )
