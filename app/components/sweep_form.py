"""What the Sweep page leaves open, and what an answer must keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.engine_stages import STAGES
from app.sweep_link import SweepLink
from planner.memory.parallel import group_size
from planner.plan import Plan
from planner.sweep_axes import MAX_MARGIN, Limits
from planner.workload import Attention, Checkpointing, Engine, TrainingWorkload

ENGINES, ATTENTIONS, CHECKPOINTINGS = (
    tuple(map(str, kind)) for kind in (Engine, Attention, Checkpointing)
)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
ROUNDS = (1, 2, 4, 8, 16, 32, 64)
DEGREES = (1, 2, 4, 8)
LENGTHS = tuple(2**power for power in range(9, 18))
SPLIT_LABELS: Mapping[str, str] = {
    "tensor_parallel": "Tensor parallel",
    "pipeline_parallel": "Pipeline stages",
    "context_parallel": "Context parallel",
    "expert_parallel": "Expert parallel",
}
EMPTY = "The plan's"


def sweep_form(
    plan: Plan, link: SweepLink
) -> tuple[dict[str, Sequence[Any]], Limits, float | None]:
    """Draw the form; return values by axis (what is not open is left out), limits and price.

    It begins with what `link` says and notes there what is chosen.
    """
    with st.expander("What is left open", expanded=True, icon=":material/tune:"):
        given = {**_choices(plan, link), **_sizes(plan, link), **_splits(link)}
        limits, price = _limits(link)
    for sentence in link.refused:
        st.warning(sentence, icon=":material/link_off:")
    return {name: values for name, values in given.items() if values}, limits, price


def _choices(plan: Plan, link: SweepLink) -> dict[str, Sequence[Any]]:
    workload = plan.workload
    assert isinstance(workload, TrainingWorkload)
    found: dict[str, Sequence[Any]] = {}
    columns = st.columns([6, 3, 3, 4])
    pills: tuple[tuple[str, str, Sequence[Any], Sequence[Any]], ...] = (
        ("engine", "Engines", ENGINES, ENGINES),
        ("zero_stage", "ZeRO stages", STAGES, STAGES),
        ("attention", "Attention", ATTENTIONS, [str(workload.attention)]),
        ("checkpointing", "Checkpointing", CHECKPOINTINGS, CHECKPOINTINGS),
    )
    for column, (name, label, options, chosen) in zip(columns, pills, strict=True):
        with column:
            found[name] = st.pills(
                label,
                options,
                default=link.values(name, chosen),
                selection_mode="multi",
                key=f"sweep_{name}",
                wrap=True,
            )
        link.keep(name, found[name], chosen)
    return found


def _sizes(plan: Plan, link: SweepLink) -> dict[str, Sequence[int]]:
    workload = plan.workload
    assert isinstance(workload, TrainingWorkload)
    gpus = plan.parallelism.world_size * group_size(plan.parallelism)
    rows: tuple[tuple[str, str, Sequence[int], int, Sequence[int]], ...] = (
        ("gpus", "GPUs of the whole job", GPUS, gpus, GPUS[:7]),
        ("micro_batch", "Micro-batches", BATCHES, workload.micro_batch, (1, 2, 4, 8, 16)),
        ("grad_accumulation", "Accumulation", ROUNDS, workload.grad_accumulation, ()),
        ("sequence_length", "Sequence lengths", LENGTHS, workload.sequence_length, ()),
    )
    found: dict[str, Sequence[int]] = {}
    for column, (name, label, options, own, chosen) in zip(
        st.columns([4, 3, 2, 2]), rows, strict=True
    ):
        begun = sorted({*chosen, own}) if chosen else []
        asked = link.values(name, begun)
        with column:
            found[name] = st.multiselect(
                label,
                sorted({*options, own, *asked}),
                default=asked,
                format_func=lambda value: f"{value:,}",
                key=f"sweep_{name}_{own}",
                placeholder=EMPTY,
            )
        link.keep(name, found[name], begun)
    return found


def _splits(link: SweepLink) -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    with st.popover("Splits of the model", icon=":material/call_split:", type="tertiary"):
        st.caption(
            "With nothing chosen, the plan's own. Combinations with a split take some hundred times as "
            "long to predict."
        )
        for name, label in SPLIT_LABELS.items():
            asked = link.values(name, ())
            found[name] = st.pills(
                label,
                sorted({*DEGREES, *asked}),
                default=asked,
                selection_mode="multi",
                key=f"sweep_{name}",
            )
            link.keep(name, found[name], ())
    return found


def _limits(link: SweepLink) -> tuple[Limits, float | None]:
    columns = st.columns(4)
    most_batch, most_gpus = link.number("global_batch", 1, 1e9), link.number("max_gpus", 1, 1e6)
    margin, cost = link.number("margin", 0, 100 * MAX_MARGIN), link.number("gpu_hour_cost", 0, 1e6)
    with columns[0]:
        batch = st.number_input(
            "Global batch",
            min_value=1,
            value=None if most_batch is None else int(most_batch),
            step=1,
            key="sweep_global_batch",
            placeholder="Any",
            help="Sequences in one step of all GPUs. Accumulation follows from it.",
        )
    with columns[1]:
        percent = st.number_input(
            "Memory left free, %",
            min_value=0,
            max_value=round(100 * MAX_MARGIN),
            value=round(margin or 0),
            step=1,
            key="sweep_margin",
            help="Of each GPU, beyond what the verdict 'fits' asks for.",
        )
    with columns[2]:
        most = st.number_input(
            "At most so many GPUs",
            min_value=1,
            value=None if most_gpus is None else int(most_gpus),
            step=1,
            key="sweep_max_gpus",
            placeholder="Any",
        )
    with columns[3]:
        price = st.number_input(
            "Your price of a GPU-hour",
            min_value=0.0,
            value=cost,
            key="sweep_price",
            placeholder="Unknown",
            help="In your currency. With it, every plan has its cost per million tokens.",
        )
    for name, value, begun in (
        ("global_batch", batch, None),
        ("margin", percent, 0),
        ("max_gpus", most, None),
        ("gpu_hour_cost", price, None),
    ):
        link.keep(name, value, begun)
    return Limits(global_batch=batch, margin=percent / 100, max_gpus=most), price
