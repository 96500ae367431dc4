"""What changes did to a model's answers: the run's page and what the command line refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

Run = Callable[..., tuple[int, str, str]]

ROW: dict[str, Any] = {"kl_mean": 0.2, "kl_max": 1.0, "same_choice": 0.5, "perplexity": 9.0}
MEASURED: dict[str, Any] = {
    "models": {
        "recall": {
            "exact": {**ROW, "max_abs": 0.0, "accuracy": 0.99, "near": 1.0, "far": 0.98},
            "floor": 1e-5,
            "settings": {"window": 16, "block": 8, "block_stride": 2, "kv_heads": 1},
            "chance": 0.125,
            "positions": 2048,
            "length": 64,
            "steps": 600,
            "changes": {
                "window": {**ROW, "max_abs": 3.0, "near": 1.0, "far": 0.1, "retrained_far": 0.13},
                "paged": {**ROW, "max_abs": 0.0, "near": 1.0, "far": 0.98},
                "int8_cache": {**ROW, "max_abs": 0.01, "near": 1.0, "far": 0.98},
            },
        }
    },
}


def page(run: dict) -> None:  # type: ignore[type-arg]
    """What the Run page draws of a probe."""
    from app.components.quality_view import show_quality

    show_quality(run)


def test_system_and_algorithm_have_tables_of_their_own() -> None:
    app = AppTest.from_function(
        page, kwargs={"run": {"measured": MEASURED}}, default_timeout=300
    ).run()
    assert not app.exception and not app.error
    system, algorithm = (frame.value for frame in app.dataframe)
    assert list(system["change"]) == ["exact", "paged cache", "int8 cache"]
    assert list(system["verdict"]) == ["-", "no change", "rounds the cache"]
    assert list(algorithm["change"]) == ["exact", "sliding window"]
    assert list(algorithm["recall far"]) == ["98 %", "10 %"]
    assert list(algorithm["trained with it"]) == ["-", "13 %"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--world", "nccl"), "--world is 'nccl': it must be solo or cpu."),
        (("--change", "magic"), "quality.changes is 'magic': it must be one of paged, kernel"),
        (("--weights", "/"), "quality.weights is '/': it must be left out where no model is"),
        (("--model", "gpt2", "--length", "4096"), "the positions of"),
    ],
)
def test_what_cannot_be_probed_is_one_sentence(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("quality", *arguments)
    assert code == 2
    assert sentence in err
