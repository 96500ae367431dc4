"""The job attention: kernels against float64, checks at the edge, the reference's row blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernels.attention.dispatch import Backend, Choice, Direction
from planner.errors import PlanError
from runners.contract import JobKind, JobSpec, World
from runners.jobs import attention_kernels
from runners.jobs.attention import measure_attention, parse_attention
from runners.jobs.attention_kernels import (
    KERNELS,
    AttentionShape,
    backends_that_ran,
    reason_to_skip,
    reference_blocks,
    reference_gradients,
    reference_output,
)
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


def _shape(**changes: Any) -> AttentionShape:
    return AttentionShape(**(GIVEN | changes))


def _draw(shape: AttentionShape) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.heads, shape.sequence_length, shape.head_dim)
    small = (shape.batch, shape.kv_heads, shape.sequence_length, shape.head_dim)
    sizes = (size, small, small, size)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes)


def test_kernels_are_measured_against_float64(tmp_path: Path) -> None:
    spec = JobSpec(kind=JobKind.ATTENTION, world=World.CPU, attention={**GIVEN, "dtype": "fp32"})
    session = JobSession(spec=spec, launch=Launch(), device=CPU, events=EventLog(tmp_path, 0))
    measure_attention(session)
    rows = session.measured["kernels"]
    for kernel in ("eager", "sdpa"):
        assert rows[kernel]["outcome"] == "done"
        assert rows[kernel]["error"].keys() == {"output", "dq", "dk", "dv"}
        for error in rows[kernel]["error"].values():
            assert 0 < error["relative"] < 1e-6
        assert rows[kernel]["forward"]["n"] == 3
    assert rows["sdpa"]["forward_time_over_sdpa"] == 1.0
    assert rows["sdpa"]["backend"] is None


def test_a_row_tells_which_of_our_kernels_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = {Direction.FORWARD: Choice(Backend.HOPPER, None)}
    monkeypatch.setattr(attention_kernels, "last_choice", choices.get)
    assert backends_that_ran("triton") == {"forward": "hopper", "backward": "triton"}
    assert backends_that_ran("eager") is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_kernels_agree_with_an_independent_softmax(kernel: str, causal: bool) -> None:
    shape = _shape(causal=causal)
    query, key, value, _ = _draw(shape)
    found = KERNELS[kernel](shape)(query, key, value)
    for head in range(4):
        scores = query[:, head] @ key[:, head // 2].mT / 8**0.5
        if causal:
            scores[:, *torch.triu_indices(12, 12, 1)] = -torch.inf
        expected = functional.softmax(scores, -1) @ value[:, head // 2]
        tolerance = 1e-6 if kernel == "eager" else 1e-12  # eager's softmax is fp32
        torch.testing.assert_close(found[:, head], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_row_blocks_equal_the_whole(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    shape = _shape(causal=causal)
    query, key, value, upstream = _draw(shape)
    whole = reference_output(shape, query, key, value)
    assert whole.shape == (1, 4, 12, 8)
    assert reference_gradients(shape, query, key, value, upstream) is not None
    monkeypatch.setattr(attention_kernels, "MAX_REFERENCE_SCORES", 4 * 12 * 6)
    blocks = reference_blocks(shape)
    assert blocks == [slice(0, 2), slice(5, 7), slice(10, 12)]
    parts = reference_output(shape, query, key, value)
    same_rows = torch.cat([whole[:, :, rows] for rows in blocks], dim=2)
    torch.testing.assert_close(parts, same_rows, rtol=1e-12, atol=1e-12)
    assert reference_gradients(shape, query, key, value, upstream) is None


def test_flops_count_two_products_and_half_of_them_when_causal() -> None:
    assert _shape(causal=False).forward_flops() == 4 * 2 * 4 * 12 * 12 * 8
    assert _shape().forward_flops() == 2 * 2 * 4 * 12 * 12 * 8


def test_triton_without_a_gpu_is_skipped_with_its_reason() -> None:
    assert reason_to_skip("sdpa", _shape(), torch.float32, CPU) is None
    reason = reason_to_skip("triton", _shape(sequence_length=4096), torch.float32, CPU)
    assert reason is not None
    assert reason_to_skip("triton", _shape(), torch.float32, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": 0}, "attention.batch"),
        ({"head_dim": 2**40}, "attention.head_dim"),
        ({"heads": True}, "attention.heads"),
        ({"causal": 1}, "attention.causal"),
        ({"kv_heads": 3}, "attention.kv_heads"),
        ({"dtype": "int4"}, "attention.dtype"),
        ({"kernels": ["flash"]}, "attention.kernels"),
        ({"kernels": []}, "attention.kernels"),
        ({"window": 3}, "attention"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        parse_attention(GIVEN | change)
