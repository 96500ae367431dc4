"""The float64 reference against numbers worked out by hand and torch's own attention."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.reference import causal_mask, reference_attention


def test_two_keys_by_hand() -> None:
    # Logits 0 and ln 3 give weights 1/4 and 3/4, log-sum-exp ln 4.
    q = torch.tensor([[[[1.0]]]])
    k = torch.tensor([[[[0.0], [math.log(3)]]]])
    v = torch.tensor([[[[8.0], [4.0]]]])
    out, lse = reference_attention(q, k, v, causal=False, scale=1.0)
    torch.testing.assert_close(out.item(), 5.0)
    torch.testing.assert_close(lse.item(), math.log(4))


def test_the_causal_mask_is_aligned_to_the_bottom_right() -> None:
    assert causal_mask(2, 3).tolist() == [[True, True, False], [True, True, True]]
    assert causal_mask(3, 2).tolist() == [[False, False], [True, False], [True, True]]


def test_a_row_without_keys_gives_zero_and_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 1, n, 4, requires_grad=True) for n in (3, 2, 2))
    out, lse = reference_attention(q, k, v, causal=True)
    assert (out[0, 0, 0] == 0).all()
    assert lse[0, 0, 0] == -math.inf
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_torch_agrees_in_float64() -> None:
    q = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, 7, 8, dtype=torch.float64) for _ in "kv")
    for causal in (False, True):
        out, _ = reference_attention(q, k, v, causal=causal)
        expected = scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        torch.testing.assert_close(out, expected)
