"""The Sweep page and the levers of the Plan page: what is best, why, and one click to have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.charts.sweep import sweep_figure
from app.components import sweep_view
from app.components.levers_view import changed_values
from app.components.problems import OUR_FAULT
from app.state import values_of_plan
from app.sweep_job import SweepJob, front_of, others_of
from planner.changes import Kind
from planner.choice import Aim, best_of, front_rows
from planner.levers import levers_of, of_kind, saving
from planner.plan import Plan, parse_plan
from planner.sweep import sweep
from planner.sweep_axes import Limits, axes_of
from planner.units import GIB_BYTES as GIB

Opened = Callable[..., AppTest]
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


def texts(app: AppTest) -> str:
    return "\n".join(str(e.value) for e in (*app.markdown, *app.caption, *app.error, *app.info))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, the page waits for its answer."""
    monkeypatch.setattr(sweep_view, "WAIT_S", 120.0)


def page(opened: Opened, **query: str) -> AppTest:
    app = opened(**query)
    app.switch_page("app_pages/sweep.py").run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def test_the_page_says_what_the_planner_says(opened: Opened) -> None:
    app = page(opened, model="openai-community/gpt2", seq="512")
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


def test_a_serving_plan_is_told_in_one_sentence(opened: Opened) -> None:
    app = page(opened, job="serve")
    assert [error.value for error in app.error] == [
        "job is 'serve': it must be train, as a sweep varies a training plan."
    ]


def test_a_sweep_can_be_cancelled_and_tells_how_far_it_is() -> None:
    plan = plan_of()
    axes = axes_of(plan, {**GIVEN, "checkpointing": ("none", "full")}, Limits())
    job = SweepJob(plan, axes, Limits())
    answer = job.answer(120.0)
    assert answer is not None and not job.is_cancelled
    assert (job.done, job.total) == (48, 48)
    stopped = SweepJob(plan, axes, Limits())
    stopped.cancel()
    assert stopped.answer(120.0) is None
    assert stopped.is_cancelled


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


def test_levers_of_the_plan_page_are_one_click(opened: Opened) -> None:
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
    assert button.label.startswith(f"{wanted.change.words}: {wanted.effect().replace('-', '−')}")
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
