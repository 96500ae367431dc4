"""A loss grafted onto layers that it was not traced with is what tracing both together gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runners.trace.graft import graft
from runners.trace.template import build_template
from runners.trace.variants import OTHER_LOSSES, Variant

DONOR = Variant("gpt2", "eager", "bf16", "none")
BASE = Variant("gpt2", "sdpa", "bf16", "none")


@pytest.mark.parametrize("loss", OTHER_LOSSES)
def test_a_grafted_loss_is_the_traced_one(loss: str) -> None:
    templates = [build_template(v) for v in (BASE, DONOR, replace(DONOR, loss=loss))]
    assert graft(*templates) == build_template(replace(BASE, loss=loss))


def test_a_loss_that_changes_the_layers_is_refused() -> None:
    base = {"forward": {"embed": [[0, "batch*seq", 2]]}}
    with pytest.raises(ValueError, match="the loss changes embed"):
        graft(base, base, {"forward": {"embed": [[0, "batch*seq", 4]]}})
