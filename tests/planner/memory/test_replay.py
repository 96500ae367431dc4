"""The replay against what H200 runs reserved, and its place in a prediction."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from planner.as_run import as_run
from planner.errors import PlanError
from planner.memory.offload import OffloadedReplay
from planner.memory.replay import EngineReplay
from planner.memory.replay_engines import _known_steps, replay_training
from planner.memory.replay_fsdp2 import Fsdp2Replay
from planner.memory.replay_peakmark import PeakmarkReplay
from planner.memory.templates import traced
from planner.memory.training import plan_segment_share, training_memory
from planner.obstacles import check_training
from planner.plan import Plan, parse_plan
from planner.presets import resolve_model
from planner.units import MIB_BYTES
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)

ROOT = Path(__file__).parents[3]


def measured(file: str) -> list[tuple[Plan, dict[str, Any]]]:
    rows = [json.loads(line) for line in (ROOT / "recorded" / file).read_text().splitlines()]
    done = [r for r in rows if r["kind"] == "train_step" and r["outcome"] == "done"]
    return [(parse_plan(row["spec"]["plan"]), row["measured"]) for row in done]


def test_untied_models_come_out_within_a_segment_or_two() -> None:
    """Where no weight is tied, the order of allocations is known to the last block."""
    main_job = measured("h200-main-job.jsonl")
    later = [*measured("h200-overlapped.jsonl"), *measured("h200-late-gather.jsonl")]
    names = {plan.model.name for plan, _ in main_job}
    every = [*main_job, *(case for case in later if case[0].model.name in names)]
    cases = [case for case in every if not case[0].model.tie_word_embeddings]
    assert len(cases) >= 13
    for plan, seen in cases:
        assert isinstance(plan.workload, TrainingWorkload)
        memory = training_memory(plan.model, plan.workload, plan.parallelism, plan.hardware)
        assert memory.allocated_bytes == pytest.approx(seen["allocated_bytes"], rel=1e-3)
        reserved_bytes = memory.overheads.reserved_bytes
        assert reserved_bytes == pytest.approx(seen["reserved_bytes"], rel=0.021)


@pytest.mark.parametrize(
    ("file", "model", "packed"),
    [
        ("h200-late-gather.jsonl", "Qwen/Qwen3-1.7B", True),
        ("h200-overlapped.jsonl", "meta-llama/Llama-2-7b-hf", False),
    ],
)
def test_eager_attention_of_one_row_reserves_what_a_gpu_did(
    file: str, model: str, packed: bool
) -> None:
    """To the byte: heads of one row are not copied, and all that comes after lies elsewhere."""
    rows = [json.loads(line) for line in (ROOT / "recorded" / file).read_text().splitlines()]
    wanted = {"attention": "eager", "micro_batch": 1, "precision": "mixed"}
    wanted |= {"packed": True} if packed else {}
    found = 0
    for row in rows:
        plan = row["spec"]["plan"] if row["kind"] == "train_step" else {"model": {}}
        if plan["model"].get("preset") != model or row["outcome"] != "done":
            continue
        if not wanted.items() <= plan["workload"].items():
            continue
        run, found = as_run(parse_plan(plan), row["environment"]), found + 1
        assert isinstance(run.workload, TrainingWorkload)
        memory = training_memory(run.model, run.workload, run.parallelism, run.hardware)
        assert memory.overheads.reserved_bytes == row["measured"]["reserved_bytes"]
    assert found


def test_rounding_is_a_part_of_the_peak_and_a_row_of_the_ledger() -> None:
    spec = resolve_model("Qwen/Qwen2.5-0.5B")
    workload = TrainingWorkload(sequence_length=2048)
    memory = training_memory(spec, workload, Parallelism(zero_stage=0, world_size=8)).to_dict()
    parts = {part["name"]: part["bytes"] for part in memory["components"]}
    # The four 2048 x 4864 bf16 tensors of each of 24 layers are 19 MiB in 20 MiB blocks, most of
    # them in segments of their own.
    assert 0.8 * 4 * 24 * MIB_BYTES < parts["rounding"] < 1.1 * 4 * 24 * MIB_BYTES
    named = {row["name"]: row["bytes"] for row in memory["ledger"]}
    assert named["unsplit ends of blocks"] == parts["rounding"]
    assert sum(parts.values()) == memory["allocated_bytes"]


def test_a_given_share_skips_the_replay() -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B")
    plan = (spec, TrainingWorkload(), Parallelism())
    estimated = training_memory(*plan, segment_share=0.5)
    assert estimated.overheads.segment_bytes == round(0.5 * estimated.allocated_bytes)
    replayed, share = training_memory(*plan), plan_segment_share(*plan)
    reserved_bytes = (1 + share) * estimated.allocated_bytes
    assert replayed.overheads.reserved_bytes == pytest.approx(reserved_bytes)


@pytest.mark.parametrize("layers", [1, 2])
def test_models_without_an_inner_layer_are_replayed_too(layers: int) -> None:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": layers})
    memory = training_memory(spec, TrainingWorkload(), Parallelism())
    assert memory.overheads.segment_bytes != round(0.12 * memory.allocated_bytes)
    summed = training_memory(spec, TrainingWorkload(), Parallelism(), segment_share=0.1)
    assert memory.allocated_bytes == pytest.approx(summed.allocated_bytes, rel=0.03)


# It has a key-value head for every query head, which eager attention does not copy: selective
# checkpointing is not traced so.
NOT_SELECTIVE = "allenai/OLMo-2-0425-1B"


@pytest.mark.parametrize("engine", [Engine.PEAKMARK, Engine.FSDP2])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize(
    "model",
    [
        "meta-llama/Llama-3.2-1B",
        "allenai/OLMo-2-0425-1B",
        "google/gemma-2-2b",
        "openai-community/gpt2",
        "mistralai/Mixtral-8x7B-v0.1",
    ],
)
def test_formulas_and_replay_see_the_same_peak(
    model: str, precision: Precision, engine: Engine
) -> None:
    """Two ways to one number: sums of live sets, and every allocation in its order."""
    depth = "n_layer" if "gpt2" in model else "num_hidden_layers"
    spec = resolve_model(model, {depth: 4})
    for stage, checkpointing, length in itertools.product((2, 3), Checkpointing, (512, 900)):
        workload = TrainingWorkload(
            sequence_length=length,
            precision=precision,
            attention=Attention.EAGER,
            checkpointing=checkpointing,
        )
        if checkpointing is Checkpointing.SELECTIVE and model == NOT_SELECTIVE:
            with pytest.raises(PlanError, match=r"'selective'.* has not been traced"):
                check_training(spec, workload, Parallelism())
            continue
        ranks = Parallelism(engine=engine, zero_stage=stage, world_size=4)
        replayed = training_memory(spec, workload, ranks).allocated_bytes
        summed = training_memory(spec, workload, ranks, segment_share=0.1).allocated_bytes
        assert replayed == pytest.approx(summed, rel=0.03)


@pytest.mark.parametrize(
    ("replay", "engine", "stage", "chosen"),
    [
        (PeakmarkReplay, Engine.PEAKMARK, 0, {"optimizer": Optimizer.SGD}),
        (PeakmarkReplay, Engine.PEAKMARK, 1, {"precision": Precision.BF16}),
        (PeakmarkReplay, Engine.PEAKMARK, 2, {"grad_accumulation": 3}),
        (PeakmarkReplay, Engine.PEAKMARK, 3, {"grad_accumulation": 2}),
        (PeakmarkReplay, Engine.PEAKMARK, 3, {"lora_rank": 8}),
        (OffloadedReplay, Engine.PEAKMARK, 2, {"offload_optimizer": True}),
        (Fsdp2Replay, Engine.FSDP2, 2, {"optimizer": Optimizer.ADAMW_FOREACH}),
        (Fsdp2Replay, Engine.FSDP2, 3, {"grad_accumulation": 2}),
        (Fsdp2Replay, Engine.FSDP2, 3, {"grad_accumulation": 2, "sync_each_micro_batch": False}),
    ],
)
def test_a_step_recorded_once_is_every_step(
    replay: type[EngineReplay],
    engine: Engine,
    stage: int,
    chosen: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines that say so repeat their steps: with all three recorded, the bytes are the same."""
    spec = resolve_model("Qwen/Qwen2.5-0.5B", {"num_hidden_layers": 4})
    for length, expandable in itertools.product((256, 1000), (False, True)):
        workload = TrainingWorkload(
            sequence_length=length, expandable_segments=expandable, **chosen
        )
        ranks = Parallelism(engine=engine, zero_stage=stage, world_size=2)
        plan = spec, workload, ranks, traced(spec, workload, length), None
        once = replay_training.__wrapped__(*plan)
        with monkeypatch.context() as patch:
            patch.setattr(replay, "repeats", False)
            assert replay_training.__wrapped__(*plan) == once


@pytest.mark.parametrize(
    ("engine", "stage", "chosen"),
    [
        (Engine.PEAKMARK, 0, {}),
        (
            Engine.PEAKMARK,
            3,
            {"grad_accumulation": 2, "packed": True, "attention": Attention.EAGER},
        ),
        (Engine.PEAKMARK, 2, {"attention": Attention.TRITON, "checkpointing": Checkpointing.FULL}),
        (Engine.PEAKMARK, 1, {"loss": Loss.CHUNKED}),
        (Engine.PEAKMARK, 3, {"lora_rank": 8}),
        (Engine.FSDP2, 3, {"grad_accumulation": 2, "sync_each_micro_batch": False}),
        (Engine.DDP, 0, {"precision": Precision.BF16}),
        (Engine.DEEPSPEED, 1, {"grad_accumulation": 2}),
        (Engine.DEEPSPEED, 2, {}),
        (Engine.DEEPSPEED, 3, {"checkpointing": Checkpointing.FULL}),
    ],
)
def test_steps_recorded_for_other_rows_and_another_length_are_the_plan_s(
    engine: Engine, stage: int, chosen: dict[str, Any]
) -> None:
    """What is recorded once serves all batches and lengths: as if each had been recorded."""
    spec = resolve_model("Qwen/Qwen2.5-0.5B", {"num_hidden_layers": 4})
    ranks = Parallelism(engine=engine, zero_stage=stage, world_size=2)
    found = {}
    for is_fresh in (False, True):
        for rows, length in ((1, 512), (1, 1100), (3, 700)):
            if is_fresh:
                _known_steps.cache_clear()
            workload = TrainingWorkload(micro_batch=rows, sequence_length=length, **chosen)
            plan = spec, workload, ranks, traced(spec, workload, length), None
            found[is_fresh, rows, length] = replay_training.__wrapped__(*plan)
    for rows, length in ((1, 512), (1, 1100), (3, 700)):
        assert found[False, rows, length] == found[True, rows, length]
    assert found[True, 1, 512] != found[True, 1, 1100]
