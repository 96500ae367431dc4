"""The benchmark's arithmetic (its timing needs a GPU)."""

from __future__ import annotations

import sys

import pytest
import torch

from kernels.attention import bench


def test_the_cases_hold_tokens_and_width_constant() -> None:
    assert len(list(bench.cases())) == 24
    assert {case.seq for case in bench.cases()} == {1024, 2048, 4096, 8192, 16384, 32768}


def test_flops_by_hand() -> None:
    # B = 4, Hq = 16, S = 8192, D = 128: 4 * 4 * 16 * 8192^2 * 128 = 2.199e12, half if causal.
    full = bench.Case(head_dim=128, causal=False, seq=8192)
    assert full.forward_flops() == 2_199_023_255_552
    assert bench.Case(head_dim=128, causal=True, seq=8192).forward_flops() == 1_099_511_627_776


def test_a_row_holds_medians_and_the_ratio_of_times() -> None:
    case = bench.Case(head_dim=128, causal=True, seq=8192)
    times = {"ours": [0.004, 0.002, 0.003], "torch": [0.001, 0.0015, 0.009]}
    row = bench.make_row(case, "backward", "cudnn", times)
    assert (row.ours_s, row.torch_s, row.ratio) == (0.003, 0.0015, 0.5)
    assert row.ours_flop_s == 2.5 * 1_099_511_627_776 / 0.003


def test_geometric_mean_by_hand() -> None:
    assert bench.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no CUDA device" in capsys.readouterr().err
