"""Compile the memory-bound kernels for real GPUs, without one: no spills, loads of 16 bytes (AMD: 8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels.adamw.triton import BLOCK as ADAMW_BLOCK
from kernels.rms_norm.triton import STAGES, SUMMED_COLUMNS, SUMMED_ROWS, row_options
from kernels.rope.triton import tile_options
from kernels.swiglu.triton import BLOCK as SWIGLU_BLOCK

ROWS = {"x_stride": "i32", "width": "i32", "eps": "fp32", "num_rows": "i32", "grad_stride": "i32"}
PAIRS = {"gate_stride": "i32", "up_stride": "i32", "grad_stride": "i32", "width": "i32"}
FACTORS = ("decay", "beta1", "new1", "beta2", "new2", "root_correction", "eps", "step_size")
# module, kernel, names of 16-bit pointers, of fp32 pointers, other types, options
KERNELS: list[tuple[str, str, str, str, dict[str, Any], dict[str, Any]]] = [
    ("rms_norm", "forward_kernel", "x weight out", "inverses", ROWS, row_options(4096)),
    ("rms_norm", "backward_kernel", "grad x weight grad_x", "inverses partials", ROWS,
     row_options(4096) | {"STAGES": STAGES}),
    ("rms_norm", "weight_gradient_kernel", "out", "partials", {"num_partials": "i32", "width": "i32"},
     {"ROWS": SUMMED_ROWS, "COLUMNS": SUMMED_COLUMNS, "num_warps": 4}),
    ("swiglu", "forward_kernel", "gate up out", "", PAIRS, {"BLOCK": SWIGLU_BLOCK}),
    ("swiglu", "backward_kernel", "grad gate up grad_gate grad_up", "", PAIRS,
     {"BLOCK": SWIGLU_BLOCK}),
    ("rope", "rope_kernel", "x cos sin out", "",
     {"x_strides": ["i32"] * 3, "out_strides": ["i32"] * 3, "cos_strides": ["i32"] * 2,
      "sin_strides": ["i32"] * 2, "num_heads": "i32", "seq": "i32"},
     tile_options(32, 128, 128) | {"BACKWARD": False}),
    ("adamw", "adamw_kernel", "gradient copy", "parameter mean square",
     {"count": "i32", **dict.fromkeys(FACTORS, "fp32")}, {"COPIES": True, "BLOCK": ADAMW_BLOCK}),
]  # fmt: skip
DIVISIBLE = ["width", "count", *(name for name in (*ROWS, *PAIRS) if name.endswith("stride"))]


@pytest.mark.parametrize("arch", [80, 90, "gfx942"])
def test_nothing_spills_and_loads_are_wide(
    arch: int | str, compile_for_gpus: Callable[..., list[dict[str, Any]]]
) -> None:
    requests = []
    for folder, kernel, halves, floats, others, options in KERNELS:
        types = dict.fromkeys(halves.split(), "*bf16") | dict.fromkeys(floats.split(), "*fp32")
        requests.append(
            {
                "module": f"kernels.{folder}.device",
                "kernel": kernel,
                "arch": arch,
                "warps": options.get("num_warps", 8),
                "types": types | others,
                "constants": {name: value for name, value in options.items() if name.isupper()},
                "divisible": [*DIVISIBLE, "x_strides", "out_strides", "cos_strides", "sin_strides"],
            }
        )
    for (folder, kernel, *_), report in zip(KERNELS, compile_for_gpus(requests), strict=True):
        assert report["spilled_bytes"] == 0, (folder, kernel, report)
        assert report["wide_loads"] > 0, (folder, kernel, report)
