"""Interpolation between measured points, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from planner.calibration import Curve
from planner.hardware import resolve_gpu
from planner.speed.calibrated import rates_of
from planner.speed.host import HostTable
from planner.speed.rates import Rates, layout_number, rates_from_curves
from planner.speed.stream_kinds import stream_number

HOST = HostTable(
    kernel_s={"": (2e-5, 1e-5)},
    step_s=(0.0, 0.0),
    extra_kernels={"checkpoint": (0.0, 0.0)},
    update_s={"peakmark/0": 0.0},
    stage3_s={"parameter": 0.0, "piece": 0.0},
    module_s=(1e-5, 3e-5),
    paces=(1.0, 1.0),
)


def curve(operation: str, shape: tuple[int, ...], time_s: float, **more: float | str) -> Curve:
    values = {"dtype": "bf16", "bytes": 0, "flops": 0.0, "n": 5} | more
    return Curve(operation=operation, shape=shape, time_s=time_s, **values)  # type: ignore[arg-type]


def rates(*curves: Curve) -> Rates:
    """Rates of a GPU that computes 1e12 FLOP/s and moves 1e9 B/s by its sheet."""
    return rates_from_curves(
        [
            curve("kernel_none", (1,), 1e-6),
            curve("copy", (1,), 11e-6, bytes=2**20),
            curve("copy", (2,), 41e-6, bytes=2**22),
            *curves,
        ],
        source="by hand",
        peak_flop_s={"bf16": 1e12, "fp32": 1e11},
        memory_bytes_s=1e9,
        multiprocessors=4,
        network_share=0.25,
        gpus_per_node=8,
        host=HOST,
    )


def test_a_measured_product_takes_what_was_measured() -> None:
    flops = 2.0 * 512**3
    found = rates(curve("matmul_nt", (512, 512, 512), 1.001e-3, flops=flops))
    size = np.array([512.0])
    taken = found.product_s("mm", "bf16", np.array([0.0]), np.array([1.0]), (size, size, size))
    # What two events take between them, a microsecond, is not the product's.
    assert taken == pytest.approx(1e-3)
    # One point only: every product is as far from the root of its two bounds' squares.
    ideal_s = 2e-6 + np.hypot(flops / 1e12, 3 * 512**2 * 2 / 1e9)
    double = 2e-6 + np.hypot(2 * flops / 1e12, (2 * 2 + 1) * 512**2 * 2 / 1e9)
    twice = found.product_s("mm", "bf16", np.array([1.0]), np.array([1.0]), (2 * size, size, size))
    assert twice == pytest.approx(1e-3 * double / ideal_s)


def test_the_nearer_of_two_products_counts_more() -> None:
    ratios = []
    for slow, fast in (((256, 256, 256), (4096, 4096, 4096)),):
        found = rates(
            curve("matmul_nt", slow, 1.0, flops=2.0 * 256**3),
            curve("matmul_nt", fast, 0.5, flops=2.0 * 4096**3),
        )
        for size in (256.0, 1024.0, 4096.0):
            at = np.array([size])
            one = np.array([1.0])
            layout = np.array([layout_number("nt")])
            ideal_s = found._ideal_s("bf16", one, (at, at, at), 2)
            ratios.append(float(ideal_s / found.product_s("mm", "bf16", layout, one, (at, at, at))))
    assert ratios[0] < ratios[1] < ratios[2]
    # Midway in log2 of every size the weights are equal: the mean of the logarithms.
    assert np.log(ratios[1]) == pytest.approx((np.log(ratios[0]) + np.log(ratios[2])) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "sizes", "is_slow"),
    [
        # Rows of the result, of either factor: 50,257 numbers of two bytes are no multiple of 16.
        ("nt", (512, 50257, 512), True),
        ("nn", (512, 512, 50257), True),
        ("tn", (50257, 512, 512), True),
        ("nt", (512, 50264, 512), False),
        # The longer dimension of a factor that lies across may be any.
        ("nt", (50257, 512, 512), False),
        ("tn", (512, 512, 50257), False),
    ],
)
def test_products_whose_rows_are_not_aligned_are_a_kind_of_their_own(
    layout: str, sizes: tuple[int, int, int], is_slow: bool
) -> None:
    flops = 2.0 * 512 * 512 * 50257
    found = rates(
        curve("matmul_nt", (512, 50264, 512), 1.0 + 1e-6, flops=flops),
        curve("matmul_nt", (512, 50257, 512), 8.0 + 1e-6, flops=flops),
    )
    m, n, k = (np.array([float(size)]) for size in sizes)
    number, one = np.array([float(layout_number(layout))]), np.array([1.0])
    [taken_s] = found.product_s("mm", "bf16", number, one, (m, n, k))
    assert taken_s == pytest.approx(8.0 if is_slow else 1.0, rel=0.01)
    # Other dtypes have no such kernels.
    [in_fp32] = found.product_s("mm", "fp32", number, one, (m, n, k))
    assert in_fp32 == pytest.approx(found._ideal_s("fp32", 1.0, sizes, 4))


def test_streams_go_along_their_curve_and_on_at_its_last_rate() -> None:
    number = stream_number("copy", "bf16")
    found = rates()
    # 10 us at 1 MiB and 40 us at 4 MiB: 20 us between them, in logarithms.
    times = found.stream_s(number, np.array([2.0**20, 2.0**21, 2.0**22, 2.0**24]))
    assert times == pytest.approx([1e-5, 2e-5, 4e-5, 16e-5])
    # Below the first point nothing is quicker: it is the kernel's own time.
    assert found.stream_s(number, 1024.0) == pytest.approx(1e-5)
    # What was not measured goes like what is like it, at last like a copy.
    assert found.stream_s(stream_number("gelu", "fp32"), 2.0**21) == pytest.approx(2e-5)


def test_a_warm_and_an_empty_cache_count_alike_but_in_a_step() -> None:
    found = rates(
        curve("kind_tanh_warm", (1,), 7e-6, bytes=2**20),
        curve("kind_tanh", (1,), 11e-6, bytes=2**20),
        curve("kind_tanh", (2,), 41e-6, bytes=2**22),
    )
    number = stream_number("tanh", "bf16")
    assert found.stream_s(number, 2.0**20) == pytest.approx(8e-6)
    assert found.warm_stream_s(number, 2.0**20) == pytest.approx(6e-6)
    # What is too large for the cache was measured with an empty one alone.
    assert found.warm_stream_s(number, 2.0**22) == pytest.approx(40e-6)


def test_from_one_kernel_to_the_next_passes_what_passes_between_two_events() -> None:
    assert rates().gap_s == 1e-6


def test_attention_fills_whole_waves() -> None:
    found = rates(curve("attention_forward_sdpa", (1, 4, 1, 1024, 64), 1.0 + 1e-6, flops=1e9))
    # Four heads of 1,024 queries are 32 blocks: 8 waves of 4 multiprocessors.
    assert found.attention_s("attention_forward_sdpa", 4.0, 1024.0, 64.0, 1e9) == pytest.approx(
        1.0 + 4e-6
    )
    # One head of 1,152 is 9 blocks: 3 waves for 2.25.
    taken = found.attention_s("attention_forward_sdpa", 1.0, 1152.0, 64.0, 1e9)
    assert taken == pytest.approx(3 / 2.25, rel=1e-4)


def test_a_ring_moves_more_of_a_buffer_the_more_ranks_it_has() -> None:
    found = rates(
        curve("all_gather", (1, 2), 1e-3, bytes=10**6),
        curve("all_gather", (2, 2), 4e-3, bytes=4 * 10**6),
    )
    # What passes between two events, 1 us, is off both points: 1 ns a byte and 1 us less. Between two
    # ranks half of the buffer moves, among four three quarters: as of one and a half.
    assert found.collective_s("all_gather", 2e6, 2) == pytest.approx(2e-3 - 1e-6)
    assert found.collective_s("all_gather", 2e6, 4) == pytest.approx(3e-3 - 1e-6)
    assert found.collective_s("all_gather", 8e6, 2) == pytest.approx(2 * (4e-3 - 1e-6))
    # Beyond a node the network has a quarter of the rate.
    fifteen_eighths = 4 * (2e-3 * 15 / 8 - 1e-6)
    assert found.collective_s("all_gather", 2e6, 16) == pytest.approx(fifteen_eighths)


def test_another_gpu_reaches_as_much_of_its_sheet() -> None:
    h200, h100 = rates_of(resolve_gpu("h200")), rates_of(resolve_gpu("h100-sxm5-80gb"))
    assert "H100" in h100.source and "sheet" in h100.source
    number = stream_number("binary", "bf16")
    slower = float(h100.stream_s(number, 1e9) / h200.stream_s(number, 1e9))
    assert slower == pytest.approx(4.8 / 3.35, rel=0.01)
    size = np.array([8192.0])
    times = [
        float(one.product_s("mm", "bf16", np.array([0.0]), np.array([1.0]), (size, size, size))[0])
        for one in (h100, h200)
    ]
    # Both compute at the same rate: a large product takes as long.
    assert times[0] == pytest.approx(times[1], rel=0.02)


def test_attention_in_fp32_and_by_our_kernels_for_hopper_have_rates_of_their_own() -> None:
    shape = (1, 4, 1, 1024, 64)
    in_fp32 = curve("attention_forward_sdpa", shape, 3.0, flops=1e9, dtype="fp32")
    found = rates(
        curve("attention_forward_sdpa", shape, 1.0, flops=1e9),
        curve("attention_forward_hopper", shape, 0.5, flops=1e9),
        in_fp32,
    )
    kinds = {"attention_forward_sdpa", "attention_forward_hopper", "attention_forward_sdpa_fp32"}
    assert set(found.attention) == kinds
    assert found.hopper_kind("attention_forward") == "attention_forward_hopper"
    assert found.hopper_kind("attention_backward") is None
    # The gradients of experts are products of their own, as each was measured.
    grouped = rates(
        curve("grouped_mm", (64, 32, 16, 4), 1.0, flops=1e9),
        curve("grouped_tn", (64, 32, 16, 4), 2.0, flops=1e9),
    ).products["grouped", "bf16"]
    assert grouped.layouts.tolist() == [layout_number("nn"), layout_number("tn")]
