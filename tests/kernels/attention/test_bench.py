"""The benchmark's arithmetic (its timing needs a GPU)."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from kernels.attention import bench, bench_flex, bench_heads
from kernels.attention.dispatch import Direction

CASE = bench.Case(head_dim=128, heads=16, kv_heads=16, causal=False, seq=8192)


def test_the_cases_are_those_of_the_bar() -> None:
    cases = list(bench.cases())
    # Two head sizes, two kinds of heads, two masks, five lengths.
    assert len(cases) == len(set(cases)) == 40
    assert {case.seq for case in cases} == {2048, 4096, 8192, 16384, 32768}
    heads = {(case.head_dim, case.heads, case.kv_heads) for case in cases}
    assert heads == {(64, 32, 32), (64, 32, 8), (128, 16, 16), (128, 32, 8)}
    assert {case.batch * case.seq for case in cases} == {32768}


def test_the_grid_beside_flex_attention_is_that_of_the_bar_without_its_longest() -> None:
    grid = list(bench_flex.cases())
    assert len(grid) == len(set(grid)) == 32
    assert set(bench.cases()) - set(grid) == {c for c in bench.cases() if c.seq == 32768}


def test_cases_with_rows_in_both_directions_are_passed_over(tmp_path: Path) -> None:
    first, second, *rest = bench_flex.cases()
    row = {**asdict(first), "direction": "forward", "ratio": 1.1}
    rows = [row, row | {"direction": "backward"}]
    rows += [{**asdict(second), "direction": "forward", "ratio": 1.0}]
    rows += [{**asdict(rest[0]), "error": "RuntimeError: too far apart"}]
    path = tmp_path / "rows.jsonl"
    assert bench_flex.left_of([first, second, *rest], path) == [first, second, *rest]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bench_flex.left_of([first, second, *rest], path) == [second, *rest]


def test_a_share_is_read_or_refused() -> None:
    assert bench_flex.share_of("2/6") == (2, 6)
    for refused in ("6/6", "1", "a/b", "-1/2", "1/0"):
        with pytest.raises(argparse.ArgumentTypeError, match="it must be K/N with K below N"):
            bench_flex.share_of(refused)


def test_flops_by_hand() -> None:
    # B = 4, Hq = 16, S = 8192, D = 128: 4 * 4 * 16 * 8192^2 * 128 = 2.199e12, half if causal.
    assert CASE.forward_flops() == 2_199_023_255_552
    causal = bench.Case(head_dim=128, heads=32, kv_heads=8, causal=True, seq=8192)
    assert causal.forward_flops() == 2_199_023_255_552


def test_rates_and_ratio_by_hand() -> None:
    figures = bench.figures_of(CASE, Direction.BACKWARD, 0.004, 0.003)
    assert figures["ours_flop_s"] == 2.5 * 2_199_023_255_552 / 0.004
    assert figures["peer_flop_s"] == 2.5 * 2_199_023_255_552 / 0.003
    assert figures["ratio"] == 0.75


def test_geometric_mean_by_hand() -> None:
    assert bench.geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)


def test_large_and_unequal_heads_by_hand() -> None:
    cases = list(bench_heads.cases())
    assert len(cases) == len(set(cases)) == 12
    # B = 4, H = 16, S = 8192, D + V = 320: 2 * 4 * 16 * 8192^2 * 320 = 2.749e12, half if causal.
    latent = bench_heads.Case(head_dim=192, value_head_dim=128, heads=16, causal=True, seq=8192)
    assert latent in cases and latent.flops() == 1_374_389_534_720


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_sweep_tries_forms_beside_the_chosen_one(head_dim: int) -> None:
    forms = list(bench.candidates(head_dim).values())
    assert len(set(forms)) == len(forms) > 4
    assert (bench.FORWARD_TILES[head_dim], bench.SECTION_BYTES) in forms


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    with pytest.raises(SystemExit):
        bench.main()
    assert "no CUDA device" in capsys.readouterr().err
