"""Compile decode attention for real GPUs, without one: no spills in the shapes that are measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.decode.splits import choose_tile

STRIDES = ("q_strides", "k_strides", "v_strides", "out_strides")
SIZES = ("table_stride", "kv_heads", "group", "seq_q", "capacity", "num_splits", "window")
ONE_BYTE = {"fp8": True, "int8": False}


def request_of(
    arch: int | str, element: str, page: int, *, window: bool = False, per_token: bool = False
) -> dict[str, Any]:
    types: dict[str, Any] = {name: ["i32"] * 3 for name in STRIDES}
    types |= dict.fromkeys(SIZES, "i32") | dict.fromkeys(("q", "out", "k", "v"), "*bf16")
    types |= {"lse": "*fp32", "lengths": "*i32", "table": "*i32", "scale_log2": "fp32"}
    constants = {"WINDOWED": window, "PAGE": page, "IS_SPLIT": False, "HEAD_DIM": 128}
    tile = choose_tile(128, 1 if element in ONE_BYTE else 2)
    if element in ONE_BYTE:
        types |= {"k": "*i16", "v": "*i16", "k_scale": "*fp32", "v_scale": "*fp32"}
        types |= {name: ["i32"] * 3 for name in ("k_scale_strides", "v_scale_strides")}
        constants |= {"FP8": ONE_BYTE[element], "PER_TOKEN": per_token}
        constants |= {"WORDS": True, "PACKED": isinstance(arch, int), "ONE_QUERY": True}
    return {
        "module": "kernels.decode.device_bytes" if element in ONE_BYTE else "kernels.decode.device",
        "kernel": "byte_kernel" if element in ONE_BYTE else "decode_kernel",
        "arch": arch,
        "warps": tile.warps,
        "stages": tile.stages,
        "types": types,
        "constants": constants | {"BLOCK_D": 128, "BLOCK_M": 16, "BLOCK_N": tile.keys},
        "divisible": [*STRIDES, "capacity"],
    }


@pytest.mark.parametrize(
    ("arch", "cases"),
    [
        (80, [("bf16", 0), ("bf16", 64)]),
        (90, [("bf16", 0), ("bf16", 64), ("bf16", 16), ("fp8", 0), ("int8", 64)]),
    ],
)
def test_measured_shapes_keep_three_programs_in_shared_memory_and_do_not_spill(
    arch: int,
    cases: list[tuple[str, int]],
    compile_for_gpus: Callable[..., list[dict[str, Any]]],
) -> None:
    reports = compile_for_gpus([request_of(arch, *case) for case in cases])
    for case, report in zip(cases, reports, strict=True):
        assert report["spilled_bytes"] == 0, (case, report)
        assert 3 * report["shared_bytes"] <= 227 * 1024, (case, report)


def test_an_amd_gpu_has_room_for_one_program_and_its_matrix_cores_are_used(
    compile_for_gpus: Callable[..., list[dict[str, Any]]],
) -> None:
    """Compiled for an MI300 only, with its 64 KiB of shared memory: nothing ever ran there."""
    cases = [("bf16", 0), ("bf16", 16), ("int8", 64)]
    for report in compile_for_gpus([request_of("gfx942", *case) for case in cases]):
        assert report["spilled_bytes"] == 0, report
        assert report["shared_bytes"] <= 64 * 1024, report
        assert report["matrix_products"] > 0, report


@pytest.mark.slow
def test_windows_and_scales_per_token_compile_too(
    compile_for_gpus: Callable[..., list[dict[str, Any]]],
) -> None:
    cases = [("bf16", 16, True, False), ("fp8", 64, True, True), ("int8", 16, False, True)]
    requests = [
        request_of(90, element, page, window=window, per_token=per_token)
        for element, page, window, per_token in cases
    ]
    for report in compile_for_gpus(requests):
        assert 2 * report["shared_bytes"] <= 227 * 1024, report


def append_request(element: str, page: int, largest: float) -> dict[str, Any]:
    strides = ("k_new_strides", "v_new_strides", "k_strides", "v_strides")
    types: dict[str, Any] = {name: ["i32"] * 3 for name in strides}
    types |= {name: ["i32"] * 3 for name in ("k_scale_strides", "v_scale_strides")}
    types |= dict.fromkeys(("k_new", "v_new"), "*bf16") | dict.fromkeys(("k", "v"), f"*{element}")
    types |= {"lengths": "*i32", "table": "*i32", "k_scale": "*fp32", "v_scale": "*fp32"}
    types |= dict.fromkeys(("table_stride", "kv_heads", "seq_q", "capacity"), "i32")
    constants = {"PAGE": page, "LARGEST": largest, "ROUNDS": element == "i8"}
    return {
        "module": "kernels.decode.append_device",
        "kernel": "append_kernel",
        "arch": 90,
        "warps": 1,
        "types": types,
        "constants": constants | {"HEAD_DIM": 128, "BLOCK_D": 128},
    }


def test_writing_into_each_kind_of_cache_compiles_without_spills(
    compile_for_gpus: Callable[..., list[dict[str, Any]]],
) -> None:
    cases = [("bf16", 0, 0.0), ("fp8e4nv", 64, 448.0), ("i8", 16, 127.0)]
    for report in compile_for_gpus([append_request(*case) for case in cases]):
        assert report["spilled_bytes"] == 0, report
