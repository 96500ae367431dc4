"""Sizes of elements and the one place where bytes, counts and times become text."""

from __future__ import annotations

KIB_BYTES = 2**10
MIB_BYTES = 2**20
GIB_BYTES = 2**30
GB_BYTES = 10**9

_DECIMAL_STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNT_STEPS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_BINARY_STEPS = ((GIB_BYTES, "GiB"), (MIB_BYTES, "MiB"), (KIB_BYTES, "KiB"))


def format_bytes(size_bytes: float) -> str:
    """Return a size in GiB, MiB, KiB or B, with two decimals from 1 KiB up."""
    for unit_bytes, unit in _BINARY_STEPS:
        if abs(size_bytes) >= unit_bytes:
            return f"{size_bytes / unit_bytes:,.2f} {unit}"
    return f"{size_bytes:,.0f} B"


def format_gb(size_bytes: float) -> str:
    """Return a size in decimal GB (10^9 bytes), as vendors and papers print it."""
    return f"{size_bytes / GB_BYTES:,.2f} GB"


def format_count(count: float) -> str:
    """Return a count or rate with four significant digits at most: 8.03 B, 124.4 M, 512, 59.19."""
    for step, unit in _COUNT_STEPS:
        if abs(count) >= step:
            return f"{count / step:.4g} {unit}"
    return f"{count:.4g}"


def format_rate(value_per_s: float, unit: str) -> str:
    """Return a rate with a decimal prefix: 989 TFLOP/s, 4.8 TB/s."""
    for step, prefix in _DECIMAL_STEPS:
        if abs(value_per_s) >= step:
            return f"{value_per_s / step:.4g} {prefix}{unit}/s"
    return f"{value_per_s:.4g} {unit}/s"


def format_seconds(time_s: float) -> str:
    """Return a time in s, ms or us with four significant digits."""
    if time_s >= 1:
        return f"{time_s:,.4g} s"
    return f"{time_s * 1e3:.4g} ms" if time_s >= 1e-3 else f"{time_s * 1e6:.4g} us"


def format_signed(percent: float | None, digits: int = 2) -> str:
    """Return a difference in percent with its sign: +0.16 %, "-" for None.

    What rounds to zero is +0.00 %, never -0.00 %.
    """
    return "-" if percent is None else f"{percent:+z.{digits}f} %"


def format_share(share: float, digits: int = 1) -> str:
    """Return a share in percent: 0.177 becomes 17.7 %."""
    return f"{100 * share:,.{digits}f} %"
