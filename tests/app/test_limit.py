"""A proven limit on the Run page and the command line, and what a machine without a GPU says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app.charts.limit import limit_figure
from app.limit_proof import limit_spec, limit_world
from app.run_logs import trials_so_far
from planner.attached import AttachedGpus
from planner.errors import PlanError
from planner.limit_run import LimitRun, Trial, limit_of, parse_limit
from planner.plan import default_plan
from planner.reach import Reach, largest_that_runs
from planner.units import GIB_BYTES
from runners.contract import JobSpec

Run = Callable[..., tuple[int, str, str]]


def trial(value: int, outcome: str, predicted: int, seen: int | None) -> Trial:
    return Trial(
        value=value,
        outcome=outcome,
        predicted_bytes=predicted * GIB_BYTES,
        device_bytes=None if seen is None else seen * GIB_BYTES,
        seconds=12.0,
    )


LIMIT = limit_of(
    LimitRun(name="micro_batch", predicted=4, edge=5),
    [trial(4, "done", 120, 118), trial(5, "done", 136, 135), trial(6, "oom_device", 152, None)],
)


def test_predicted_measured_and_out_of_memory_are_told_apart() -> None:
    figure = limit_figure(LIMIT, 139 * GIB_BYTES, "GiB")
    predicted, measured, refused = figure.data
    assert (list(predicted.x), list(predicted.y)) == ([4, 5, 6], [120, 136, 152])
    assert (list(measured.x), list(measured.y)) == ([4, 5], [118, 135])
    assert (list(refused.x), list(refused.y)) == ([6], [152])
    assert (predicted.marker.symbol, measured.marker.symbol) == ("circle-open", "circle")


def page(run: dict) -> None:  # type: ignore[type-arg]
    """What the Run page draws of a search that has ended."""
    from app.components.limit_view import show_limit

    show_limit(run, "GiB")


def test_the_run_page_says_what_was_proven() -> None:
    run: dict[str, Any] = {"measured": {"limit": LIMIT}, "plan": default_plan().to_dict()}
    app = AppTest.from_function(page, kwargs={"run": run}, default_timeout=60).run()
    assert not app.exception
    assert app.markdown[0].value == (
        "#### The largest micro-batch that fits is 5, 6 ran out of memory (proven by 3 short runs). "
        "Predicted with the verdict 'fits': 4, 20.0 % below it; to run with no room to spare: 5, as proven."
    )


def test_a_machine_without_a_gpu_says_so(run: Run) -> None:
    code, _, err = run("prove", "--model", "qwen2.5-0.5b", "--largest", "micro_batch")
    assert code == 2
    assert "What fits a GPU is proven by running on one, and this machine has none: NVML" in err
    code, _, err = run("prove", "--model", "qwen2.5-0.5b", "--largest", "heads")
    assert code == 2
    assert (
        "--largest is 'heads': it must be one of micro_batch, sequence_length, num_layers." in err
    )


def test_with_a_gpu_the_search_is_a_job_that_the_worker_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One GPU for a plan of eight ranks: one rank alone, from the predicted value on."""
    monkeypatch.setattr(
        "app.limit_proof.attached_gpus",
        lambda: AttachedGpus(gpus=(object(),), reason=None),  # type: ignore[arg-type]
    )
    plan = default_plan()
    reach = Reach(
        name="micro_batch", value=7, device_bytes=1, parameters=1, stopped_by="Does not fit"
    )
    world = limit_world(plan, None)
    spec = JobSpec.from_dict(limit_spec(plan, reach, world))
    assert (spec.world, spec.kind) == ("solo", "limit")
    asked = parse_limit(spec.limit, plan, spec.world)
    assert asked.predicted == 7
    assert asked.edge == largest_that_runs(plan, "micro_batch", None)
    with pytest.raises(PlanError, match="in the world nccl or solo"):
        limit_spec(plan, reach, "shared")


def test_runs_so_far_are_read_from_the_events(tmp_path: Path) -> None:
    lines = [{"event": "start"}, {"event": "trial", "value": 4}]
    text = "\n".join(map(json.dumps, lines)) + '\n{"event": "tri'
    (tmp_path / "events-rank0.jsonl").write_text(text)
    assert [one["value"] for one in trials_so_far(str(tmp_path))] == [4]
    assert trials_so_far(str(tmp_path / "nowhere")) == []
