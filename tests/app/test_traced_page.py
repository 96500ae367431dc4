"""The Plan page and a model of an architecture without a template: refused in words, or traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamlit.testing.v1 import AppTest

from app import state

BLOOM = {
    "model_type": "bloom",
    "vocab_size": 250880,
    "hidden_size": 1024,
    "n_layer": 24,
    "n_head": 16,
    "layer_norm_epsilon": 1e-5,
}


def words(app: AppTest) -> str:
    return "\n".join(str(e.value) for e in (*app.error, *app.caption, *app.markdown, *app.warning))


def url(config: dict[str, Any]) -> dict[str, str]:
    packed = state.pack_config(config)
    assert packed is not None
    return {"source": "config", state.CONFIG_KEY: packed, "attention": "eager"}


def test_an_unknown_configuration_is_refused_with_what_to_run(
    opened: Callable[..., AppTest],
) -> None:
    app = opened(**url({**BLOOM, "n_layer": 7}))
    assert not app.exception
    assert "run `peakmark trace CONFIG.json`" in words(app)


def test_a_traced_configuration_is_planned_and_says_so(opened: Callable[..., AppTest]) -> None:
    app = opened(**url(BLOOM))
    assert not app.exception
    assert "bloom · 559.2 M parameters as published · 24 layers" in words(app)
    assert "traced: planned as it is" in words(app)
    assert not app.error
