"""The job attention: variants against float64, the masks they stand for, OOM as a result."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.attention.dispatch import Backend, Choice, Direction
from planner.attention.problem import AttentionProblem, Variant, visible_pairs
from runners.contract import JobKind, JobSpec, World
from runners.jobs import attention, attention_kernels, attention_reference
from runners.jobs.attention import Inputs, measure_attention
from runners.jobs.attention_kernels import KERNELS, backends_that_ran, reason_to_skip
from runners.jobs.attention_reference import reference_blocks, reference_of, visible_keys
from runners.jobs.harness import EventLog, JobSession
from runners.worlds import Launch

CPU = torch.device("cpu")
GIVEN: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "sequence_length": 12,
    "causal": True,
}
PATTERN = {"window": 5, "global_tokens": 3, "block": 64, "block_stride": 2}


def _problem(**changes: Any) -> AttentionProblem:
    return AttentionProblem(**(GIVEN | changes))


def _draw(problem: AttentionProblem) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    size = (problem.batch, problem.heads, problem.sequence_length, problem.head_dim)
    small = (problem.batch, problem.kv_heads, problem.sequence_length, problem.head_dim)
    sizes = (size, small, small, size)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)


def _measure(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    given = {**GIVEN, "dtype": "fp32", **changes}
    spec = JobSpec(kind=JobKind.ATTENTION, world=World.CPU, attention=given)
    session = JobSession(spec=spec, launch=Launch(), device=CPU, events=EventLog(tmp_path, 0))
    measure_attention(session)
    return session.measured


def test_variants_are_measured_against_float64_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kernels, "INTERPRETED", False)
    measured = _measure(tmp_path)
    rows = measured["kernels"]
    assert list(rows) == [str(variant) for variant in Variant]
    for kernel in ("eager", "sdpa"):
        assert rows[kernel]["outcome"] == "done"
        assert rows[kernel]["error"].keys() == {"output", "dq", "dk", "dv"}
        for error in rows[kernel]["error"].values():
            assert 0 < error["relative"] < 1e-6
        assert rows[kernel]["forward"]["n"] == 3
        assert "stage" not in rows[kernel] and "apart_from_exact" not in rows[kernel]
    assert rows["sdpa"]["forward_time_over_sdpa"] == 1.0
    assert rows["sdpa"]["backend"]["forward"] == "flash"
    assert measured["attention_backend"] == "sdpa:flash"
    assert rows["window"]["outcome"] == "skipped" and "need a GPU" in rows["window"]["reason"]
    assert measured["card"].keys() == {"copy_bytes_s", "product_flop_s"}


@pytest.mark.parametrize("causal", [True, False])
def test_masked_variants_compute_their_own_function(causal: bool) -> None:
    if not attention_kernels.INTERPRETED:
        pytest.skip("Triton's interpreter was not asked for before Python started")
    problem = _problem(batch=1, sequence_length=100, causal=causal, dtype="fp32", **PATTERN)
    *drawn, upstream = (tensor.float() for tensor in _draw(problem))
    leaves = tuple(tensor.requires_grad_() for tensor in drawn)
    for variant in (Variant.WINDOW, Variant.GLOBAL_LOCAL, Variant.BLOCK_SPARSE):
        exact = reference_of(problem, variant, leaves, upstream)
        found = KERNELS[variant](problem)(*leaves)
        torch.testing.assert_close(found.double(), exact.output, rtol=1e-4, atol=1e-5)


class _Hungry:
    """A variant that has room for its forward alone."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *leaves: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        # Error, warming up and timing call the forward six times; the backward comes next.
        if self.calls > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 GiB.")
        query, key, value = leaves
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )


def test_a_variant_that_runs_out_of_memory_is_a_result_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hungry = _Hungry()
    monkeypatch.setitem(KERNELS, "eager", lambda problem: hungry)
    numbers = {"requested_bytes": 64 * 2**30, "free_bytes": 5}
    monkeypatch.setattr(attention, "describe_device_oom", lambda message, device: numbers)
    rows = _measure(tmp_path, kernels=["eager", "sdpa"])["kernels"]
    eager = rows["eager"]
    assert (eager["outcome"], eager["stage"], eager["requested_bytes"]) == (
        "oom_device",
        "backward",
        64 * 2**30,
    )
    assert eager["forward"]["median_s"] > 0 and "backward" not in eager
    assert rows["sdpa"]["outcome"] == "done"


def test_a_row_tells_which_of_our_kernels_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem()
    inputs = _draw(problem)[:3]
    choices = {Direction.FORWARD: Choice(Backend.HOPPER, None)}
    monkeypatch.setattr(attention_kernels, "last_choice", choices.get)
    ran = backends_that_ran(Variant.TRITON, problem, inputs)
    assert ran == {"forward": "hopper", "backward": "triton"}
    assert backends_that_ran(Variant.EAGER, problem, inputs)["forward"] == "torch"
    assert backends_that_ran(Variant.LINEAR, problem, inputs)["forward"] == "triton"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_kernels_agree_with_an_independent_softmax(kernel: str, causal: bool) -> None:
    problem = _problem(causal=causal)
    query, key, value, _ = _draw(problem)
    found = KERNELS[kernel](problem)(query, key, value)
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].mT / 8**0.5
        if causal:
            scores[:, *torch.triu_indices(12, 12, 1)] = -torch.inf
        expected = functional.softmax(scores, -1) @ value[:, head // 2]
        tolerance = 1e-6 if kernel == "eager" else 1e-12  # eager's softmax is fp32
        torch.testing.assert_close(found[:, head], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", [Variant.TRITON, Variant.WINDOW, Variant.LINEAR])
def test_row_blocks_equal_the_whole(monkeypatch: pytest.MonkeyPatch, variant: Variant) -> None:
    problem = _problem(**PATTERN)
    query, key, value, upstream = _draw(problem)
    whole = reference_of(problem, variant, (query, key, value), upstream)
    assert whole.output.shape == (1, 4, 12, 8)
    assert whole.gradients.keys() == {"dq", "dk", "dv"}
    monkeypatch.setattr(attention_reference, "MAX_REFERENCE_SCORES", 4 * 12 * 6)
    monkeypatch.setattr(attention_reference, "SAMPLED_BLOCKS", 3)
    assert reference_blocks(problem) == [slice(0, 2), slice(5, 7), slice(10, 12)]
    parts = reference_of(problem, variant, (query, key, value), upstream)
    assert parts.gradients.keys() == {"dq"}
    torch.testing.assert_close(parts.compared(whole.output), parts.output)
    torch.testing.assert_close(parts.compared(whole.gradients["dq"]), parts.gradients["dq"])


def test_linear_attention_of_the_second_query_by_hand() -> None:
    ones = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "sequence_length": 2}
    problem = _problem(**ones)
    query, key, value = (
        torch.tensor(v).reshape(1, 1, 2, 1) for v in ([9.0, 1.0], [0.0, 2.0], [4.0, 8.0])
    )
    found = reference_of(problem, Variant.LINEAR, (query, key, value), torch.ones_like(query))
    # f = elu + 1: f(1) = 2, f(0) = 1, f(2) = 3: weights 2 and 6 of values 4 and 8.
    assert found.output.flatten().tolist() == [4.0, (2 * 4 + 6 * 8) / 8]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("variant", list(Variant))
def test_the_planner_counts_the_pairs_that_are_seen(variant: Variant, causal: bool) -> None:
    for length in (1, 5, 64, 130, 300):
        for pattern in (
            PATTERN,
            {"window": 70, "global_tokens": 90, "block": 64, "block_stride": 1},
            {"window": 400, "global_tokens": 1, "block": 128, "block_stride": 3},
        ):
            problem = _problem(sequence_length=length, causal=causal, **pattern)
            seen = int(visible_keys(problem, variant, slice(0, length), CPU).sum())
            assert visible_pairs(problem, variant, float(length)) == seen


def test_what_cannot_run_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_to_skip("sdpa", _problem(), torch.float32, CPU) is None
    assert reason_to_skip("triton", _problem(sequence_length=4096), torch.float32, CPU) is not None
    gpu = torch.device("cuda")
    assert reason_to_skip("triton", _problem(), torch.float32, gpu) is None
    reason = reason_to_skip("linear", _problem(causal=False), torch.float32, gpu)
    assert reason == "Linear attention is causal here: choose a causal mask."


def test_a_distance_is_the_mean_over_rows() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    ours = torch.tensor([[3.0, 4.0], [6.0, 2.0]])
    # The first row is exact, the second is off by (6, -8), as long as itself.
    assert attention._apart(ours, exact) == 0.5


def test_the_inputs_are_what_the_spec_says() -> None:
    drawn = attention._draw_inputs(_problem(dtype="bf16"), CPU, seed=0)
    assert isinstance(drawn, Inputs)
    assert [tuple(x.shape) for x in drawn.leaves] == [(2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)]
    assert drawn.query.dtype is torch.bfloat16 and not drawn.upstream.requires_grad


def test_what_is_flushed_gets_memory_of_its_own_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cached blocks are given back first: else it would be cut from one that scores fill whole."""
    order: list[str] = []
    device = SimpleNamespace(type="cuda")
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("give back"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    clock = SimpleNamespace(now=lambda: 0.0, seconds=lambda start, end: 1.0)
    monkeypatch.setattr(attention, "Clock", lambda device: clock)

    def allocate(size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        order.append("flushed")
        return empty(1, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    times_s = attention._repeat(
        lambda _: order.append("work"), device, prepare=lambda: order.append("prepare")
    )
    assert order[:4] == ["give back", "flushed", "prepare", "work"]
    assert order.count("give back") == order.count("flushed") == 1
    assert len(times_s) == 10
