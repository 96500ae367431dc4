"""One attention call by hand: pairs, FLOPs, bytes moved and held, times, lengths that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.attention import costs
from planner.attention.answer import answer, curves, exactness, longest_that_fits
from planner.attention.backends import our_backend, sdpa_backend
from planner.attention.memory import footprint, input_bytes
from planner.attention.problem import (
    AttentionProblem,
    Variant,
    is_exact,
    parse_job,
    visible_pairs,
)
from planner.errors import PlanError
from planner.hardware import custom_gpu, resolve_gpu
from planner.speed.calibrated import rates_of

H200, A100, T4 = (resolve_gpu(name) for name in ("h200", "a100-sxm4-80gb", "t4"))
# B 2, H 4, K 2, D 64, S 256, bf16: Q has 2 x 4 x 256 x 64 elements, K half of them.
SMALL = AttentionProblem(
    batch=2, heads=4, kv_heads=2, head_dim=64, sequence_length=256, causal=True
)
QUERY, KEY = 2 * 131_072, 2 * 65_536
ROWS = 4 * 2 * 4 * 256
SCORES = 2 * 4 * 256 * 256
CAUSAL_PAIRS = 256 * 257 // 2


def held(problem: AttentionProblem, variant: Variant, gpu: Any = H200) -> tuple[int, int, int]:
    found = footprint(problem, variant, gpu, float(problem.sequence_length))
    sizes = (found.forward_peak_bytes(), found.saved_bytes(), found.backward_peak_bytes())
    return tuple(int(size) for size in sizes)  # type: ignore[return-value]


def test_pairs_of_small_patterns_counted_by_hand() -> None:
    tiny = replace(SMALL, window=2, global_tokens=1, block=64, block_stride=2)
    # Five queries see 1, 2, 2, 2, 2 keys; the last three also the first one.
    assert visible_pairs(tiny, Variant.WINDOW, 5.0) == 9
    assert visible_pairs(tiny, Variant.GLOBAL_LOCAL, 5.0) == 12
    # To both sides: 2, 3, 3, 3, 2, and key 0 for queries 2 to 4.
    both = replace(tiny, causal=False)
    assert visible_pairs(both, Variant.WINDOW, 5.0) == 13
    assert visible_pairs(both, Variant.GLOBAL_LOCAL, 5.0) == 16
    # Blocks of 64, 64 and 2 tokens; the third sees the first whole and itself.
    triangle = 64 * 65 // 2
    assert visible_pairs(tiny, Variant.BLOCK_SPARSE, 130.0) == 2 * triangle + 3 + 2 * 64
    assert visible_pairs(tiny, Variant.LINEAR, 5.0) == 15


def test_our_kernel_holds_results_rows_and_on_hopper_an_fp32_accumulator() -> None:
    kept = QUERY + ROWS
    portable = kept + ROWS + QUERY + 2 * KEY
    assert held(SMALL, Variant.TRITON, A100) == (kept, kept, portable)
    # 256 rows are a multiple of 128: rows of lse and delta are padded by nothing.
    assert held(SMALL, Variant.TRITON) == (kept, kept, portable + 2 * QUERY + 2 * ROWS)
    uneven = replace(SMALL, sequence_length=130)
    extra = held(uneven, Variant.TRITON)[2] - held(uneven, Variant.TRITON, A100)[2]
    assert extra == 4 * 2 * 4 * 130 * 64 + 2 * 4 * 2 * 4 * 256
    narrow = replace(SMALL, window=16)
    assert held(narrow, Variant.WINDOW, A100) == (kept, kept, portable)
    assert held(narrow, Variant.WINDOW) == held(SMALL, Variant.TRITON)
    assert held(SMALL, Variant.WINDOW) == held(SMALL, Variant.TRITON)
    # Two blocks each way: 2 x (2 + 2) numbers of 4 bytes.
    lists = 2 * 4 * 2 * 4
    assert held(SMALL, Variant.BLOCK_SPARSE) == (kept + lists, kept + lists, portable + lists)


def test_linear_attention_holds_states_of_chunks() -> None:
    # Four chunks of 64 tokens; a state of 64 x 64 and its norm for each of 2 x 2 key heads.
    states = 4 * 4 * 4 * (64 * 64 + 64)
    kept = QUERY + ROWS
    gradients = QUERY + 2 * KEY
    expected = (kept + states, kept, kept + gradients + 2 * states)
    assert held(SMALL, Variant.LINEAR) == expected
    # D = 80 takes 128 columns and chunks of 32.
    wide = replace(SMALL, head_dim=80)
    states = 8 * 4 * 4 * (128 * 128 + 128)
    assert held(wide, Variant.LINEAR)[0] == QUERY * 80 // 64 + ROWS + states


def test_torch_attention_by_backend() -> None:
    kept = QUERY + ROWS
    gradients = QUERY + 2 * KEY
    # cuDNN: dQ in fp32, dK and dV of each query head, row sums.
    # Beside these two scalars that are kept, and 256 bytes while a kernel runs.
    cudnn = 2 * QUERY + 2 * QUERY + ROWS
    small = 16 + 256
    expected = (kept + small, kept + 16, kept + gradients + cudnn + small)
    assert held(SMALL, Variant.SDPA) == expected
    alike = replace(SMALL, kv_heads=4)
    assert held(alike, Variant.SDPA)[2] == kept + 3 * QUERY + 2 * QUERY + ROWS + small
    # Flash pads 130 rows to 256 and 80 columns to 96.
    odd = replace(SMALL, sequence_length=130, head_dim=80, kv_heads=4)
    query, rows = 2 * 2 * 4 * 130 * 80, 4 * 2 * 4 * 130
    padded = 4 * 2 * 4 * 256
    expected = query + rows + 3 * query + padded * 96 + padded
    assert held(odd, Variant.SDPA, A100)[2] == expected
    # fp32 with grouped heads stores the scores: 16 bytes each in the softmax's backward.
    math = replace(SMALL, dtype="fp32")
    assert held(math, Variant.SDPA)[2] == 16 * SCORES + 4 * 2 * QUERY


@pytest.mark.parametrize(
    ("changes", "gpu", "backend"),
    [
        ({}, H200, "cudnn"),
        ({}, A100, "flash"),
        ({}, T4, "math"),
        ({"kv_heads": 4}, T4, "efficient"),
        ({"head_dim": 192}, H200, "flash"),
        ({"dtype": "fp32"}, H200, "math"),
        ({"dtype": "fp32", "kv_heads": 4}, H200, "efficient"),
        ({}, resolve_gpu("mi300x"), "flash"),
    ],
)
def test_torch_picks_its_backend(changes: dict[str, Any], gpu: Any, backend: str) -> None:
    assert sdpa_backend(replace(SMALL, **changes), gpu) == backend


def test_ours_is_the_hopper_kernel_where_the_dispatcher_takes_it() -> None:
    def both(problem: AttentionProblem, variant: Variant, gpu: Any = H200) -> list[str]:
        return [our_backend(problem, variant, gpu, way) for way in ("forward", "backward")]

    assert both(SMALL, Variant.TRITON) == ["hopper", "hopper"]
    assert both(SMALL, Variant.TRITON, A100) == ["triton", "triton"]
    assert both(replace(SMALL, dtype="fp32"), Variant.TRITON) == ["triton", "triton"]
    assert both(replace(SMALL, head_dim=192), Variant.TRITON) == ["hopper", "triton"]
    assert both(replace(SMALL, window=16), Variant.WINDOW) == ["hopper", "hopper"]
    assert both(SMALL, Variant.BLOCK_SPARSE) == ["triton", "triton"]


@pytest.mark.parametrize(
    ("variant", "counted"),
    [
        # Requested bytes above the inputs, counted by torch's allocator on an H200 (torch 2.11):
        # forward peak, kept, backward peak of B 1, H 32/8, D 128, S 8,192, causal.
        (Variant.EAGER, (21_743_271_936, 13_220_446_208, 34_695_282_688)),
        (Variant.SDPA, (68_157_712, 68_157_456, 438_305_040)),
        (Variant.TRITON, (68_157_440, 68_157_440, 306_184_192)),
        (Variant.BLOCK_SPARSE, (68_191_232, 68_191_232, 169_903_104)),
        (Variant.LINEAR, (203_423_744, 68_157_440, 439_353_344)),
    ],
)
def test_bytes_are_those_that_a_gpu_counted(variant: Variant, counted: tuple[int, ...]) -> None:
    llama = replace(SMALL, batch=1, heads=32, kv_heads=8, head_dim=128, sequence_length=8192)
    assert held(llama, variant) == counted


def test_flops_count_products_of_visible_pairs_and_eager_the_square() -> None:
    pair = 2 * 2 * 4 * 64
    length = 256.0

    def flops(variant: Variant, direction: str, gpu: Any = H200) -> float:
        return float(costs.flops(costs.work(SMALL, variant, gpu, direction, length)))

    assert flops(Variant.TRITON, "forward") == 2 * pair * CAUSAL_PAIRS
    assert flops(Variant.TRITON, "backward") == 5 * pair * CAUSAL_PAIRS
    # The portable backward computes weights and their gradient in both of its kernels.
    assert flops(Variant.TRITON, "backward", A100) == 7 * pair * CAUSAL_PAIRS
    assert flops(Variant.EAGER, "forward") == 2 * pair * 256 * 256
    assert flops(Variant.EAGER, "backward") == 4 * pair * 256 * 256
    # 64-token chunks: a state of 2 D^2 per token and key head; 2 D^2 + 4 x 64 D per query head.
    tokens = 2 * 256
    assert flops(Variant.LINEAR, "forward") == tokens * (
        2 * 2 * 64**2 + 4 * (2 * 64**2 + 4 * 64 * 64)
    )


def test_bytes_count_a_tensor_for_each_kernel_that_touches_it() -> None:
    def moved(problem: AttentionProblem, variant: Variant, direction: str) -> float:
        parts = costs.work(problem, variant, H200, direction, float(problem.sequence_length))
        return float(costs.moved_bytes(parts))

    assert moved(SMALL, Variant.TRITON, "forward") == 2 * QUERY + 2 * KEY + ROWS
    # Row sums: O, dO, sums. Then Q, dO, K, V, lse, sums; dQ four times in fp32; dQ, dK, dV.
    fused = 2 * QUERY + 2 * KEY + 2 * ROWS + 4 * 2 * QUERY + QUERY + 2 * KEY
    assert moved(SMALL, Variant.TRITON, "backward") == 2 * QUERY + ROWS + fused
    # bf16, causal: product 2, scale 4, mask 6, cast 6, softmax 8, cast back 6, read again 2.
    beside = 2 * (KEY + QUERY) + 2 * QUERY + 2 * QUERY
    assert moved(SMALL, Variant.EAGER, "forward") == 34 * SCORES + beside
    # dP 2, P 2; cast 6, two kernels of softmax 24, cast back 6; scale 4; dS twice 4.
    assert moved(SMALL, Variant.EAGER, "backward") == 48 * SCORES + 2 * 4 * QUERY + 2 * (
        QUERY + KEY
    )
    full = replace(SMALL, causal=False)
    assert moved(full, Variant.EAGER, "forward") == 28 * SCORES + beside


def test_the_roofline_is_at_the_vendors_rates() -> None:
    gpu = custom_gpu(
        {
            "visible_bytes": 2**36,
            "mem_bandwidth_bytes_s": 1e12,
            "peak_dense_flop_s": {"bf16": 1e14, "fp32": 1e13},
        }
    )
    found = answer(SMALL, tuple(Variant), gpu)
    ours = next(one for one in found.variants if one.variant is Variant.TRITON)
    # 2 KiB per pair and product at 1e14 FLOP/s: 0.7 us; 0.8 MB at 1 TB/s: 0.8 us.
    assert ours.forward.roofline_s == pytest.approx((2 * QUERY + 2 * KEY + ROWS) / 1e12)
    assert ours.forward.bound == "hbm"
    linear = next(one for one in found.variants if one.variant is Variant.LINEAR)
    # No tf32 rate: fp32's counts.
    assert linear.forward.roofline_s == pytest.approx(linear.forward.flops / 1e13)
    nothing = replace(gpu, peak_dense_flop_s={"int8": 1e14})
    found = answer(SMALL, tuple(Variant), nothing)
    assert not found.variants and not curves(SMALL, tuple(Variant), nothing)
    assert "peak_dense_flop_s.bf16 is missing" in found.refused["eager"]
    assert "peak_dense_flop_s.tf32 is missing" in found.refused["linear"]


def test_exact_or_not_is_said_in_words() -> None:
    narrow = replace(SMALL, window=16, global_tokens=4, block_stride=2)
    assert [is_exact(narrow, variant) for variant in Variant] == [True] * 3 + [False] * 4
    assert exactness(narrow, Variant.WINDOW) == (
        "not exact: a query sees keys less than 16 tokens before it"
    )
    assert exactness(SMALL, Variant.WINDOW).startswith("exact here")
    assert exactness(narrow, Variant.LINEAR).startswith("another function")


def test_curves_are_the_same_formulas_and_mark_what_does_not_fit() -> None:
    problem = replace(SMALL, batch=1, heads=32, kv_heads=8, head_dim=128, sequence_length=8192)
    lines = curves(problem, tuple(Variant), H200)
    assert lines.keys() == {str(variant) for variant in Variant}
    found = {one.variant.value: one for one in answer(problem, tuple(Variant), H200).variants}
    for name, points in lines.items():
        own = next(point for point in points if point["sequence_length"] == 8192)
        assert own["forward_s"] == pytest.approx(found[name].forward.time_s, rel=1e-12)
        assert own["device_bytes"] == found[name].device_bytes
    longest = longest_that_fits(problem, Variant.EAGER, H200)
    assert longest is not None
    # 16 bytes a score in the softmax's backward fill 140 GiB near 17,000 tokens of 32 heads.
    assert 16_384 < longest < 17_500
    for length, fits in ((longest, True), (longest + 1, False)):
        at = replace(problem, sequence_length=length)
        assert answer(at, (Variant.EAGER,), H200).variants[0].fits is fits
    assert [p["fits"] for p in lines["eager"]] == [
        p["sequence_length"] <= longest for p in lines["eager"]
    ]
    assert longest_that_fits(replace(problem, sequence_length=1), Variant.EAGER, H200) == longest


def test_inputs_are_q_k_v_and_the_upstream_gradient() -> None:
    assert input_bytes(SMALL, 256.0) == 2 * QUERY + 2 * KEY
    sizes = input_bytes(SMALL, np.array([256.0, 512.0]))
    assert list(np.asarray(sizes)) == [2 * QUERY + 2 * KEY, 4 * QUERY + 4 * KEY]


def test_linear_attention_is_refused_where_it_does_not_exist() -> None:
    found = answer(replace(SMALL, causal=False), tuple(Variant), H200)
    assert found.refused == {"linear": "Linear attention is causal here: choose a causal mask."}
    assert "linear" not in curves(replace(SMALL, head_dim=256), tuple(Variant), H200)
    document = found.to_dict()
    assert document["rates"] == rates_of(H200).source
    assert [one["variant"] for one in document["variants"]] == [str(v) for v in Variant][:-1]


GIVEN = SMALL.to_dict()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 0}, "attention.batch is 0"),
        ({"head_dim": 2**40}, "attention.head_dim"),
        ({"head_dim": 512}, "attention.head_dim is 512: it must be an integer from 1 to 256"),
        ({"heads": True}, "attention.heads"),
        ({"causal": 1}, "attention.causal"),
        ({"kv_heads": 3}, "attention.kv_heads"),
        ({"dtype": "int4"}, "attention.dtype"),
        ({"dtype": ["bf16"]}, "attention.dtype"),
        ({"kernels": ["flash"]}, "attention.kernels"),
        ({"kernels": []}, "attention.kernels"),
        ({"kernels": [[]]}, "attention.kernels"),
        ({"block": 96}, "attention.block is 96: it must be 64 or a multiple of 128"),
        ({"window": 0}, "attention.window"),
        ({"depth": 3}, "attention has no field 'depth'"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        parse_job(GIVEN | change)


def test_a_job_names_its_variants_once_or_runs_all() -> None:
    problem, variants = parse_job(GIVEN)
    assert problem == SMALL and variants == tuple(Variant)
    assert parse_job({**GIVEN, "kernels": ["sdpa", "sdpa"]})[1] == (Variant.SDPA,)
    given = {key: value for key, value in GIVEN.items() if key != "causal"}
    with pytest.raises(PlanError, match=r"attention\.causal is missing"):
        parse_job(given)
