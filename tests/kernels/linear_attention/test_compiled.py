"""Compile linear attention for real GPUs, without one: hardly anything spills, tiles fit an A100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.linear_attention import device
from kernels.linear_attention.triton import STATE_ROWS, STATE_STAGES, chunk_options

A100_SHARED_BYTES = 163 * 1024
# What ptxas spills today.
SPILLED_BYTES = {(80, "key_gradient_kernel", 64): 36, (90, "output_kernel", 128): 16}
FP32 = ("inverses", "states", "norms")
KERNELS = ("state_kernel", "output_kernel", "query_gradient_kernel", "key_gradient_kernel")


def request_of(kernel: str, arch: int, head_dim: int) -> dict[str, Any]:
    options = chunk_options(head_dim, torch.bfloat16)
    constants = {name: value for name, value in options.items() if name.isupper()}
    constants |= {
        "state_kernel": {"BACKWARD": True, "ROWS": STATE_ROWS, "STAGES": STATE_STAGES}
    }.get(kernel, {})
    constants |= {"key_gradient_kernel": {"FOR_VALUES": False}}.get(kernel, {})
    types: dict[str, Any] = {}
    for name in getattr(device, kernel).arg_names:
        if name.endswith("strides"):
            types[name] = ["i32"] * 3
        elif name in ("heads", "kv_heads", "group", "seq", "chunks"):
            types[name] = "i32"
        elif name not in constants:
            types[name] = "*fp32" if name in FP32 else "*bf16"
    return {
        "module": "kernels.linear_attention.device",
        "kernel": kernel,
        "arch": arch,
        "warps": options["num_warps"],
        "stages": options["num_stages"],
        "types": types,
        "constants": constants,
        "divisible": [name for name in types if name.endswith("strides")],
    }


@pytest.mark.parametrize("arch", [80, 90])
def test_no_more_spills_than_is_known_and_tiles_fit(
    arch: int, compile_for_gpus: Callable[..., list[dict[str, Any]]]
) -> None:
    cases = [(kernel, head_dim) for kernel in KERNELS for head_dim in (64, 128)]
    reports = compile_for_gpus([request_of(kernel, arch, size) for kernel, size in cases])
    for case, report in zip(cases, reports, strict=True):
        assert report["spilled_bytes"] <= SPILLED_BYTES.get((arch, *case), 0), (case, report)
        assert report["shared_bytes"] <= A100_SHARED_BYTES, (case, report)
