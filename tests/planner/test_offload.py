"""An optimizer in host memory as the planner sees it: bytes, seconds and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.calibration import Curve
from planner.errors import PlanError
from planner.memory.offload import host_ledger, pinned_bytes
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.speed.host_updates import HostUpdates
from planner.speed.own import OwnCalibration, calibrated

# Llama 3.2 1B by its config.json: tied embedding of 128,256 x 2,048, 16 layers of 60,821,504, a norm.
EMBEDDING, LAYER, HEAD = 128_256 * 2_048, 60_821_504, 2_048
TOTAL = EMBEDDING + 16 * LAYER + HEAD


def plan(stage: int = 2, workload: dict[str, Any] | None = None, **parallelism: Any) -> Plan:
    """Return a plan with the optimizer offloaded."""
    return parse_plan(
        {
            "schema": 1,
            "job": "train",
            "model": {"preset": "llama-3.2-1b"},
            "workload": {"sequence_length": 512, "offload_optimizer": True, **(workload or {})},
            "parallelism": {"zero_stage": stage, "world_size": 4, **parallelism},
            "hardware": {"preset": "h200"},
        }
    )


def test_the_field_is_written_where_it_is_set_only() -> None:
    offloaded = plan()
    assert parse_plan(offloaded.to_dict()) == offloaded
    assert (
        "offload_optimizer" not in plan(workload={"offload_optimizer": False}).to_dict()["workload"]
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_device_keeps_bf16_shards_and_no_optimizer(stage: int) -> None:
    memory = predict(plan(stage)).memory
    parts = {part["name"]: part["bytes"] for part in memory["components"]}
    assert "optimizer" not in parts
    assert parts["parameters"] == 2 * TOTAL / 4
    assert sum(row["bytes"] for row in memory["ledger"]) == memory["allocated_bytes"]


def test_the_host_keeps_twelve_bytes_an_element_and_buffers() -> None:
    rows = {row.name: row for row in host_ledger(*_parts(plan()))}
    kept = [rows[name].size_bytes for name in ("fp32 parameters", "exp_avg", "exp_avg_sq")]
    assert kept == [4 * TOTAL // 4] * 3
    assert rows["gradient in fp32"].size_bytes == EMBEDDING  # a quarter of it in four bytes
    # A quarter of the embedding in bf16 is 125.25 MiB: 128 MiB are pinned, for each of two.
    assert rows["gradient buffers"].size_bytes == rows["parameter buffers"].size_bytes == 2 * 2**27
    assert [row.name for row in rows.values() if row.is_pinned] == [
        "gradient buffers",
        "parameter buffers",
    ]


def _parts(planned: Plan) -> tuple[Any, ...]:
    return planned.model, planned.workload, planned.parallelism


@pytest.mark.parametrize(
    ("size", "pinned"), [(1, 1), (2, 2), (3, 4), (2**20, 2**20), (2**20 + 1, 2**21)]
)
def test_pinned_blocks_are_powers_of_two(size: int, pinned: int) -> None:
    assert pinned_bytes(size) == pinned


def test_a_step_costs_the_slower_of_link_and_updates_and_two_copies() -> None:
    # A microsecond for 1,000 elements, and never less than what the smallest measured update took.
    points = [
        Curve(
            operation="host_update",
            shape=(elements, threads),
            dtype="bf16",
            bytes=40 * elements,
            flops=0.0,
            time_s=1e-9 * elements * 8 / threads,
            n=5,
        )
        for elements, threads in ((10**6, 8), (10**8, 8), (10**6, 4))
    ]
    offloaded = plan()
    own = OwnCalibration(offloaded.hardware.id, tuple(points), "by hand")
    prediction = predict(replace(offloaded, hardware=calibrated(offloaded.hardware, own)))
    operation = {o.name: o for o in prediction.throughput.operations}["optimizer.host"]
    # 40 B of host memory an element: the gradient read in bf16 and written in fp32, AdamW's seven
    # passes of 4 B, the value read and written in bf16. PCIe 5 x16 moves 63 GB/s each way.
    updates_s = 1e-9 * (EMBEDDING + 16 * LAYER) / 4 + 1e-3
    ends_s = 2 * 2 * (EMBEDDING / 4) / 63e9
    assert operation.time_s == pytest.approx(updates_s + ends_s)
    assert (operation.bound, operation.bytes) == ("host memory", 40 * TOTAL / 4)
    assert any("512.00 MiB pinned" in note for note in prediction.notes)
    assert any("with 8 threads, as measured" in note for note in prediction.notes)


def test_beyond_the_largest_measured_update_the_rate_stays() -> None:
    updates = HostUpdates(np.array([1e6, 4e6]), np.array([1e-3, 8e-3]), 8)
    found = updates.update_s(np.array([1e5, 1e6, 2.5e6, 8e6]))
    assert found == pytest.approx([1e-3, 1e-3, 4.5e-3, 16e-3])


def test_of_a_plan_with_adapters_the_host_steps_those() -> None:
    rows = host_ledger(*_parts(plan(workload={"lora_rank": 8, "lora_targets": "qv"})))
    # Per layer: q 2,048 -> 2,048 and v 2,048 -> 512, each down to rank 8 and up.
    adapters = 16 * 8 * (2_048 + 2_048 + 2_048 + 512)
    assert rows[0].size_bytes == 4 * adapters // 4


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"engine": "deepspeed"}, "what deepspeed keeps on the host is not predicted; use engine"),
        ({"engine": "fsdp2"}, "what fsdp2 keeps on the host is not predicted"),
        ({"zero_stage": 0}, "stage 0 shards no optimizer; use ZeRO stage 1, 2 or 3"),
        ({"workload": {"optimizer": "sgd"}}, "sgd is not stepped on the host; use adamw_fused"),
        ({"workload": {"precision": "bf16"}}, "bf16 has no fp32 values to step there; use mixed"),
        ({"tensor_parallel": 2}, "it is predicted for data parallelism only"),
    ],
)
def test_what_is_not_offloaded_is_refused_in_one_sentence(
    choices: dict[str, Any], message: str
) -> None:
    stage = choices.pop("zero_stage", 2)
    with pytest.raises(PlanError, match=f"workload.offload_optimizer is true: {message}"):
        plan(stage, **choices)
