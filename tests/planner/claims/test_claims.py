"""Claims: their figures against values worked out by hand, what runs measured, and the verdicts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.claims.answers import CHECKS, answers
from planner.claims.claim import Answer, Bounds, Figure, Findings, Unit, Verdict, all_claims
from planner.claims.evidence import Evidence
from planner.plan import default_plan, parse_plan
from planner.records import Kind, RecordedRow, read_file

ROOT = Path(__file__).parents[3]
GIB = 2**30
ONLY, HOLDS, NOT = Verdict.ONLY_WHEN, Verdict.HOLDS, Verdict.NOT
VERDICTS = {
    "score_matrix": ONLY,
    "layers": ONLY,
    "memory_98": ONLY,
    "linear_memory": HOLDS,
    "quadratic_flops": HOLDS,
    "compute_15": ONLY,
    "time_15": NOT,
    "memory_3_5": ONLY,
    "traffic_10": ONLY,
    "speed_2_4": ONLY,
    "standard_2k": ONLY,
    "flash_8k": ONLY,
    "flash_100k": ONLY,
    "summaries_memory": ONLY,
    "summaries_speed": ONLY,
    "genes_without": HOLDS,
    "genes_memory": ONLY,
    "genes_speed": ONLY,
    "image_pixels": HOLDS,
    "image_blocks": ONLY,
    "image_days": ONLY,
    "quality": NOT,
    "card_65b": ONLY,
    "zero_4": ONLY,
    "zero_8": ONLY,
}


@pytest.fixture(scope="module")
def rows() -> list[RecordedRow]:
    names = ("h200-attention", "h200-zero", "h200-late-gather", "h200-main-job")
    found = [row for name in names for row in read_file(ROOT / f"recorded/{name}.jsonl")]
    return sorted(found, key=lambda row: row.recorded_at)


@pytest.fixture(scope="module")
def every(rows: list[RecordedRow]) -> dict[str, Answer]:
    return {one.claim.id: one for one in answers(default_plan(), rows)}


def values(answer: Answer) -> list[float]:
    return [figure.value for figure in answer.found.figures if not figure.own]


def seen(answer: Answer) -> list[float]:
    return [one.value for one in answer.found.measured]


def test_every_claim_is_checked_and_says_where_it_was_made() -> None:
    claims = all_claims()
    assert [claim.id for claim in claims] == list(dict.fromkeys(claim.id for claim in claims))
    assert {claim.id for claim in claims} == set(CHECKS) == set(VERDICTS)
    assert all(claim.quote and claim.source.file.endswith(".txt") for claim in claims)


@pytest.mark.parametrize("claim", sorted(VERDICTS))
def test_verdicts(every: dict[str, Answer], claim: str) -> None:
    assert every[claim].found.verdict is VERDICTS[claim]


def test_a_verdict_counts_the_claims_own_cases_only() -> None:
    def found(*figures: Figure) -> Verdict:
        bounds = Bounds(unit=Unit.TIMES, low=2.0, high=3.0)
        return Findings(bounds=bounds, needs="", because="", figures=figures).verdict

    inside = Figure(condition="", value=2.0, how="")
    outside = Figure(condition="", value=3.1, how="")
    mine = Figure(condition="", value=9.0, how="", own=True)
    assert found(inside, mine) is HOLDS
    assert found(inside, outside) is ONLY
    assert found(outside, mine) is NOT


def test_the_score_matrix(every: dict[str, Answer]) -> None:
    scores = 8192 * 8192
    # Of eager: weights in fp32 and bf16, K and V of all 32 heads, a mask, the output.
    heads = 32 * scores
    kept = 6 * heads + 3 * 32 * 8192 * 128 * 2 + scores * 2
    assert values(every["score_matrix"]) == [4 * scores, 2 * scores, 4 * heads, kept]
    assert seen(every["score_matrix"]) == [13_220_446_208] == [kept]
    assert values(every["layers"]) == [65 * 4 * scores, 65 * kept]


def test_98_percent_less(every: dict[str, Answer]) -> None:
    strip, long, short, *_ = values(every["memory_98"])
    assert strip == 1 - 1 / 64
    # The rows of 8,192 and 4,096 tokens in recorded/h200-attention.jsonl, bytes requested.
    assert seen(every["memory_98"]) == [
        1 - 438_305_040 / 34_695_282_688,
        1 - 219_152_656 / 8_724_152_320,
    ]
    assert long == pytest.approx(1 - 438_305_040 / 34_695_282_688, abs=1e-6)
    # Scores are a quarter as many a token at 2,048 tokens.
    assert short == pytest.approx(1 - 4 * (1 - long), abs=2e-3)


def test_recomputation_is_one_product_of_six(every: dict[str, Answer]) -> None:
    one, two, causal = values(every["compute_15"])
    assert one == pytest.approx(7 / 6 - 1)
    assert two == pytest.approx(9 / 6 - 1)
    # A causal kernel computes s (s + 1) / 2 of the s x s pairs.
    assert causal == pytest.approx(7 / 6 * 8193 / 2 / 8192 - 1)


def test_growth_with_the_sequence(every: dict[str, Answer]) -> None:
    assert values(every["linear_memory"]) == pytest.approx([2, 2], abs=1e-4)
    full, causal = values(every["quadratic_flops"])
    assert full == 4
    assert causal == pytest.approx(4 * 8193 / 8194, abs=1e-4)
    assert seen(every["linear_memory"]) == [438_305_040 / 219_152_656]


def test_hbm_traffic_at_512_tokens(every: dict[str, Answer]) -> None:
    s, element = 512, 2
    scores, query, key = 32 * s * s, 32 * s * 128 * element, 8 * s * 128 * element
    rows = 32 * s * 4
    # Kernel by kernel: heads repeated, Q K^T, scale, mask, softmax (cast, fp32 twice, cast), P V.
    forward = 2 * (key + query) + 2 * query + 2 * scores + 4 * scores + 6 * scores
    forward += (2 + 4 + 8 + 4 + 2) * scores + 2 * scores + 2 * query
    # dP and dV, softmax (casts, three reads and three writes in fp32), scale, dQ and dK, heads summed.
    backward = 2 * (4 * scores + 4 * query) + (2 + 4 + 24 + 4 + 2) * scores + 4 * scores
    backward += 2 * (query + key)
    # Q, K, V, O, log-sum-exp; row sums; Q, K, V, O, dO once more, dQ in fp32 four times, dQ, dK, dV.
    fused = 2 * query + 2 * key + rows + 2 * query + rows
    fused += 2 * query + 2 * key + 2 * rows + 8 * query + query + 2 * key
    assert values(every["traffic_10"])[0] == pytest.approx((forward + backward) / fused)


def test_what_eager_keeps_of_a_step(every: dict[str, Answer]) -> None:
    """32 layers keep 6 bytes a score, and the peak has a layer's gradients of 12 bytes more."""
    eager_to_sdpa = values(every["memory_3_5"])[2]
    how = every["memory_3_5"].found.figures[2].how
    eager, fused = (
        float(part.split()[-2]) for part in how.replace(" (does not fit)", "").split(",")
    )
    assert eager_to_sdpa == pytest.approx(eager / fused, rel=1e-3)
    scores_gib = 32 * 8192 * 8192 / GIB
    assert 31 * 6 * scores_gib < eager - fused < 33 * 6 * scores_gib + 12 * scores_gib


def test_measured_speed(every: dict[str, Answer]) -> None:
    call = next(one for one in every["speed_2_4"].found.measured if "8,192" in one.condition)
    (row,) = call.rows
    text = (ROOT / "recorded/h200-attention.jsonl").read_text()
    kernels = next(
        json.loads(line)["measured"]["kernels"] for line in text.splitlines() if row in line
    )
    seconds = {
        name: kernels[name]["forward"]["median_s"] + kernels[name]["backward"]["median_s"]
        for name in ("eager", "sdpa")
    }
    assert call.value == pytest.approx(seconds["eager"] / seconds["sdpa"])
    assert call.gpu == "NVIDIA H200"
    assert not call.here


def test_zero_by_the_papers_formula_and_as_measured(every: dict[str, Answer]) -> None:
    *states, peak = values(every["zero_4"])
    assert states == pytest.approx([16 / (4 + 12 / n) for n in (8, 64, 1024)])
    *states, _ = values(every["zero_8"])
    assert states == pytest.approx([16 / (2 + 14 / n) for n in (8, 64, 1024)])
    # recorded/: allocated peaks of stages 0 and 1 of Llama-3.1-8B on 8 ranks.
    measured = 145_255_721_984 / 59_887_339_008
    assert seen(every["zero_4"]) == [measured]
    assert peak == pytest.approx(measured, rel=1e-3)


def test_65_billion_parameters(every: dict[str, Answer]) -> None:
    layer = 4 * 8192**2 + 3 * 8192 * 22016 + 2 * 8192
    parameters = 2 * 32000 * 8192 + 80 * layer + 8192
    state, four_bit, adapters, sharded, eager = values(every["card_65b"])
    assert state == 16 * parameters
    # Four bits of every weight in a layer's matrices, two bytes of those outside.
    matrices = 80 * (4 * 8192**2 + 3 * 8192 * 22016)
    assert four_bit > matrices / 2 + 2 * 2 * 32000 * 8192
    assert four_bit > 24 * GIB > eager
    assert adapters > 2 * parameters / 8
    assert sharded > 16 * parameters / 64


def test_the_image(every: dict[str, Answer]) -> None:
    voxels = 512**3
    eager, fused = values(every["image_pixels"])
    query = voxels * 64 * 2
    # Q, K, V, dO; O, dQ, dK, dV, dQ in fp32 (twice a query); log-sum-exp and row sums.
    assert fused == 4 * query + 6 * query + 2 * voxels * 4
    # Four fp32 matrices at the peak of its softmax's backward.
    assert eager == pytest.approx(16 * voxels**2, rel=1e-3)
    of_slice = values(every["image_blocks"])[0]
    tokens = 512 * 512
    assert of_slice == 10 * tokens * 8 * 64 * 2 + 2 * tokens * 8 * 4
    whole_over_blocks = values(every["image_days"])[1]
    assert whole_over_blocks == pytest.approx(voxels / 4096, rel=0.02)


def test_genes(every: dict[str, Answer]) -> None:
    call, _ = values(every["genes_without"])
    assert call == pytest.approx(16 * 32 * 100_000**2, rel=0.01)
    without_logits = values(every["genes_memory"])
    assert without_logits[0] < 40 * GIB < without_logits[1]


def test_an_exact_kernel_changes_nothing(every: dict[str, Answer]) -> None:
    assert values(every["quality"]) == [0, 0]
    assert all(0 < error < 0.01 for error in seen(every["quality"]))


def test_steps_that_ran_with_both_kernels_are_measured(rows: list[RecordedRow]) -> None:
    def ran(attention: str, allocated_bytes: int, step_time_s: float, name: str) -> RecordedRow:
        plan = {
            "model": {"preset": "meta-llama/Llama-3.1-8B"},
            "workload": {"sequence_length": 8192, "attention": attention, "checkpointing": "full"},
            "parallelism": {"engine": "peakmark", "zero_stage": 3, "world_size": 8},
        }
        measured = {"allocated_bytes": allocated_bytes, "step_time_s": step_time_s}
        spec = {"plan": plan, "world": "solo"}
        return replace(rows[0], id=name, kind=Kind.TRAIN_STEP, spec=spec, measured=measured)

    pair = (ran("eager", 50, 3.0, "a"), ran("sdpa", 25, 1.0, "b"))
    seen = Evidence(rows=pair, here=frozenset(("a", "b")))
    for claim, value in (("memory_3_5", 2.0), ("speed_2_4", 3.0), ("memory_98", 0.5)):
        (one,) = CHECKS[claim](None, seen).measured
        assert (one.value, one.rows, one.here, one.world) == (value, ("a", "b"), True, "solo")
    assert CHECKS["speed_2_4"](None, Evidence(rows=pair[:1])).measured == ()


def test_nothing_measured_without_rows() -> None:
    found = CHECKS["memory_98"](None, Evidence())
    assert found.measured == ()
    assert [figure for figure in found.figures if figure.own] == []


def test_your_plan_has_a_figure_of_its_own(every: dict[str, Answer]) -> None:
    (mine,) = (figure for figure in every["zero_4"].found.figures if figure.own)
    assert mine.condition == "your plan"
    assert mine.value == values(every["zero_4"])[-1]


def test_a_serving_plan_is_left_out_in_a_sentence() -> None:
    mapping: dict[str, Any] = {
        "job": "serve",
        "model": {"preset": "meta-llama/Llama-3.1-8B"},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    found = CHECKS["zero_8"](parse_plan(mapping), Evidence())
    assert found.left_out is not None
    assert "train" in found.left_out
    assert not any(figure.own for figure in found.figures)


def test_answers_are_plain_json(every: dict[str, Answer]) -> None:
    document = [one.to_dict() for one in every.values()]
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    first = document[0]
    assert first["said_in"]["file"] == "001_1b08c83a1174b997.txt"
    assert first["computed"][0]["agrees"] is True
    opened = parse_plan(first["computed"][0]["opens"]["plan"])
    assert opened.model.name


def test_the_document_gives_every_verdict(every: dict[str, Answer]) -> None:
    lines = (ROOT / "docs/claims.md").read_text().splitlines()
    told = [line.split(" | ") for line in lines if line.startswith("| `")]
    assert [[cells[0].strip("| `"), cells[2], cells[3].removesuffix(" |")] for cells in told] == [
        [name, str(one.found.verdict), f"{one.found.because}."] for name, one in every.items()
    ]
