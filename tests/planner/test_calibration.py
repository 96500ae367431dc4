"""Rates of measured points, worked out by hand, and the sheet beside them."""

from __future__ import annotations

import pytest

from planner.calibration import (
    Curve,
    bandwidth_lines,
    finding_cells,
    findings,
    sheet_of,
    stored_findings,
)
from planner.hardware import resolve_gpu


def _curve(operation: str, time_s: float, *shape: int, **more: float | str) -> Curve:
    values = {"dtype": "bf16", "bytes": 0, "flops": 0.0, "n": 5} | more
    return Curve(operation=operation, shape=shape, time_s=time_s, **values)  # type: ignore[arg-type]


def test_the_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # PERFORMANCE.md: all-reduce 2 (n-1)/n, all-gather and reduce-scatter (n-1)/n of size over time.
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "copy")
    rates = [_curve(kind, 0.5, 500, 4, bytes=1000).bytes_s for kind in kinds]
    assert rates == [2 * 0.75 * 2000, 0.75 * 2000, 0.75 * 2000, 2000]


def test_collectives_stand_side_by_side_by_size() -> None:
    sizes = (("all_gather", 2**21, 1e-5), ("all_gather", 2**20, 8e-6), ("all_reduce", 2**20, 1e-5))
    seen = [_curve(name, time_s, size // 2, 2, bytes=size) for name, size, time_s in sizes]
    seen.append(_curve("copy", 1e-6, 2**19, bytes=2**20))
    # Half of the buffer passes a link of two ranks, for an all-reduce twice.
    assert bandwidth_lines(seen) == [
        {
            "full buffer": "1.00 MiB",
            "all-gather": "8 us, 65.54 GB/s",
            "all-reduce": "10 us, 104.9 GB/s",
        },
        {"full buffer": "2.00 MiB", "all-gather": "10 us, 104.9 GB/s"},
    ]


def test_the_best_of_each_operation_stands_beside_the_sheet() -> None:
    gpu = resolve_gpu("h200-sxm5-141gb")
    points = [
        _curve("matmul_nt", 1.0, 8, 8, 8, flops=4e14),
        _curve("matmul_nt", 1.0, 9, 9, 9, flops=6e14),
        _curve("matmul_nt", 1.0, 7, 7, 7, flops=3e13, dtype="fp32"),
        _curve("copy", 1.0, 5, bytes=2 * 10**12),
        _curve("copy", 1.0, 6, bytes=4 * 10**12),
        _curve("host_to_device_pinned", 1.0, 5, bytes=5 * 10**10),
        _curve("kind_unary", 1.0, 5, bytes=3 * 10**12),
        _curve("host_update", 1.0, 5, 2, bytes=5 * 10**10),
        _curve("all_gather", 1.0, 5, 2, bytes=8 * 10**11),
        _curve("launch_matmul", 4e-6, 1, bytes=8),
    ]
    found = {(one.operation, one.dtype): one for one in findings(points, gpu)}
    best = found["matmul_nt", "bf16"]
    assert (best.best, best.shape, best.points, best.unit) == (6e14, (9, 9, 9), 2, "flop/s")
    # The H200's sheet: 989.5 TFLOP/s bf16 and 67 fp32, 4.8 TB/s, NVLink 450 GB/s, PCIe 5 63 GB/s.
    assert best.share == pytest.approx(6e14 / 989.5e12, rel=1e-3)
    assert found["matmul_nt", "fp32"].share == pytest.approx(3e13 / 67e12, rel=1e-2)
    assert found["copy", "bf16"].share == pytest.approx(4e12 / 4.8e12, rel=1e-3)
    assert found["host_to_device_pinned", "bf16"].share == pytest.approx(50 / 63, rel=1e-3)
    assert found["kind_unary", "bf16"].share == pytest.approx(3e12 / 4.8e12, rel=1e-3)
    assert (found["host_update", "bf16"].best, found["host_update", "bf16"].sheet) == (5e10, None)
    assert found["all_gather", "bf16"].share == pytest.approx(400 / 450, rel=1e-3)
    launch = found["launch_matmul", "bf16"]
    assert (launch.unit, launch.best, launch.share) == ("s", 4e-6, None)
    assert finding_cells(best)[:4] == ("matmul nt", "bf16", "9 x 9 x 9", "600.0 TFLOP/s")
    assert finding_cells(launch)[3:] == ("4.00 us", "-", "-", "1")


def test_a_run_is_read_back_with_the_sheet_of_its_gpu() -> None:
    point = _curve("copy", 1.0, 5, bytes=4 * 10**12)
    gpu = {"name": "NVIDIA H200", "total_bytes": 150109880320, "memory_total_bytes": 150754820096}
    [found] = stored_findings({"curves": [point.to_dict()]}, {"gpu": gpu})
    assert found.share == pytest.approx(4 / 4.8, rel=1e-3)
    assert Curve.from_dict(point.to_dict()) == point
    [found] = stored_findings({"curves": [point.to_dict()]}, {"gpu": None})
    assert found.sheet is None
    assert sheet_of({"gpu": {"name": "NVIDIA Nothing 1", "total_bytes": 1}}) is None
