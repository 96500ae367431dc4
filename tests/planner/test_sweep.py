"""A sweep answers as single plans do, and counts what it leaves out."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest

from planner.errors import PlanError
from planner.memory.stages import step_segment_share
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.sweep import plan_with, sweep
from planner.sweep_axes import AXES, Limits, axes_of


def plan_of(model: str = "llama-3.2-1b", **parts: dict[str, Any]) -> Plan:
    """Return a training plan on eight H200s."""
    return parse_plan({"model": {"preset": model}, "hardware": {"preset": "h200"}, **parts})


def swept(plan: Plan, limits: Limits | None = None, **given: Any) -> Any:
    limits = limits or Limits()
    return sweep(plan, axes_of(plan, given, limits), limits)


def test_every_row_is_what_a_single_plan_says() -> None:
    plan = plan_of(workload={"sequence_length": 512})
    found = swept(
        plan,
        engine=("peakmark", "fsdp2"),
        zero_stage=(2, 3),
        gpus=(1, 8),
        micro_batch=(2, 5),
        grad_accumulation=(1, 3),
        attention=("sdpa", "eager"),
        checkpointing=("none", "full"),
    )
    assert found.planned == found.combinations == 2**7
    share = step_segment_share(plan.model, plan.workload, plan.parallelism, plan.hardware)  # type: ignore[arg-type]
    for row in found.records():
        single = predict(plan_with(plan, row), segment_share=share)
        for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
            assert abs(row[name] - single.memory[name]) <= 2
        assert row["verdict"] == single.verdict.state
        for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu"):
            assert row[name] == pytest.approx(getattr(single.throughput, name), rel=1e-9)


def test_split_models_with_pipelines_are_what_single_plans_say() -> None:
    plan = plan_of(workload={"sequence_length": 256})
    found = swept(
        plan,
        zero_stage=(1,),
        gpus=(8,),
        tensor_parallel=(1, 2),
        pipeline_parallel=(1, 2, 4),
        micro_batch=(1, 2),
        grad_accumulation=(1, 2, 3, 4, 7),
    )
    assert found.planned == found.combinations == 2 * 3 * 2 * 5
    share = step_segment_share(plan.model, plan.workload, plan.parallelism, plan.hardware)  # type: ignore[arg-type]
    for row in found.records():
        assert row["gpus"] == 8
        single = predict(plan_with(plan, row), segment_share=share)
        assert abs(row["device_bytes"] - single.memory["device_bytes"]) <= 2
        assert row["tokens_per_s"] == pytest.approx(single.throughput.tokens_per_s, rel=1e-9)


def test_what_a_plan_refuses_is_counted_with_its_sentence() -> None:
    plan = plan_of()
    engines, stages, gpus, batches = ("peakmark", "fsdp2", "ddp"), (0, 2), (2, 3), (1, 2, 4)
    found = swept(
        plan,
        Limits(max_gpus=2),
        engine=engines,
        zero_stage=stages,
        gpus=(*gpus, 4),
        micro_batch=batches,
        tensor_parallel=(1, 2),
    )
    planned, reasons = 0, {}
    for engine, stage, number, _, tensor in product(engines, stages, (*gpus, 4), batches, (1, 2)):
        reason = None
        if number > 2:
            reason = "More than 2 GPUs."
        else:
            spread = {"engine": engine, "zero_stage": stage, "tensor_parallel": tensor}
            try:
                parse_plan({**plan.to_dict(), "parallelism": {**spread, "world_size": number}})
            except PlanError as problem:
                reason = str(problem)
        planned += reason is None
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
    assert found.planned == planned > 0
    assert dict(found.not_planned) == reasons
    assert sum(found.counts().values()) == found.combinations == 3 * 2 * 3 * 3 * 2


def test_gpus_that_make_no_whole_groups_are_counted() -> None:
    found = swept(plan_of(), gpus=(2, 3, 4), tensor_parallel=(2,), micro_batch=(1, 2))
    assert found.columns["world_size"].tolist() == [1, 1, 2, 2]
    assert list(found.not_planned.values()) == [2]
    assert "no multiple of 2" in next(iter(found.not_planned))


def test_a_global_batch_sets_the_accumulation() -> None:
    limits = Limits(global_batch=24)
    gpus, batches = (1, 4, 6, 16), (1, 2, 3, 5)
    found = swept(plan_of(), limits, gpus=gpus, micro_batch=batches)
    expected = {
        (n, b, 24 // (n * b)) for n, b in product(gpus, batches) if math.fmod(24, n * b) == 0
    }
    columns = found.columns
    rows = set(
        zip(
            *(columns[n].tolist() for n in ("gpus", "micro_batch", "grad_accumulation")),
            strict=True,
        )
    )
    assert rows == expected
    assert sum(found.not_planned.values()) == 16 - len(expected)
    given = swept(
        plan_of(), limits, gpus=gpus, micro_batch=batches, grad_accumulation=(2, 4)
    ).columns
    assert set(given["grad_accumulation"].tolist()) == {2, 4}
    assert given["gpus"].size == sum(rounds in (2, 4) for _, _, rounds in expected)


def test_the_margin_is_kept_free() -> None:
    plan = plan_of()
    batches = tuple(range(1, 13))
    wide, narrow = (
        swept(plan, Limits(margin=margin), micro_batch=batches) for margin in (0.0, 0.5)
    )
    most_bytes = 0.5 * plan.hardware.visible_bytes
    kept = wide.is_admissible & (wide.columns["device_bytes"] <= most_bytes)
    assert narrow.is_admissible.tolist() == kept.tolist()
    assert 0 < kept.sum() < wide.is_admissible.sum()
    assert narrow.counts()["too_little_margin"] == wide.is_admissible.sum() - kept.sum()


def test_progress_is_told_and_can_end_a_sweep() -> None:
    told: list[tuple[int, int]] = []
    plan = plan_of()
    axes = axes_of(plan, {"checkpointing": ("none", "full"), "micro_batch": (1, 2)}, Limits())
    sweep(plan, axes, progress=lambda *at: told.append(at))
    assert told == [(2, 4), (4, 4)]

    class StoppedError(Exception):
        pass

    def stop(done: int, _: int) -> None:
        raise StoppedError(done)

    with pytest.raises(StoppedError, match="2"):
        sweep(plan, axes, progress=stop)


def test_rows_replayed_say_what_their_plans_say() -> None:
    found = swept(plan_of(), micro_batch=(1, 3)).replayed()
    for row in range(2):
        memory = predict(found.plan_at(row)).memory
        assert found.record(row)["device_bytes"] == memory["device_bytes"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"zero_stage": (4,)}, "sweep.zero_stage"),
        ({"engine": ("horovod",)}, "sweep.engine"),
        ({"gpus": ()}, "sweep.gpus"),
        ({"micro_batch": (1.5,)}, "sweep.micro_batch"),
        ({"colour": ("red",)}, "sweep.colour"),
    ],
)
def test_a_wrong_axis_is_named(given: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        axes_of(plan_of(), given, Limits())
    assert caught.value.field == field


@pytest.mark.parametrize(
    "limits", [{"margin": 1.0}, {"margin": -0.1}, {"global_batch": 0}, {"max_gpus": "8"}]
)
def test_a_wrong_limit_is_named(limits: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=f"sweep.{next(iter(limits))}"):
        Limits(**limits)


def test_too_many_combinations_and_serving_plans_are_refused() -> None:
    plan = plan_of()
    many = {"gpus": range(1, 2000), "micro_batch": range(1, 2000)}
    with pytest.raises(PlanError, match="2,000,000"):
        sweep(plan, axes_of(plan, many, Limits()))
    with pytest.raises(PlanError, match="train"):
        axes_of(plan_of(job="serve"), {}, Limits())  # type: ignore[arg-type]


def test_nothing_planned_is_an_empty_sweep() -> None:
    found = swept(plan_of(), Limits(max_gpus=1), gpus=(2,))
    assert (found.planned, found.combinations) == (0, 1)
    assert not found.is_admissible.any()
    assert set(AXES) <= set(found.columns)
