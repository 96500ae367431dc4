"""Compile the chosen tiles for real GPUs, without one: registers, spills, shared memory.

The spilled bytes allowed are what Triton 3.6 and 3.7 give today. Those of the causal dK/dV kernel
at head size 128 lie outside its inner loops, where the two sweeps over the queries meet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels.attention.blocks import MAX_SHARED_BYTES, Pass, choose_blocks

ROOT = Path(__file__).parents[3]
CONSUMER_BYTES = 99 * 1024
HOPPER, AMPERE = 90, 80
SPILLED_BYTES = {(HOPPER, Pass.FORWARD, 128): 112, (HOPPER, Pass.KEY_GRADIENT, 128): 96}


def compile_all(arch: int, shared_bytes: int) -> list[tuple[Pass, int, dict[str, Any]]]:
    """Compile the causal kernels for head sizes 64 and 128; return ptxas' report of each."""
    cases = [(kernel, head_dim) for kernel in Pass for head_dim in (64, 128)]
    requests = []
    for kernel, head_dim in cases:
        tile = choose_blocks(head_dim, 2, kernel, shared_bytes)
        sizes = (head_dim, head_dim, tile.queries, tile.keys, tile.warps, tile.stages, arch)
        requests.append(":".join(map(str, (kernel, *sizes, "bf16", "causal", 0, 0))))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    probe = str(Path(__file__).with_name("compile_probe.py"))
    finished = subprocess.run(
        [sys.executable, probe, *requests],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    reports = map(json.loads, finished.stdout.splitlines())
    return [(*case, report) for case, report in zip(cases, reports, strict=True)]


@pytest.mark.parametrize(
    ("arch", "shared_bytes"), [(HOPPER, MAX_SHARED_BYTES), (AMPERE, CONSUMER_BYTES)]
)
def test_chosen_tiles_fit_and_do_not_spill(arch: int, shared_bytes: int) -> None:
    for kernel, head_dim, report in compile_all(arch, shared_bytes):
        assert report["shared_bytes"] <= shared_bytes, report
        assert report["spilled_bytes"] <= SPILLED_BYTES.get((arch, kernel, head_dim), 0), report
        assert (report["wgmma"] > 0) == (arch == HOPPER), report
