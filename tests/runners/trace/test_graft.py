"""A loss grafted onto layers that it was not traced with is what tracing both together gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.memory.kinds import PLAIN
from runners.trace.graft import graft
from runners.trace.patterns import homogeneous
from runners.trace.template import build_template
from runners.trace.variants import OTHER_LOSSES, Variant

DONOR = Variant("gpt2", "eager", "bf16", "none")
BASE = Variant("gpt2", "sdpa", "bf16", "none")


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_a_grafted_loss_is_the_traced_one(loss: str) -> None:
    variants = (BASE, DONOR, replace(DONOR, loss=loss))
    templates = [build_template(v, homogeneous(PLAIN)) for v in variants]
    assert graft(*templates) == build_template(replace(BASE, loss=loss), homogeneous(PLAIN))


def test_a_loss_that_changes_the_layers_is_refused() -> None:
    base, other = one_section([0, "batch*seq", 2]), one_section([0, "batch*seq", 4])
    with pytest.raises(ValueError, match="the loss changes embed"):
        graft({PLAIN: base}, {PLAIN: base}, {PLAIN: other})


def one_section(row: list[Any]) -> dict[str, Any]:
    parts = {part: {} for part in ("kept", "added", "saved")}
    return {"forward": {"embed ^|plain|plain": [row]}, **parts}
