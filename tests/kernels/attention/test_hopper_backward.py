"""The fused Hopper backward: its host parts anywhere, its gradients on a Hopper GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention.dispatch import (
    Backend,
    Choice,
    Direction,
    forced_backend,
    last_choice,
)
from kernels.attention.hopper_backward import (
    ROW_PADDING,
    _pad_rows,
    interleaved_heads,
    padded_head_dim,
    temporary_bytes,
    tma_ready,
)
from kernels.attention.reference import reference_attention
from kernels.attention.triton import attention_backward, flash_attention
from tests.kernels.attention.conftest import DEVICE, assert_as_good_as_plain

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
SEQS = [
    *[(1, 1), (64, 128), (128, 192), (239, 1), (799, 3), (113, 203), (128, 217), (108, 256)],
    *[(384, 256), (640, 128), (65, 129), (1024, 1024), (1023, 1024), (1024, 1023)],
]


def test_head_sizes_are_padded_to_one_of_two() -> None:
    assert [padded_head_dim(d) for d in (8, 64, 72, 128)] == [64, 64, 128, 128]


def test_the_last_heads_of_a_causal_grid_are_dealt_out_together() -> None:
    # 8,192 keys are 64 tiles: four heads make 256 programs. 32,768 keys: one head does.
    assert [interleaved_heads(64, tiles, True) for tiles in (64, 256, 1000)] == [4, 1, 1]
    assert interleaved_heads(2, 64, True) == 2
    assert interleaved_heads(64, 64, False) == 1


def test_temporary_bytes_by_hand() -> None:
    # dQ: 2 x 4 x 100 x 64 x 4 = 204,800; lse and delta: 2 x (2 x 4) x 128 x 4 = 8,192.
    assert temporary_bytes(2, 4, 100, 64) == 204_800 + 8_192


def test_rows_are_padded_so_that_nothing_weighs() -> None:
    lse = torch.tensor([[[0.0, 2.0, -math.inf]]], device=DEVICE)
    delta = torch.tensor([[[1.0, 2.0, 3.0]]], device=DEVICE)
    for lse_factor, delta_factor in ((1.5, 1.0), (-8.0, -1.0)):
        rows = _pad_rows(lse, delta, (lse_factor, delta_factor))
        assert rows.shape == (2, 1, ROW_PADDING)
        assert rows[0, 0, :2].tolist() == [0.0, 2 * lse_factor]
        # The kernels add -inf to the scores, or take +inf from them: weights of 0 either way.
        assert rows[0, 0, 2:].eq(math.copysign(math.inf, lse_factor)).all()
        assert rows[1, 0, :3].tolist() == [delta_factor * value for value in (1.0, 2.0, 3.0)]
        assert rows[1, 0, 3:].eq(0).all()


def test_only_what_tma_cannot_read_is_copied() -> None:
    rows = torch.randn(2, 5, 3, 64, dtype=FP16).transpose(1, 2)
    assert tma_ready(rows) is rows
    shifted = torch.randn(2 * 3 * 5 * 64 + 1, dtype=FP16)[1:].view(2, 3, 5, 64)
    assert shifted.is_contiguous()
    for odd in (rows[..., 1:33], rows[:, :, :1].expand(2, 3, 5, 64), rows[..., ::2], shifted):
        copy = tma_ready(odd)
        assert copy is not odd and torch.equal(copy, odd)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0


def hopper_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, causal: bool
) -> tuple[Tensor, ...]:
    """Call the backward operator, and see that the Hopper kernels ran."""
    with forced_backend("hopper"):
        grads = attention_backward(dout, q, k, v, lse, delta, causal, q.shape[-1] ** -0.5)
    choice = last_choice(Direction.BACKWARD)
    assert choice is not None and choice.backend is Backend.HOPPER
    return tuple(grads)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return dq, dk, dv of ours, of float64 and of plain low precision."""
    found = []
    for dtype in (torch.float64, q.dtype):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out, lse = reference_attention(*leaves, causal=causal, dtype=dtype)
        found.append(torch.autograd.grad(out, leaves, dout.to(dtype)))
        if dtype == torch.float64:
            delta = (out.detach() * dout.double()).sum(-1).float()
            exact_lse = lse.detach().float()
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    ours = hopper_backward(dout, q, k, v, exact_lse, delta, causal)
    names = ("dq", "dk", "dv")
    exact, plain = (dict(zip(names, values, strict=True)) for values in found)
    return dict(zip(names, ours, strict=True)), exact, plain


def check(q: Tensor, k: Tensor, v: Tensor, causal: bool, dout: Tensor | None = None) -> None:
    """Hold the three gradients against float64 by the rule of all attention tests."""
    dout = torch.randn_like(q.detach()) if dout is None else dout
    ours, exact, plain = gradients(q, k, v, dout, causal)
    for name in ours:
        assert_as_good_as_plain(name, ours[name], exact[name], plain[name])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_length_matches_float64(
    head_dim: int, heads: tuple[int, int], causal: bool, make_inputs: Make
) -> None:
    for seqs in SEQS:
        check(*make_inputs(2, heads, seqs, head_dim, BF16), causal)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 72, 80, 96, 120])
def test_padded_head_sizes_match_float64(
    head_dim: int, dtype: torch.dtype, make_inputs: Make
) -> None:
    check(*make_inputs(1, (4, 2), (300, 413), head_dim, dtype), causal=True)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("seq", [2048, 4096, 4224])
def test_long_sequences_match_float64(seq: int, make_inputs: Make) -> None:
    check(*make_inputs(1, (2, 1), (seq, seq), 128, BF16), causal=True)


@pytest.mark.gpu
@on_hopper
def test_any_strides_and_an_expanded_dout(make_inputs: Make) -> None:
    q, k, v = make_inputs(2, (4, 2), (200, 300), 64, BF16)
    contiguous = [tensor.detach().contiguous().requires_grad_() for tensor in (q, k, v)]
    check(*contiguous, causal=True)
    check(
        q, k, v, causal=True, dout=torch.ones(1, 1, 1, 64, device=DEVICE, dtype=BF16).expand_as(q)
    )
    wide = torch.randn(2, 200, 4, 3, 64, device=DEVICE, dtype=BF16).permute(3, 0, 2, 1, 4)
    check(*(tensor.requires_grad_() for tensor in wide.detach().unbind(0)), causal=False)


@pytest.mark.gpu
@on_hopper
def test_huge_logits_and_nan_in_another_batch_stay_apart(make_inputs: Make) -> None:
    check(*make_inputs(1, (2, 2), (200, 200), 64, BF16, spread=8.0), causal=False)
    q, k, v = (tensor.detach() for tensor in make_inputs(2, (2, 2), (100, 100), 64, BF16))
    dout = torch.randn_like(q)
    clean, *_ = gradients(q[:1], k[:1], v[:1], dout[:1], causal=False)
    for tensor in (q, k, v, dout):
        tensor[1] = math.nan
    lse = reference_attention(q, k, v, causal=False)[1].float()
    delta = torch.zeros_like(lse)
    delta[0] = (reference_attention(q, k, v, causal=False)[0][0] * dout[0].double()).sum(-1)
    mixed = hopper_backward(dout, q, k, v, lse, delta, False)
    assert all(tensor[0].isfinite().all() for tensor in mixed)
    assert torch.equal(mixed[1][0], clean["dk"][0]) and torch.equal(mixed[2][0], clean["dv"][0])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_a_busy_gpu_repeats_dk_and_dv(head_dim: int, causal: bool, make_inputs: Make) -> None:
    q, k, v = (t.detach() for t in make_inputs(60, (8, 4), (512, 512), head_dim, BF16))
    lse = torch.rand(60, 8, 512, device=DEVICE) + 6
    arguments = (torch.randn_like(q), q, k, v, lse, torch.randn_like(lse), causal)
    dq, *first = hopper_backward(*arguments)
    for _ in range(20):
        again, *rest = hopper_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, rest, strict=True))
        # Only the order of fp32 additions differs: the result may round to a neighbour.
        torch.testing.assert_close(again, dq, rtol=2**-7, atol=1e-2 * dq.float().std().item())


@pytest.mark.gpu
@on_hopper
def test_it_allocates_what_it_says(make_inputs: Make) -> None:
    q, k, v = (t.detach() for t in make_inputs(2, (8, 4), (1024, 2048), 64, BF16))
    lse = torch.rand(2, 8, 1024, device=DEVICE) + 6
    arguments = (torch.randn_like(q), q, k, v, lse, torch.zeros_like(lse), True)
    hopper_backward(*arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = hopper_backward(*arguments)
    gradient_bytes = sum(tensor.numel() * 2 for tensor in results)
    # Every size here is a multiple of the allocator's 512 bytes.
    expected = gradient_bytes + temporary_bytes(2, 8, 1024, 64)
    assert torch.cuda.max_memory_allocated() - before == expected
    assert torch.cuda.memory_allocated() - before == gradient_bytes


@pytest.mark.gpu
@on_hopper
def test_a_training_step_takes_it(make_inputs: Make) -> None:
    q, k, v = make_inputs(2, (4, 2), (300, 300), 64, BF16)
    dout = torch.randn_like(q)
    found = torch.autograd.grad(flash_attention(q, k, v, causal=True), (q, k, v), dout)
    assert last_choice(Direction.BACKWARD) == Choice(Backend.HOPPER, None)
    _, exact, plain = gradients(q, k, v, dout, causal=True)
    for (name, reference), ours in zip(exact.items(), found, strict=True):
        assert_as_good_as_plain(name, ours, reference, plain[name])


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize(("batch", "heads", "seq"), [(33, 64, 8192), (17000, 1, 1024)])
def test_more_than_two_to_the_31_elements(batch: int, heads: int, seq: int) -> None:
    assert batch * heads * seq * 128 > 2**31

    def make(heads: int) -> Tensor:
        rows = torch.empty(batch, seq, heads, 128, dtype=BF16, device=DEVICE)
        return rows.normal_().transpose(1, 2)

    q, k, v, dout = make(heads), make(1), make(1), make(heads)
    lse = torch.rand(batch, heads, seq, device=DEVICE) + 6
    whole = hopper_backward(dout, q, k, v, lse, torch.zeros_like(lse), True)
    parts = (tensor[-1:].clone() for tensor in (dout, q, k, v, lse))
    last = hopper_backward(*parts, torch.zeros_like(lse[-1:]), True)
    assert torch.equal(whole[1][-1:], last[1]) and torch.equal(whole[2][-1:], last[2])
    torch.testing.assert_close(whole[0][-1:], last[0], rtol=2**-7, atol=1e-2)
