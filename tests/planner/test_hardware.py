"""GPUs from the fact table and from numbers that people enter."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.hardware import custom_gpu, gpu_presets, parse_gpu, resolve_gpu

CUSTOM: dict[str, Any] = {
    "name": "Mine",
    "visible_bytes": 24_000_000_000,
    "mem_bandwidth_bytes_s": 9e11,
    "peak_dense_flop_s": {"bf16": 1e14, "fp32": 2e13, "fp8": None},
    "interconnect_bytes_s": None,
}


@pytest.mark.parametrize(
    ("name", "gpu_id"),
    [
        ("h200", "h200-sxm5-141gb"),
        ("H200-SXM5-141GB", "h200-sxm5-141gb"),
        ("rtx-4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("a10", "a10"),
        ("l4", "l4"),
        ("mi300x", "mi300x"),
        ("b200", "b200-sxm-180gb"),
    ],
)
def test_short_names_find_one_gpu(name: str, gpu_id: str) -> None:
    assert resolve_gpu(name).id == gpu_id


def test_a_name_with_several_meanings_lists_them() -> None:
    with pytest.raises(PlanError, match=r"h100-pcie-80gb, h100-sxm5-80gb, h100-nvl-94gb"):
        resolve_gpu("h100")


def test_the_h200_has_its_measured_total_and_its_sheet_s_rates() -> None:
    gpu = resolve_gpu("h200")
    assert gpu.visible_bytes == 150_109_880_320
    assert gpu.peak_dense_flop_s["bf16"] == 989e12
    assert gpu.interconnect_bytes_s == 450e9
    assert gpu.source
    assert (gpu.kind, gpu.gpus_per_node) == ("preset", 8)
    assert resolve_gpu("gb200").gpus_per_node == 72


def test_an_unpublished_total_is_bounded_from_below_and_said() -> None:
    # A10: nvidia-smi prints 23,028 MiB; the same board as A10G shows CUDA 23,684,186,112 B.
    a10 = resolve_gpu("a10")
    assert a10.visible_bytes == (23_028 - 768) * 1_048_576
    assert a10.visible_bytes < 23_684_186_112
    assert "768 MiB" in a10.notes[0]
    assert resolve_gpu("mi325x").visible_bytes == 256 * 10**9


def test_gpus_without_nvlink_use_their_slot() -> None:
    gpu = resolve_gpu("rtx-4090")
    assert gpu.interconnect_bytes_s == 31.5e9
    assert any("PCIe 4" in note for note in gpu.notes)


def test_every_preset_is_complete() -> None:
    assert len(gpu_presets()) == 29
    for gpu in gpu_presets():
        assert gpu.visible_bytes > 10**10
        assert gpu.mem_bandwidth_bytes_s > 1e11
        assert gpu.source
        assert parse_gpu(gpu.to_dict()) == gpu


def test_entered_numbers_are_kept() -> None:
    gpu = custom_gpu(CUSTOM)
    assert gpu.to_dict() == {"custom": CUSTOM}
    assert parse_gpu(gpu.to_dict()) == gpu


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("visible_bytes", 0),
        ("visible_bytes", "24 GB"),
        ("visible_bytes", 24e9),
        ("visible_bytes", 2**60),
        ("mem_bandwidth_bytes_s", math.nan),
        ("mem_bandwidth_bytes_s", -1),
        ("mem_bandwidth_bytes_s", math.inf),
        ("interconnect_bytes_s", 0),
        ("peak_dense_flop_s", {}),
        ("peak_dense_flop_s", {"bf16": None}),
        ("peak_dense_flop_s", {"bf16": "fast"}),
        ("peak_dense_flop_s", {"bf17": 1e14}),
        ("peak_dense_flop_s", 1e14),
        ("name", ""),
        ("tdp_w", 700),
    ],
)
def test_a_wrong_number_is_refused_by_its_field(key: str, value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        custom_gpu({**CUSTOM, key: value})
    assert caught.value.field.startswith(f"hardware.custom.{key}")


@pytest.mark.parametrize("key", ["visible_bytes", "mem_bandwidth_bytes_s", "peak_dense_flop_s"])
def test_a_missing_number_is_named(key: str) -> None:
    with pytest.raises(PlanError, match=rf"hardware\.custom\.{key} is missing"):
        custom_gpu({name: value for name, value in CUSTOM.items() if name != key})


@pytest.mark.parametrize("value", [{}, None, [], {"preset": "h200", "custom": CUSTOM}, {"gpu": 1}])
def test_hardware_is_one_preset_or_one_custom_gpu(value: object) -> None:
    with pytest.raises(PlanError, match="hardware"):
        parse_gpu(value)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(CUSTOM)),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.none()),
)
def test_any_value_gives_a_gpu_or_a_plan_error(key: str, value: object) -> None:
    try:
        assert custom_gpu({**CUSTOM, key: value}).visible_bytes > 0
    except PlanError as error:
        assert error.field.startswith("hardware.custom")
