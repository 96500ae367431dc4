"""Causal linear attention against its quadratic form in float64, and what mistaken callers see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import launch
from kernels.linear_attention import triton as fused
from kernels.linear_attention.reference import reference_linear_attention
from kernels.linear_attention.triton import causal_linear_attention, chunk_options

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32


def make_inputs(
    batch: int, heads: tuple[int, int], seq: int, head_dim: int, dtype: torch.dtype, device: str
) -> list[Tensor]:
    """q, k, v and an incoming gradient, laid out as transformers has them."""
    torch.manual_seed(seq * 10 + head_dim)
    counts = (heads[0], heads[1], heads[1], heads[0])
    rows = [torch.randn(batch, seq, count, head_dim) for count in counts]
    return [row.to(device, dtype).transpose(1, 2) for row in rows]


def results(attention: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3].to(out.dtype))]


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(inputs: list[Tensor]) -> None:
        ours = results(causal_linear_attention, inputs)
        exact = results(reference_linear_attention, [t.double() for t in inputs])
        plain = results(reference_linear_attention, inputs, dtype=inputs[0].dtype)
        for name, mine, x, theirs in zip(
            ("out", "dQ", "dK", "dV"), ours, exact, plain, strict=True
        ):
            if mine.dtype == FP32:
                # Gradients are small differences of sums of order 1, rounded in either's own order.
                torch.testing.assert_close(mine.double(), x, rtol=1e-5, atol=2e-6, msg=name)
            else:
                as_good_as_plain(name, mine, x, theirs)

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(
    ("batch", "heads", "seq", "head_dim"),
    [(2, (2, 1), 130, 16), (1, (1, 1), 1, 3), (1, (3, 1), 65, 40), (1, (1, 1), 64, 64),
     (1, (2, 2), 33, 80)],
)  # fmt: skip
def test_values_and_gradients_match_float64(
    batch: int, heads: tuple[int, int], seq: int, head_dim: int, dtype: torch.dtype,
    assert_accurate: Callable[..., None], device: str,
) -> None:  # fmt: skip
    assert_accurate(make_inputs(batch, heads, seq, head_dim, dtype, device))


@pytest.mark.parametrize("layout", ["contiguous", "last first", "expanded"])
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    inputs = make_inputs(2, (2, 2), 70, 16, FP32, device)
    if layout == "contiguous":
        inputs = [t.contiguous() for t in inputs]
    elif layout == "last first":
        inputs = [t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in inputs]
    else:
        inputs[2], inputs[3] = (
            inputs[2][:1].expand(2, 2, 70, 16),
            inputs[3][:1].expand(2, 2, 70, 16),
        )
    assert_accurate(inputs)


def test_a_row_whose_weights_all_underflow_is_zero(device: str) -> None:
    q, k, v, grad = make_inputs(1, (1, 1), 5, 16, FP32, device)
    q[0, 0, 2] = -200.0  # exp(-200) is 0 in fp32
    out, *gradients = results(causal_linear_attention, [q, k, v, grad])
    assert not out[0, 0, 2].any()
    assert out[0, 0, 3].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_later_tokens_do_not_reach_earlier_ones(device: str) -> None:
    q, k, v, _ = make_inputs(1, (2, 1), 100, 16, FP32, device)
    before = causal_linear_attention(q, k, v)
    k[:, :, 70:], v[:, :, 70:] = torch.nan, torch.nan
    after = causal_linear_attention(q, k, v)
    # The chunk of 64 that holds token 70 multiplies its later keys by weights of 0; earlier chunks
    # do not see them at all.
    assert torch.equal(after[:, :, :64], before[:, :, :64])


def test_compiled_and_eager_agree(device: str) -> None:
    inputs = make_inputs(1, (2, 1), 9, 16, FP32, device)
    torch.library.opcheck(
        fused.linear_attention_forward,
        tuple(inputs[:3]),
        test_utils=("test_schema", "test_faketensor"),
    )
    compiled = torch.compile(causal_linear_attention, backend="aot_eager", fullgraph=True)
    eager = results(causal_linear_attention, inputs)
    for ours, expected in zip(results(compiled, inputs), eager, strict=True):
        assert torch.equal(ours, expected)


def test_chunks_by_head_size() -> None:
    assert chunk_options(64, torch.bfloat16)["CHUNK"] == 64
    assert chunk_options(80, torch.bfloat16)["CHUNK"] == 32
    assert chunk_options(80, FP32)["PRECISION"] == "ieee"


def change(**tensors: Tensor) -> dict[str, Tensor]:
    """Return arguments that are valid but for the given ones."""
    valid = {"q": torch.zeros(2, 4, 5, 8), "k": torch.zeros(2, 2, 5, 8)}
    return valid | {"v": torch.zeros(2, 2, 5, 8)} | tensors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(q=torch.zeros(4, 5, 8)), r"q has shape \(4, 5, 8\); it must be \(B, H, S, D\)"),
        (change(k=torch.zeros(2, 2, 5, 8).half()), "k has dtype torch.float16; it must be q's"),
        (change(v=torch.zeros(2, 2, 6, 8)), r"v has shape .*; it must be k's"),
        (change(q=torch.zeros(2, 4, 6, 8)), r"k has shape .*; all but its heads must be q's"),
        (change(q=torch.zeros(2, 3, 5, 8)), "q has 3 heads; it must be a multiple of k's 2"),
        (
            {name: torch.zeros(1, 1, 5, 129) for name in "qkv"},
            "q has head size 129; allowed are 1 to 128",
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_linear_attention(**arguments)


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="q is on cpu; it must be on a CUDA device"):
        causal_linear_attention(**change())
