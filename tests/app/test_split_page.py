"""Split plans on the pages: predicted, said not to be proven, and no run is offered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

Opened = Callable[..., AppTest]


def texts(app: AppTest) -> str:
    """Return everything a page says."""
    return " ".join(str(element.value) for element in [*app.markdown, *app.caption, *app.info])


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel": "4", "sequence_parallel": "True"},
        {"pipeline_parallel": "4", "accumulation": "8"},
        {"model": "mistralai/Mixtral-8x7B-v0.1", "expert_parallel": "8"},
    ],
    ids=lambda sizes: next(iter(sizes)),
)
def test_a_split_plan_is_shown_and_no_run_offered(opened: Opened, sizes: dict[str, str]) -> None:
    app = opened(**sizes)
    assert not app.exception and not app.error
    said = texts(app)
    assert "planned, not proven" in said
    assert "Planned, not proven" in said
    assert "prove" not in [button.key for button in app.button]
