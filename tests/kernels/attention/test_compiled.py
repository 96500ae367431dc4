"""Compile the chosen tiles for real GPUs, without one: registers, spills, shared memory.

The spilled bytes allowed are what Triton 3.6 and 3.7 give today, most of them in the dK/dV kernel,
where its two sweeps over the queries meet, none in its loops at head size 64. There a tile of two stages
spills nothing and takes 0.6 % longer (causal) and 7 % longer (full) on an H200, S = 8,192.
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
HOPPER, AMPERE, CDNA3 = 90, 80, "gfx942"
CDNA3_BYTES = 64 * 1024
SPILLED_BYTES = {
    (HOPPER, Pass.KEY_GRADIENT, "causal", 64): 160,
    (HOPPER, Pass.KEY_GRADIENT, "causal", 128): 96,
    (HOPPER, Pass.KEY_GRADIENT, "documents", 128): 96,
    (HOPPER, Pass.KEY_GRADIENT, "full", 128): 8,
    (AMPERE, Pass.KEY_GRADIENT, "causal", 128): 12,
}


Case = tuple[Pass, tuple[int, int], str, bool]
# A full mask is compiled for lengths that fill their tiles.
CAUSAL: list[Case] = [(kernel, (d, d), "causal", False) for kernel in Pass for d in (64, 128)]
# Of each other kind one kernel: the sinks and the softcap are in those marked True.
MASKED: dict[int, list[Case]] = {
    HOPPER: [
        (Pass.FORWARD, (128, 128), "window", True),
        (Pass.KEY_GRADIENT, (128, 128), "documents", False),
        (Pass.QUERY_GRADIENT, (128, 128), "blocks", False),
        (Pass.FORWARD, (192, 128), "causal", False),
        *((kernel, (128, 128), "full", False) for kernel in Pass),
    ],
    AMPERE: [
        (Pass.FORWARD, (128, 128), "global", False),
        (Pass.KEY_GRADIENT, (64, 64), "window", False),
    ],
}


def compile_all(
    cases: list[Case], arch: int | str, shared_bytes: int
) -> list[tuple[Pass, str, int, dict[str, Any]]]:
    """Compile kernels for (head sizes, mask, with sinks and softcap); return the assembler's reports."""
    requests = []
    for kernel, sizes, mask, more in cases:
        length = 4096 if mask == "full" else None
        tile = choose_blocks(max(sizes), 2, kernel, shared_bytes, length)
        numbers = (*sizes, tile.queries, tile.keys, tile.warps, tile.stages, arch)
        requests.append(":".join(map(str, (kernel, *numbers, "bf16", mask, int(more), int(more)))))
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
    found = zip(cases, reports, strict=True)
    return [(case[0], case[2], max(case[1]), report) for case, report in found]


@pytest.mark.parametrize(
    ("arch", "shared_bytes"), [(HOPPER, MAX_SHARED_BYTES), (AMPERE, CONSUMER_BYTES)]
)
def test_chosen_tiles_fit_and_spill_no_more_than_is_known(arch: int, shared_bytes: int) -> None:
    for kernel, mask, head_dim, report in compile_all(CAUSAL + MASKED[arch], arch, shared_bytes):
        allowed = SPILLED_BYTES.get((arch, kernel, mask, head_dim), 0)
        assert report["shared_bytes"] <= shared_bytes, report
        assert report["spilled_bytes"] <= allowed, report
        assert (report["wgmma"] > 0) == (arch == HOPPER), report


def test_the_portable_tiles_fit_an_amd_gpu_and_use_its_matrix_cores() -> None:
    """Compiled only: none of these ever ran on an AMD GPU. The dK and dV kernel keeps some in scratch."""
    cases: list[Case] = [(kernel, (128, 128), "causal", False) for kernel in Pass]
    cases.append((Pass.FORWARD, (64, 64), "window", True))
    for kernel, _, head_dim, report in compile_all(cases, CDNA3, CDNA3_BYTES):
        assert report["shared_bytes"] <= CDNA3_BYTES, report
        assert report["matrix_products"] > 0, report
        if kernel is not Pass.KEY_GRADIENT:
            assert report["spilled_bytes"] == 0, (head_dim, report)
