"""`peakmark attention`: the page's answer on the command line, and a run through the queue."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from planner.attention.answer import answer
from planner.attention.problem import AttentionProblem, Variant
from planner.hardware import resolve_gpu

Run = Callable[..., tuple[int, str, str]]


def test_the_answer_is_the_planners(run: Run) -> None:
    code, out, _ = run("attention", "--seq", "8192", "--json")
    document = json.loads(out)
    assert code == 0
    problem = AttentionProblem(
        batch=1, heads=32, kv_heads=8, head_dim=128, sequence_length=8192, causal=True
    )
    expected = answer(problem, tuple(Variant), resolve_gpu("h200")).to_dict()
    assert {key: document[key] for key in expected} == json.loads(json.dumps(expected))
    assert document["run"] is None and document["measured"] == []


def test_options_change_the_shape_and_the_table_says_what_is_not_exact(run: Run) -> None:
    code, out, _ = run(
        *("attention", "--gpu", "a100-sxm4-80gb", "--head-dim", "64", "--kv-heads", "32"),
        *("--full", "--window", "512", "--kernels", "triton,window,linear"),
    )
    assert code == 0
    assert "1 x 4,096 tokens, 32/32 heads of 64, bf16, full, A100" in out
    assert "window is not exact: a query sees keys less than 512 tokens away" in out
    assert "linear is not shown: Linear attention is causal here" in out
    assert "eager" not in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--kernels", "flash"), "attention.kernels is"),
        (("--heads", "5"), "attention.kv_heads is 8: it must be a divisor of attention.heads."),
        (("--dtype", "int4"), "attention.dtype is 'int4': it must be one of bf16, fp16, fp32."),
        (("--block", "100"), "attention.block is 100: it must be 64 or a multiple of 128."),
    ],
)
def test_what_cannot_be_is_one_sentence(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("attention", *arguments)
    assert code == 2
    assert sentence in err


def test_a_shape_is_measured_through_the_queue_and_shown_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = ("--seq", "64", "--heads", "4", "--kv-heads", "2", "--head-dim", "16")
    code, out, _ = run("attention", *shape, "--kernels", "eager,sdpa,window", "--measure", "--json")
    document = json.loads(out)
    assert code == 0, document["run"]
    measured = {one["variant"]: one for one in document["measured"]}
    # On the CPU the kernels for GPUs are left out.
    assert measured.keys() == {"eager", "sdpa"}
    assert 0 < measured["eager"]["error"] < 0.02
    assert measured["eager"]["forward_s"] > 0
    code, shown, _ = run("runs", "show", document["run"]["summary"]["id"])
    assert code == 0
    assert "1 x 64 tokens, 4/2 heads of 16" in shown
