"""DeepSpeed, FSDP2 and our engine give the same numbers in `mixed`, where they begin with the same.

Over two ranks, whose sums have one order, losses, reduced gradients and parameters of ten steps are equal
bit by bit; over three the reduced gradients are within the bound of three roundings (peers_main.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
STAGES = {"peakmark": {1, 2, 3}, "fsdp2": {2, 3}, "deepspeed": {1, 2, 3}}
Lines = list[dict[str, Any]]


def _run(out: Path, device: str, backend: str, *world_sizes: int) -> dict[int, Lines]:
    command = [sys.executable, str(HERE / "peers_main.py"), str(out), device, backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path_with_root()}
    # The ranks are forked, so nothing that is imported before may begin CUDA to count GPUs.
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(
        [*command, *map(str, world_sizes)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        size: [json.loads(x) for x in (out / f"{size}.jsonl").read_text().splitlines()[1:]]
        for size in world_sizes
    }


def _path_with_root() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Lines]:
    return _run(tmp_path_factory.mktemp("peers"), "cpu", "gloo", 2, 3)


@pytest.fixture(params=sorted(STAGES))
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "deepspeed" and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed: pip install 'peakmark[deepspeed]'")
    return str(request.param)


def check_equal(lines: Lines, engine: str) -> None:
    """Hold every training of an engine to our stage 0, bit by bit."""
    own = [line for line in lines if line["engine"] == engine]
    assert {line["stage"] for line in own} == STAGES[engine]
    assert {line["model"] for line in own} == {"llama", "gpt2"}
    for line in own:
        assert line["losses_equal"] and line["parameters_equal"], line
        assert line["gradients_worst"] == 0
        # Ranks have tokens of their own, and every step moves their losses.
        losses = [loss for rank in line["losses"] for loss in rank]
        assert len(set(losses)) == len(losses) == 2 * line["steps"]


def test_two_ranks_train_alike_bit_by_bit(worlds: dict[int, Lines], engine: str) -> None:
    check_equal(worlds[2], engine)


def test_three_ranks_reduce_within_their_bound(worlds: dict[int, Lines], engine: str) -> None:
    own = [line for line in worlds[3] if line["engine"] == engine]
    assert {line["stage"] for line in own} == STAGES[engine]
    assert all(0 < line["share"] <= 1 for line in own)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_train_alike(tmp_path: Path, engine: str) -> None:
    check_equal(_run(tmp_path, "cuda:rank", "cpu:gloo,cuda:nccl", 2)[2], engine)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_that_share_a_gpu_train_alike(tmp_path: Path, engine: str) -> None:
    check_equal(_run(tmp_path, "cuda:0", "cpu:gloo,cuda:gloo", 2)[2], engine)
