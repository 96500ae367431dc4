"""The Claims page and Export on page Plan."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from streamlit.testing.v1 import AppTest

from app import claim_rows
from app.charts.claims import claim_figure
from app.claim_words import value_text
from app.components.claims_view import said_line
from app.components.problems import OUR_FAULT
from planner.claims.answers import answers
from planner.claims.claim import all_claims
from tests.app.drawn import texts

Opened = Callable[..., AppTest]


KEPT = ("score_matrix", "time_15", "zero_8")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check three claims, which need no long replays."""
    kept = [claim for claim in all_claims() if claim.id in KEPT]
    for place in ("planner.claims.answers", "app.components.claims_view"):
        monkeypatch.setattr(f"{place}.all_claims", lambda: kept)


def test_every_claim_stands_with_its_verdict_and_the_plan_beside(opened: Opened, few: None) -> None:
    app = opened(gpus="4")
    app.switch_page("app_pages/claims.py").run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    shown = texts(app)
    assert "**The score matrix of a sequence of 8K takes 256 MB.**" in shown
    assert ":material/cancel: **Does not hold**]: the call gets faster" in shown
    # Rows that were recorded on an H200 are in every new database.
    assert "measured: 12.31 GiB" in shown
    assert "your plan: " in shown
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics == {"Claims": "3", "Holds": "0", "Holds only when": "2", "Does not hold": "1"}


def test_a_figure_opens_its_plan_or_its_call(few: None) -> None:
    matrix, _, stage_2 = (one.to_dict() for one in answers())
    page, query = claim_rows.page_of(matrix["computed"][0]["opens"])
    assert page == "app_pages/attention.py"
    assert query["seq"] == "8192"
    assert (query["at_heads"], query["at_kv_heads"]) == ("1", "1")
    assert query["at_variants"] == "eager,sdpa"
    page, query = claim_rows.page_of(stage_2["computed"][-1]["opens"])
    assert page == "app_pages/plan.py"
    assert query == {"zero": "2"}


def test_a_quote_keeps_its_asterisks() -> None:
    said = {"title": "A text", "english": "a text", "file": "a.txt"}
    line = said_line({"quote": "8K*8K*4B, QK^T", "said_in": said})
    assert line == r"Said: “8K\*8K\*4B, QK^T” — A text (a text, `a.txt`)"


def test_the_figure_draws_every_value_and_what_is_claimed() -> None:
    claim = {
        "unit": "times",
        "claimed": {"low": 2.0, "high": 4.0},
        "computed": [
            {"condition": "a", "value": 18.7, "agrees": False, "how": "x", "own_plan": False},
            {"condition": "your plan", "value": 2.5, "agrees": True, "how": "y", "own_plan": True},
        ],
        "measured": [
            {"condition": "b", "value": 16.0, "agrees": False, "rows": ["r1"], "here": False},
        ],
    }
    figure = claim_figure(claim, lambda value: value_text(value, "times"))
    drawn = [trace for trace in figure.data if trace.x[0] is not None]
    assert [trace.text[0].strip() for trace in drawn] == ["18.7×", "2.5×", "16×"]
    assert [trace.marker.symbol for trace in drawn] == ["square-open", "diamond-open", "circle"]
    (band,) = figure.layout.shapes
    assert (band.x0, band.x1) == (2.0, 4.0)
    assert figure.layout.xaxis.type == "linear"


def test_every_figure_of_the_table_says_its_unit() -> None:
    said = {"english": "a text"}
    one = {"condition": "a", "value": 268_435_456.0, "agrees": True}
    claim = {"id": "x", "says": "y", "said_in": said, "verdict": "holds", "unit": "bytes"}
    (row,) = claim_rows.table_rows([{**claim, "computed": [one], "measured": []}], "GiB")
    assert (row["figure"], row["value"], row["unit"]) == ("256.00 MiB", 268_435_456.0, "bytes")


def choose_an_export() -> None:
    from app.components.export_box import _choose
    from planner.plan import default_plan

    _choose(default_plan())


def test_the_export_of_a_target_is_read_taken_away_or_refused() -> None:
    app = AppTest.from_function(choose_an_export, default_timeout=300).run()
    (config,) = app.code
    assert json.loads(config.value)["zero_optimization"] == {"stage": 3}
    assert "engine peakmark: DeepSpeed's memory and speed are others" in texts(app)
    target = app.get_by_key("export_target_train")
    target.set_value("sbatch").run()
    app.text_input[0].set_value("my run.py").run()
    assert app.code[0].value.endswith("'my run.py'")
    app.text_input[0].set_value("-c").run()
    assert app.error[0].value.startswith("export.script is '-c'")
    assert not app.exception
