"""The stored templates are what tracing the installed transformers gives today."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.memory.templates import _family_file
from runners.trace.build import _numbered_live, _Pool
from runners.trace.model import FAMILIES, Variant, variants
from runners.trace.template import build_template


def stored_section(family: str, key: str, part: str, name: str) -> Any:
    data = _family_file(family)
    section = data["sections"][data["templates"][key][part][name]]
    return {
        "net": named(section["net"], data["monomials"]),
        "peaks": [named(peak, data["monomials"]) for peak in section["peaks"]],
    }


def named(live: dict[str, list[list[int]]], monomials: list[str]) -> dict[str, dict[str, int]]:
    return {c: {monomials[i]: size for i, size in entries} for c, entries in live.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_trace_equals_the_stored_template(family: str) -> None:
    attention = "eager" if family == "gemma2" else "sdpa"
    variant = Variant(family, attention, "bf16", "full")
    fresh = build_template(variant)
    for part in ("forward", "kept", "added"):
        for name, section in fresh[part].items():
            stored = stored_section(family, variant.key, part, name)
            assert stored == section, f"{family} {variant.key}: {part} {name} differs; retrace it"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_is_stored(family: str) -> None:
    assert set(_family_file(family)["templates"]) == {v.key for v in variants(family)}


def test_numbering_a_live_set_loses_nothing() -> None:
    live = {"logits": {"batch*seq*vocab": 4}, "gradients": {"hidden": 2, "vocab*hidden": 2}}
    names = _Pool()
    numbered = json.loads(json.dumps(_numbered_live(live, names)))
    monomials = [json.loads(item) for item in names.items]
    assert named(numbered, monomials) == live
