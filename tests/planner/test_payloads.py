"""Payloads of a step's collectives: padding by hand, and what every recorded run counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from planner.payloads import step_payloads
from planner.plan import parse_plan
from planner.presets import resolve_model
from planner.workload import Engine, LoraTargets, TrainingWorkload

RECORDED = Path(__file__).resolve().parents[2] / "recorded"
MIXED = TrainingWorkload()
# GPT-2: 50,257 x 768 and 1,024 x 768 rows of embedding, twelve layers, a final norm.
GPT2 = resolve_model("openai-community/gpt2")
EMBEDDING, LAYER, NORM = (50257 + 1024) * 768, 7_087_872, 2 * 768
P = 124_439_808


def payloads(
    engine: Engine, stage: int, ranks: Any, workload: TrainingWorkload = MIXED
) -> dict[str, tuple[Any, Any]]:
    """Return full buffers' bytes and calls by collective."""
    found = step_payloads(GPT2, workload, engine, stage, ranks)
    return {payload.collective: (payload.bytes, payload.calls) for payload in found}


def test_our_flat_groups_are_padded_to_the_ranks() -> None:
    assert EMBEDDING + 12 * LAYER + NORM == P
    # Of 1,000 ranks: remainders 808, 872 and 536.
    embedding, layer, norm = EMBEDDING + 192, LAYER + 128, NORM + 464
    whole = embedding + 12 * layer + norm
    assert payloads(Engine.PEAKMARK, 2, 1000) == {
        "all_gather": (2 * whole, 14),
        "reduce_scatter": (2 * whole, 14),
    }
    # Layers for forward and backward, the tied embedding for its own use and for the head.
    gathered = whole + 12 * layer + embedding
    assert payloads(Engine.PEAKMARK, 3, 1000)["all_gather"] == (2 * gathered, 27)


def test_fsdp2_pads_rows_of_every_parameter_and_is_silent_alone() -> None:
    # Of 8 ranks all rows divide, but those of the vocabulary: 50,257 + 7.
    whole = P + 7 * 768
    assert payloads(Engine.FSDP2, 2, 8) == {
        "all_gather": (2 * whole, 13),
        "reduce_scatter": (4 * whole, 13),
    }
    assert payloads(Engine.FSDP2, 2, 1) == {}


def test_deepspeed_pads_its_flat_buffer_to_twice_the_ranks_and_gathers_nothing_alone() -> None:
    # 124,439,808 = 2,000 x 62,219 + 1,808.
    assert payloads(Engine.DEEPSPEED, 2, 1000) == {
        "all_gather": (2 * (P + 192), 1),
        "all_reduce": (2 * P, 1),
    }
    assert payloads(Engine.DEEPSPEED, 1, 1) == {"all_reduce": (2 * P, 1)}


def test_deepspeed_3_gathers_small_parameters_after_the_step_one_by_one() -> None:
    # All but 100,000 elements and fewer are fetched, once for forward and backward together: they
    # stay within the reuse distance. Per layer ten norms and biases, one norm at the end.
    small = 12 * (4 * 768 + 2304 + 768 + 3072 + 768) + 2 * 768
    found = payloads(Engine.DEEPSPEED, 3, 2)
    assert found["reduce_scatter"] == (2 * P, 1)
    fetched, calls = found["all_gather"]
    assert calls > 12 * 8 + 2
    assert fetched == 2 * (P - small) + 2 * small


def test_adapters_are_all_that_is_reduced_and_the_rest_is_gathered_still() -> None:
    workload = TrainingWorkload(lora_rank=8, lora_targets=LoraTargets.QV)
    adapters = 12 * (8 * 768 + 2304 * 8)
    assert payloads(Engine.PEAKMARK, 2, 8, workload) == {
        "all_gather": (2 * adapters, 12),
        "reduce_scatter": (2 * adapters, 12),
    }
    gathered = P + 12 * LAYER + EMBEDDING + 2 * adapters
    assert payloads(Engine.PEAKMARK, 3, 8, workload)["all_gather"] == (2 * gathered, 27 + 24)


def test_world_sizes_may_be_an_array() -> None:
    worlds = np.array([1, 2, 8, 1000])
    for engine, stage in ((Engine.PEAKMARK, 3), (Engine.FSDP2, 3), (Engine.DEEPSPEED, 3)):
        many = payloads(engine, stage, worlds)
        for index, ranks in enumerate(worlds):
            for name, (size, calls) in payloads(engine, stage, int(ranks)).items():
                assert many[name][0][index] == size
                assert np.broadcast_to(many[name][1], worlds.shape)[index] == calls


def test_every_recorded_run_counted_what_the_formula_says() -> None:
    """To the byte and the call, whatever engine; DeepSpeed's first rows were not counted yet."""
    compared: set[Engine] = set()
    for path in sorted(RECORDED.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["kind"] != "train_step" or row["outcome"] != "done":
                continue
            plan = parse_plan(row["spec"]["plan"])
            assert isinstance(plan.workload, TrainingWorkload)
            engine, counted = plan.parallelism.engine, row["measured"]["communication"]
            if engine is Engine.DEEPSPEED and not counted:
                assert row["recorded_at"] < "2026-11-29T21:27"
                continue
            found = step_payloads(
                plan.model,
                plan.workload,
                engine,
                plan.parallelism.zero_stage,
                plan.parallelism.world_size,
            )
            assert counted == {
                name: {"calls": calls, "bytes": size} for name, size, calls in found
            }, row["id"]
            compared.add(engine)
    assert compared >= set(Engine) - {Engine.DEEPSPEED}
