"""The Ledger page: the plan's tensors, the reason of its peak, filters, and no traceback."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from app import services
from app.components.problems import OUR_FAULT
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
PAGE = "app_pages/ledger.py"


def ledger(opened: Opened, **query: str) -> AppTest:
    app = opened(**query)
    app.switch_page(PAGE).run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def test_every_tensor_of_the_plan_is_in_the_table(opened: Opened) -> None:
    app = ledger(opened, seq="2048", zero="1")
    plan = services.check_plan(
        {
            "model": {"preset": "meta-llama/Llama-3.1-8B"},
            "workload": {"sequence_length": 2048},
            "parallelism": {"zero_stage": 1, "world_size": 8},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )
    memory = services.prediction_of(plan)["memory"]
    table = app.dataframe[-1].value
    assert table["bytes"].sum() == memory["allocated_bytes"]
    assert "Why is this the peak?" in texts(app)
    assert "train 1 × 2,048 tokens" in texts(app)


def test_a_filter_narrows_table_and_caption(opened: Opened) -> None:
    app = ledger(opened)
    app.multiselect(key="ledger_component").set_value(["logits"]).run()
    assert set(app.dataframe[-1].value["component"]) == {"logits"}
    app.text_input(key="ledger_search").set_value("nothing is called that").run()
    assert "widen the filter" in texts(app)


@pytest.mark.parametrize(
    "query",
    [
        {"job": "serve"},
        {"source": "hub"},
        {"source": "config", "config": "damaged"},
        {"hidden_size": "7"},
        {"engine": "fsdp2", "zero": "0"},
        {"gpu": "custom", "gpu_gib": "24"},
        {"unit": "GB"},
        {"num_hidden_layers": "1"},
    ],
)
def test_any_plan_is_drawn_or_told_in_a_sentence(opened: Opened, query: dict[str, str]) -> None:
    app = ledger(opened, **query)
    assert app.dataframe or app.error or app.info


def test_a_pasted_config_has_a_ledger(opened: Opened, tiny_config: str) -> None:
    app = opened(source="config")
    app.text_area(key="config_text").set_value(tiny_config).run()
    app.switch_page(PAGE).run()
    assert not app.exception and not app.error
    assert app.dataframe[-1].value["bytes"].sum() > 0


def test_the_step_is_drawn_moment_by_moment_or_says_why_not(opened: Opened) -> None:
    titles = texts(ledger(opened))
    assert "One step, moment by moment" in titles
    split = ledger(opened, tensor_parallel="2")
    assert "No timeline: The step of a split model" in texts(split)
    assert "moment by moment" not in texts(ledger(opened, job="serve"))
