"""Every stage trains alike on worlds of two, three and four ranks, and like torch's DDP.

The worlds reduce in one order of sums, two ranks by the backend itself, so that parameters, gradients and
losses must be equal bit by bit over ten steps; what gloo's own order over more ranks changes is held to a
bound (see numerics_main).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def _load_main() -> ModuleType:
    spec = importlib.util.spec_from_file_location("numerics_main", HERE / "numerics_main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["numerics_main"] = module
    spec.loader.exec_module(module)
    return module


main = _load_main()
Results = dict[int, list[dict[str, Any]]]


def _run(out: Path, device: str, backend: str, world_sizes: tuple[int, ...]) -> Results:
    command = [sys.executable, str(HERE / "numerics_main.py"), str(out), device, backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # The ranks are forked, so nothing that is imported before may begin CUDA to count GPUs.
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run(
        [*command, *map(str, world_sizes)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        size: [torch.load(out / f"{size}.{rank}.pt", map_location="cpu") for rank in range(size)]
        for size in world_sizes
    }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _run(tmp_path_factory.mktemp("worlds"), "cpu", "gloo", (4, 2, 3))


def _differences(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def _assert_alike(ranks: list[dict[str, Any]], case: Any, reference: Any) -> None:
    """Hold a training to its reference on every rank, and all ranks to the same parameters."""
    for results in ranks:
        mine, other = results[repr(case)], results[repr(reference)]
        assert mine["losses"] == other["losses"]
        for step, gradients in enumerate(mine["gradients"]):
            assert _differences(gradients, other["gradients"][step]) == [], f"step {step}"
        assert _differences(mine["parameters"], other["parameters"]) == []
        assert _differences(mine["parameters"], ranks[0][repr(case)]["parameters"]) == []


def check_alike(worlds: Results) -> None:
    """Hold all stages, and DDP, to stage 0."""
    for size, ranks in worlds.items():
        for alike in main.ALIKE[size]:
            for case in main.engines_of(alike):
                _assert_alike(ranks, case, alike)


def check_clipped(worlds: Results) -> None:
    """Hold clipping to its bound in every engine, and stages with one order of squares to each other.

    A norm is summed over shards from stage 1 on, over whole groups at stage 0, by parameter in DDP.
    """
    for size, ranks in worlds.items():
        for clipped in main.CLIPPED.get(size, ()):
            for case in main.engines_of(clipped):
                found = [results[repr(("clipped", case))] for results in ranks]
                assert all(found[0]["clips"]), case
                assert {tuple(one["shares"]) for one in found} == {tuple(found[0]["shares"])}
                assert 0 < max(found[0]["shares"]) <= 1, case
                parameters = [one["parameters"] for one in found]
                assert all(_differences(one, parameters[0]) == [] for one in parameters)
            for stage in (2, 3):
                for results in ranks:
                    named = [results[repr(("clipped", clipped.at(s)))] for s in (1, stage)]
                    first, other = named
                    assert first["losses"] == other["losses"]
                    assert _differences(first["parameters"], other["parameters"]) == []


def check_loaded(worlds: Results, out_size: int, saved_size: int) -> None:
    """Hold what one world loaded to what the other saved, and how it went on."""
    for case in main.SAVED:
        saved = worlds[saved_size][0][repr(("saved", case))]
        for stage in main.stages_loaded(out_size):
            here = replace(case.at(stage), accumulation=2, sync=False)
            loaded = worlds[out_size][0][repr(("loaded", here))]
            assert _differences(loaded["saved"], saved["saved"]) == []
            if saved_size == 2 * out_size:
                assert _differences(loaded["parameters"], saved["parameters"]) == []
                for mine, other in zip(loaded["gradients"], saved["gradients"], strict=True):
                    assert _differences(mine, other) == []
                assert _losses(worlds[out_size], here) == _losses(worlds[saved_size], case)


def _losses(ranks: list[dict[str, Any]], case: Any) -> list[list[float]]:
    """The losses of each step after the save, in the order of the global batch."""
    by_rank = []
    for results in ranks:
        key = ("loaded" if repr(("loaded", case)) in results else "saved", case)
        losses, number = results[repr(key)]["losses"], case.accumulation
        by_rank.append([losses[i : i + number] for i in range(0, len(losses), number)])
    return [list(chain.from_iterable(parts)) for parts in zip(*by_rank, strict=True)]


def test_stages_and_ddp_train_alike_bit_by_bit(worlds: Results) -> None:
    check_alike(worlds)


def test_clipping_scales_to_the_norm_over_all_parameters_and_ranks(worlds: Results) -> None:
    check_clipped(worlds)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("bounded", main.BOUNDED, ids=lambda case: f"{case.model}-{case.precision}")
def test_gloos_own_sums_stay_within_their_bound(worlds: Results, bounded: Any, stage: int) -> None:
    case = bounded.at(stage)
    for size in main.BOUNDED_WORLDS:
        shares = {ranks[repr(("bound", case))] for ranks in worlds[size]}
        assert len(shares) == 1
        assert 0 < shares.pop() <= 1


def test_what_four_ranks_saved_at_stage_3_two_go_on_with_at_stage_1(worlds: Results) -> None:
    check_loaded(worlds, 2, 4)


def test_what_four_ranks_saved_three_load(worlds: Results) -> None:
    check_loaded(worlds, 3, 4)


def test_what_two_ranks_saved_at_stage_1_three_load_at_stage_3(worlds: Results) -> None:
    here = replace(main.GROWS.at(1), accumulation=2, sync=False)
    saved = worlds[2][0][repr(("loaded", here))]["parameters"]
    for ranks in worlds[3]:
        assert _differences(ranks[repr(("grown", main.GROWS))], saved) == []


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_train_alike(tmp_path: Path) -> None:
    worlds = _run(tmp_path, "cuda:0", "cpu:gloo,cuda:gloo", (4, 2))
    check_alike(worlds)
    check_clipped(worlds)
    check_loaded(worlds, 2, 4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_over_nccl_train_alike_and_one_loads_what_they_saved(tmp_path: Path) -> None:
    worlds = _run(tmp_path, "cuda:rank", "cpu:gloo,cuda:nccl", (2, 1))
    check_alike(worlds)
    check_clipped(worlds)
    check_loaded(worlds, 1, 2)
