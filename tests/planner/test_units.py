"""Sizes as people read them."""

from __future__ import annotations

import pytest

from planner.units import (
    format_bytes,
    format_count,
    format_gb,
    format_rate,
    format_seconds,
    format_signed,
)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (150_109_880_320, "139.80 GiB"),
        (-(3 * 1_073_741_824), "-3.00 GiB"),
        (2_200_000 * 1_073_741_824, "2,200,000.00 GiB"),
    ],
)
def test_bytes_are_shown_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_gb_is_decimal() -> None:
    assert format_gb(150_109_880_320) == "150.11 GB"


def test_counts_rates_and_times() -> None:
    assert format_count(8_030_261_248) == "8.03 B"
    assert format_count(124_439_808) == "124.4 M"
    assert format_count(512) == "512"
    assert format_count(59.1897) == "59.19"
    assert format_count(803.861) == "803.9"
    assert format_rate(4.8e12, "B") == "4.8 TB/s"
    assert format_rate(989e12, "FLOP") == "989 TFLOP/s"
    assert [format_seconds(t) for t in (2.5, 0.0125, 3e-6)] == ["2.5 s", "12.5 ms", "3 us"]


def test_what_rounds_to_zero_has_no_minus() -> None:
    shown = [format_signed(percent) for percent in (0.163, -4.387, -0.004, 0.0)]
    assert shown == ["+0.16 %", "-4.39 %", "+0.00 %", "+0.00 %"]
    assert (format_signed(-0.4, 0), format_signed(None)) == ("+0 %", "-")
