"""The Hopper forward on a real GPU: float64 rule, edges, strides, races, poison, overflow.

Every call is forced onto `hopper`, so that none of these tests passes on another kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernels.attention import dispatch
from kernels.attention.dispatch import Backend, Direction
from kernels.attention.reference import reference_attention
from kernels.attention.schedule import forward_tile
from kernels.attention.triton import flash_attention, flash_attention_with_lse

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
BF16 = torch.bfloat16
# Those of kernels.md's list, one query against many keys, and one more than a tile.
SEQS = [
    *[(1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128)],
    *[(128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)],
    *[(1024, 1024), (1023, 1024), (1024, 1023), (1, 1000), (65, 129), (193, 193)],
]
Make = Callable[..., tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(autouse=True)
def forced_hopper() -> Iterator[None]:
    with dispatch.forced_backend("hopper"):
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return flash_attention_with_lse(q, k, v, causal=causal)


def assert_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Hold out and lse to float64: at most twice the error of plain attention in the same dtype."""
    q, k, v = (tensor.detach() for tensor in (q, k, v))
    out, lse = attend(q, k, v, causal)
    exact, exact_lse = reference_attention(q, k, v, causal=causal)
    plain, _ = reference_attention(q, k, v, causal=causal, dtype=q.dtype)
    assert out.isfinite().all()
    rounded = exact.to(q.dtype)
    allowance = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    limit = 2 * (plain.double() - exact).abs().max().item() + allowance
    error = (out.double() - exact).abs().max().item()
    assert error <= limit, f"out errs by {error}, allowed {limit}"
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("seqs", SEQS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_length_matches_float64(
    head_dim: int, seqs: tuple[int, int], heads: tuple[int, int], causal: bool, make_inputs: Make
) -> None:
    assert_forward(*make_inputs(2, heads, seqs, head_dim, BF16), causal)


@pytest.mark.parametrize("seq", [4096, 4224])
def test_long_sequences_match_float64(seq: int, make_inputs: Make) -> None:
    assert_forward(*make_inputs(1, (2, 1), (seq, seq), 128, BF16), causal=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 80, 96, 120, 128])
def test_every_head_size_in_eights_matches_float64(
    head_dim: int, dtype: torch.dtype, make_inputs: Make
) -> None:
    for causal in (False, True):
        assert_forward(*make_inputs(1, (4, 2), (300, 413), head_dim, dtype), causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_huge_logits_do_not_overflow(head_dim: int, make_inputs: Make) -> None:
    assert_forward(*make_inputs(1, (2, 2), (512, 512), head_dim, BF16, spread=30.0), causal=True)


@pytest.mark.parametrize("causal", [False, True])
def test_any_layout_is_read_in_place(causal: bool) -> None:
    fused = torch.randn(2, 300, 3, 4, 128, device="cuda").to(BF16)
    assert_forward(*(fused[:, :, i].transpose(1, 2) for i in range(3)), causal)
    heads_first = torch.randn(3, 2, 4, 300, 64, device="cuda").to(BF16)
    assert_forward(*heads_first, causal)
    assert_forward(heads_first[0][:, ::2], heads_first[1][:, 1::2], heads_first[2][:, :2], causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_past_the_end_stays_out(head_dim: int, causal: bool, make_inputs: Make) -> None:
    """Rows after the last query and key lie in the same memory, and hold NaN."""
    whole = [t.detach().clone() for t in make_inputs(2, (4, 4), (512, 512), head_dim, BF16)]
    cut = [tensor[:, :, :300] for tensor in whole]
    expected = attend(*(tensor.contiguous() for tensor in cut), causal)
    for tensor in whole:
        tensor[:, :, 300:] = math.nan
    assert all(torch.equal(a, b) for a, b in zip(attend(*cut, causal), expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_busy_gpu_repeats_every_bit(head_dim: int, causal: bool, make_inputs: Make) -> None:
    """Batch 60 makes 1,440 tiles or more: every program walks ten and reuses all its buffers."""
    q, k, v = (tensor.detach() for tensor in make_inputs(60, (8, 4), (512, 512), head_dim, BF16))
    assert 60 * 8 * -(-512 // forward_tile(head_dim).rows) > 10 * 132
    first = attend(q, k, v, causal)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, attend(q, k, v, causal), strict=True))
    alone = attend(q[37:38], k[37:38], v[37:38], causal)
    assert torch.equal(alone[0], first[0][37:38])
    assert_forward(q[37:38], k[37:38], v[37:38], causal)


def test_more_than_two_to_the_31_elements() -> None:
    shape = (33, 8192, 64, 128)
    assert torch.Size(shape).numel() > 2**31
    q = torch.empty(shape, dtype=BF16, device="cuda").normal_().transpose(1, 2)
    kv = torch.empty(2, 33, 8192, 1, 128, dtype=BF16, device="cuda").normal_().transpose(2, 3)
    whole = attend(q, kv[0], kv[1], True)
    last = attend(*(tensor[-1:].clone() for tensor in (q, kv[0], kv[1])), True)
    assert all(torch.equal(a[-1:], b) for a, b in zip(whole, last, strict=True))


def test_its_gradients_fit_its_lse(make_inputs: Make, assert_accurate: Callable[..., None]) -> None:
    with dispatch.forced_backend("auto"):
        assert_accurate(*make_inputs(2, (4, 2), (300, 413), 128, BF16), causal=True)


def test_what_ran_is_told(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(1, (2, 2), (256, 256), 64, BF16))
    flash_attention(q, k, v, causal=True)
    assert dispatch.last_choice(Direction.FORWARD) == dispatch.Choice(Backend.HOPPER, None)
    with dispatch.forced_backend("auto"):
        flash_attention(q.float(), k.float(), v.float(), causal=True)
    choice = dispatch.last_choice(Direction.FORWARD)
    assert choice is not None and choice.backend is Backend.TRITON
    with pytest.raises(ValueError, match=r"dtype is torch\.float32"):
        flash_attention(q.float(), k.float(), v.float(), causal=True)


def test_the_current_stream_is_used(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(1, (2, 2), (256, 256), 64, BF16))
    expected = attend(q, k, v, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = attend(q, k, v, True)
    stream.synchronize()
    assert torch.equal(found[0], expected[0])


def test_it_allocates_out_lse_and_once_its_tile_list(make_inputs: Make) -> None:
    q, k, v = (tensor.detach() for tensor in make_inputs(3, (4, 4), (2048, 2048), 64, BF16))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    attend(q, k, v, True)
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    # 3 * 4 heads of ceil(2048 / 192) = 11 tiles; the allocator rounds to 512 bytes.
    list_bytes = 4 * (1 + workers + 3 * 4 * 11)
    kept = torch.cuda.memory_allocated() - before
    assert kept == -(-list_bytes // 512) * 512
    torch.cuda.reset_peak_memory_stats()
    attend(q, k, v, True)
    rows_bytes, lse_bytes = q.numel() * 2, 3 * 4 * 2048 * 4
    assert torch.cuda.max_memory_allocated() - before - kept == rows_bytes + lse_bytes
