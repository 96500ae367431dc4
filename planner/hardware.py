"""GPUs: vendor-sheet presets with their sources, numbers that a person enters, attached cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from planner.checks import check_integer, check_mapping, check_number, check_text
from planner.errors import PlanError
from planner.presets import find_by_name
from planner.units import GB_BYTES, MIB_BYTES

if TYPE_CHECKING:
    from planner.speed.own import OwnCalibration

RATE_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")

# The largest gap between board total and visible total among the cards whose both were printed
# is 717 MiB (B200); facts table, `reserved_mib` and `visible_bytes`.
_CAUTIOUS_DRIVER_RESERVE_BYTES = 768 * MIB_BYTES

# One direction of a x16 slot by generation; data/interconnects.json pcie4-x16, pcie5-x16 and
# pcie6-x16. Generation 3 is half of generation 4 (8 instead of 16 GT/s per lane).
_PCIE_X16_BYTES_S = {3: 15.75e9, 4: 31.5e9, 5: 63e9, 6: 121e9}

_CUSTOM_FIELDS = frozenset(
    ("name", "visible_bytes", "mem_bandwidth_bytes_s", "peak_dense_flop_s", "interconnect_bytes_s")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: what its memory holds and how fast it moves and computes.

    `visible_bytes` is the total that CUDA reports; `peak_dense_flop_s` is by element type, None
    where the hardware lacks it; `interconnect_bytes_s` is per direction between the
    `gpus_per_node` GPUs that such links join, `host_link_bytes_s` to the host's memory: PCIe x16 of
    the GPU's generation, the 4th where that is not known. `calibration` is what was measured on this kind
    of GPU here, at whose rates all that is planned for it is timed; it is no part of the plan's document.
    """

    id: str
    name: str
    visible_bytes: int
    mem_bandwidth_bytes_s: float
    peak_dense_flop_s: Mapping[str, float | None] = field(hash=False)
    interconnect_bytes_s: float | None
    source: tuple[str, ...]
    kind: str
    gpus_per_node: int = 8
    compute_capability: str | None = None
    host_link_bytes_s: float = _PCIE_X16_BYTES_S[4]
    notes: tuple[str, ...] = ()
    calibration: OwnCalibration | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the form a plan carries: the preset's id, or all the numbers."""
        if self.kind == "preset":
            return {"preset": self.id}
        return {
            "custom": {
                "name": self.name,
                "visible_bytes": self.visible_bytes,
                "mem_bandwidth_bytes_s": self.mem_bandwidth_bytes_s,
                "peak_dense_flop_s": dict(self.peak_dense_flop_s),
                "interconnect_bytes_s": self.interconnect_bytes_s,
            }
        }


def _preset_visible_bytes(row: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the visible total and, where it is not published, a note on how it was bounded."""
    if row["visible_bytes"] is not None:
        return row["visible_bytes"], []
    if row["nvidia_smi_total_mib"] is not None:
        total_bytes = row["nvidia_smi_total_mib"] * MIB_BYTES
        note = "Visible memory is the board total less 768 MiB: the visible total is not published."
        return total_bytes - _CAUTIOUS_DRIVER_RESERVE_BYTES, [note]
    note = "Visible memory is the marketing size in 10^9 bytes: no printed total was found."
    return row["memory_gb_marketing"] * GB_BYTES, [note]


def _preset_gpu(row: Mapping[str, Any]) -> Gpu:
    visible_bytes, notes = _preset_visible_bytes(row)
    link_bytes_s = row["nvlink_per_direction_bytes_s"]
    if link_bytes_s is None:
        link_bytes_s = _PCIE_X16_BYTES_S[row["pcie_gen"]]
        notes.append(f"No NVLink: GPUs exchange data over PCIe {row['pcie_gen']} x16.")
    return Gpu(
        id=row["id"],
        name=row["name"],
        visible_bytes=visible_bytes,
        mem_bandwidth_bytes_s=float(row["mem_bandwidth_bytes_s"]),
        peak_dense_flop_s={
            dtype: None if rate is None else float(rate)
            for dtype, rate in row["peak_dense_flop_s"].items()
        },
        interconnect_bytes_s=float(link_bytes_s),
        source=tuple(row["source"]),
        kind="preset",
        gpus_per_node=row["gpus_per_node"],
        compute_capability=row["compute_capability"],
        host_link_bytes_s=_PCIE_X16_BYTES_S[row["pcie_gen"]],
        notes=(*notes, *([row["note"]] if row["note"] else [])),
    )


@cache
def gpu_presets() -> tuple[Gpu, ...]:
    """Return every GPU of the fact table."""
    rows = json.loads(files("planner").joinpath("data/gpus.json").read_text())
    return tuple(_preset_gpu(row) for row in rows)


@lru_cache(maxsize=1024)
def _gpu_by_name(name: str) -> Gpu:
    presets = {gpu.id: gpu for gpu in gpu_presets()}
    return presets[find_by_name("hardware.preset", name, list(presets))]


def resolve_gpu(name: object) -> Gpu:
    """Return the preset of an id or an unambiguous short name ("h200")."""
    if not isinstance(name, str):
        raise PlanError("hardware.preset", name, "the name of a preset")
    return _gpu_by_name(name)


def _check_rates(value: object) -> dict[str, float | None]:
    root = "hardware.custom.peak_dense_flop_s"
    rates = check_mapping(root, value, frozenset(RATE_DTYPES))
    checked = {
        dtype: None if rate is None else check_number(f"{root}.{dtype}", rate, 1e9, 1e19)
        for dtype, rate in rates.items()
    }
    if all(rate is None for rate in checked.values()):
        raise PlanError(root, value, "an object with a rate for at least one element type")
    return checked


def custom_gpu(numbers: object) -> Gpu:
    """Return a GPU from numbers that a person entered; raises PlanError naming the field."""
    root = "hardware.custom"
    values = check_mapping(root, numbers, _CUSTOM_FIELDS)
    for key in ("visible_bytes", "mem_bandwidth_bytes_s", "peak_dense_flop_s"):
        if key not in values:
            sentence = f"{root}.{key} is missing: a custom GPU needs it."
            raise PlanError(f"{root}.{key}", None, "present", sentence=sentence)
    link = values.get("interconnect_bytes_s")
    return Gpu(
        id="custom",
        name=check_text(f"{root}.name", values.get("name", "custom GPU")),
        visible_bytes=check_integer(
            f"{root}.visible_bytes", values["visible_bytes"], MIB_BYTES, 2**50
        ),
        mem_bandwidth_bytes_s=check_number(
            f"{root}.mem_bandwidth_bytes_s", values["mem_bandwidth_bytes_s"], 1e6, 1e16
        ),
        peak_dense_flop_s=_check_rates(values["peak_dense_flop_s"]),
        interconnect_bytes_s=None
        if link is None
        else check_number(f"{root}.interconnect_bytes_s", link, 1e6, 1e16),
        source=("entered by hand",),
        kind="custom",
    )


def parse_gpu(value: object) -> Gpu:
    """Return the GPU of a plan's "hardware" object: {"preset": id} or {"custom": {...}}."""
    choice = check_mapping("hardware", value, frozenset(("preset", "custom")))
    if len(choice) != 1:
        raise PlanError("hardware", value, "an object with either preset or custom")
    return resolve_gpu(choice["preset"]) if "preset" in choice else custom_gpu(choice["custom"])
