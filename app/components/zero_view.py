"""The ZeRO page: what stages and engines hold, send and save for the plan, predicted and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app import real_rows, services, zero_beside, zero_rows
from app.charts.style import size_text
from app.charts.zero import holds_figure, sends_figure
from app.components.current_plan import current_document, keep_plan_in_url
from app.components.figure import show_figure, show_table
from app.components.header import unit
from app.components.problems import told_in_one_sentence
from app.engine_stages import STAGES
from planner.communication import NETWORK_ID
from planner.plan import Plan
from planner.workload import Engine

WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ENGINES = tuple(str(engine) for engine in Engine)
WHAT_ZERO_DOES = (
    "ZeRO divides what training keeps beside the activations over the data-parallel ranks. Stage 0: "
    "nothing, every rank keeps all. Stage 1: the optimizer's states. Stage 2: gradients too. Stage 3: "
    "parameters too, which are then gathered for each use. The engine peakmark shards parameters "
    "between steps from stage 1 on; at stages 1 and 2 it gathers them once a step."
)


def show_zero_page() -> None:
    """Draw stages and engines for the plan that the form describes."""
    with told_in_one_sentence():
        document = current_document()
        if document is None:
            st.info("Give a model on the Plan page to see its stages.", icon=":material/info:")
            st.page_link("app_pages/plan.py", label="To the plan", icon=":material/straighten:")
            return
        plan = services.check_plan(document)
        keep_plan_in_url()
        zero_rows.check_trains(plan)
        st.caption(WHAT_ZERO_DOES)
        found = zero_rows.zero_rows(plan, *_choices(plan))
        measured, timed = zero_rows.measured_like(plan), zero_rows.timed_like(plan)
        _findings(plan, found["savings"])
        if not found["rows"]:
            st.info("None of these engines has one of these stages.", icon=":material/info:")
        else:
            _holds(found["rows"], measured, timed, plan.hardware.visible_bytes)
            _sends(found["rows"], plan)
        _timed(timed)
        _real(plan)
        _beside(plan)
        _alike()
        _refused(found["refused"])


def _choices(plan: Plan) -> tuple[Sequence[str], Sequence[int], Sequence[int], str, str]:
    """Draw what to compare; return engines, stages, world sizes and the two links."""
    own = plan.parallelism.world_size
    columns = st.columns([3, 2, 3])
    with columns[0]:
        engines = st.pills(
            "Engines",
            ENGINES,
            default=ENGINES,
            selection_mode="multi",
            key="zero_engines",
            wrap=True,
        )
    with columns[1]:
        stages = st.pills(
            "Stages", STAGES, default=STAGES, selection_mode="multi", key="zero_stages"
        )
    with columns[2]:
        worlds = st.multiselect(
            "Data-parallel ranks",
            sorted({*WORLDS, own}),
            default=[own],
            max_selections=4,
            key=f"zero_worlds_{own}",
            placeholder="The plan's",
        )
    left, right = st.columns(2)
    with left:
        in_node = _link("Within a node", "zero_in_node", zero_rows.OWN_LINK, between_nodes=False)
    with right:
        network = _link("Between nodes", "zero_network", NETWORK_ID, between_nodes=True)
    return engines, stages, worlds or [own], in_node, network


def _link(label: str, key: str, default: str, *, between_nodes: bool) -> str:
    names = zero_rows.link_choices(between_nodes)
    if not between_nodes:
        names = {zero_rows.OWN_LINK: "The GPU's own link", **names}
    ids = list(names)
    return st.selectbox(
        label,
        ids,
        index=ids.index(default),
        format_func=lambda link: names[link],
        key=key,
        help="What the time of collectives is worked out with: bytes per GPU and direction.",
    )


def _findings(plan: Plan, savings: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Say in words what each stage of the plan's engine saves, and when ZeRO is not the answer."""
    chosen, parallelism = unit(), plan.parallelism
    own = [
        pair
        for pair in savings
        if pair[1]["engine"] == parallelism.engine
        and pair[1]["world_size"] == parallelism.world_size
    ]
    left, right = st.columns(2)
    with left, st.container(border=True, key="zero_savings", height="stretch"):
        st.markdown("**What does each stage save here?**")
        sentences = zero_rows.saving_sentences(own, lambda size: size_text(size, chosen))
        for sentence in sentences:
            st.markdown(sentence)
        if not sentences:
            st.markdown(
                f"{parallelism.engine} has no two stages to compare here: choose peakmark, fsdp2 or "
                "deepspeed with neighbouring stages, and the plan's number of ranks."
            )
    with right, st.container(border=True, key="zero_answer", height="stretch"):
        st.markdown("**Is ZeRO the answer?**")
        found = zero_rows.zero_remainder(plan)
        for sentence in zero_rows.remainder_sentences(found, lambda size: size_text(size, chosen)):
            st.markdown(sentence)


def _holds(
    rows: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]],
    capacity_bytes: int,
) -> None:
    places = {(row["engine"], row["zero_stage"], row["world_size"]) for row in rows}
    shown = [m for m in measured if (m["engine"], m["zero_stage"], m["world_size"]) in places]
    lines = zero_rows.table_rows(rows, shown, timed)
    said = (
        f"{len(shown)} of these rows were measured (filled, the bar below)."
        if shown
        else "Nothing stored measured this model and workload with these stages yet."
    )
    show_figure(
        holds_figure(rows, shown, capacity_bytes, unit()),
        key="zero_holds",
        title="What each stage and engine holds at its peak",
        caption="Predicted (hatched) and measured (filled) allocated bytes of rank 0: blocks of "
        "torch's caching allocator, at the highest moment of a steady step. Gathered are whole "
        "parameters in use or in flight; gradients in flight count as gradients. The golden tick is "
        f"the ideal: shards and what must be whole at that moment. {said}",
        rows=lines,
    )
    st.markdown("### Stage by stage")
    table = [{**_in_unit(line), **_not_measured(line)} for line in lines]
    show_table(table, key="zero_table", title="Stages and engines")


def _not_measured(line: Mapping[str, Any]) -> dict[str, str]:
    return {"measured": "not measured"} if line["measured_bytes"] is None else {}


def _in_unit(line: Mapping[str, Any]) -> dict[str, Any]:
    """Write a line's bytes in the chosen unit, for people; the figure's CSV has the bytes."""
    chosen = unit()
    shown: dict[str, Any] = {}
    for name, value in line.items():
        words = name.removesuffix("_bytes").replace("_percent", " %").replace("_", " ")
        is_size = name.endswith("_bytes") and value is not None
        shown[words] = size_text(value, chosen) if is_size else value
    return shown


def _sends(rows: Sequence[Mapping[str, Any]], plan: Plan) -> None:
    lines = zero_rows.communication_rows(rows)
    nodes = plan.hardware.gpus_per_node
    show_figure(
        sends_figure(rows, unit()),
        key="zero_sends",
        title="What each stage and engine sends in a step",
        caption="Predicted: bytes that each rank sends in a ring, over the slowest link on the way "
        f"(nodes of {nodes} GPUs). Not overlapped with computing and without latency. Full buffers "
        "and calls equal the formula to the byte in every run that counted them.",
        rows=lines,
    )
    st.markdown("### Collective by collective")
    show_table([_in_unit(line) for line in lines], key="zero_sent", title="Collectives of a step")


def _timed(lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw what engines took in turns on one GPU, where a run timed this work so."""
    if not lines:
        return
    st.markdown("### Step time in the same run")
    st.caption(zero_rows.timed_sentence(lines))
    show_table(zero_rows.timed_table(lines), key="zero_timed", title="Engines timed in turns")


def _real(plan: Plan) -> None:
    """Draw runs with a GPU for each rank beside the same plans alone, where any were traced."""
    is_own, lines = real_rows.real_lines(plan)
    if not lines:
        return
    st.markdown("### Real ranks beside one alone")
    which = "" if is_own else "No stored run of this plan's work had several GPUs; these had. "
    st.caption(
        f"{which}One process per GPU over NCCL, and (alone) the same plan as one rank by itself; rank "
        "0. Exposed: how long only collectives ran in a traced step, which is what it waits for. "
        "Losses: the largest distance of a step's loss from our engine's lowest stage (attention's backward "
        "adds up in no fixed order; below they are compared with kernels that do); FSDP2 begins with "
        "fp32 numbers that ours rounds to bf16, and from the same ones trains alike."
    )
    chosen = unit()
    table = real_rows.real_table(lines, lambda size: size_text(size, chosen))
    show_table(table, key="zero_real", title="Real ranks beside one alone")
    st.markdown("### Collectives timed between GPUs")
    st.caption(
        "Of the traced step: calls, full buffers, the time of NCCL's kernels and bus bandwidth, what a "
        "rank's link carries. A call's time is that of the rank that came last; where calls were not kept "
        "apart it is a rank's sum, with waits for the other, and the bandwidth is less than the link's."
    )
    timed = real_rows.collective_table(lines, lambda size: size_text(size, chosen))
    show_table(timed, key="zero_real_sent", title="Collectives timed between GPUs")


def _beside(plan: Plan) -> None:
    """Draw runs of the plan's work that offloaded the optimizer, or stepped it with our kernel."""
    if offloaded := zero_beside.offloaded_like(plan):
        st.markdown("### The optimizer in host memory")
        st.caption(
            "Peak on the device, and (kept) of the same plan with its optimizer there; what the run held in "
            "host memory, and predicted; the step's time beside that plan's (* with a thread on every CPU, "
            "which were too many), and what the host adds to it, predicted. GiB and milliseconds."
        )
        show_table(offloaded, key="zero_offloaded", title="The optimizer in host memory")
    if kernels := zero_beside.kernels_like(plan):
        st.markdown("### Our AdamW kernel beside torch's")
        st.caption(
            "Optimizer adamw_triton and adamw_fused at the same plan: peaks, the optimizer's phase and the "
            "whole step. GiB and milliseconds."
        )
        show_table(kernels, key="zero_kernels", title="Our AdamW kernel beside torch's")


def _alike() -> None:
    lines = zero_beside.alike()
    if lines:
        st.markdown("### The same numbers from every stage and engine")
        st.caption(zero_beside.alike_sentence(lines))
        show_table(lines, key="zero_alike", title="Trainings compared value by value")


def _refused(refused: Mapping[str, str]) -> None:
    for engine, sentence in refused.items():
        st.caption(f":material/info: {engine} is not shown: {sentence}")
