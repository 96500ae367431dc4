"""Compile the Hopper attention forward without a GPU and print what ptxas says, as JSON lines.

Run in its own process, because `TRITON_INTERPRET` must not be set. Each argument is one request:
head_dim:dtype:causal:masking of the persistent kernel, or single:head_dim:value_head_dim:dtype:right:left
of the one without a list of tiles.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

sys.path.insert(0, str(Path(__file__).parents[3]))

from kernels.attention.hopper_common import tile_layout
from kernels.attention.hopper_forward import forward_kernel
from kernels.attention.hopper_single import single_forward_kernel
from kernels.attention.schedule import BLOCK_KEYS, GROUP_ROWS, forward_tile, single_tile
from tests.kernels.ptxas import assemble

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def descriptor(rows: int, columns: int, dtype: str) -> str:
    """Return the type of a tensor descriptor of (1, 1, rows, columns) tiles."""
    layout = tile_layout(rows, columns, DTYPES[dtype])
    return f"tensordesc<{dtype}{[1, 1, rows, columns]},{layout!r}>"


def single_source_of(request: str) -> GluonASTSource:
    """Return the kernel without a list with the types that a launch gives it."""
    head_dim, value_head_dim, dtype, right, left = request.split(":")
    tile = single_tile(int(head_dim), int(value_head_dim))
    constants: dict[str, Any] = {
        "NC": tile.groups,
        "BM": GROUP_ROWS,
        "BN": tile.keys,
        "D": tile.columns,
        "EXTRA": tile.extra,
        "STAGES": tile.stages,
        "RIGHT": right == "1",
        "LEFT": left == "1",
        "CAPPED": False,
        "SINKS": False,
        "OWN_OUT": tile.has_own_out,
        "REGISTERS": tile.registers,
    }
    names = single_forward_kernel.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys(("lse_ptr", "sink_ptr"), "*fp32")
    signature["lists"] = "*i32"
    signature |= dict.fromkeys(("scale_log2", "inner"), "fp32")
    for name in ("q_d", "o_d"):
        signature[name] = descriptor(GROUP_ROWS, tile.columns, dtype)
    for name in ("k_d", "v_d"):
        signature[name] = descriptor(tile.keys, tile.columns, dtype)
    extra = tile.extra or tile.columns
    signature |= {"qx_d": descriptor(GROUP_ROWS, extra, dtype)}
    signature |= {"kx_d": descriptor(tile.keys, extra, dtype)}
    signature |= dict.fromkeys(constants, "constexpr")
    positions = [names.index(name) for name in ("lse_ptr", "sink_ptr", "lists")]
    attributes = {(position,): [["tt.divisibility", 16]] for position in positions}
    return GluonASTSource(single_forward_kernel, signature, constants, attributes)


def source_of(request: str) -> GluonASTSource:
    """Return the kernel with the types and divisibility that a launch gives it."""
    if request.startswith("single:"):
        return single_source_of(request.removeprefix("single:"))
    head_dim, dtype, causal, masking = request.split(":")
    tile = forward_tile(int(head_dim))

    constants: dict[str, Any] = {
        "NC": tile.groups,
        "BM": GROUP_ROWS,
        "BN": BLOCK_KEYS,
        "D": tile.columns,
        "STAGES": tile.stages,
        "CAUSAL": causal == "1",
        "MASK": int(masking),
        "REGISTERS": tile.registers,
    }
    signature = dict.fromkeys(forward_kernel.arg_names, "i32")
    rows, keys = (descriptor(size, tile.columns, dtype) for size in (GROUP_ROWS, BLOCK_KEYS))
    signature |= {"q_d": rows, "o_d": rows, "k_d": keys, "v_d": keys}
    signature |= {"lse_ptr": "*fp32", "lists": "*i32", "scale_log2": "fp32"}
    signature |= dict.fromkeys(constants, "constexpr")
    positions = [forward_kernel.arg_names.index(name) for name in ("lse_ptr", "lists")]
    attributes = {(position,): [["tt.divisibility", 16]] for position in positions}
    return GluonASTSource(forward_kernel, signature, constants, attributes)


def inner_counts_follow_the_tile(ttgir: str) -> bool:
    """Say whether each loop over key blocks takes its end from inside the loop over tiles.

    Triton 3.6 has dropped a count that the outer loop carried, and walked the first tile's number of
    blocks in every tile.
    """
    lines = ttgir.splitlines()
    outer = indent = 0
    inner = []
    for number, line in enumerate(lines):
        loop = re.search(r"scf\.for %\S+ = \S+ to (%\w+)", line)
        if not loop:
            continue
        depth = len(line) - len(line.lstrip())
        if indent and depth > indent:
            name = re.escape(loop[1])
            made_inside = any(
                re.match(rf"\s*{name}(:\d+)? =", body) for body in lines[outer:number]
            )
            inner.append(made_inside or bool(re.search(rf"[(\s]{name} =", lines[outer])))
        else:
            outer, indent = number, depth
    return bool(inner) and all(inner)


def compile_one(request: str) -> dict[str, Any]:
    """Compile one request; return shared memory, spills, and the instructions that must be there."""
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source_of(request), target=target, options={"num_warps": 4})
    report = {
        "request": request,
        "shared_bytes": compiled.metadata.shared,
        "follows_tile": inner_counts_follow_the_tile(compiled.asm["ttgir"]),
    }
    return report | assemble(compiled.asm["ptx"], 90)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(compile_one(argument)), flush=True)
