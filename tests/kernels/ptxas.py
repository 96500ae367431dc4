"""What assemblers say of compiled kernels; the probes beside import it in processes of their own.

An architecture is a compute capability (80, 90) or the name of an AMD one ("gfx942", MI300).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

# Of 8 bytes or more: warps have 64 threads there, so each has half as much of a tile.
AMD_WIDE_LOAD = re.compile(r"(global|buffer)_load_dwordx[24]")


def target_of(arch: int | str) -> GPUTarget:
    """Return Triton's name of an architecture."""
    if isinstance(arch, str):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", arch, 32)


def read_amdgcn(text: str) -> dict[str, Any]:
    """Return registers, bytes in scratch per thread, products by matrix cores and wide loads."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    return {
        "registers": number("vgpr_count"),
        "spilled_bytes": number("private_segment_fixed_size"),
        "matrix_products": text.count("v_mfma"),
        "wide_loads": len(AMD_WIDE_LOAD.findall(text)),
    }


def assemble(ptx: str, arch: int) -> dict[str, Any]:
    """Run ptxas on `ptx`; return registers per thread, spilled bytes and what Hopper kernels need."""
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(source), "-o", str(binary)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        code = disassemble(binary) if "setmaxnreg" in ptx else ""
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert spilled and registers, log
    return {
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]) + int(spilled[2]),
        "wgmma": ptx.count("wgmma.mma_async"),
        "setmaxnreg": ptx.count("setmaxnreg"),
        # C7510 says that products are serialised: their registers are touched while they run.
        "serialised": "C7510" in log or "serializ" in log.lower(),
        "exponentials_under_a_product": exponentials_under_a_product(code),
    }


def disassemble(binary: Path) -> str:
    """Return the machine code of a cubin as text, by the tool that Triton brings."""
    tool = Path(get_ptxas(90).path).with_name("nvdisasm")
    return subprocess.run([tool, binary], capture_output=True, text=True, check=True).stdout


def exponentials_under_a_product(code: str) -> list[int]:
    """Count the exponentials in each stretch between waits that starts with one product under way.

    They run while the tensor cores do only if the compiler leaves them before the wait for it.
    """
    waits = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d+)", code)
    # Left of it the number of products that a wait leaves under way, right of it the code behind it.
    return [
        behind.count("MUFU.EX2")
        for left, behind, next_left in zip(waits[1::2], waits[2::2], waits[3::2], strict=False)
        if left == "0x1" and next_left == "0x0"
    ]
