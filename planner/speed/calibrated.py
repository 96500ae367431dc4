"""The rates of a plan's GPU: measured on its kind, or what such a measurement says of its sheet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from planner.calibration import Curve
from planner.hardware import Gpu, gpu_presets
from planner.interconnects import interconnect
from planner.speed.host import HostTable
from planner.speed.own import with_own
from planner.speed.rates import HOPPER, AttentionPoints, Rates, rates_from_curves

# The GPU whose curves come with the planner. Others are taken to reach as much of their sheets.
MEASURED_ID = "h200-sxm5-141gb"
_MULTIPROCESSORS = 132
_NETWORK_ID, _FALLBACK_LINK_ID = "infiniband-ndr400", "pcie4-x16"
_DTYPES = ("bf16", "fp32")


@cache
def shipped() -> Mapping[str, Any]:
    """Return the measured points that come with the planner: `curves`, `host` and their `source`."""
    data: Mapping[str, Any] = json.loads(files("planner.speed").joinpath("h200.json").read_text())
    return data


def measured_gpu() -> Gpu:
    """Return the preset of the GPU whose curves come with the planner."""
    return next(preset for preset in gpu_presets() if preset.id == MEASURED_ID)


def rates_of_points(curves: Sequence[Curve], host: Mapping[str, Any], source: str) -> Rates:
    """Return the rates of the measured GPU from points of `peakmark calibrate`."""
    gpu = measured_gpu()
    return rates_from_curves(
        curves,
        source=source,
        peak_flop_s={dtype: _peak(gpu, dtype) for dtype in _DTYPES},
        memory_bytes_s=gpu.mem_bandwidth_bytes_s,
        multiprocessors=_MULTIPROCESSORS,
        network_share=_network_share(gpu),
        gpus_per_node=gpu.gpus_per_node,
        host=HostTable.from_dict(host),
    )


@cache
def rows_used() -> frozenset[str]:
    """Return the ids of recorded steps whose time set a constant: they are no evidence for times."""
    return frozenset(shipped()["host"]["rows_used"])


@cache
def _measured() -> Rates:
    data = shipped()
    curves = [Curve.from_dict(curve) for curve in data["curves"]]
    return rates_of_points(curves, data["host"], data["source"])


@lru_cache(maxsize=64)
def rates_of(gpu: Gpu) -> Rates:
    """Return the rates of a GPU: measured here, else shipped, else by the ratio of the sheets.

    The one place that decides at which rates anything is timed; `source` of the rates says which.
    """
    if gpu.calibration is not None:
        plain = replace(gpu, calibration=None)
        shipped_curves = [Curve.from_dict(curve) for curve in shipped()["curves"]]
        return with_own(rates_of(plain), plain, gpu.calibration, shipped_curves)
    if gpu.id == MEASURED_ID:
        return _measured()
    return _scaled(_measured(), measured_gpu(), gpu)


def _scaled(rates: Rates, measured: Gpu, gpu: Gpu) -> Rates:
    """Let another GPU reach the same part of its sheet, at every size, as the measured one of its own."""
    compute = {dtype: _peak(gpu, dtype) for dtype in _DTYPES}
    faster = compute["bf16"] / rates.peak_flop_s["bf16"]
    memory = gpu.mem_bandwidth_bytes_s / measured.mem_bandwidth_bytes_s
    link = _link_bytes_s(gpu) / _link_bytes_s(measured)
    return replace(
        rates,
        source=f"sheet of {gpu.name}, with the share of it that an {measured.name} reaches",
        peak_flop_s=compute,
        memory_bytes_s=gpu.mem_bandwidth_bytes_s,
        streams=rates.streams - np.log(memory),
        warm_streams=rates.warm_streams - np.log(memory),
        attention={
            name: AttentionPoints(points.sizes, points.rates + np.log(faster))
            for name, points in rates.attention.items()
            if gpu.compute_capability == measured.compute_capability or HOPPER not in name
        },
        collectives={
            name: (sizes, times / link) for name, (sizes, times) in rates.collectives.items()
        },
        network_share=_network_share(gpu),
        gpus_per_node=gpu.gpus_per_node,
    )


def _peak(gpu: Gpu, dtype: str) -> float:
    """The sheet's rate; fp32's where there is none."""
    found = gpu.peak_dense_flop_s.get(dtype) or gpu.peak_dense_flop_s.get("fp32")
    return float(found or gpu.peak_dense_flop_s.get("bf16") or 1.0)


def _link_bytes_s(gpu: Gpu) -> float:
    return float(gpu.interconnect_bytes_s or interconnect(_FALLBACK_LINK_ID).bytes_s)


def _network_share(gpu: Gpu) -> float:
    """One 400 Gb/s port per GPU between nodes, over the link within one; 1 where that is slower."""
    return min(1.0, interconnect(_NETWORK_ID).bytes_s / _link_bytes_s(gpu))
