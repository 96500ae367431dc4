"""Which training variants are refused where, and in which words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import PlanError
from planner.hardware import resolve_gpu
from planner.memory.ideal import ideal_bytes
from planner.memory.stages import step_memory
from planner.memory.training import training_memory
from planner.obstacles import check_training
from planner.presets import resolve_model
from planner.workload import Engine, Optimizer, Parallelism, Precision, TrainingWorkload

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


def test_our_adamw_kernel_steps_fp32_shards_of_our_engine() -> None:
    for stage in range(4):
        for precision in (Precision.MIXED, Precision.FP32, Precision.AUTOCAST):
            chosen = {"optimizer": Optimizer.ADAMW_TRITON, "precision": precision}
            _check(Parallelism(zero_stage=stage, world_size=4), **chosen)
    for engine in (Engine.FSDP2, Engine.DEEPSPEED, Engine.DDP, Engine.ZERO_REDUNDANCY):
        stage = {Engine.DDP: 0, Engine.ZERO_REDUNDANCY: 1}.get(engine, 2)
        precision = Precision.MIXED if engine is Engine.DEEPSPEED else Precision.FP32
        chosen = {"optimizer": Optimizer.ADAMW_TRITON, "precision": precision}
        with pytest.raises(PlanError, match=f"which {engine} has not; use engine peakmark"):
            _check(Parallelism(engine=engine, zero_stage=stage), **chosen)
    with pytest.raises(PlanError, match="it steps fp32 values, which precision bf16 has not"):
        _check(Parallelism(), optimizer=Optimizer.ADAMW_TRITON, precision=Precision.BF16)
    with pytest.raises(PlanError, match="adamw_triton is not stepped on the host"):
        spread = Parallelism(zero_stage=2, world_size=4)
        _check(spread, optimizer=Optimizer.ADAMW_TRITON, offload_optimizer=True)


def test_its_step_needs_no_gradient_in_fp32() -> None:
    """By formula and by the allocator's replay: the peak is no longer the optimizer's, but the ideal."""
    model, gpu = resolve_model("meta-llama/Llama-3.1-8B"), resolve_gpu("h200-sxm5-141gb")
    workload = TrainingWorkload(sequence_length=64, optimizer=Optimizer.ADAMW_FUSED)
    own = replace(workload, optimizer=Optimizer.ADAMW_TRITON)
    spread = Parallelism(zero_stage=0, world_size=1)
    ideal = ideal_bytes(model, own, spread, gpu)
    for share in (0.05, None):
        fused, ours = (step_memory(model, w, spread, gpu, share).worst for w in (workload, own))
        assert (fused.peak_phase, ours.peak_phase) == ("optimizer", "backward_last")
        # 16 bytes of each of 8,030,261,248 parameters, and the embedding's gradient cast to fp32.
        held = 16 * 8_030_261_248
        assert fused.allocated_bytes == pytest.approx(held + 4 * 128256 * 4096, rel=1e-3)
        assert ours.allocated_bytes == pytest.approx(ideal, rel=2e-4)


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
