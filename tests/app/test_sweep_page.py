"""The Sweep page and the levers of the Plan page: what is best, why, and one click to have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import lever_rows, sweep_job
from app.charts.sweep import sweep_figure
from app.components import sweep_view
from app.components.levers_view import changed_values
from app.components.problems import OUR_FAULT
from app.state import values_of_plan
from app.sweep_job import SweepJob, front_of, others_of
from app.sweep_link import SweepLink
from planner.changes import Kind
from planner.choice import Aim, best_of, front_rows
from planner.levers import levers_of, of_kind, saving
from planner.plan import Plan, parse_plan
from planner.sweep import Swept, sweep
from planner.sweep_axes import Limits, axes_of
from planner.units import GIB_BYTES as GIB
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
ROOT = Path(__file__).resolve().parents[2]
GIVEN = {
    "zero_stage": (1, 3),
    "gpus": (2, 4),
    "micro_batch": (1, 2, 64),
    "engine": ("ddp", "fsdp2"),
}


def plan_of() -> Plan:
    workload = {"sequence_length": 512}
    model, hardware = {"preset": "gpt2"}, {"preset": "h200"}
    return parse_plan({"model": model, "hardware": hardware, "workload": workload})


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the page waits for its answer."""
    monkeypatch.setattr(sweep_view, "WAIT_S", 120.0)


@pytest.fixture
def page(database_url: str) -> Opened:
    """Open the Sweep page as a link to it does, without the Plan page before it."""

    def opened(**query: str) -> AppTest:
        app = AppTest.from_file(str(ROOT / "app" / "streamlit_app.py"), default_timeout=300)
        for key, value in query.items():
            app.query_params[key] = value
        app.switch_page("app_pages/sweep.py").run()
        assert not app.exception
        assert not any(error.value == OUR_FAULT for error in app.error)
        return app

    return opened


def test_the_page_says_what_the_planner_says(page: Opened) -> None:
    app = page(model="openai-community/gpt2", seq="512")
    plan, limits = plan_of(), Limits()
    given = {
        "engine": ("peakmark", "fsdp2", "ddp", "zero_redundancy", "deepspeed"),
        "zero_stage": (0, 1, 2, 3),
        "gpus": (1, 2, 4, 8, 16, 32, 64),
        "micro_batch": (1, 2, 4, 8, 16),
        "checkpointing": ("none", "full", "selective"),
    }
    swept = sweep(plan, axes_of(plan, given, limits), limits)
    best = best_of(swept)
    assert best is not None
    shown = texts(app)
    assert best.sentence() in shown
    metrics = {metric.label: metric.value for metric in app.metric}
    assert metrics["Combinations"] == "2,100"
    assert metrics["Could be planned"] == f"{swept.planned:,}"
    assert metrics["On the front"] == str(len(front_rows(swept)))
    left_out = next(frame.value for frame in app.dataframe if "why" in frame.value)
    assert left_out["combinations"].sum() == 2100 - swept.counts()["admissible"]
    app.segmented_control(key="sweep_aim").set_value(Aim.CHEAPEST).run()
    cheapest = best_of(swept, Aim.CHEAPEST)
    assert cheapest is not None and cheapest.sentence() in texts(app)
    assert {k: v for k, v in app.query_params.items() if k.startswith("sweep")} == {
        "sweep_best": "cheapest"
    }


LINK = {
    "sweep_engine": "fsdp2,peakmark",
    "sweep_zero": "3",
    "sweep_gpus": "3,8",
    "sweep_micro_batch": "2",
    "sweep_checkpointing": "plan",
    "sweep_tensor_parallel": "1,2",
    "sweep_margin": "10",
    "sweep_max_gpus": "16",
    "sweep_gpu_hour_cost": "2.5",
    "sweep_best": "cheapest",
}


def test_a_link_opens_the_sweep_that_it_was_copied_from(page: Opened) -> None:
    app = page(model="openai-community/gpt2", seq="512", **LINK)
    # 2 engines x 2 numbers of GPUs x 2 splits; three GPUs are no multiple of a split over two.
    assert {m.label: m.value for m in app.metric}["Combinations"] == "8"
    assert "Numbers of GPUs that are no multiple of 2" in str(
        next(frame.value for frame in app.dataframe if "why" in frame.value)
    )
    assert {k: v for k, v in app.query_params.items() if k.startswith("sweep")} == LINK


def test_what_a_link_says_wrongly_is_told_and_left_out() -> None:
    query = {"sweep_zero": "7", "sweep_engine": "x", "sweep_gpus": "a,1", "sweep_margin": "99"}
    link = SweepLink(plan_of(), {**query, "sweep_seq": "128,128"})
    assert link.values("zero_stage", (0, 1)) == [0, 1]
    assert link.values("engine", ("ddp",)) == ["ddp"]
    assert link.values("gpus", (8,)) == [8]
    assert link.number("margin", 0, 95) is None
    assert link.values("sequence_length", ()) == [128]
    assert [sentence.split("`")[1] for sentence in link.refused] == list(query)
    link.keep("gpus", [8, 1], (1, 8))
    link.keep("micro_batch", [], (1, 2))
    link.keep("margin", 5, 0)
    assert link.own == {"sweep_micro_batch": "plan", "sweep_margin": "5"}


def test_a_serving_plan_is_told_in_one_sentence(page: Opened) -> None:
    app = page(job="serve")
    assert [error.value for error in app.error] == [
        "job is 'serve': it must be train, as a sweep varies a training plan."
    ]


def test_a_sweep_can_be_cancelled_and_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of()
    axes = axes_of(plan, {**GIVEN, "checkpointing": ("none", "full")}, Limits())
    job = SweepJob(plan, axes, Limits())
    answer = job.answer(120.0)
    assert answer is not None and not job.is_cancelled
    assert (job.done, job.total) == (48, 48)
    job.cancel()
    assert job.answer(0.0) is None

    begins = Event()

    def waiting(*arguments: Any) -> Swept:
        assert begins.wait(120.0)
        return sweep(*arguments)

    monkeypatch.setattr(sweep_job, "sweep", waiting)
    stopped = SweepJob(plan, axes, Limits())
    stopped.cancel()
    begins.set()
    assert stopped.answer(120.0) is None
    assert stopped.is_cancelled and stopped.done < stopped.total


def test_the_figure_draws_the_front_and_the_best_apart() -> None:
    plan = plan_of()
    given = {**GIVEN, "checkpointing": ("none", "full", "selective")}
    job = SweepJob(plan, axes_of(plan, given, Limits()), Limits())
    answer = job.answer(120.0)
    assert answer is not None
    front, others = front_of(answer, 3.6), others_of(answer, None)
    assert len(front) + len(others) == answer.swept.counts()["admissible"]
    best = answer.best[Aim.FASTEST]
    assert best is not None
    figure = sweep_figure(front, others, best.row, plan.hardware.visible_bytes, "GiB")
    traces: Mapping[str, Any] = {trace.name: trace for trace in figure.data}
    assert set(traces) >= {"4 GPUs", "not on the front", "the best, replayed"}
    for trace in traces.values():
        assert str(trace.marker.symbol).endswith("-open")
    drawn = [row for name, t in traces.items() if "GPU" in name for (row,) in t.customdata]
    assert sorted(drawn) == sorted(answer.front)
    star = traces["the best, replayed"]
    assert star.x[0] == pytest.approx(best.row["device_bytes"] / GIB)
    # 3.6 a GPU-hour are 0.001 a GPU-second.
    for row in front:
        per_token = 0.001 * row["gpus"] / row["tokens_per_s"]
        assert row["cost_per_million_tokens"] == pytest.approx(1e6 * per_token)


def test_levers_of_the_plan_page_are_one_click(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The largest model is found by compiling deep ones, which tests/planner/test_reach.py does.
    monkeypatch.setattr(lever_rows, "REACHES", ("micro_batch",))
    app = opened(model="openai-community/gpt2", seq="512", micro_batch="8")
    assert not app.exception
    shown = texts(app)
    assert "#### Levers" in shown and "What would make it fit?" not in shown
    assert "The largest micro-batch that fits" in shown
    document = plan_of().to_dict()
    workload = {**document["workload"], "micro_batch": 8}
    plan = parse_plan({**document, "workload": workload})
    wanted = saving(
        of_kind(levers_of(plan, replay=False), Kind.SYSTEM), plan.hardware.visible_bytes
    )[0]
    button = next(b for b in app.button if str(b.key).startswith("lever_memory_0_"))
    assert button.label == "Apply"
    assert f"**{wanted.change.words}**: {wanted.effect().replace('-', '−')}" in shown
    button.click().run()
    assert not app.exception
    values = values_of_plan(wanted.plan.to_dict())
    for name, value in changed_values(values_of_plan(plan.to_dict()), values).items():
        assert app.session_state[name] == value


def test_a_lever_leaves_model_and_gpu_named_as_they_are() -> None:
    plan = plan_of().to_dict()
    changed = {**plan, "workload": {**plan["workload"], "checkpointing": "full"}}
    before = values_of_plan(plan)
    assert changed_values(before, values_of_plan(changed)) == {"checkpointing": "full"}
    model = {**plan["model"], "overrides": {"num_hidden_layers": 3}}
    fewer = values_of_plan({**plan, "model": model})
    assert changed_values(before, fewer) == {"num_hidden_layers": 3}
