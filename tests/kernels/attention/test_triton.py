"""flash_attention against float64: shapes, masks, head groups, strides and hard numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention.triton import flash_attention, flash_attention_with_lse

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Check = Callable[..., None]
Make = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "seqs", [(1, 1), (64, 64), (1, 130), (130, 1), (129, 129), (63, 200), (200, 63), (3, 70)]
)
def test_every_length_matches_float64(
    seqs: tuple[int, int], causal: bool, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (2, 1), seqs, 64, torch.float16), causal)


@pytest.mark.parametrize("seqs", [(64, 128), (128, 256), (70, 128), (128, 70), (64, 64)])
def test_a_full_mask_fills_its_tiles_or_does_not(
    seqs: tuple[int, int], make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (2, 1), seqs, 128, torch.float16), causal=False)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_head_size_matches_float64(
    head_dim: int, dtype: torch.dtype, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (2, 2), (70, 70), head_dim, dtype), causal=True)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_share_key_heads(
    heads: tuple[int, int], causal: bool, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(2, heads, (70, 90), 16, torch.float32), causal)


@pytest.mark.parametrize("scale", [0.03, 1.0])
def test_scale_replaces_the_default(
    scale: float, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (1, 1), (20, 30), 32), causal=False, scale=scale)


def test_contiguous_and_odd_strides_agree(make_inputs: Make, assert_accurate: Check) -> None:
    q, k, v = make_inputs(2, (2, 2), (40, 40), 32)
    packed = torch.stack([q, k, v], dim=3).detach().requires_grad_()
    views = packed.unbind(3)
    sliced = torch.cat([v, v], dim=2).detach().requires_grad_()[:, :, ::2]
    assert_accurate(q.contiguous(), views[1], sliced, causal=True)


def test_a_last_dimension_that_is_not_contiguous_is_copied(
    make_inputs: Make, assert_accurate: Check
) -> None:
    q, k, v = make_inputs(1, (1, 1), (20, 20), 16)
    q, k, v = (t.detach().mT.contiguous().mT.requires_grad_() for t in (q, k, v))
    assert q.stride(-1) != 1
    assert_accurate(q, k, v, causal=True)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 70, 1), (1, 1, 1, 16)])
def test_an_expanded_output_gradient_is_read_by_its_strides(
    shape: tuple[int, ...], make_inputs: Make, assert_accurate: Check
) -> None:
    q, k, v = make_inputs(1, (2, 1), (70, 70), 16)
    dout = torch.randn(shape, device=DEVICE).expand(1, 2, 70, 16)
    assert_accurate(q, k, v, causal=True, dout=dout)


@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_match_float64(
    causal: bool, make_inputs: Make, assert_accurate: Check
) -> None:
    assert_accurate(*make_inputs(1, (1, 1), (70, 70), 16, torch.float16, spread=4.0), causal)


def test_huge_logits_pick_the_largest_and_stay_finite(make_inputs: Make) -> None:
    # Logits reach 1e5: without the running maximum exp2 overflows at once. Each query sees one key.
    q, k, v = make_inputs(1, (1, 1), (70, 70), 16, spread=100.0)
    out = flash_attention(q, k, v, causal=False)
    winners = (q @ k.mT).argmax(-1)[0, 0]
    torch.testing.assert_close(out[0, 0], v[0, 0, winners])
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


# Rows of dK and dV past the last key overflow by design: they are never stored.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_keys_past_the_end_do_not_overflow_when_all_logits_are_very_negative(
    make_inputs: Make, assert_accurate: Check
) -> None:
    # A tail key read as zero has logit 0, far above every real one: it must not enter the sums.
    q, k, v = make_inputs(1, (1, 1), (70, 70), 16)
    q, k = (t.detach().abs().mul(20).requires_grad_() for t in (q, k))
    k = k.detach().neg().requires_grad_()
    assert_accurate(q, k, v, causal=False)


def test_queries_without_keys_give_zero_and_minus_infinity(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (70, 5), 16)
    out, lse = flash_attention_with_lse(q, k, v, causal=True)
    assert (out[:, :, :65] == 0).all()
    assert (lse[:, :, :65] == -torch.inf).all()
    assert lse[:, :, 65:].isfinite().all()
    grads = torch.autograd.grad(out.square().sum() + lse[:, :, 65:].sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, :65] == 0).all()


@pytest.mark.parametrize(("seq_q", "seq_k"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences_are_allowed(seq_q: int, seq_k: int, make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (seq_q, seq_k), 16)
    out, lse = flash_attention_with_lse(q, k, v, causal=False)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    assert all((grad == 0).all() for grad in grads)


def test_values_behind_the_views_do_not_leak(make_inputs: Make, assert_accurate: Check) -> None:
    def inside_nan(tensor: Tensor) -> Tensor:
        batch, heads, seq, head_dim = tensor.shape
        padded = torch.full((batch, heads, seq + 70, head_dim + 8), torch.nan, device=DEVICE)
        padded[:, :, :seq, :head_dim] = tensor.detach()
        return padded[:, :, :seq, :head_dim].requires_grad_()

    q, k, v = (inside_nan(tensor) for tensor in make_inputs(2, (2, 1), (70, 70), 24))
    assert_accurate(q, k, v, causal=True)
    assert_accurate(q, k, v, causal=False)


def test_one_tensor_may_be_query_key_and_value(make_inputs: Make) -> None:
    (x, *_) = make_inputs(1, (2, 2), (70, 70), 16)
    apart = [x.detach().clone().requires_grad_() for _ in range(3)]
    dout = torch.randn_like(x)
    out, expected = (flash_attention(*inputs, causal=True) for inputs in ((x, x, x), apart))
    assert torch.equal(out, expected)
    (found,) = torch.autograd.grad(out, x, dout)
    torch.testing.assert_close(found, sum(torch.autograd.grad(expected, apart, dout)))


def test_nan_in_a_query_stays_in_its_row(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(1, (2, 1), (70, 70), 16))
    broken = q.clone()
    broken[0, 1, 33] = torch.nan
    others = torch.ones(1, 2, 70, dtype=torch.bool)
    others[0, 1, 33] = False

    def run(query: Tensor) -> tuple[Tensor, Tensor]:
        leaf = query.clone().requires_grad_()
        out = flash_attention(leaf, k, v, causal=True)
        return out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0]

    for clean, found in zip(run(q), run(broken), strict=True):
        assert found[~others].isnan().all()
        assert torch.equal(found[others], clean[others])


def test_infinity_in_a_value_reaches_whoever_sees_it(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(1, (2, 1), (70, 70), 16))
    clean = flash_attention(q, k, v, causal=True)
    v[0, 0, 33, 5] = torch.inf
    out = flash_attention(q, k, v, causal=True)
    assert (out[:, :, 33:, 5] == torch.inf).all()
    others = torch.arange(16, device=DEVICE) != 5
    assert torch.equal(out[..., others], clean[..., others])


def test_the_log_sum_exp_is_differentiable(make_inputs: Make) -> None:
    from kernels.attention.reference import reference_attention

    q, k, v = make_inputs(1, (2, 1), (20, 70), 16)
    weight = torch.randn(1, 2, 20, device=DEVICE)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out.square().sum() + (lse * weight).sum(), (q, k, v))

    ours = gradients(*flash_attention_with_lse(q, k, v, causal=True))
    exact = gradients(*reference_attention(q, k, v, causal=True))
    for grad, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_outputs_lie_in_memory_as_batch_sequence_head(make_inputs: Make) -> None:
    q, k, v = make_inputs(2, (4, 2), (9, 9), 16)
    out = flash_attention(q, k, v, causal=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(t.transpose(1, 2).is_contiguous() for t in (out, *grads))


def test_results_repeat_to_the_last_bit(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (130, 130), 16)

    def run() -> tuple[Tensor, ...]:
        out = flash_attention(q, k, v, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((3, 1, 5, 16), (2**30, 80, 16, 1)),
        ((1, 3, 5, 16), (80, 2**30, 16, 1)),
        ((1, 1, 3, 16), (80, 80, 2**30, 1)),
        ((1, 1, 66, 16), (80, 80, 2**25, 1)),
    ],
    ids=["batch", "head", "row in a tile", "first row of a tile"],
)
def test_offsets_past_two_to_the_31_are_exact(
    shape: tuple[int, ...], strides: tuple[int, ...], tmp_path: Any, assert_accurate: Check
) -> None:
    # Each stride fits an int32 and its product with an index does not. The file stays sparse.
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    size = reach + 3 * 4096
    if DEVICE == "cuda":
        storage = torch.zeros(size, dtype=torch.float16, device=DEVICE)
    else:
        path = str(tmp_path / "storage")
        storage = torch.from_file(path, shared=True, size=size, dtype=torch.float16)
    tensors = [storage.as_strided(shape, strides, part * 4096) for part in range(4)]
    for tensor in tensors:
        tensor.copy_(torch.randn(shape))
    q, k, v, dout = tensors
    q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
    assert_accurate(q, k, v, causal=True, dout=dout)
