"""The stored templates are what tracing the installed transformers gives today."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.memory.templates import _family_file
from runners.trace.build import _numbered, _Pool
from runners.trace.patterns import traced_patterns
from runners.trace.template import build_template
from runners.trace.variants import FAMILIES, OTHER_LOSSES, adapter_variants, variants


def stored(family: str, key: str, kinds: str, part: str, name: str) -> list[list[Any]]:
    data = _family_file(family)
    rows = data["sections"][data["templates"][key][kinds][part][name]]
    return [named(row, data["monomials"]) for row in rows]


def named(row: list[Any], monomials: list[str]) -> list[Any]:
    return [row[0], monomials[row[1]], row[2]] if len(row) == 3 else row


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_trace_equals_the_stored_template(family: str) -> None:
    variant = next(v for v in variants(family) if (v.compute, v.checkpointing) == ("bf16", "full"))
    fresh = build_template(variant, traced_patterns(variant)[:1])
    (kinds,) = fresh
    for part in ("forward", "kept", "added"):
        for name, rows in fresh[kinds][part].items():
            kept = stored(family, variant.key, kinds, part, name)
            assert kept == rows, f"{family} {variant.key}: {part} {name} differs; retrace it"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_is_stored(family: str) -> None:
    keys = {
        replace(variant, loss=loss).key
        for variant in variants(family)
        for loss in ("hf", *OTHER_LOSSES)
    } | {variant.key for variant in adapter_variants(family)}
    assert set(_family_file(family)["templates"]) == keys


def test_numbering_loses_nothing() -> None:
    rows = [[2, "batch*seq*vocab", 4], [0], [-1, 0], [4, "vocab*hidden", 2], [4, "hidden", 2]]
    names = _Pool()
    numbered = json.loads(json.dumps(_numbered(rows, names)))
    monomials = [json.loads(item) for item in names.items]
    assert [named(row, monomials) for row in numbered] == rows
