"""What can be saved and gone on from, and what is refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.saved_training import check_folder, check_saved_training


def plan_of(*, engine: str = "peakmark", stage: int = 3, **workload: Any) -> Plan:
    """Return a plan of four ranks."""
    return parse_plan(
        {
            "schema": 1,
            "job": "train",
            "model": {"preset": "Qwen/Qwen2.5-0.5B"},
            "workload": {"sequence_length": 64, **workload},
            "parallelism": {"engine": engine, "zero_stage": stage, "world_size": 4},
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )


@pytest.mark.parametrize("folder", ["/data/steps", "/data/steps/step-00000005", "/a b/c"])
def test_absolute_folders_are_taken_as_they_are(folder: str) -> None:
    assert check_folder("save_to", folder) == folder
    assert check_folder("save_to", None) is None


@pytest.mark.parametrize(
    "folder", ["", "steps", "~/steps", "/data/../etc", "/a\x00b", "/a\nb", 5, "/" + 1024 * "a"]
)
def test_other_folders_are_refused_in_one_sentence(folder: object) -> None:
    with pytest.raises(
        PlanError, match=r"^save_to is .*: it must be an absolute path without \.\."
    ):
        check_folder("save_to", folder)


@pytest.mark.parametrize("world", ["nccl", "shared", "cpu"])
def test_our_engine_saves_where_all_ranks_run(world: str) -> None:
    check_saved_training(plan_of(), world, "/data/steps", None)
    check_saved_training(plan_of(), world, None, "/data/steps")


@pytest.mark.parametrize(
    ("plan", "world", "reason"),
    [
        (plan_of(engine="fsdp2"), "cpu", "only peakmark saves and loads"),
        (plan_of(engine="ddp", stage=0, precision="fp32"), "cpu", "the engine ddp is run to be"),
        (plan_of(optimizer="adamw_8bit"), "nccl", "use another workload.optimizer"),
        (plan_of(), "solo", "one of 4 ranks runs, .* use nccl, shared or cpu"),
    ],
)
def test_what_cannot_be_saved_is_refused_in_one_sentence(
    plan: Plan, world: str, reason: str
) -> None:
    check_saved_training(plan, world, None, None)
    with pytest.raises(PlanError, match=rf"^load_from cannot be done: .*{reason}"):
        check_saved_training(plan, world, None, "/data/steps")
