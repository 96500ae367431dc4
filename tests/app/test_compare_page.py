"""The Compare page: plans of the address side by side, added from anywhere, refused ones kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import services
from app.components.problems import OUR_FAULT
from app.plan_links import document_of
from db import repository
from planner.difference import Measure, waterfall
from planner.plan import parse_plan
from planner.units import GIB_BYTES
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
ROOT = Path(__file__).resolve().parents[2]
PAGE = "app_pages/compare.py"
SMALL = "model=Qwen/Qwen2.5-0.5B&seq=1024&gpus=4"


def page(**query: str) -> AppTest:
    """Open the page by its address, as a shared link does."""
    app = AppTest.from_file(str(ROOT / "app" / "streamlit_app.py"), default_timeout=300)
    for key, value in query.items():
        app.query_params[key] = value
    return whole(app.switch_page(PAGE).run())


def whole(app: AppTest) -> AppTest:
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ({}, ["checkpointing", "attention"]),
        ({"checkpointing": "full", "attention": "eager"}, ["checkpointing", "attention"]),
        ({"job": "serve"}, ["sequences"]),
    ],
)
def test_an_empty_page_offers_an_example(
    database_url: str, query: dict[str, str], what: list[str]
) -> None:
    app = page(model="Qwen/Qwen2.5-0.5B", **query)
    assert "No plan is here yet" in texts(app)
    app = whole(app.button(key="compare_example").click().run())
    assert sorted(app.dataframe[0].value["what"]) == sorted(what)
    assert not app.error


def test_the_plans_of_the_address_are_compared(database_url: str) -> None:
    second = f"{SMALL}&checkpointing=full&zero=1"
    app = page(plan_1=SMALL, plan_2=second, plan_3=f"{SMALL}&engine=fsdp2&zero=0", baseline="B")
    options, quantities = (frame.value for frame in app.dataframe[:2])
    assert list(options["what"]) == ["checkpointing", "engine", "zero stage"]
    assert list(options["B (baseline)"]) == ["full", "peakmark", "1"]
    assert list(options["C"]) == ["none", "fsdp2", "0"]
    assert [e.value[:34] for e in app.error] == ["parallelism.zero_stage is 0: fsdp2"]
    # Nothing is known of C, so there is no column of its changes.
    assert list(quantities.columns) == ["part", "what", "A", "A − B", "B (baseline)", "C"]
    first, base = (
        services.prediction_of(parse_plan(document_of(dict(p.split("=") for p in q.split("&")))))
        for q in (SMALL, second)
    )
    fall = waterfall(base, first, Measure.DEVICE)
    assert fall.change == first["memory"]["device_bytes"] - base["memory"]["device_bytes"]
    [memory, time] = [json.loads(chart.proto.spec)["data"] for chart in app.get("plotly_chart")]
    assert memory[0]["y"] == ["B", "A"]
    assert memory[0]["x"] == pytest.approx(
        [one["memory"]["device_bytes"] / GIB_BYTES for one in (base, first)]
    )
    assert time[0]["x"][1] == pytest.approx(1000 * first["throughput"]["step_time_s"])


def test_the_current_plan_and_pasted_links_are_added(opened: Opened) -> None:
    app = opened(model="Qwen/Qwen2.5-0.5B", seq="1024", gpus="4")
    app.button(key="compare_add").click().run()
    app = whole(app.switch_page(PAGE).run())
    assert app.session_state["compare_tray"] == ["gpus=4&model=Qwen%2FQwen2.5-0.5B&seq=1024"]
    app.button(key="compare_add_here").click().run()
    assert len(app.session_state["compare_tray"]) == 1
    app.text_input(key="compare_pasted").input("what is this").run()
    assert "The link cannot be used: it says nothing of a plan" in texts(app)
    # A comparison's link adds all of its plans, also one that cannot be planned.
    app.text_input(key="compare_pasted").input("http://h/compare?plan_1=seq%3Dx&plan_2=job%3Dserve")
    app = whole(app.run())
    assert app.session_state["compare_tray"][1:] == ["seq=x", "job=serve"]
    assert [error.value for error in app.error] == ["seq is 'x': it must be a whole number."]
    assert "A is a plan to train and C one to serve" in texts(app)
    assert app.query_params["plan_3"] == "job=serve"
    app.button(key="compare_remove_1").click().run()
    assert app.session_state["compare_tray"][1:] == ["job=serve"]
    assert not whole(app).error


def test_a_runs_plan_is_added(database_url: str) -> None:
    plan = parse_plan(document_of({"model": "Qwen/Qwen2.5-0.5B", "gpus": "2"}))
    run_id = services.submit_proof(plan, "cpu", "key")
    app = page()
    app.selectbox(key="compare_run").select(run_id).run()
    assert app.session_state["compare_tray"] == ["gpus=2&model=Qwen%2FQwen2.5-0.5B"]
    app.text_input(key="compare_pasted").input("http://h/run?run=nothing").run()
    assert "There is no run nothing in this database." in texts(app)
    repository.request_cancel(services.database(), run_id)
