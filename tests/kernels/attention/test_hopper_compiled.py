"""Compile the Hopper forward for sm_90a, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.attention.blocks import MAX_SHARED_BYTES
from kernels.attention.schedule import Masking

ROOT = Path(__file__).parents[3]
# What is closest to its registers, and what runs most; the other forms differ by less.
REQUESTS = {
    64: [
        f"64:bf16:0:{Masking.FIRST_BLOCK}",
        f"64:bf16:1:{Masking.FIRST_BLOCK}",
        f"64:bf16:1:{Masking.EVERY_BLOCK}",
    ],
    128: [f"128:bf16:0:{Masking.NONE}", f"128:fp16:1:{Masking.FIRST_BLOCK}"],
}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_form_spills_and_products_stay_asynchronous(head_dim: int) -> None:
    requests = REQUESTS[head_dim]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    probe = str(Path(__file__).with_name("hopper_compile_probe.py"))
    finished = subprocess.run(
        [sys.executable, probe, *requests],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    reports = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(reports) == len(requests)
    for report in reports:
        assert report["spilled_bytes"] == 0, report
        assert not report["serialised"], report
        assert report["shared_bytes"] <= MAX_SHARED_BYTES, report
        # Per group: 8 products of 16 keys, and D / 16 products of scores, in prologue and loop.
        assert report["wgmma"] >= 2 * (8 + head_dim // 16), report
        assert report["setmaxnreg"] > 0, report
        # Without a causal mask every tile walks as many blocks.
        assert report["follows_tile"] or ":bf16:0:" in report["request"], report
