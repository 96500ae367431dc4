"""The probe of quality: what each change does to logits, and to what a small model recalls."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.errors import PlanError
from planner.quality_run import Change, change_verdict
from runners.contract import JobKind, JobSpec, World
from runners.jobs.harness import EventLog, JobSession
from runners.jobs.quality import measure_quality
from runners.serving.quality import NAME, Probe, Prober, attend, divergence, register, visible
from runners.serving.recall import KEYS, VALUES, Questions, ask, shares_right
from runners.worlds import Launch

CPU = torch.device("cpu")
PROBE = Probe(change=None, window=3, block=2, block_stride=2, kv_heads=1)
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def prober() -> Prober:
    register()
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **SIZES)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
    for parameter in made.parameters():
        # Larger than at initialisation, so that attention weighs and changes of it are seen.
        parameter.data.mul_(4)
    return Prober(made.eval(), replace(PROBE, window=12, block=8))


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))


def test_a_window_counts_the_query_s_own_token() -> None:
    seen = visible(5, replace(PROBE, change=Change.WINDOW), CPU)
    assert seen is not None
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_blocks_are_seen_at_every_other_distance() -> None:
    seen = visible(6, replace(PROBE, change=Change.BLOCK_SPARSE), CPU)
    assert seen is not None
    # Blocks of two: the query's own, and the one two before.
    assert seen[5].int().tolist() == [1, 1, 0, 0, 1, 1]
    assert seen[3].int().tolist() == [0, 0, 1, 1, 0, 0]


def test_fewer_heads_are_means_of_those_they_replace() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 5, 8, generator=generator) for _ in range(3))
    found = attend(query, key, value, replace(PROBE, change=Change.FEWER_KV_HEADS, kv_heads=2), 0.3)
    joined = [(tensor[:, 0] + tensor[:, 1]) / 2 for tensor in (key, value)]
    scores = (query[:, 1] @ joined[0].mT * 0.3).masked_fill(~torch.ones(5, 5).tril().bool(), -1e9)
    assert torch.allclose(found[:, 1], scores.softmax(-1) @ joined[1], atol=1e-6)
    with pytest.raises(PlanError, match=r"quality.kv_heads is 3"):
        attend(query, key, value, replace(PROBE, change=Change.FEWER_KV_HEADS, kv_heads=3), 0.3)


def test_divergence_is_that_of_two_distributions_worked_out_by_hand() -> None:
    exact = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    other = torch.tensor([[0.6, 0.4], [0.5, 0.5]]).log()
    found = divergence(exact, other, torch.tensor([1, 0]))
    first = 0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4)
    assert found["kl_mean"] == pytest.approx(first / 2, rel=1e-5)
    assert found["kl_max"] == pytest.approx(first, rel=1e-5)
    assert found["max_abs"] == pytest.approx(math.log(4), rel=1e-5)
    assert found["perplexity"] == pytest.approx(1 / math.sqrt(0.4 * 0.5), rel=1e-5)
    assert found["same_choice"] == 1.0


def test_paging_changes_no_logit_and_one_byte_some(prober: Prober, tokens: torch.Tensor) -> None:
    plain = prober.logits(tokens, None)
    kept = prober.cached_logits(tokens, None)
    # Two exact ways in fp32: two layers of some eighty roundings of 1.2e-7 each.
    assert torch.allclose(plain, kept, rtol=0, atol=2e-5 * float(plain.abs().max()))
    assert torch.equal(prober.cached_logits(tokens, Change.PAGED), kept)
    moved = {
        change: float((prober.cached_logits(tokens, change) - kept)[:, 16:].abs().max())
        for change in (Change.FP8_CACHE, Change.INT8_CACHE)
    }
    # e4m3 keeps 4 bits of a number, int8 keeps 7 of the largest.
    assert 0 < moved[Change.INT8_CACHE] < moved[Change.FP8_CACHE]


def test_what_a_query_still_sees_in_full_is_not_changed(
    prober: Prober, tokens: torch.Tensor
) -> None:
    exact, windowed = prober.logits(tokens, None), prober.logits(tokens, Change.WINDOW)
    assert torch.allclose(exact[:, :12], windowed[:, :12], atol=1e-4)
    assert float((exact - windowed)[:, 12:].abs().max()) > 1e-2


def test_a_question_has_its_answer_at_the_distance_it_says() -> None:
    asked = ask(20, 24, torch.Generator().manual_seed(4))
    for row in range(20):
        for index in range(8):
            place = 16 + index
            token = int(asked.tokens[row, place - int(asked.distances[row, index])])
            key, value = divmod(token, VALUES)
            assert value == int(asked.answers[row, index])
            assert int(asked.tokens[row, place]) == KEYS * VALUES + key
        pairs = [int(one) // VALUES for one in asked.tokens[row] if one < KEYS * VALUES]
        assert len(set(pairs)) == len(pairs) == 3


def test_answers_are_counted_near_and_far() -> None:
    answers, distances = torch.tensor([[0, 1], [0, 3]]), torch.tensor([[1, 2], [3, 9]])
    asked = Questions(torch.zeros(2, 9), answers, distances)
    logits = torch.eye(4)
    assert shares_right(logits, asked, 3) == {"accuracy": 0.75, "near": 1.0, "far": 0.5}
    assert shares_right(logits, asked, 10)["far"] is None


def test_a_run_trains_probes_and_tells_apart(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    asked = {
        "model": {"config": config, "name": "tiny"},
        "changes": ["paged", "int8_cache", "window", "fewer_kv_heads"],
        "length": 40,
        "recall_length": 32,
        "recall_steps": 3,
        "window": 8,
    }
    spec = JobSpec(kind=JobKind.QUALITY, world=World.CPU, quality=asked)
    session = JobSession(spec, Launch(), CPU, EventLog(tmp_path, 0))
    measure_quality(session)
    models = session.measured["models"]
    assert set(models) == {"recall", "tiny"}
    for found in models.values():
        assert found["changes"]["paged"]["max_abs"] == 0.0
        assert change_verdict(Change.WINDOW, found["changes"]["window"], found["floor"]) == (
            "another model"
        )
    assert models["tiny"]["positions"] == 2 * (40 - 16 - 1)
    assert {"near", "far", "retrained_far"} <= set(models["recall"]["changes"]["window"])
    assert "retrained_far" not in models["recall"]["changes"]["int8_cache"]
