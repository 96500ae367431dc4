"""Trace a model's variants at its own dimensions and put them into one file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from planner.traced import longest_sequence
from planner.traced_file import SCHEMA, read_trace
from runners.trace.build import read_templates, templates_text
from runners.trace.own_model import (
    OwnModel,
    UntraceableError,
    check_causal,
    check_stateless,
    supported_attentions,
)
from runners.trace.own_template import OwnTemplate, Range, trace_variant
from runners.trace.variants import Variant

MAX_TOKENS = 2**24
# Configurations' names for the tokens that a layer looks back on: below it a mask may be left out.
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size")
Watch = Callable[[int, int, str], None]


def trace_model(
    hf_config: Mapping[str, Any],
    *,
    attentions: tuple[str, ...],
    computes: tuple[str, ...],
    checkpointings: tuple[str, ...],
    known: Path,
    watch: Watch,
) -> str:
    """Return the text of a trace file with these variants, and those of `known` that still hold.

    `watch` is told (variants done, of how many, what is next). Raises UntraceableError.
    """
    check_causal(hf_config)
    model = OwnModel(hf_config)
    check_stateless(model)
    wanted = [
        Variant(str(hf_config["model_type"]), *choices)
        for choices in product(supported_attentions(model, attentions), computes, checkpointings)
    ]
    found = list(_traced(model, wanted, _ranges(hf_config), watch))
    head = _head(hf_config, model)
    heads = [template.head() for template in found]
    templates = {template.name: dict(template.template) for template in found}
    for variant, template in _kept_variants(known, head, {t.key for t in found}):
        heads.append(variant)
        templates[variant["name"]] = template
    return templates_text({**head, "variants": heads}, templates)


def _traced(
    model: OwnModel, wanted: Sequence[Variant], ranges: Sequence[Range], watch: Watch
) -> Iterator[OwnTemplate]:
    steps = list(product(wanted, ranges))
    traced, refused = 0, ""
    for done, (variant, lengths) in enumerate(steps):
        watch(done, len(steps), variant.key.replace("/", ", "))
        try:
            for template in trace_variant(model, variant, lengths):
                traced += 1
                yield template
        except UntraceableError as error:
            # One kernel or mode that this model has not leaves the others.
            refused = str(error)
    if not traced:
        raise UntraceableError(refused or f"{model.name} takes too few tokens to be traced.")


def _ranges(hf_config: Mapping[str, Any]) -> list[Range]:
    """Ranges of sequence lengths between which a model may run other operations."""
    longest = longest_sequence(hf_config, MAX_TOKENS)
    windows = {hf_config.get(key) for key in _WINDOWS}
    ends = sorted(w for w in windows if type(w) is int and 1 < w <= longest)
    starts = [2, *ends]
    return [
        Range(low, high)
        for low, high in zip(starts, [*(end - 1 for end in ends), longest], strict=True)
        if low <= high
    ]


def _head(hf_config: Mapping[str, Any], model: OwnModel) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "config": dict(hf_config),
        "architecture": model.name,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__).split("+")[0],
        "date": datetime.now(UTC).date().isoformat(),
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "num_layers": len(model.kinds),
        "ties_embeddings": model.ties_embeddings,
        "longest": longest_sequence(hf_config, MAX_TOKENS),
        "parameters": model.parameters(),
    }


def _kept_variants(
    known: Path, head: Mapping[str, Any], anew: set[str]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Variants of an earlier trace by the same libraries that were not traced anew."""
    with suppress(OSError, ValueError, RecursionError):
        data = json.loads(known.read_text())
        read_trace(data)
        same = ("transformers", "torch", "parameters", "num_layers")
        if any(data[key] != head[key] for key in same):
            return
        templates = read_templates(known)
        for variant in data["variants"]:
            if variant["key"] not in anew:
                yield variant, templates[variant["name"]]
