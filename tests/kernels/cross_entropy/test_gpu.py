"""The fused loss on a real GPU: bf16, real vocabularies, its bytes, more than 2^31 logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cross_entropy.reference import reference_linear_cross_entropy
from kernels.cross_entropy.triton import cross_entropy_rows, linear_cross_entropy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16 = torch.bfloat16


def make_inputs(tokens: int, width: int, classes: int, dtype: torch.dtype = BF16) -> list[Tensor]:
    hidden = torch.randn(tokens, width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(classes, width, device="cuda", dtype=dtype) / width**0.5).requires_grad_()
    return [hidden, weight, torch.randint(classes, (tokens,), device="cuda")]


def results(loss: Callable[..., Tensor], inputs: list[Tensor], **options: Any) -> list[Tensor]:
    value = loss(*inputs, **options)
    return [value.detach(), *torch.autograd.grad(3 * value, inputs[:2])]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("tokens", "width", "classes", "chunk"),
    [(777, 512, 32003, 256), (1024, 512, 128256, 128), (33, 96, 50257, 8)],
)
def test_bf16_errs_at_most_twice_as_much_as_plain_torch(
    tokens: int, width: int, classes: int, chunk: int, softcap: float | None,
    as_good_as_plain: Callable[..., None],
) -> None:  # fmt: skip
    inputs = make_inputs(tokens, width, classes)
    inputs[2][::7] = -100
    doubles = [t.detach().double().requires_grad_() for t in inputs[:2]]
    exact = results(reference_linear_cross_entropy, [*doubles, inputs[2]], softcap=softcap)
    plain = results(reference_linear_cross_entropy, inputs, softcap=softcap, dtype=BF16)
    ours = results(linear_cross_entropy, inputs, chunk_tokens=chunk, softcap=softcap)
    for name, *values in zip(("dX", "dW"), ours[1:], exact[1:], plain[1:], strict=True):
        as_good_as_plain(name, *values)
    # A mean may be right by luck where its tokens are not: those of plain torch set the measure.
    options = {"softcap": softcap, "reduction": "none"}
    with torch.no_grad():
        of_tokens = reference_linear_cross_entropy(*doubles, inputs[2], **options)
        of_plain = reference_linear_cross_entropy(*inputs, dtype=BF16, **options)
    counted = inputs[2] != -100
    allowed = 2 * (of_plain - of_tokens).abs()[counted].mean()
    assert (ours[0] - exact[0]).abs() <= allowed


def test_its_bytes_are_two_gradients_one_chunk_and_some_per_token() -> None:
    tokens, width, classes, chunk = 4096, 1024, 65536, 512
    inputs = make_inputs(tokens, width, classes)
    for _ in range(2):  # the first call brings cuBLAS's workspace
        loss = linear_cross_entropy(*inputs, chunk_tokens=chunk)
        torch.autograd.grad(loss, inputs[:2])
        del loss
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(*inputs, chunk_tokens=chunk)
    gradients = torch.autograd.grad(loss, inputs[:2])
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # dX, dW and a chunk's logits in bf16, the losses in fp32, the count of labels (512: a block).
    expected = 2 * (tokens * width + classes * width + chunk * classes) + 4 * tokens + 512
    assert peak == expected
    # What stays: the gradients and the loss.
    assert torch.cuda.memory_allocated() - before == sum(g.nbytes for g in gradients) + 512


def test_more_than_two_to_the_31_logits() -> None:
    rows, classes = 17_000, 128_256
    assert rows * classes > 2**31
    logits = torch.randn(rows, classes, device="cuda", dtype=BF16)
    labels = torch.randint(classes, (rows,), device="cuda")
    last = logits[-1:].clone()
    losses, count = torch.empty(rows, device="cuda"), torch.tensor(rows, device="cuda")
    cross_entropy_rows(logits, labels, losses, count, False, -100, None, True)
    exact = torch.nn.functional.cross_entropy(last.double(), labels[-1:])
    assert losses[-1].item() == pytest.approx(exact.item(), rel=1e-5)
    one = torch.empty(1, device="cuda")
    cross_entropy_rows(last, labels[-1:], one, count, False, -100, None, True)
    assert torch.equal(last, logits[-1:])


def test_repeats_are_equal_to_the_bit() -> None:
    inputs = make_inputs(1024, 512, 32003)
    first = results(linear_cross_entropy, inputs, chunk_tokens=256)
    for _ in range(5):
        again = results(linear_cross_entropy, inputs, chunk_tokens=256)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
