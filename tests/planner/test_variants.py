"""Which training variants are refused where, and in which words."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import Engine, Optimizer, Parallelism, TrainingWorkload

SPEC = resolve_model("meta-llama/Llama-3.2-1B")


def _check(parallelism: Parallelism, **workload: object) -> None:
    check_training(SPEC, TrainingWorkload(**workload), parallelism)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAFACTOR, Optimizer.MUON])
def test_optimizers_of_whole_matrices_run_unsharded_only(optimizer: Optimizer) -> None:
    _check(Parallelism(zero_stage=0, world_size=4), optimizer=optimizer)
    with pytest.raises(PlanError, match="whole matrices, which stages 1 to 3 cut; use stage 0"):
        _check(Parallelism(zero_stage=1), optimizer=optimizer)
    with pytest.raises(PlanError, match="does not run under fsdp2; use engine peakmark"):
        _check(Parallelism(engine=Engine.FSDP2), optimizer=optimizer)


def test_eight_bit_adamw_runs_at_every_stage_of_our_engine() -> None:
    for stage in range(4):
        _check(Parallelism(zero_stage=stage), optimizer=Optimizer.ADAMW_8BIT)
    with pytest.raises(PlanError, match="bitsandbytes cannot step the tensors of fsdp2"):
        _check(Parallelism(engine=Engine.FSDP2), optimizer=Optimizer.ADAMW_8BIT)


def _optimizer_bytes(optimizer: Optimizer) -> int:
    memory = training_memory(
        SPEC, TrainingWorkload(optimizer=optimizer), Parallelism(zero_stage=0, world_size=1)
    )
    rows = {c["name"]: c["bytes"] for c in memory.to_dict()["components"]}
    return int(rows["optimizer"])


def test_optimizer_bytes_of_a_billion_parameters_by_hand() -> None:
    """Llama 3.2 1B, tied: embedding 128256 x 2048, 16 layers, one norm; master weights are fp32."""
    matrices = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048)]
    matrices += [(8192, 2048), (8192, 2048), (2048, 8192)]
    in_layers = 16 * sum(rows * columns for rows, columns in matrices)
    embedding, norms = 128256 * 2048, 33 * 2048
    master = 4 * (in_layers + embedding + norms)
    assert _optimizer_bytes(Optimizer.SGD) == 2 * master
    assert _optimizer_bytes(Optimizer.ADAMW_FUSED) == 3 * master
    assert _optimizer_bytes(Optimizer.MUON) == master + 4 * in_layers + 8 * (embedding + norms)
    factors = 16 * sum(sum(shape) for shape in matrices) + 128256 + 2048 + norms
    assert _optimizer_bytes(Optimizer.ADAFACTOR) == master + 4 * factors
    # One flat buffer per group, all larger than 4,096 elements but the final norm's.
    layer = in_layers // 16 + 2 * 2048
    scales = 16 * (layer // 256) + embedding // 256
    small, tables = 8 * 2048, 18 * 2048
    bytes_8bit = 2 * (16 * layer + embedding) + 8 * scales + small + tables
    assert _optimizer_bytes(Optimizer.ADAMW_8BIT) == master + bytes_8bit


@pytest.mark.parametrize("optimizer", Optimizer)
def test_the_ledger_names_every_byte_of_the_optimizer(optimizer: Optimizer) -> None:
    stage = 0 if optimizer in (Optimizer.MUON, Optimizer.ADAFACTOR) else 3
    workload = TrainingWorkload(optimizer=optimizer, sequence_length=512)
    memory = training_memory(SPEC, workload, Parallelism(zero_stage=stage, world_size=4))
    written = memory.to_dict()
    rows = [row for row in written["ledger"] if row["component"] == "optimizer"]
    part = next(c for c in written["components"] if c["name"] == "optimizer")
    assert sum(row["bytes"] for row in rows) == part["bytes"]
    assert all(row["owner"] == "engine" for row in rows)
