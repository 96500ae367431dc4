"""A grid answers as single plans do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.errors import PlanError
from planner.plan import parse_plan
from planner.predict import predict
from planner.search import grid


def plan_of(**workload: Any) -> Any:
    """Return a Llama-3.1-8B training plan on H200s."""
    return parse_plan(
        {
            "model": {"preset": "llama-3.1-8b"},
            "hardware": {"preset": "h200"},
            "workload": workload,
        }
    )


@pytest.mark.parametrize("workload", [{}, {"checkpointing": "full", "grad_accumulation": 2}])
def test_a_grid_gives_what_single_plans_give(workload: dict[str, Any]) -> None:
    plan = plan_of(**workload)
    axes: dict[str, tuple[int, ...]] = {
        "zero_stages": (0, 3),
        "world_sizes": (1, 64),
        "micro_batches": (1, 7),
        "sequence_lengths": (512, 8192),
    }
    found = grid(plan, **axes, replay=True)
    for place in itertools.product(range(2), repeat=4):
        stage, n, b, s = (values[i] for values, i in zip(axes.values(), place, strict=True))
        document = plan.to_dict()
        document["workload"] |= {"micro_batch": b, "sequence_length": s}
        document["parallelism"] |= {"zero_stage": stage, "world_size": n}
        single = predict(parse_plan(document)).to_dict()
        memory, speed = single["memory"], single["throughput"]
        for name in ("allocated_bytes", "reserved_bytes", "device_bytes"):
            assert abs(int(found.values[name][place]) - memory[name]) <= 2
        assert found.values["verdict"][place] == single["verdict"]["state"]
        for name in ("step_time_s", "tokens_per_s", "mfu"):
            assert found.values[name][place] == pytest.approx(speed[name], rel=1e-9)


def test_records_are_plain_and_in_the_order_of_the_axes() -> None:
    records = list(grid(plan_of(), zero_stages=(2, 3), world_sizes=(8, 16)).records())
    coordinates = [(r["zero_stage"], r["world_size"]) for r in records]
    assert coordinates == [(2, 8), (2, 16), (3, 8), (3, 16)]
    assert all((r["micro_batch"], r["sequence_length"]) == (1, 4096) for r in records)
    for record in records:
        assert type(record["device_bytes"]) is int
        assert type(record["step_time_s"]) is float
        assert record["verdict"] in ("fits", "tight", "does_not_fit")


def test_needs_fall_with_stage_and_grow_with_batch_and_length() -> None:
    found = grid(
        plan_of(),
        zero_stages=(0, 1, 2, 3),
        world_sizes=(8, 64),
        micro_batches=tuple(range(1, 9)),
        sequence_lengths=tuple(range(512, 8193, 512)),
    )
    needed = found.values["device_bytes"]
    assert found.size == needed.size == 4 * 2 * 8 * 16
    assert (np.diff(needed, axis=2) >= 0).all()
    assert (np.diff(needed, axis=3) >= 0).all()
    assert (np.diff(needed[:3], axis=0) <= 0).all()


@pytest.mark.parametrize(
    ("axes", "field"),
    [
        ({"zero_stages": (4,)}, "grid.zero_stage"),
        ({"world_sizes": (0,)}, "grid.world_size"),
        ({"micro_batches": ()}, "grid.micro_batch"),
        ({"sequence_lengths": ("512",)}, "grid.sequence_length"),
        ({"micro_batches": range(1, 2000), "world_sizes": range(1, 2000)}, "grid"),
    ],
)
def test_a_wrong_axis_is_named(axes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        grid(plan_of(), **axes)
    assert caught.value.field == field


def test_a_combination_that_a_plan_refuses_is_refused_in_a_grid() -> None:
    document = plan_of(attention="triton").to_dict()
    document["model"] = {"preset": "openai-community/gpt2"}
    with pytest.raises(PlanError, match="at most 1024"):
        grid(parse_plan(document), sequence_lengths=(1024, 2048))
    document = plan_of().to_dict()
    document["parallelism"] |= {"engine": "fsdp2"}
    with pytest.raises(PlanError, match="fsdp2"):
        grid(parse_plan(document), zero_stages=(1, 3))
    serve = {**document, "job": "serve", "workload": {}}
    with pytest.raises(PlanError, match="train"):
        grid(parse_plan(serve))


def test_absurd_plans_do_not_fit_instead_of_overflowing() -> None:
    plan = plan_of(attention="eager", micro_batch=65536)
    found = grid(plan, sequence_lengths=(2**24,))
    assert found.values["verdict"].ravel().tolist() == ["does_not_fit"]
    assert (found.values["device_bytes"] > 10**18).all()
