"""What cannot be trained as planned, and why: combinations that no single field shows."""

from __future__ import annotations

from planner.engines import check_engine, check_stage
from planner.errors import PlanError
from planner.memory.templates import (
    has_template,
    has_templates,
    load_moments,
    template_family,
    traced,
)
from planner.model import ModelSpec
from planner.splits import check_splits
from planner.untraced import untraced
from planner.variants import check_variants
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Parallelism,
    TrainingWorkload,
)

MAX_TRITON_HEAD_DIM = 256


def check_parallelism(parallelism: Parallelism) -> None:
    """Raise PlanError where the engine has no such stage."""
    check_stage(parallelism)


def check_length(model: ModelSpec, field_name: str, length: int) -> None:
    """Raise PlanError where a model has a learned row for each position and too few of them."""
    if model.has_learned_positions and length > model.max_positions:
        raise PlanError(
            field_name, length, f"at most {model.max_positions}, the positions {model.name} has"
        )


def _attention_obstacle(model: ModelSpec, workload: TrainingWorkload) -> str | None:
    """Return why no step of this model can be planned with the chosen kernel, or None."""
    if workload.attention is Attention.EAGER:
        return None
    if workload.attention is Attention.TRITON:
        return _triton_obstacle(model, workload)
    if model.attention_logit_softcap is not None or model.family == "gemma2":
        return "it does not cap attention logits, as this model does"
    if model.has_attention_sinks:
        return "it knows no attention sinks, which this model has"
    return None


def _triton_obstacle(model: ModelSpec, workload: TrainingWorkload) -> str | None:
    """Return why no step of this model can be planned with our kernel, or None.

    The kernel itself does more than the steps that have been traced with it (docs/kernels.md).
    """
    if model.family == "falcon":
        return "transformers' Falcon takes no attention function from outside"
    if model.head_dim > MAX_TRITON_HEAD_DIM:
        return f"its largest head size is {MAX_TRITON_HEAD_DIM}, this model's is {model.head_dim}"
    untraced = _untraced_with_triton(model, workload)
    return untraced and f"no step with {untraced} has been traced with it"


def _untraced_with_triton(model: ModelSpec, workload: TrainingWorkload) -> str | None:
    """Return what of a step our kernel can compute and no trace shows, or None."""
    if model.attention_logit_softcap is not None:
        return "capped attention logits, which this model has,"
    if model.has_attention_sinks:
        return "attention sinks, which this model has,"
    if workload.packed:
        return "several documents in a row"
    if model.value_dim != model.head_dim:
        return f"keys of head size {model.head_dim} and values of {model.value_dim}"
    return None


def _check_packed(workload: TrainingWorkload) -> None:
    """Raise PlanError where a row is too short for two documents."""
    if workload.packed and workload.sequence_length < _MIN_PACKED_LENGTH:
        field, least = "workload.sequence_length", f"at least {_MIN_PACKED_LENGTH}"
        raise PlanError(field, workload.sequence_length, f"{least}, a token of each document")


_MIN_PACKED_LENGTH = 2


def _check_attention(model: ModelSpec, workload: TrainingWorkload) -> None:
    """Raise PlanError where the chosen kernel cannot compute this model's attention."""
    obstacle = _attention_obstacle(model, workload)
    if obstacle is None:
        return
    eager_only = model.attention_logit_softcap is not None or model.has_attention_sinks
    others = "eager" if eager_only or workload.attention is Attention.SDPA else "eager or sdpa"
    sentence = f"workload.attention is '{workload.attention}': {obstacle}; use {others}."
    raise PlanError("workload.attention", str(workload.attention), others, sentence=sentence)


def _check_checkpointing(workload: TrainingWorkload) -> None:
    """Raise PlanError where a number of layers is given and none is checkpointed."""
    every = workload.checkpoint_every
    if every > 1 and workload.checkpointing is Checkpointing.NONE:
        sentence = (
            f"workload.checkpoint_every is {every}, but no layer is checkpointed: set "
            "workload.checkpointing to full or selective."
        )
        raise PlanError("workload.checkpoint_every", every, "1", sentence=sentence)


def _check_traced(model: ModelSpec) -> None:
    """Raise PlanError for a family of which no training step has been traced."""
    if not has_templates(template_family(model)):
        sentence = (
            f"model.family is {model.family}: its training step has not been traced yet; it can be "
            "planned for serving."
        )
        raise PlanError("model.family", model.family, "a traced family", sentence=sentence)


def _is_traced(model: ModelSpec, workload: TrainingWorkload) -> bool:
    """Whether a step with these choices has been traced for this family, in this order of layers."""
    template = traced(model, workload, workload.sequence_length)
    if not has_template(template):
        return False
    try:
        load_moments(template, "kept")
    except PlanError:
        return False
    return True


def _check_own_trace(
    model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism
) -> None:
    """Raise PlanError for what is planned of families only, where a model was traced by itself."""
    if model.trace is None:
        return
    checks = {
        "workload.attention": (str(workload.attention), Attention.TRITON, "eager or sdpa"),
        "parallelism.engine": (str(parallelism.engine), Engine.DEEPSPEED, "peakmark, fsdp2 or ddp"),
    }
    for name, (value, refused, allowed) in checks.items():
        if value == refused:
            reason = f"it is planned for families with templates, and {model.family} was traced"
            sentence = f"{name} is {value!r}: {reason} by itself; use {allowed}."
            raise PlanError(name, value, allowed, sentence=sentence)
    degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
    for name in (name for name in degrees if getattr(parallelism, name) > 1):
        value = getattr(parallelism, name)
        sentence = (
            f"parallelism.{name} is {value}: how {model.family}, which was traced by itself, is "
            "split over GPUs is not predicted; use 1."
        )
        raise PlanError(f"parallelism.{name}", value, "1", sentence=sentence)


def _check_choices(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError for choices that exclude each other, traced or not."""
    _check_own_trace(model, workload, parallelism)
    check_engine(workload, parallelism)
    check_variants(model, workload, parallelism)
    _check_checkpointing(workload)
    _check_traced(model)
    check_length(model, "workload.sequence_length", workload.sequence_length)
    _check_packed(workload)
    _check_attention(model, workload)
    check_splits(model, workload, parallelism)


def check_training(model: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism) -> None:
    """Raise PlanError where the model cannot be trained like this; the sentence says why."""
    check_parallelism(parallelism)
    _check_choices(model, workload, parallelism)
    if _is_traced(model, workload):
        return

    def works(other: TrainingWorkload) -> bool:
        try:
            _check_choices(model, other, parallelism)
        except PlanError:
            return False
        return _is_traced(model, other)

    raise untraced(model, workload, works)
