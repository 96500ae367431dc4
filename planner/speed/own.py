"""A calibration of one's own: points that `peakmark calibrate` measured on the kind of GPU of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from planner.calibration import Curve, sheet_of
from planner.hardware import Gpu
from planner.speed.host import HostTable
from planner.speed.rates import Rates, rates_from_curves

# How fast a host is: forward and back through a small module; in earlier calibrations only the time to
# start the smallest kernel.
_MODULE, _LAUNCH = ("launch_module_forward", "launch_module_backward"), "launch_elementwise"


@dataclass(frozen=True, slots=True, eq=False)
class OwnCalibration:
    """Points measured on the GPU of preset `gpu_id`, and `source`, the words that say so."""

    gpu_id: str
    curves: tuple[Curve, ...]
    source: str


def own_calibrations(stored: Iterable[Mapping[str, Any]]) -> dict[str, OwnCalibration]:
    """Return the calibrations of each GPU by its preset's id, of stored runs from old to new.

    A stored run holds `measured`, `environment` and `recorded_at`. A newer point takes the place of an
    older one of the same operation; a run without points or of a GPU without preset says nothing.
    """
    found: dict[str, dict[tuple[str, str], list[Curve]]] = {}
    names: dict[str, tuple[str, str]] = {}
    for run in stored:
        gpu = sheet_of(run["environment"] or {})
        if gpu is None:
            continue
        newer: dict[tuple[str, str], list[Curve]] = {}
        for data in run["measured"].get("curves", ()):
            curve = Curve.from_dict(data)
            newer.setdefault((curve.operation, curve.dtype), []).append(curve)
        if newer:
            found.setdefault(gpu.id, {}).update(newer)
            names[gpu.id] = (gpu.name, str(run["recorded_at"])[:10])
    return {
        gpu_id: OwnCalibration(
            gpu_id,
            tuple(curve for points in groups.values() for curve in points),
            "curves measured here on {} ({})".format(*names[gpu_id]),
        )
        for gpu_id, groups in found.items()
    }


def calibrated(gpu: Gpu, own: OwnCalibration | None) -> Gpu:
    """Return a GPU with the calibration made here, as it was where that is of another kind."""
    if own is None or own.gpu_id != gpu.id:
        return gpu
    return replace(gpu, calibration=own)


def with_own(rates: Rates, gpu: Gpu, own: OwnCalibration, shipped: Iterable[Curve]) -> Rates:
    """Return `rates` of a GPU with what was measured here in the place of what was not.

    The host goes at the pace that was measured, or is slower than that of the `shipped` curves by the ratio
    of their launches.
    """
    mine = rates_from_curves(
        own.curves,
        source=own.source,
        peak_flop_s=rates.peak_flop_s,
        memory_bytes_s=gpu.mem_bandwidth_bytes_s,
        multiprocessors=rates.multiprocessors,
        network_share=rates.network_share,
        gpus_per_node=gpu.gpus_per_node,
        host=rates.host,
        instead=rates,
    )
    return replace(mine, host=_host(rates.host, own.curves, shipped))


def _host(table: HostTable, curves: Sequence[Curve], shipped: Iterable[Curve]) -> HostTable:
    forward_s, backward_s = (_median_s(curves, name) for name in _MODULE)
    if forward_s and backward_s:
        return table.at_pace(forward_s, backward_s)
    launched_s, usual_s = _median_s(curves, _LAUNCH), _median_s(shipped, _LAUNCH)
    if not launched_s or not usual_s:
        return table
    ahead, back = (pace * launched_s / usual_s for pace in table.paces)
    return replace(table, paces=(ahead, back))


def _median_s(curves: Iterable[Curve], operation: str) -> float | None:
    found = [curve.time_s for curve in curves if curve.operation == operation]
    return median(found) if found else None
