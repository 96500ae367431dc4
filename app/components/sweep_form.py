"""What the Sweep page leaves open, and what an answer must keep to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from app.engine_stages import STAGES
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


def sweep_form(plan: Plan) -> tuple[dict[str, Sequence[Any]], Limits, float | None]:
    """Draw the form; return values by axis (what is not open is left out), limits and price."""
    with st.expander("What is left open", expanded=True, icon=":material/tune:"):
        given = {**_choices(plan), **_sizes(plan), **_splits()}
        limits, price = _limits()
    return {name: values for name, values in given.items() if values}, limits, price


def _choices(plan: Plan) -> dict[str, Sequence[Any]]:
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
                label, options, default=chosen, selection_mode="multi", key=f"sweep_{name}"
            )
    return found


def _sizes(plan: Plan) -> dict[str, Sequence[int]]:
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
        with column:
            found[name] = st.multiselect(
                label,
                sorted({*options, own}),
                default=sorted({*chosen, own}) if chosen else [],
                key=f"sweep_{name}_{own}",
                placeholder=EMPTY,
            )
    return found


def _splits() -> dict[str, Sequence[int]]:
    found: dict[str, Sequence[int]] = {}
    with st.popover("Splits of the model", icon=":material/call_split:", type="tertiary"):
        st.caption(
            "With nothing chosen, the plan's own. Combinations with a split take some hundred times as "
            "long to predict."
        )
        for name, label in SPLIT_LABELS.items():
            found[name] = st.pills(label, DEGREES, selection_mode="multi", key=f"sweep_{name}")
    return found


def _limits() -> tuple[Limits, float | None]:
    columns = st.columns(4)
    with columns[0]:
        batch = st.number_input(
            "Global batch",
            min_value=1,
            value=None,
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
            value=0,
            step=1,
            key="sweep_margin",
            help="Of each GPU, beyond what the verdict 'fits' asks for.",
        )
    with columns[2]:
        most = st.number_input(
            "At most so many GPUs",
            min_value=1,
            value=None,
            step=1,
            key="sweep_max_gpus",
            placeholder="Any",
        )
    with columns[3]:
        price = st.number_input(
            "Your price of a GPU-hour",
            min_value=0.0,
            value=None,
            key="sweep_price",
            placeholder="Unknown",
            help="In your currency. With it, every plan has its cost per million tokens.",
        )
    return Limits(global_batch=batch, margin=percent / 100, max_gpus=most), price
