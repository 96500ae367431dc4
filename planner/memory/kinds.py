"""The kind of every decoder layer: what its tensors depend on beside the model's dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from planner.model import ModelSpec
from planner.workload import Attention, Checkpointing, TrainingWorkload

PLAIN, SLIDING, MOE, CHECKPOINTED, FROZEN = "plain", "sliding", "moe", "checkpointed", "frozen"
START, END, ANY = "^", "$", "*"


def kind_name(traits: Sequence[str]) -> str:
    """Name a kind by its traits, given in the order of this module's constants."""
    return "+".join(traits) or PLAIN


def layer_kinds(
    spec: ModelSpec, workload: TrainingWorkload, sequence_length: int | None = None
) -> tuple[str, ...]:
    """Name the kind of each layer, at the workload's sequence length or another.

    transformers gives a layer with a sliding window a mask of its own: eager attention always, SDPA
    once the window is not longer than the sequence (`masking_utils._ignore_causal_mask_sdpa`).
    """
    length = workload.sequence_length if sequence_length is None else sequence_length
    slides = _window_matters(spec, workload.attention, length)
    recomputes = workload.checkpointing is not Checkpointing.NONE
    return _kinds(
        spec.sliding_layers if slides else (False,) * spec.num_layers,
        spec.expert_layers,
        workload.checkpoint_every if recomputes else 0,
        workload.frozen_layers,
    )


@lru_cache(maxsize=512)
def _kinds(
    slides: tuple[bool, ...], has_experts: tuple[bool, ...], checkpoint_every: int, frozen: int
) -> tuple[str, ...]:
    """Name the kinds; every so many layers one recomputes, or none for 0."""
    kinds = []
    for layer, (sliding, experts) in enumerate(zip(slides, has_experts, strict=True)):
        has = {
            SLIDING: sliding,
            MOE: experts,
            CHECKPOINTED: checkpoint_every > 0 and layer % checkpoint_every == 0,
            FROZEN: layer < frozen,
        }
        kinds.append(kind_name([trait for trait, holds in has.items() if holds]))
    return tuple(kinds)


def _window_matters(spec: ModelSpec, attention: Attention, sequence_length: int) -> bool:
    if spec.sliding_window is None or not any(spec.sliding_layers):
        return False
    if attention is Attention.SDPA:
        return sequence_length >= spec.sliding_window
    return attention is Attention.EAGER


def contexts(kinds: Sequence[str]) -> tuple[str, ...]:
    """Name each layer by the kinds of the layer before, itself and the layer after."""
    around = (START, *kinds, END)
    return tuple("|".join(around[i : i + 3]) for i in range(len(kinds)))


def wider_contexts(context: str) -> tuple[str, ...]:
    """A context, the same after any layer, and its kind after and before any layer.

    The model's ends are no layers: "^" and "$" stay.
    """
    before, kind, after = context.split("|")
    start = START if before == START else ANY
    end = END if after == END else ANY
    return context, f"{start}|{kind}|{after}", f"{start}|{kind}|{end}"


def kind_set(kinds: Sequence[str]) -> str:
    """Name the kinds that a model has; templates are stored by it."""
    return ",".join(sorted(set(kinds)))
