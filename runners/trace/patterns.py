"""Which sequences of layers are traced, and how a model is made to have them."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

from torch import nn

from planner.memory.kinds import (
    CHECKPOINTED,
    FROZEN,
    MOE,
    PLAIN,
    SLIDING,
    kind_name,
)
from runners.trace.variants import Variant
from runners.zero.groups import decoder_layers

Pattern = tuple[str, ...]
SHORT_WINDOW = 7  # far below the traced sequence


def traits(kind: str) -> tuple[str, ...]:
    """The traits of a kind, see `kinds.kind_name`."""
    return () if kind == PLAIN else tuple(kind.split("+"))


# Each of these has inner layers of every kind after and before those it can have as neighbours.
def homogeneous(kind: str) -> list[Pattern]:
    """One kind of layer in models of any depth."""
    return [(kind,) * 4, (kind,) * 2, (kind,)]


def one_among(rare: str, other: str) -> list[Pattern]:
    """Single layers of one kind among others, in models that end with either."""
    r, o = rare, other
    return [(r, o, o, r, o, r, o), (r, o, r), (r, o, o)]


def one_after_many(many: str, one: str) -> list[Pattern]:
    """Several layers of one kind, then a single one of another, and so on."""
    m, o = many, one
    return [(m, m, m, o, m, o), (m, o, m), (m, o, m, m), (m,)]


def one_change(first: str, then: str) -> list[Pattern]:
    """Any number of `first`, then any number of `then`."""
    a, b = first, then
    return [(a, a, a, b, b, b)]


def frozen_below(frozen: str, trained: str) -> list[Pattern]:
    """Frozen layers, then trained ones: the first of these differs from those that follow."""
    f, t = frozen, trained
    return [(f, f, f, t, t, t), (f, t, t), (f, t)]


def every_end(period: Sequence[str]) -> list[Pattern]:
    """A repeated pattern in models that end anywhere in it."""
    twice = tuple(period) * 4
    longest = len(period) + 4
    return [twice[:count] for count in range(longest, longest - len(period), -1)]


def with_trait(kind: str, trait: str) -> str:
    """The kind that has one more trait."""
    order = (SLIDING, MOE, CHECKPOINTED, FROZEN)
    present = {*traits(kind), trait}
    return kind_name([name for name in order if name in present])


def prepare_layers(model: nn.Module, pattern: Pattern) -> None:
    """Switch checkpointing on and gradients off, layer by layer, as the pattern says."""
    for layer, kind in zip(decoder_layers(model), pattern, strict=True):
        layer.gradient_checkpointing = CHECKPOINTED in traits(kind)  # type: ignore[assignment]
        if FROZEN in traits(kind):
            layer.requires_grad_(False)
    if FROZEN in traits(pattern[0]):
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        embedding.requires_grad_(False)


def pattern_fields(pattern: Pattern) -> dict[str, Any]:
    """Hugging Face config fields of a model with these layers."""
    fields: dict[str, Any] = {"num_hidden_layers": len(pattern)}
    slides = [SLIDING in traits(kind) for kind in pattern]
    if any(slides):
        fields |= {"sliding_window": SHORT_WINDOW, "use_sliding_window": True}
        names = {True: "sliding_attention", False: "full_attention"}
        fields["layer_types"] = [names[slide] for slide in slides]
    return fields


# Families whose layers may have a sliding window: in every layer; in the last layers; by a period.
SLIDING_THROUGHOUT = ("mistral", "phi3", "mixtral", "qwen3_moe")
SLIDING_AT_THE_END = ("qwen2", "qwen3")
SLIDING_PERIOD = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2}  # the last of each period is full
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
DENSE_FIRST = ("deepseek_v2", "deepseek_v3", "qwen3_moe")
CHECKPOINT_INTERVALS = (2, 3, 4)


def traced_patterns(variant: Variant) -> list[Pattern]:
    """The sequences of layers that a variant is traced with."""
    family = variant.family
    has_mask = variant.implementation in ("eager", "sdpa")
    base = with_trait(PLAIN, MOE) if family in EXPERTS else PLAIN
    if variant.loss != "hf":  # it changes nothing in a layer, and is grafted onto other patterns
        whole = base if variant.checkpointing == "none" else with_trait(base, CHECKPOINTED)
        return homogeneous(whole)
    # Adapters are for whole models, and so are packed rows; a batch of one row is much like several:
    # fewer patterns do.
    is_first = not (variant.adapters or variant.is_packed or variant.differs_little)
    patterns = homogeneous(base)
    if family in DENSE_FIRST:
        patterns += [*one_change(PLAIN, base), *homogeneous(PLAIN)]
    if has_mask:
        patterns += _sliding(family, base, is_first)
    if variant.checkpointing != "none":
        patterns = [tuple(with_trait(k, CHECKPOINTED) for k in pattern) for pattern in patterns]
        if is_first and family != "gemma3_text":  # with its period of six, too many
            patterns += _partly_checkpointed(family, base, has_mask)
    if is_first and not variant.attention.endswith("_mha") and variant.compute != "fp32":
        recomputed = variant.checkpointing != "none"
        trained = with_trait(base, CHECKPOINTED) if recomputed else base
        patterns += frozen_below(with_trait(trained, FROZEN), trained)
    return list(dict.fromkeys(patterns))


def _sliding(family: str, base: str, in_any_mix: bool) -> list[Pattern]:
    slides = with_trait(base, SLIDING)
    if family in SLIDING_THROUGHOUT:
        return homogeneous(slides)
    if family in SLIDING_AT_THE_END:
        return [*homogeneous(slides), *(one_change(base, slides) if in_any_mix else [])]
    if family in SLIDING_PERIOD:
        # Where the period is long, a shallow model has no full layer.
        shallow = homogeneous(slides) if SLIDING_PERIOD[family] > 2 else []
        return [*shallow, *one_after_many(slides, base)]
    return []


def _partly_checkpointed(family: str, base: str, has_mask: bool) -> list[Pattern]:
    slides = with_trait(base, SLIDING)
    if family in SLIDING_PERIOD and has_mask:
        kinds = [slides] * (SLIDING_PERIOD[family] - 1) + [base]
        intervals = [_checkpointed_every(kinds, every) for every in CHECKPOINT_INTERVALS]
        return [pattern for period in intervals for pattern in every_end(period)]
    patterns = one_among(with_trait(base, CHECKPOINTED), base)
    if family in (*SLIDING_THROUGHOUT, *SLIDING_AT_THE_END) and has_mask:
        patterns += one_among(with_trait(slides, CHECKPOINTED), slides)
    return patterns


def _checkpointed_every(kinds: Sequence[str], every: int) -> Pattern:
    return tuple(
        with_trait(kinds[i % len(kinds)], CHECKPOINTED) if i % every == 0 else kinds[i % len(kinds)]
        for i in range(lcm(len(kinds), every))
    )
