"""The form's workload, kernel and parallelism parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log2

import streamlit as st

from app import state
from app.components.variant_form import advanced, model_parallelism_form, training_variants_form
from app.engine_stages import STAGES, possible_stages
from planner.plan import MAX_COUNT, MAX_TOKENS_PER_SEQUENCE
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    KvDtype,
    Optimizer,
    Precision,
    WeightsDtype,
)

LENGTHS = tuple(2**power for power in range(7, 21))


def job_form() -> str:
    """Draw the choice between training and serving and return it."""
    return st.segmented_control(
        "Job",
        ("train", "serve"),
        default=state.DEFAULTS["job"],
        required=True,
        key="job",
        bind="query-params",
    )


def training_form() -> None:
    """Draw what one optimizer step of one GPU consists of."""
    st.markdown("**Workload**")
    _length("seq", "Sequence length")
    columns = st.columns(2)
    with columns[0]:
        _count("micro_batch", "Micro-batch", "Sequences per GPU in one forward.")
    with columns[1]:
        _count("grad_accumulation", "Grad accumulation", "Micro-batches per optimizer step.")
    columns = st.columns(2)
    with columns[0]:
        _choice("optimizer", "Optimizer", tuple(Optimizer), OPTIMIZER_HELP)
    with columns[1]:
        _choice("precision", "Precision", tuple(Precision), help=PRECISION_HELP)
    st.markdown("**Kernels**")
    _segments("attention", "Attention", tuple(Attention), ATTENTION_HELP)
    _segments("checkpointing", "Checkpointing", tuple(Checkpointing), CHECKPOINTING_HELP)
    with advanced("Loss, adapters, clipping, host", state.RARE_TRAINING):
        training_variants_form()


OPTIMIZER_HELP = (
    "adamw_fused, foreach and loop are PyTorch's AdamW in one kernel, in several, or tensor by tensor. "
    "adamw_triton is Peakmark's own kernel: it reads 16-bit gradients as they are (engine peakmark). "
    "adamw_8bit keeps its moments in bytes."
)
PRECISION_HELP = (
    "mixed: bf16 parameters and gradients, fp32 master copy and optimizer states. bf16 and fp32: "
    "everything in that type. autocast: fp32 tensors, bf16 compute."
)
ATTENTION_HELP = (
    "eager stores the score matrices; sdpa is PyTorch's fused attention; triton is Peakmark's own "
    "FlashAttention kernel. All three are exact."
)
CHECKPOINTING_HELP = (
    "full keeps only each layer's input and computes the layer again backward. selective keeps the "
    "results of matrix products and attention too, and computes only the rest again."
)
ENGINE_HELP = (
    "peakmark: the readable ZeRO engine of this product. fsdp2: PyTorch's fully_shard. ddp: whole "
    "copies, gradients reduced in buckets. zero_redundancy: ddp with PyTorch's "
    "ZeroRedundancyOptimizer. deepspeed: DeepSpeed's ZeRO."
)
ZERO_HELP = "0: nothing sharded. 1: optimizer. 2: and gradients. 3: and parameters."


def serving_form() -> None:
    """Draw what one serving GPU holds."""
    st.markdown("**Workload**")
    _length("context", "Context length")
    columns = st.columns(2)
    with columns[0]:
        _count("sequences", "Sequences at once", "Requests held in the cache together.")
    with columns[1]:
        st.number_input(
            "Usable share",
            min_value=0.01,
            max_value=1.0,
            value=state.DEFAULTS["utilization"],
            step=0.01,
            key="utilization",
            bind="query-params",
            help="Share of the GPU's memory that the serving engine may take.",
        )
    columns = st.columns(2)
    with columns[0]:
        _choice("weights_dtype", "Weights", tuple(WeightsDtype))
    with columns[1]:
        _choice("kv_dtype", "KV cache", tuple(KvDtype))


def parallelism_form() -> None:
    """Draw engine, ZeRO stage, number of GPUs, and how each copy of the model is split."""
    st.markdown("**Parallelism**")
    columns = st.columns(2)
    with columns[0]:
        _choice("engine", "Engine", tuple(Engine), ENGINE_HELP, on_change=_keep_stage_possible)
    with columns[1]:
        _count("gpus", "Data-parallel ranks", "GPUs that each train on data of their own.")
    _segments("zero", "ZeRO stage", (0, 1, 2, 3), ZERO_HELP)
    engine = st.session_state["engine"]
    stages = possible_stages(engine)
    if len(stages) < len(STAGES):
        st.caption(f"{engine} has ZeRO stage {' and '.join(str(stage) for stage in stages)} only.")
    with advanced("Model parallelism", state.MODEL_PARALLEL):
        model_parallelism_form()


def replicas_form() -> None:
    """Draw how many GPUs serve, each with its own copy of the model."""
    _count("gpus", "GPUs", "Replicas: each GPU serves its own copy of the model.")


def _keep_stage_possible() -> None:
    """Choosing an engine that lacks the stage moves it to the highest that the engine has."""
    stages = possible_stages(st.session_state["engine"])
    if st.session_state["zero"] not in stages:
        st.session_state["zero"] = max(stages)


def _count(key: str, label: str, help_text: str) -> None:
    st.number_input(
        label,
        min_value=1,
        max_value=MAX_COUNT,
        value=state.DEFAULTS[key],
        step=1,
        key=key,
        bind="query-params",
        help=help_text,
    )


def _choice(
    key: str,
    label: str,
    options: tuple[str, ...],
    help: str | None = None,
    on_change: Callable[[], None] | None = None,
) -> None:
    names = [str(option) for option in options]
    st.selectbox(
        label,
        names,
        index=names.index(state.DEFAULTS[key]),
        key=key,
        bind="query-params",
        help=help,
        on_change=on_change or "rerun",
    )


def _segments(
    key: str,
    label: str,
    options: Sequence[str] | Sequence[int],
    help_text: str,
    on_change: Callable[[], None] | None = None,
) -> None:
    st.segmented_control(
        label,
        [option if isinstance(option, int) else str(option) for option in options],
        default=state.DEFAULTS[key],
        required=True,
        key=key,
        bind="query-params",
        help=help_text,
        on_change=on_change or "rerun",
    )


def _length(key: str, label: str) -> None:
    """A slider over powers of two beside the exact number: one value, two ways to set it."""
    slider_key = f"{key}_power"
    columns = st.columns([3, 2], vertical_alignment="bottom")
    with columns[1]:
        exact = st.number_input(
            f"{label}, exact",
            min_value=1,
            max_value=MAX_TOKENS_PER_SEQUENCE,
            value=state.DEFAULTS[key],
            step=1,
            key=key,
            bind="query-params",
            label_visibility="collapsed",
        )
    st.session_state[slider_key] = _nearest_power(exact)
    with columns[0]:
        st.select_slider(
            f"{label} (tokens)",
            LENGTHS,
            key=slider_key,
            format_func=lambda length: f"{length:,}",
            on_change=_take_power,
            args=(key, slider_key),
        )


def _nearest_power(length: int | None) -> int:
    bounded = min(max(length or LENGTHS[0], LENGTHS[0]), LENGTHS[-1])
    return 2 ** round(log2(bounded))


def _take_power(key: str, slider_key: str) -> None:
    st.session_state[key] = st.session_state[slider_key]
