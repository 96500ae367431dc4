"""Compile the fused Hopper backward for sm_90a without a GPU; print what ptxas says as JSON lines.

Run in its own process, because `TRITON_INTERPRET` must not be set. Each argument is one request,
head_dim:dtype:right:left:masked, dtype being bf16 or fp16.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from kernels.attention import hopper_backward_device as device
from kernels.attention.hopper_backward import KEYS, TILES
from tests.kernels.ptxas import assemble

GLUON = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


def describe(shape: list[int], dtype: str) -> str:
    """Return the type of a host tensor descriptor with tiles of `shape`."""
    layout = gl.NVMMASharedLayout.get_default_for(shape, GLUON[dtype])
    return f"tensordesc<{dtype}{shape},{layout!r}>"


def compile_one(request: str) -> dict[str, Any]:
    """Compile one request and return spilled bytes, shared memory and what the PTX holds."""
    head_dim, dtype, right, left, masked = request.split(":")
    columns, half = int(head_dim), KEYS // 2
    tile = TILES[columns]
    constants = {
        "BM": tile.queries,
        "D": columns,
        "DS_STAGES": tile.ds_stages,
        "FOLDED": tile.folded,
        "RIGHT": right == "1",
        "LEFT": left == "1",
        "MASKED": masked == "1",
        "DS_LAYOUT": gl.NVMMASharedLayout.get_default_for([half, tile.queries], GLUON[dtype]),
        "REGISTERS": tile.registers,
    }
    rows = describe([1, 1, tile.queries, columns], dtype)
    keys = describe([1, 1, half, columns], dtype)
    row_values = describe([tile.queries], "fp32")
    types = {"q_d": rows, "do_d": rows, "lse_d": row_values, "delta_d": row_values}
    types |= dict.fromkeys(("k_d", "v_d", "dk_d", "dv_d"), keys)
    types["dq_d"] = describe([1, 1, tile.queries, columns // 2], "fp32")
    types |= dict.fromkeys(("scale", "scale_log2"), "fp32") | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in device.backward_kernel.arg_names}
    source = GluonASTSource(device.backward_kernel, signature, constants, {})
    target, options = GPUTarget("cuda", 90, 32), {"num_warps": 4}
    compiled = triton.compile(source, target=target, options=options)
    ptx = compiled.asm["ptx"]
    report = {
        "request": request,
        "shared_bytes": compiled.metadata.shared,
        "reductions": ptx.count("cp.reduce.async.bulk.tensor"),
    }
    return report | assemble(ptx, 90)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(compile_one(argument)), flush=True)
