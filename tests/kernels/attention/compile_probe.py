"""Compile the attention kernels without a GPU and print what the assembler says, as JSON lines.

Run in its own process, because `TRITON_INTERPRET` must not be set. Each argument is one request,
kernel:head_dim:value_dim:block_m:block_n:num_warps:num_stages:arch:dtype:mask:capped:sinks.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from kernels.attention import device, device_backward
from kernels.attention.blocks import padded_head_dim
from tests.kernels.ptxas import assemble, read_amdgcn, target_of

KERNELS = {
    "forward": device.forward_kernel,
    "key_gradient": device_backward.key_gradient_kernel,
    "query_gradient": device_backward.query_gradient_kernel,
}
FLOAT_ARGUMENTS = {"scale", "scale_log2", "softcap"}
INTEGERS = {
    *("num_heads", "num_kv_heads", "group", "seq_q", "seq_k"),
    *("left", "right", "prefix"),
}
POINTERS = {"lse": "*fp32", "delta": "*fp32", "table": "*i32", "sinks": "*fp32"}
MASK_BLOCK = 128


def signature_of(
    kernel: Any, dtype: str, absent: set[str]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """Return types and divisibility attributes as a launch on aligned, contiguous tensors has."""
    signature: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    divisible = [["tt.divisibility", 16]]
    for position, name in enumerate(kernel.arg_names):
        if name.isupper() or name in absent:
            signature[name] = "constexpr"
        elif name == "table_strides":
            signature[name] = ("i32", "i32")
        elif name.endswith("strides"):
            signature[name] = ("i32", "i32", "i32")
            attributes.update({(position, part): divisible for part in range(3)})
        elif name in FLOAT_ARGUMENTS:
            signature[name] = "fp32"
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name, f"*{dtype}")
            attributes[(position,)] = divisible
    return signature, attributes


def compile_one(request: str) -> dict[str, Any]:
    """Compile one request and return registers, spilled bytes and shared memory."""
    kernel_name, *numbers, arch, dtype, mask, capped, sinks = request.split(":")
    head_dim, value_dim, block_m, block_n, num_warps, num_stages = map(int, numbers)
    target = target_of(int(arch) if arch.isdecimal() else arch)
    kernel = KERNELS[kernel_name]
    constants = {
        "MASK": mask,
        "MASK_BLOCK": MASK_BLOCK if mask == "blocks" else 0,
        "PARTIALS": mask != "full",
        "CAPPED": capped == "1",
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": padded_head_dim(head_dim),
        "BLOCK_V": padded_head_dim(value_dim),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    absent = set() if mask in ("documents", "blocks") else {"table"}
    absent |= {"sinks"} if sinks == "0" else set()
    absent &= set(kernel.arg_names)
    constants |= dict.fromkeys(absent)
    signature, attributes = signature_of(kernel, dtype, absent)
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=target, options=options)
    report = {"request": request, "shared_bytes": compiled.metadata.shared}
    if target.backend == "hip":
        return report | read_amdgcn(compiled.asm["amdgcn"])
    return report | assemble(compiled.asm["ptx"], target.arch)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(json.dumps(compile_one(argument)), flush=True)
