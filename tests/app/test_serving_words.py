"""What the Serving page says above and beside its figures: headline, refused links, one size for one cache."""

from __future__ import annotations

from pathlib import Path

from streamlit.testing.v1 import AppTest

from app.components.header import header_line
from app.components.link import refused
from app.serving_rows import answer_of, engines_of
from app.state import DEFAULTS, values_from
from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.serving_levers import ServingPoint

ROOT = Path(__file__).resolve().parents[2]


def test_serving_has_no_training_in_its_headline() -> None:
    values = {**DEFAULTS, "model": "meta-llama/Llama-3.1-8B", "gpu": "h200-sxm5-141gb"}
    assert header_line(values, "Serving") == "Llama-3.1-8B · h200-sxm5-141gb"
    assert "train" in header_line(values, "Ledger")


def test_a_training_that_cannot_be_is_told_and_the_model_served(database_url: str) -> None:
    # Opened by its address: the plan's form, which would tell it too, has not been drawn.
    app = AppTest.from_file(str(ROOT / "app" / "streamlit_app.py"), default_timeout=300)
    for key, value in (("model", "meta-llama/Llama-3.2-1B"), ("seq", "9" * 12), ("gpus", "many")):
        app.query_params[key] = value
    app.switch_page("app_pages/serving.py").run()
    assert not app.exception and not app.error
    told = [warning.value for warning in app.warning]
    assert any(one.startswith("The link says `gpus` is `'many'`") for one in told)
    assert any(
        one.startswith(f"workload.sequence_length is {'9' * 12}") and "model and GPU" in one
        for one in told
    )


def test_a_page_without_the_form_names_what_its_link_cannot_say() -> None:
    query = {"micro_batch": "many", "seq": "4096"}
    assert refused(query, values_from({}, query)) == [
        ("micro_batch", "many", DEFAULTS["micro_batch"])
    ]


def test_the_same_cache_has_the_same_size_in_both_places() -> None:
    """The line above the levers and the table of engines; graphs of fewer requests leave more."""
    point = ServingPoint(
        spec=resolve_model("meta-llama/Llama-3.1-8B"), gpu=resolve_gpu("h200-sxm5-141gb")
    )
    ours = engines_of(point)[0]
    assert ours.pool_bytes == answer_of(point).pool_bytes
    # Their ends are longer than half way.
    assert ours.max_sequences < answer_of(point).max_requests
