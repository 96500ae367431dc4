"""The form's rare choices, folded away: training variants and splits of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from app import state
from app.components.header import current_values
from planner.plan import MAX_COUNT, MAX_NORM
from planner.workload import BaseDtype, LoraTargets, Loss, ReduceDtype

LOSS_HELP = (
    "hf: all logits at once, as transformers does. chunked: chunk by chunk of the tokens, each "
    "computed again backward. fused_linear: gradients made in the forward, no stored logits."
)
LORA_HELP = "0 trains the model itself; above, adapters of that rank on frozen weights."
TARGETS_HELP = "qv: query and value projections. all_linear: every linear layer of a block."
BASE_HELP = "How the frozen weights below adapters are stored; nf4: 4 bits each, as QLoRA does."
SYNC_HELP = "Off: gradients are reduced over the ranks after the last micro-batch only."
REDUCE_HELP = "The dtype in which ranks sum gradients; auto is the engine's own."
EXPANDABLE_HELP = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: segments that grow, so that fewer bytes are "
    "reserved without a tensor in them."
)
OFFLOAD_HELP = (
    "ZeRO-Offload with engine peakmark: fp32 parameters and moments in host memory, AdamW on the CPU; "
    "less on the GPU, a longer step."
)


def advanced(title: str, keys: Sequence[str]) -> DeltaGenerator:
    """Return a fold for rare choices; it is open, and says so, while one is not at its default."""
    values = current_values()
    changed = [key for key in keys if values[key] != state.DEFAULTS[key]]
    label = f"{title} · {len(changed)} set" if changed else title
    return st.expander(label, expanded=bool(changed), icon=":material/tune:")


def training_variants_form() -> None:
    """Draw loss, adapters, frozen parts, packing, reduction and the allocator's mode."""
    values = current_values()
    columns = st.columns(2)
    with columns[0]:
        _choice("loss", "Loss", tuple(Loss), LOSS_HELP)
        _number("lora_rank", "LoRA rank", LORA_HELP, low=0)
        adapted = bool(values["lora_rank"])
        _choice("base_dtype", "Base weights", tuple(BaseDtype), BASE_HELP, applies=adapted)
        _choice("reduce_dtype", "Reduced in", tuple(ReduceDtype), REDUCE_HELP)
    with columns[1]:
        _number(
            "checkpoint_every",
            "Checkpoint every",
            "With checkpointing: layers 0, k, 2k, ... only.",
            applies=values["checkpointing"] != "none",
        )
        _choice("lora_targets", "LoRA on", tuple(LoraTargets), TARGETS_HELP, applies=adapted)
        _number("frozen_layers", "Frozen layers", "The embedding and the first k layers.", low=0)
        st.number_input(
            "Clip at norm",
            min_value=0.0,
            max_value=MAX_NORM,
            value=state.DEFAULTS["max_grad_norm"],
            step=0.5,
            key="max_grad_norm",
            bind="query-params",
            help="Largest norm of all gradients over all ranks; 0 clips nothing.",
        )
    accumulates = values["grad_accumulation"] != 1
    _switch("sync_each_micro_batch", "Reduce each micro-batch", SYNC_HELP, applies=accumulates)
    _switch("packed", "Packed documents", "Two per row, each blind to the other.")
    _switch("expandable_segments", "Expandable segments", EXPANDABLE_HELP)
    _switch("offload_optimizer", "Optimizer in host memory", OFFLOAD_HELP)


def model_parallelism_form() -> None:
    """Draw over how many GPUs each copy of the model is split, and along what."""
    values = current_values()
    columns = st.columns(2)
    with columns[0]:
        _number("tensor_parallel", "Tensor", "GPUs that split every layer's matrices.")
        _number("context_parallel", "Context", "GPUs that split each sequence.")
    with columns[1]:
        _number("pipeline_parallel", "Pipeline", "Stages that split the layers.")
        _number("expert_parallel", "Expert", "Data-parallel ranks that split a layer's experts.")
    _switch(
        "sequence_parallel",
        "Sequence parallel",
        "Tensor-parallel GPUs split norms and residuals along the sequence too.",
        applies=values["tensor_parallel"] != 1,
    )
    split = _factor(values)
    if split > 1:
        gpus = split * (values["gpus"] or 1)
        st.caption(f"{gpus:,} GPUs in all: {values['gpus']} data-parallel ranks of {split} each.")


def _factor(values: dict[str, Any]) -> int:
    """GPUs of one data-parallel rank."""
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel")
    tensor, pipeline, context = (values[name] or 1 for name in names)
    return int(tensor * pipeline * context)


def _is_idle(key: str, applies: bool) -> bool:
    """Greyed out where it would do nothing, unless it must be set back first."""
    return not applies and current_values()[key] == state.DEFAULTS[key]


def _number(key: str, label: str, help_text: str, low: int = 1, applies: bool = True) -> None:
    st.number_input(
        label,
        min_value=low,
        max_value=MAX_COUNT,
        value=state.DEFAULTS[key],
        step=1,
        key=key,
        bind="query-params",
        help=help_text,
        disabled=_is_idle(key, applies),
    )


def _choice(
    key: str, label: str, options: Sequence[str], help_text: str, applies: bool = True
) -> None:
    names = [str(option) for option in options]
    st.selectbox(
        label,
        names,
        index=names.index(state.DEFAULTS[key]),
        key=key,
        bind="query-params",
        help=help_text,
        disabled=_is_idle(key, applies),
    )


def _switch(key: str, label: str, help_text: str, applies: bool = True) -> None:
    st.toggle(
        label,
        value=state.DEFAULTS[key],
        key=key,
        bind="query-params",
        help=help_text,
        disabled=_is_idle(key, applies),
    )
