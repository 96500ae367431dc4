"""The fused linear cross-entropy against float64, at every edge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cross_entropy import triton as fused
from kernels.cross_entropy.reference import reference_linear_cross_entropy
from kernels.cross_entropy.triton import cross_entropy_rows, linear_cross_entropy

Check = Callable[[str, Tensor, Tensor, Tensor], None]
FP16, FP32 = torch.float16, torch.float32


def make_inputs(
    tokens: int, width: int, classes: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + classes)
    hidden = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(classes, width, generator=generator) / width**0.5
    labels = torch.randint(0, classes, (tokens,), generator=generator)
    hidden, weight = (t.to(device, dtype).requires_grad_() for t in (hidden, weight))
    return hidden, weight, labels.to(device)


def results(
    loss: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any
) -> list[Tensor]:
    """Loss and both gradients under an incoming gradient of 3."""
    value = loss(*inputs, **options)
    return [value.detach(), *torch.autograd.grad(3 * value, inputs[:2])]


def plain_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int, reduction: str = "mean",
    **options: Any,
) -> Tensor:  # fmt: skip
    """The reference in the tested dtype over as many rows at a time as ours takes.

    A product of two rows sums its thousands of classes in another order than one of five.
    """
    parts = zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    options |= {"dtype": hidden.dtype, "reduction": "sum"}
    total = torch.stack(
        [reference_linear_cross_entropy(rows, weight, of, **options) for rows, of in parts]
    ).sum()
    counted = labels != options.get("ignored_label", -100)
    return total / counted.sum() if reduction == "mean" else total


def plain_results(inputs: tuple[Tensor, ...], orders: int = 8, **options: Any) -> list[Tensor]:
    """Results of plain arithmetic in the tested dtype, [orders, ...]: each sums the width in another order.

    How far one order is off is luck, which is another on every kind of processor.
    """
    hidden, weight, labels = inputs
    found = []
    for seed in range(orders):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(hidden.shape[1], generator=generator).to(hidden.device)
        mixed = [t.detach()[:, order].requires_grad_() for t in (hidden, weight)]
        loss, *gradients = results(plain_loss, (*mixed, labels), **options)
        found.append([loss, *(gradient[:, order.argsort()] for gradient in gradients)])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


@pytest.fixture
def assert_accurate(as_good_as_plain: Check) -> Callable[..., None]:
    def check(inputs: tuple[Tensor, ...], chunk_tokens: int, **options: Any) -> None:
        hidden, weight, labels = inputs
        doubles = tuple(t.detach().double().requires_grad_() for t in (hidden, weight))
        exact = results(reference_linear_cross_entropy, (*doubles, labels), **options)
        plain = plain_results(inputs, chunk_tokens=chunk_tokens, **options)
        ours = results(linear_cross_entropy, inputs, chunk_tokens=chunk_tokens, **options)
        assert ours[0].dtype is FP32
        for name, *values in zip(("dX", "dW"), ours[1:], exact[1:], plain[1:], strict=True):
            as_good_as_plain(name, *values)
        # One number: by luck the plain one may be exact. Four roundings of it in fp32 are allowed.
        allowed = 2 * (plain[0] - exact[0]).abs().max() + 4 * torch.finfo(FP32).eps * exact[0].abs()
        assert (ours[0] - exact[0]).abs() <= allowed

    return check


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(
    ("tokens", "width", "classes", "chunk"),
    [
        (1, 8, 1, 1),
        (1, 16, 2, 4),
        (13, 24, 71, 5),
        (12, 7, 64, 4),
        (5, 40, 4099, 2),
        (9, 8, 130, 64),
    ],
)
def test_loss_and_gradients_match_float64(
    tokens: int, width: int, classes: int, chunk: int, dtype: torch.dtype,
    assert_accurate: Callable[..., None], device: str,
) -> None:  # fmt: skip
    assert_accurate(make_inputs(tokens, width, classes, dtype, device), chunk)


@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_labels_count_nothing(
    reduction: str, softcap: float | None, assert_accurate: Callable[..., None], device: str
) -> None:
    hidden, weight, labels = make_inputs(11, 16, 37, FP32, device)
    labels[[0, 4, 5, 10]] = 7
    inputs = (hidden, weight, labels)
    assert_accurate(inputs, 4, reduction=reduction, softcap=softcap, ignored_label=7)
    grad_hidden = results(linear_cross_entropy, inputs, chunk_tokens=4, ignored_label=7)[1]
    assert not grad_hidden[labels == 7].any()


def test_a_batch_without_labels_has_no_mean_and_no_gradient(device: str) -> None:
    hidden, weight, labels = make_inputs(4, 8, 9, FP32, device)
    labels.fill_(-100)
    loss, *gradients = results(linear_cross_entropy, (hidden, weight, labels), chunk_tokens=3)
    assert loss.isnan()  # as torch's own
    assert not any(gradient.any() for gradient in gradients)
    total = linear_cross_entropy(hidden, weight, labels, chunk_tokens=3, reduction="sum")
    assert total.item() == 0.0


def test_no_tokens_at_all(device: str) -> None:
    hidden, weight, labels = make_inputs(0, 8, 9, FP32, device)
    options = {"chunk_tokens": 3, "reduction": "sum"}
    loss, grad_hidden, grad_weight = results(
        linear_cross_entropy, (hidden, weight, labels), **options
    )
    assert (loss.item(), grad_hidden.shape, grad_weight.any().item()) == (0.0, (0, 8), False)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [1e4, 1e18])
def test_huge_logits_neither_overflow_nor_lose_the_label(
    size: float, softcap: float | None, device: str
) -> None:
    hidden, weight, labels = make_inputs(6, 16, 40, FP32, device)
    inputs = ((hidden * size).detach().requires_grad_(), weight, labels)
    doubles = tuple(t.detach().double().requires_grad_() for t in inputs[:2])
    ours = results(linear_cross_entropy, inputs, chunk_tokens=4, softcap=softcap)
    exact = results(reference_linear_cross_entropy, (*doubles, labels), softcap=softcap)
    for name, mine, theirs in zip(("loss", "dX", "dW"), ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=2e-5, atol=1e-6, msg=name)


def rows_of(logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Losses of rows of logits, and their gradients, written over a copy."""
    chosen = {"mean": False, "ignored_label": -100, "softcap": None, "with_gradient": True}
    written, losses = logits.clone(), torch.empty(len(logits), device=logits.device)
    count = torch.tensor(len(labels), device=logits.device)
    cross_entropy_rows(written, labels, losses, count, **(chosen | options))
    return losses, written


def test_classes_at_minus_infinity_have_no_share(device: str) -> None:
    # Two classes left of 5,000, a whole tile of -inf before them: log 2, and gradients -1/2, 1/2.
    logits = torch.full((1, 5000), -torch.inf, device=device)
    logits[0, 4990:4992] = 1.0
    losses, gradient = rows_of(logits, torch.tensor([4990], device=device))
    assert losses.item() == pytest.approx(0.6931472)
    assert gradient[0, 4990:4992].tolist() == pytest.approx([-0.5, 0.5])
    assert not gradient[0, :4990].any()


@pytest.mark.parametrize("label", [-1, 40, 2**40])
def test_a_label_that_is_no_class_gives_nan(label: int, device: str) -> None:
    logits = torch.randn(2, 40, device=device)
    losses, gradient = rows_of(logits, torch.tensor([3, label], device=device))
    assert losses.isnan().tolist() == [False, True]
    assert gradient.isnan().all(-1).tolist() == [False, True]


def test_nan_logits_stay_in_their_row(device: str) -> None:
    logits = torch.randn(3, 40, device=device)
    logits[1, 5] = torch.nan
    losses, gradient = rows_of(logits, torch.tensor([3, 4, 5], device=device))
    assert losses.isnan().tolist() == [False, True, False]
    assert gradient.isnan().any(-1).tolist() == [False, True, False]


def test_rows_further_apart_than_32_bits_are_found(device: str) -> None:
    """A view with 2^31 elements between two rows; only the pages of these rows are touched."""
    stride, classes = 2**31, 33
    storage = torch.zeros(0, dtype=FP16, device=device)
    storage.untyped_storage().resize_((stride + classes) * 2)
    logits = storage.as_strided((2, classes), (stride, 1))
    logits.copy_(torch.randn(2, classes))
    expected = rows_of(logits.contiguous(), labels := torch.tensor([3, 32], device=device))
    losses = torch.empty(2, device=device)
    cross_entropy_rows(logits, labels, losses, labels[0], False, -100, None, True)
    assert torch.equal(losses, expected[0])
    assert torch.equal(logits, expected[1])


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_strides_of_any_kind(
    layout: str, assert_accurate: Callable[..., None], device: str
) -> None:
    hidden, weight, labels = (t.detach() for t in make_inputs(8, 8, 24, FP32, device))
    if layout == "transposed":
        hidden, weight = hidden.t(), weight.t().contiguous().t()
    elif layout == "expanded":
        hidden, labels = hidden[:1].expand(8, 8), labels[:1].expand(8)
    else:
        hidden, weight = torch.randn(16, 9, device=device)[::2, 1:], weight[::3]
        labels = torch.stack([labels % 8, labels], 1)[:, 0]
    assert_accurate((hidden.requires_grad_(), weight.requires_grad_(), labels), 3)


def test_only_gradients_that_are_wanted_are_made(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = fused.compute_gradients

    def watched(*arguments: Any) -> Any:
        made.append([t.numel() for t in real(*arguments)[1:]])
        return real(*arguments)

    monkeypatch.setattr(fused, "compute_gradients", watched)
    hidden, weight, labels = make_inputs(6, 8, 10, FP32, device)
    frozen = linear_cross_entropy(hidden, weight.detach(), labels, chunk_tokens=4)
    only_hidden = torch.autograd.grad(frozen, hidden)[0]
    only_weight = linear_cross_entropy(hidden.detach(), weight, labels, chunk_tokens=4)
    only_weight = torch.autograd.grad(only_weight, weight)[0]
    with torch.no_grad():
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=4)
    assert made == [[48, 0], [0, 80], [0, 0]]
    both = results(linear_cross_entropy, (hidden, weight, labels), chunk_tokens=4)[1:]
    assert torch.equal(3 * only_hidden, both[0])
    assert torch.equal(3 * only_weight, both[1])


def test_the_buffer_of_the_forward_becomes_the_parameters_gradient(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = fused.compute_gradients

    def watched(*arguments: Any) -> Any:
        out = real(*arguments)
        made.extend(tensor.data_ptr() for tensor in out[1:])
        return out

    monkeypatch.setattr(fused, "compute_gradients", watched)
    hidden, weight, labels = make_inputs(6, 8, 10, FP32, device)
    (linear_cross_entropy(hidden, weight, labels, chunk_tokens=4) / 2).backward()
    assert [hidden.grad.data_ptr(), weight.grad.data_ptr()] == made


def test_a_second_backward_is_refused_in_one_sentence(device: str) -> None:
    loss = linear_cross_entropy(*make_inputs(6, 8, 10, FP32, device), chunk_tokens=4)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once for each forward"):
        loss.backward()
