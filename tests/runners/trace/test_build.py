"""The stored templates are what tracing the installed transformers gives today.

Tracing everything takes an hour of processor time (`make retrace`). A test run traces of every family
one variant with one pattern of layers, chosen by the commit: all get their turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from planner.memory.templates import _family_file
from runners.trace.build import FOLDER, _numbered, _Pool, read_templates, write_templates
from runners.trace.check import choice, pattern_differences, rotation_seed, row_words
from runners.trace.patterns import Pattern, traced_patterns
from runners.trace.template import build_template
from runners.trace.variants import FAMILIES, OTHER_LOSSES, Variant, adapter_variants, variants

# Longer patterns take too long for a test: left to `make retrace`.
MOST_LAYERS = 7


def chosen() -> Iterator[Any]:
    """Of every family, the variant and pattern whose turn it is at this commit."""
    seed = rotation_seed()
    for family in FAMILIES:
        every = (*variants(family), *adapter_variants(family))
        candidates = [
            (variant, pattern)
            for variant in every
            for pattern in traced_patterns(variant)
            if len(pattern) <= MOST_LAYERS
        ]
        variant, pattern = choice(candidates, f"{seed} {family}")
        yield pytest.param(variant, pattern, id=f"{family}/{variant.key}:{','.join(pattern)}")


@pytest.mark.parametrize(("variant", "pattern"), list(chosen()))
def test_a_fresh_trace_equals_the_stored_template(variant: Variant, pattern: Pattern) -> None:
    stored = read_templates(FOLDER / f"{variant.family}.json")[variant.key]
    differences = list(pattern_differences(variant, pattern, stored))
    advice = f"what it keeps has changed: run python -m runners.trace.build {variant.family}"
    assert not differences, "\n".join((advice, *differences[:20]))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_is_stored(family: str) -> None:
    keys = {
        replace(variant, loss=loss).key
        for variant in (*variants(family), *adapter_variants(family))
        for loss in ("hf", *(OTHER_LOSSES if variant.has_other_losses else ()))
    }
    assert set(_family_file(family)["templates"]) == keys


VARIANT = Variant("gpt2", "sdpa", "bf16", "none")
PATTERN = ("plain",) * 4


def test_a_difference_names_section_row_and_both_tensors() -> None:
    stored = build_template(VARIANT, [PATTERN])
    rows = next(r for n, r in stored["plain"]["forward"].items() if n.startswith("loss "))
    at = next(i for i, row in enumerate(rows) if len(row) == 3)
    was = list(rows[at])
    rows[at] = [was[0], was[1], was[2] + 1]
    (difference,) = pattern_differences(VARIANT, PATTERN, stored)
    assert f"row {at}: {row_words(rows[at])} -> {row_words(was)}" in difference
    assert difference.startswith("gpt2 sdpa/bf16/none, plain: forward loss ")


def test_words_of_a_row() -> None:
    assert row_words([2, "batch*seq*vocab", 4]) == "logits batch*seq*vocab x 4 B"
    saved = ["mlp.act", "relu", ["batch", "seq", "ffn"], "bfloat16", "batch*seq*ffn", 2]
    assert row_words(saved) == "mlp.act relu [batch, seq, ffn] bfloat16, batch*seq*ffn x 2 B"
    assert row_words(None) == "nothing"


def test_a_seed_chooses_alike_and_reaches_every_candidate() -> None:
    picks = [choice("abcd", f"commit {number}") for number in range(100)]
    assert picks == [choice("abcd", f"commit {number}") for number in range(100)]
    assert set(picks) == set("abcd")
    assert rotation_seed() == rotation_seed()


def test_a_written_file_reads_back_as_it_was(tmp_path: Any) -> None:
    templates = read_templates(FOLDER / "gpt_oss.json")
    assert read_templates(write_templates("gpt_oss", templates, tmp_path)) == templates


def named(row: list[Any], monomials: list[str]) -> list[Any]:
    return [row[0], monomials[row[1]], row[2]] if len(row) == 3 else row


def test_numbering_loses_nothing() -> None:
    rows = [[2, "batch*seq*vocab", 4], [0], [-1, 0], [4, "vocab*hidden", 2], [4, "hidden", 2]]
    names = _Pool()
    numbered = json.loads(json.dumps(_numbered(rows, names)))
    monomials = [json.loads(item) for item in names.items]
    assert [named(row, monomials) for row in numbered] == rows
