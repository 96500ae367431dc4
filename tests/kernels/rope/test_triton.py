"""The fused rotary embedding against float64 and transformers, and what mistaken callers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import launch
from kernels.rope import triton as fused
from kernels.rope.reference import reference_rope
from kernels.rope.triton import apply_rope, tile_options

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32


def make_inputs(
    batch: int, heads: tuple[int, int], seq: int, head_dim: int, turned: int, dtype: torch.dtype,
    device: str,
) -> list[Tensor]:  # fmt: skip
    """q and k laid out as transformers has them, cos and sin of independent halves, gradients."""
    torch.manual_seed(seq + head_dim)

    def states(count: int) -> Tensor:
        return torch.randn(batch, seq, count, head_dim, device=device).to(dtype).transpose(1, 2)

    angles = torch.randn(2, 1, seq, turned, device=device).to(dtype)
    return [states(heads[0]), states(heads[1]), *angles, states(heads[0]), states(heads[1])]


def plain_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Any:
    return tuple(reference_rope(x, cos, sin, dtype=dtype) for x in (q, k))


def results(turn: Callable[..., Any], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    q, k = (t.detach().requires_grad_() for t in inputs[:2])
    out = turn(q, k, *inputs[2:4], **options)
    grads = [g.to(o.dtype) for g, o in zip(inputs[4:], out, strict=True)]
    return [*(o.detach() for o in out), *torch.autograd.grad(out, (q, k), grads)]


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(inputs: list[Tensor]) -> None:
        ours = results(apply_rope, inputs)
        exact = results(plain_rope, [t.double() for t in inputs], dtype=torch.float64)
        plain = results(plain_rope, inputs, dtype=inputs[0].dtype)
        for name, *values in zip(("q", "k", "dq", "dk"), ours, exact, plain, strict=True):
            as_good_as_plain(name, *values)

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(
    ("batch", "heads", "seq", "head_dim", "turned"),
    [(2, (3, 1), 5, 16, 16), (1, (1, 1), 1, 2, 2), (1, (5, 5), 3, 80, 80), (2, (4, 2), 3, 24, 6),
     (1, (40, 8), 2, 128, 128), (1, (2, 1), 0, 16, 16)],
)  # fmt: skip
def test_values_and_gradients_match_float64(
    batch: int, heads: tuple[int, int], seq: int, head_dim: int, turned: int, dtype: torch.dtype,
    assert_accurate: Callable[..., None], device: str,
) -> None:  # fmt: skip
    inputs = make_inputs(batch, heads, seq, head_dim, turned, dtype, device)
    if seq:
        assert_accurate(inputs)
    else:
        assert [t.numel() for t in results(apply_rope, inputs)] == [0] * 4


def test_it_is_what_transformers_computes(device: str) -> None:
    q, k, cos, sin, *_ = make_inputs(2, (4, 2), 7, 16, 16, FP32, device)
    for ours, theirs in zip(
        apply_rope(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "layout", ["contiguous", "last first", "expanded", "batched", "fp32 angles"]
)
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    inputs = make_inputs(2, (4, 2), 6, 8, 8, FP16, device)
    if layout == "contiguous":
        inputs = [t.contiguous() for t in inputs]
    elif layout == "last first":
        inputs = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    elif layout == "expanded":
        inputs[1], inputs[4] = inputs[1][:, :1].expand(2, 2, 6, 8), inputs[4][:1].expand(2, 4, 6, 8)
    elif layout == "batched":
        inputs[2:4] = [torch.randn(2, 6, 8, device=device).half() for _ in range(2)]
    else:
        inputs[2:4] = [t.float() for t in inputs[2:4]]
    assert_accurate(inputs)


def test_results_lie_in_memory_as_the_inputs_do(device: str) -> None:
    q, k, cos, sin, *_ = make_inputs(2, (4, 2), 6, 8, 8, FP32, device)
    turned = apply_rope(q, k, cos, sin)
    assert [t.stride() for t in turned] == [q.stride(), k.stride()]


def test_compiled_and_eager_agree(device: str) -> None:
    inputs = make_inputs(1, (2, 1), 5, 8, 8, FP32, device)
    torch.library.opcheck(
        fused.rope,
        (*inputs[:1], *inputs[2:4], False),
        test_utils=("test_schema", "test_faketensor"),
    )
    compiled = torch.compile(apply_rope, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(results(compiled, inputs), results(apply_rope, inputs), strict=True):
        assert torch.equal(ours, eager)


def test_tiles_hold_all_heads_of_a_token_where_they_fit() -> None:
    assert tile_options(32, 128, 128)["BLOCK_HEADS"] == 32
    assert tile_options(96, 128, 128)["BLOCK_HEADS"] == 32
    assert tile_options(8, 96, 24) == {
        "HALF": 12,
        "HEAD_DIM": 96,
        "BLOCK_HEADS": 8,
        "BLOCK_HALF": 16,
        "BLOCK_REST": 128,
        "num_warps": 1,
    }


def change(**tensors: Tensor) -> dict[str, Tensor]:
    """Return arguments that are valid but for the given ones."""
    valid = {"q": torch.zeros(2, 4, 5, 8), "k": torch.zeros(2, 2, 5, 8)}
    return valid | {"cos": torch.zeros(1, 5, 8), "sin": torch.zeros(1, 5, 8)} | tensors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(q=torch.zeros(4, 5, 8)), r"q has shape \(4, 5, 8\); it must be \(B, H, S, D\)"),
        (change(k=torch.zeros(2, 2, 6, 8)), r"k has shape .*; all but its heads must be q's"),
        (change(k=torch.zeros(2, 2, 5, 8).half()), "k has dtype torch.float16; it must be q's"),
        (change(q=torch.zeros(2, 4, 5, 514)), "q has head size 514; allowed are 2 to 512"),
        (
            change(cos=torch.zeros(1, 5, 7)),
            r"cos has shape \(1, 5, 7\); it must be \(2 or 1, 5, R\)",
        ),
        (change(cos=torch.zeros(3, 5, 8)), r"cos has shape \(3, 5, 8\); it must be"),
        (change(sin=torch.zeros(1, 5, 10)), r"sin has shape \(1, 5, 10\); it must be"),
        (change(sin=torch.zeros(1, 5, 6)), r"sin has shape \(1, 5, 6\); it must be cos's"),
        (
            change(cos=torch.zeros(1, 5, 8).half()),
            "cos has dtype torch.float16; allowed are float32",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_rope(**arguments)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="q is on cpu; it must be on a CUDA device"):
        apply_rope(**change())
