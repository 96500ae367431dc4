"""What a GPU and its links really do: measured curves, and how they stand to the vendor's sheet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from planner.attached import match_preset
from planner.hardware import Gpu, gpu_presets
from planner.units import format_bytes, format_rate, format_seconds

# Bytes that a rank moves over its link per byte of the full buffer, as nccl-tests define the bus
# bandwidth (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): all-reduce twice the others.
_BUS_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
_HOST_LINK = ("host_to_device", "device_to_host")
# An optimizer's update in host memory, whose rate no sheet of a GPU gives.
_HOST_UPDATE = "host_update"
_LATENCIES = ("launch", "kernel", "synchronize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One point: an operation at one shape, the median time of `n` repetitions.

    `bytes` are those it must read and write (of a collective: the full buffer), `flops` what it
    computes. A collective's shape is [elements, ranks].
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    flops: float
    time_s: float
    n: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Curve:
        """Read the JSON form, as a run stores it."""
        return cls(**{**data, "shape": tuple(data["shape"])})

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "shape": list(self.shape)}

    @property
    def flop_s(self) -> float:
        """FLOPs per second."""
        return self.flops / self.time_s

    @property
    def bytes_s(self) -> float:
        """Bytes per second; of a collective, over a rank's link (the bus bandwidth)."""
        passes = _BUS_PASSES.get(self.operation)
        if passes is None:
            return self.bytes / self.time_s
        ranks = self.shape[1]
        return passes * self.bytes * (ranks - 1) / ranks / self.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The best point of one operation and dtype, in `unit` ("flop/s", "B/s" or "s").

    `sheet` is the vendor's figure for the same, None where there is none.
    """

    operation: str
    dtype: str
    points: int
    shape: tuple[int, ...]
    unit: str
    best: float
    sheet: float | None

    @property
    def share(self) -> float | None:
        """The measured part of the sheet's figure."""
        return None if not self.sheet else self.best / self.sheet

    def to_dict(self) -> dict[str, Any]:
        """Return one plain line of a table."""
        return {**asdict(self), "shape": list(self.shape), "share": self.share}


def bandwidth_lines(curves: Iterable[Curve]) -> list[dict[str, str]]:
    """Return a plain line for each size of full buffer: time and bus bandwidth of every collective."""
    lines: dict[int, dict[str, str]] = {}
    for curve in sorted(curves, key=lambda curve: curve.bytes):
        if curve.operation in _BUS_PASSES:
            line = lines.setdefault(curve.bytes, {"full buffer": format_bytes(curve.bytes)})
            name = curve.operation.replace("_", "-")
            line[name] = f"{format_seconds(curve.time_s)}, {format_rate(curve.bytes_s, 'B')}"
    return list(lines.values())


def findings(curves: Iterable[Curve], gpu: Gpu | None) -> list[Finding]:
    """Return the best of every operation and dtype beside the sheet of `gpu`."""
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.operation, curve.dtype), []).append(curve)
    return [_finding(points, gpu) for points in groups.values()]


def _finding(points: Sequence[Curve], gpu: Gpu | None) -> Finding:
    operation, dtype = points[0].operation, points[0].dtype
    if operation.startswith(_LATENCIES):
        unit, best = "s", min(points, key=lambda point: point.time_s)
        value = best.time_s
    elif best_flop := max((point for point in points if point.flops), key=_rate, default=None):
        unit, best, value = "flop/s", best_flop, best_flop.flop_s
    else:
        unit, best = "B/s", max(points, key=lambda point: point.bytes_s)
        value = best.bytes_s
    return Finding(
        operation=operation,
        dtype=dtype,
        points=len(points),
        shape=best.shape,
        unit=unit,
        best=value,
        sheet=None if gpu is None else _sheet(operation, dtype, unit, gpu),
    )


def _rate(curve: Curve) -> float:
    return curve.flop_s


def _sheet(operation: str, dtype: str, unit: str, gpu: Gpu) -> float | None:
    if unit == "s" or operation == _HOST_UPDATE:
        return None
    if unit == "flop/s":
        return gpu.peak_dense_flop_s.get(dtype)
    if operation in _BUS_PASSES:
        return gpu.interconnect_bytes_s
    is_copy = operation.startswith(_HOST_LINK)
    return gpu.host_link_bytes_s if is_copy else gpu.mem_bandwidth_bytes_s


def sheet_of(environment: Mapping[str, Any]) -> Gpu | None:
    """Return the preset of the GPU that a run's environment names; None without one."""
    gpu = environment.get("gpu") or {}
    if not gpu.get("name"):
        return None
    total_bytes = gpu.get("memory_total_bytes") or gpu["total_bytes"]
    found = match_preset(str(gpu["name"]), int(total_bytes))
    return next((preset for preset in gpu_presets() if preset.id == found), None)


def stored_findings(
    measured: Mapping[str, Any], environment: Mapping[str, Any] | None
) -> list[Finding]:
    """Return the findings of a stored run of `peakmark calibrate`."""
    curves = [Curve.from_dict(curve) for curve in measured.get("curves", ())]
    return findings(curves, sheet_of(environment or {}))


def finding_cells(found: Finding) -> tuple[str, ...]:
    """Return a finding in words: operation, type, shape, best, sheet, share, points."""
    return (
        found.operation.replace("_", " "),
        found.dtype,
        " x ".join(f"{size:,}" for size in found.shape),
        _in_words(found.best, found.unit),
        "-" if found.sheet is None else _in_words(found.sheet, found.unit),
        "-" if found.share is None else f"{100 * found.share:.0f} %",
        str(found.points),
    )


def _in_words(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1e6 * value:.2f} us"
    if unit == "flop/s":
        return f"{value / 1e12:,.1f} TFLOP/s"
    return f"{value / 1e9:,.1f} GB/s"
