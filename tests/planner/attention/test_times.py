"""Times of one attention call: rates put in by hand, and recorded calls of the exact kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

from planner.attention import times
from planner.attention.problem import AttentionProblem, Variant
from planner.attention.times import expected_s
from planner.hardware import resolve_gpu
from planner.speed.calibrated import rates_of
from planner.speed.rates import AttentionPoints, Rates
from tests.planner.attention.test_recorded import ROWS, counted

H200, A100 = resolve_gpu("h200"), resolve_gpu("a100-sxm4-80gb")
# B 2, H 4, K 2, D 64, S 256: 8 rows of 2 blocks of 128 queries on 132 multiprocessors are one wave.
SMALL = AttentionProblem(
    batch=2, heads=4, kv_heads=2, head_dim=64, sequence_length=256, causal=True
)
PAIRS, WAVES, STARTS_S, GAP_S = 256 * 257 // 2, 8 * 2 / 132, 4e-6, 1e-6
SCORES = 2 * 4 * 256 * 256


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """Rates: each kind of attention its own, every stream 1 TB/s, products as their two limits say."""

    def one(flop_s: float) -> AttentionPoints:
        return AttentionPoints(np.array([[13.0, 7.0]]), np.log(np.array([flop_s])))

    known = rates_of(H200)
    sizes = 2.0 ** (8 + np.arange(known.streams.shape[1]) / 2)
    rates = replace(
        known,
        gap_s=GAP_S,
        products={},
        memory_bytes_s=1e12,
        peak_flop_s={"bf16": 1e14, "fp32": 1e13},
        streams=np.tile(np.log(sizes / 1e12), (len(known.streams), 1)),
        attention={
            "attention_forward_sdpa": one(4e14),
            "attention_forward_hopper": one(5e14),
            "attention_backward_hopper": one(2.5e14),
            "attention_forward_triton": one(3e14),
            "attention_backward_triton": one(2e14),
        },
    )
    monkeypatch.setattr(times, "rates_of", lambda gpu: rates)
    return rates


@pytest.mark.parametrize(
    ("variant", "direction", "flop_s"),
    [
        (Variant.SDPA, "forward", 4e14),
        (Variant.TRITON, "forward", 5e14),
        (Variant.TRITON, "backward", 2.5e14),
        (Variant.BLOCK_SPARSE, "forward", 3e14),
    ],
)
def test_a_fused_kernel_runs_at_its_kinds_rate(
    by_hand: Rates, variant: Variant, direction: str, flop_s: float
) -> None:
    problem = replace(SMALL, block=64, block_stride=1)
    flops = 4 * 2 * 4 * 64 * PAIRS * (2.5 if direction == "backward" else 1.0)
    expected = STARTS_S + flops / flop_s / WAVES + GAP_S
    assert expected_s(problem, variant, H200, direction, 256.0) == pytest.approx(expected)


def test_a_window_counts_the_pairs_it_sees(by_hand: Rates) -> None:
    problem = replace(SMALL, window=16)
    # The first 16 queries see 1 to 16 keys, the other 240 see 16.
    flops = 4 * 2 * 4 * 64 * (16 * 17 // 2 + 240 * 16)
    for direction, flop_s in (("forward", 5e14), ("backward", 2.5e14 / 2.5)):
        expected = STARTS_S + flops / flop_s / WAVES + GAP_S
        found = expected_s(problem, Variant.WINDOW, H200, direction, 256.0)
        assert found == pytest.approx(expected)


def test_eager_is_its_kernels_one_by_one(by_hand: Rates) -> None:
    # Smallest kernel 2 us, then both limits: 2 n D operations, and Q, K and the scores in bf16.
    moved = 2 * (8 * 256 * 64 * 2 + SCORES)
    product = 2e-6 + np.hypot(2 * SCORES * 64 / 1e14, moved / 1e12)
    query, key = 2 * 131_072, 2 * 65_536
    # Copies of K and V; scale 4, mask 6, to fp32 6, softmax 8, to bf16 6 bytes a score.
    streams = (2 * (key + query) + 30 * SCORES) / 1e12
    expected = 2 * product + streams + 8 * GAP_S
    assert expected_s(SMALL, Variant.EAGER, H200, "forward", 256.0) == pytest.approx(expected)
    # To fp32 6, the softmax's own part 12, to bf16 6, scale 4 bytes a score; heads summed.
    streams = (2 * (key + query) + 28 * SCORES) / 1e12
    expected = 4 * product + streams + 9 * GAP_S
    assert expected_s(SMALL, Variant.EAGER, H200, "backward", 256.0) == pytest.approx(expected)


def test_fp32_kernels_that_were_not_measured_go_by_half_of_the_sheet(by_hand: Rates) -> None:
    problem = replace(SMALL, kv_heads=4, dtype="fp32")
    expected = 4 * 2 * 4 * 64 * PAIRS / 5e12 + GAP_S
    for variant in (Variant.SDPA, Variant.TRITON):
        found = expected_s(problem, variant, H200, "forward", 256.0)
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("gpu", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("variant", Variant)
def test_lengths_at_once_are_lengths_one_by_one(variant: Variant, gpu: object) -> None:
    lengths = np.array([512.0, 4096.0, 131072.0])
    for direction in ("forward", "backward"):
        at_once = expected_s(SMALL, variant, gpu, direction, lengths)  # type: ignore[arg-type]
        one_by_one = [expected_s(SMALL, variant, gpu, direction, s) for s in lengths]  # type: ignore[arg-type]
        assert np.asarray(at_once) == pytest.approx(np.array(one_by_one, dtype=float))
        assert (np.diff(one_by_one) > 0).all()


def exact_errors() -> Iterator[float]:
    """Errors of predicted times of recorded exact kernels; the rates are of other rows."""
    for row in ROWS:
        for one in counted(row):
            if one.variant in (Variant.EAGER, Variant.SDPA, Variant.TRITON):
                for direction in ("forward", "backward"):
                    measured_s = getattr(one, f"{direction}_s")
                    if measured_s is not None:
                        length = float(one.problem.sequence_length)
                        found = expected_s(one.problem, one.variant, H200, direction, length)
                        yield float(found) / measured_s - 1


def test_recorded_exact_kernels_took_what_is_predicted() -> None:
    errors = [abs(error) for error in exact_errors()]
    assert len(errors) >= 38
    assert fmean(errors) < 0.08 and max(errors) < 0.19
