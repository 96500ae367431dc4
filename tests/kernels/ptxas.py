"""What ptxas says of compiled kernels; the probes beside import it in processes of their own."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas


def assemble(ptx: str, arch: int) -> dict[str, Any]:
    """Run ptxas on `ptx`; return registers per thread, spilled bytes and what Hopper kernels need."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
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
    }
