"""Compile kernels without a GPU and print what the assembler says, as JSON lines.

Run in its own process, because `TRITON_INTERPRET` must not be set. Standard input holds one JSON
request per line: module, kernel, arch, warps, stages, constants, and types by argument name (a
Triton type, or a list of them for a tuple); pointers, 64-bit integers and the arguments named in
`divisible` are divisible by 16.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from tests.kernels.ptxas import assemble, read_amdgcn, target_of

DIVISIBLE = [["tt.divisibility", 16]]
WIDE_LOAD = re.compile(r"ld\.global[.\w]*\.v4\.b32|ld\.global[.\w]*\.v2\.b64")


def compile_one(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one request; return what the assembler says, and bytes of shared memory."""
    kernel = getattr(importlib.import_module(request["module"]), request["kernel"])
    signature: dict[str, Any] = dict.fromkeys(request["constants"], "constexpr")
    attributes: dict[Any, Any] = {}
    for position, name in enumerate(kernel.arg_names):
        if name in request["constants"]:
            continue
        types = request["types"][name]
        signature[name] = tuple(types) if isinstance(types, list) else types
        parts = enumerate(types) if isinstance(types, list) else [(None, types)]
        for part, kind in parts:
            if kind.startswith("*") or kind == "i64" or name in request.get("divisible", ()):
                attributes[(position,) if part is None else (position, part)] = DIVISIBLE
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=request["constants"], attrs=attributes)
    options = {"num_warps": request["warps"], "num_stages": request.get("stages", 3)}
    arch = request["arch"]
    compiled = triton.compile(source, target=target_of(arch), options=options)
    shared = {"shared_bytes": compiled.metadata.shared}
    if isinstance(arch, str):
        return shared | read_amdgcn(compiled.asm["amdgcn"])
    ptx = compiled.asm["ptx"]
    return shared | {"wide_loads": len(WIDE_LOAD.findall(ptx))} | assemble(ptx, arch)


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(compile_one(json.loads(line))), flush=True)
