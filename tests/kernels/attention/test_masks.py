"""What masks are made of, which are refused, and that kernels visit the tiles they need, no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention import device_tiles, masks
from kernels.attention.masks import Mask
from kernels.attention.triton import (
    attention_backward,
    attention_forward,
    flash_attention,
    flash_attention_with_lse,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Check = Callable[..., None]
Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
Maker = Callable[..., Any]
SEQS = [(70, 70), (40, 90), (90, 40), (1, 70)]


def test_kinds_match_float64(
    window_name: str, window_case: Maker, make_inputs: Make, assert_masked_accurate: Check
) -> None:
    seqs = SEQS[len(window_name) % 4]
    case = window_case(window_name, seqs, DEVICE)
    assert_masked_accurate(*make_inputs(1, (1, 1), seqs, 16), case)


@pytest.mark.parametrize(("left", "right"), [(None, 0), (9, 0), (None, None), (3, 20)])
def test_documents_match_float64(
    left: int | None,
    right: int | None,
    document_case: Maker,
    make_inputs: Make,
    assert_masked_accurate: Check,
) -> None:
    # Empty documents first, inside and last; the last 7 tokens belong to none and see nothing.
    case = document_case([0, 20, 0, 0, 33, 1, 5, 0], 66, DEVICE, left, right)
    assert_masked_accurate(*make_inputs(1, (1, 1), (66, 66), 16), case)


def test_every_row_of_a_batch_has_its_own_documents(
    make_inputs: Make, assert_masked_accurate: Check
) -> None:
    positions = torch.stack([torch.arange(40), torch.arange(40)]).to(DEVICE)
    positions[1, 27:] -= 27
    document = torch.stack([torch.zeros(40), (torch.arange(40) >= 27).float()]).to(DEVICE)
    visible = (document[:, :, None] == document[:, None]).tril()[:, None]

    class Case:
        mask = masks.packed(positions)

    Case.visible = visible
    assert_masked_accurate(*make_inputs(2, (1, 1), (40, 40), 16), Case)


def test_documents_of_queries_and_keys_may_differ_in_length(make_inputs: Make) -> None:
    # Two documents by hand: 1 query on 3 keys, then 2 queries on 1 key (the first sees nothing).
    mask = masks.documents([0, 1, 3], 3, [0, 3, 4], 4)
    q, k, v = (t.to(DEVICE) for t in make_inputs(1, (1, 1), (3, 4), 16))
    out, lse = flash_attention_with_lse(q, k, v, mask=mask, scale=1.0)
    logits = (q @ k.mT)[0, 0]
    torch.testing.assert_close(out[0, 0, 0], logits[0, :3].softmax(0) @ v[0, 0, :3])
    assert (out[0, 0, 1] == 0).all() and lse[0, 0, 1] == -torch.inf
    torch.testing.assert_close(out[0, 0, 2], v[0, 0, 3])


@pytest.mark.parametrize("causal", [False, True])
def test_block_tables_match_float64(
    causal: bool, block_case: Maker, make_inputs: Make, assert_masked_accurate: Check
) -> None:
    # A table for each query head of one shared key head; one row of blocks sees nothing.
    table = torch.rand(1, 2, 2, 2, generator=torch.Generator().manual_seed(5)) < 0.6
    table[0, 0, 1] = False
    case = block_case(table.to(DEVICE), 64, (80, 100), causal=causal)
    assert_masked_accurate(*make_inputs(1, (2, 1), (80, 100), 16), case)


@pytest.mark.parametrize("kind", ["full", "window 20"])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_matches_float64(
    kind: str,
    softcap: float,
    window_case: Maker,
    make_inputs: Make,
    assert_masked_accurate: Check,
) -> None:
    inputs = make_inputs(1, (1, 1), (70, 50), 16, spread=2.0)
    assert_masked_accurate(*inputs, window_case(kind, (70, 50), DEVICE), softcap=softcap)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_huge_logits_saturate_at_the_softcap(make_inputs: Make) -> None:
    # Logits reach 1e9, whose tanh is 1 or -1: all keys of one sign weigh the same.
    q, k, v = make_inputs(1, (1, 1), (20, 40), 16, spread=1e4)
    out = flash_attention(q, k, v, causal=False, softcap=3.0)
    weights = (3.0 * (q @ k.mT).sign()).softmax(-1)
    torch.testing.assert_close(out, weights @ v, rtol=1e-4, atol=1e-1)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("kind", ["causal", "local 9"])
def test_sinks_match_float64(
    kind: str, window_case: Maker, make_inputs: Make, assert_masked_accurate: Check
) -> None:
    # The first 20 queries see no key: only the sink, so their log-sum-exp is the sink.
    sinks = torch.tensor([0.3, -2.0], device=DEVICE)
    inputs = make_inputs(1, (2, 1), (70, 50), 16)
    case = window_case(kind, (70, 50), DEVICE)
    assert_masked_accurate(*inputs, case, sinks=sinks, softcap=20.0)


def test_a_sink_of_minus_infinity_changes_nothing(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (40, 20), 16)
    sinks = torch.full((2,), -torch.inf, device=DEVICE, requires_grad=True)
    out, lse = flash_attention_with_lse(q, k, v, causal=True, sinks=sinks)
    plain, plain_lse = flash_attention_with_lse(q, k, v, causal=True)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    assert (torch.autograd.grad(out.sum(), sinks)[0] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((192, 128), torch.float16), ((24, 100), torch.float32), ((100, 24), torch.float32)],
)
def test_values_may_have_their_own_head_size(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    window_case: Maker,
    make_inputs: Make,
    assert_masked_accurate: Check,
) -> None:
    q, k, _ = make_inputs(1, (2, 1), (40, 70), sizes[0], dtype)
    v = make_inputs(1, (2, 1), (40, 70), sizes[1], dtype)[2]
    assert_masked_accurate(q, k, v, window_case("window 20", (40, 70), DEVICE))


def test_an_expanded_gradient_and_odd_strides_are_read_by_their_strides(
    window_case: Maker, make_inputs: Make, assert_masked_accurate: Check
) -> None:
    q, k, v = make_inputs(1, (2, 1), (70, 70), 16)
    dout = torch.randn(1, 1, 1, 16, device=DEVICE).expand(1, 2, 70, 16)
    sliced = torch.cat([v, v], dim=2).detach()[:, :, ::2]
    inputs = (q.contiguous(), k, sliced)
    assert_masked_accurate(
        *inputs, window_case("global 10, window 12", (70, 70), DEVICE), dout=dout
    )


def test_a_window_longer_than_the_keys_is_causal_to_the_last_bit(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (1, 1), (40, 70), 16)
    for mask in (masks.window(69), masks.window(10**12), masks.window(None)):
        out = flash_attention(q, k, v, mask=mask)
        assert torch.equal(out, flash_attention(q, k, v, causal=True))


@pytest.mark.parametrize(("seqs", "right"), [((9, 4), 3), ((9, 4), 8), ((4, 9), 3), ((4, 9), 2)])
def test_a_window_far_ahead_is_full_only_where_the_first_query_sees_the_last_key(
    seqs: tuple[int, int], right: int, make_inputs: Make
) -> None:
    # Query 0 stands at key Sk - Sq and sees `right` keys more: the last, Sk - 1, if right >= Sq - 1.
    q, k, v = make_inputs(1, (1, 1), seqs, 16)
    mask = masks.window(None, right)
    assert (mask.simplified(*seqs) is masks.FULL) == (right >= seqs[0] - 1)
    _, lse = flash_attention_with_lse(q, k, v, mask=mask)
    seen = min(max(seqs[1] - seqs[0] + right + 1, 0), seqs[1])
    logits = (q[0, 0, 0] @ k[0, 0, :seen].mT) / 4
    torch.testing.assert_close(lse[0, 0, 0], logits.logsumexp(0))


def test_nan_in_tokens_of_no_document_does_not_leak(make_inputs: Make) -> None:
    q, k, v = (t.detach() for t in make_inputs(1, (1, 1), (70, 70), 16))
    dout = torch.randn_like(q)
    mask = masks.documents([0, 20, 41], 70)

    def run(fill: float) -> list[Tensor]:
        rows = [t.clone() for t in (q, k, v, dout)]
        for row in rows:
            row[:, :, 41:] = fill
        leaves = [row.requires_grad_() for row in rows[:3]]
        out = flash_attention(*leaves, mask=mask)
        return [out, *torch.autograd.grad(out, leaves, rows[3])]

    for clean, poisoned in zip(run(0.0), run(torch.nan), strict=True):
        assert torch.equal(clean[:, :, :41], poisoned[:, :, :41])


def test_results_under_a_mask_repeat_to_the_last_bit(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (1, 1), (70, 70), 16)

    def run() -> tuple[Tensor, ...]:
        out = flash_attention(q, k, v, mask=masks.window(20), softcap=9.0)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@triton.jit
def visits_kernel(
    seen: Any,
    table: Any,
    seq_q: Any,
    seq_k: Any,
    left: Any,
    right: Any,
    prefix: Any,
    MASK: tl.constexpr,  # noqa: N803
    MASK_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    OF_QUERIES: tl.constexpr,  # noqa: N803
) -> None:
    """Add 1 to `seen` for a visit to a partial tile, 100 for one to a whole tile."""
    if OF_QUERIES:
        first = tl.program_id(0) * BLOCK_M
        seen += tl.program_id(0) * tl.cdiv(seq_k, BLOCK_N)
        walked: tl.constexpr = BLOCK_N
        table = device_tiles.table_start(table, (0, 0), 0, 0, first, seq_k, MASK, MASK_BLOCK)
        visits, _floor, _limit = device_tiles.visits_of_queries(
            first, seq_q, seq_k, left, right, prefix, table, MASK, MASK_BLOCK, BLOCK_M, BLOCK_N
        )
    else:
        first = tl.program_id(0) * BLOCK_N
        seen += tl.program_id(0) * tl.cdiv(seq_q, BLOCK_M)
        walked: tl.constexpr = BLOCK_M
        table = device_tiles.table_start(table, (0, 0), 0, 0, first, seq_q, MASK, MASK_BLOCK)
        visits, _floor, _limit = device_tiles.visits_of_keys(
            first, seq_q, seq_k, left, right, prefix, table, MASK, MASK_BLOCK, BLOCK_M, BLOCK_N
        )
    for visit in range(visits[2]):
        tile = device_tiles.whole_tile(visit, visits, table, MASK, MASK_BLOCK, walked) // walked
        tl.store(seen + tile, tl.load(seen + tile) + 100)
    for visit in range(visits[7]):
        tile = device_tiles.partial_tile(visit, visits, table, MASK, MASK_BLOCK, walked) // walked
        tl.store(seen + tile, tl.load(seen + tile) + 1)


def count_visits(
    mask: Mask, seqs: tuple[int, int], block: tuple[int, int], of_queries: bool
) -> Tensor:
    """Return how often each tile is visited, (query tiles, key tiles)."""
    counts = [-(-seq // size) for seq, size in zip(seqs, block, strict=True)]
    shape = counts if of_queries else counts[::-1]
    seen = torch.zeros(shape, dtype=torch.int32, device=DEVICE)
    table = mask.keys_of_query if of_queries else mask.queries_of_key
    numbers = (*seqs, mask.left, mask.right, mask.prefix)
    constants = {"MASK": str(mask.kind), "MASK_BLOCK": mask.block, "OF_QUERIES": of_queries}
    sizes = {"BLOCK_M": block[0], "BLOCK_N": block[1]}
    visits_kernel[(shape[0],)](seen, table, *numbers, **constants, **sizes)
    return seen if of_queries else seen.T


def tiles_by_force(visible: Tensor, block: tuple[int, int], what: str) -> Tensor:
    """Return which tiles hold any visible pair, or only visible pairs and no edge."""
    rows = visible.split(block[0], 0)
    parts = [list(row.split(block[1], 1)) for row in rows]
    if what == "any":
        return torch.tensor([[bool(tile.any()) for tile in row] for row in parts])
    area = block[0] * block[1]
    return torch.tensor([[int(tile.sum()) == area for tile in row] for row in parts])


def assert_visits(case: Any, seqs: tuple[int, int], block: tuple[int, int]) -> None:
    """Assert that the needed tiles are visited once, no others, and only whole ones unmasked."""
    needed = tiles_by_force(case.visible.cpu(), block, "any")
    whole = tiles_by_force(case.visible.cpu(), block, "all")
    for of_queries in (True, False):
        seen = count_visits(case.mask, seqs, block, of_queries).cpu()
        assert torch.equal((seen == 1) | (seen == 100), needed), (of_queries, seen)
        assert torch.equal(seen != 0, needed), (of_queries, seen)
        if of_queries:
            # Only whole tiles may go unmasked; the last query tile is whole up to its last row.
            assert not ((seen == 100) & ~whole)[:-1].any()


@pytest.mark.parametrize("seqs", [(50, 130), (130, 50)])
def test_only_needed_tiles_are_visited(
    window_name: str, seqs: tuple[int, int], window_case: Maker
) -> None:
    assert_visits(window_case(window_name, seqs, DEVICE), seqs, (32, 16))


@pytest.mark.parametrize("left", [None, 9])
def test_only_tiles_of_the_own_document_are_visited(left: int | None, document_case: Maker) -> None:
    case = document_case([0, 20, 0, 33, 1, 40, 0], 99, DEVICE, left)
    assert_visits(case, (99, 99), (16, 32))


def test_a_block_table_is_visited_block_by_block(block_case: Maker) -> None:
    table = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    case = block_case(table.to(DEVICE), 64, (150, 200))
    assert_visits(case, (150, 200), (64, 64))


def test_a_window_visits_its_share_of_the_causal_tiles() -> None:
    # 512 of 4,096 keys in tiles of 128 x 128: tile row t holds t + 1 causal tiles, at most 5 of
    # which the window reaches (4 steps back and its own).
    for mask, most in ((masks.CAUSAL, 32), (masks.window(511), 5)):
        seen = count_visits(mask, (4096, 4096), (128, 128), True)
        assert (seen != 0).sum(1).tolist() == [min(t + 1, most) for t in range(32)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.window(-1), "left is -1; it must be 0 or more keys, or None for all"),
        (lambda: masks.window(0, -2), "right is -2; it must be 0 or more"),
        (lambda: masks.prefix(-1), "length is -1; it must be 0 or more keys"),
        (lambda: masks.global_local(-1, 3), "length is -1; it must be 0 or more keys"),
        (lambda: masks.window(2.5), r"left is 2\.5; it must be 0 or more keys"),
        (lambda: masks.window("3"), "left is '3'; it must be 0 or more keys"),
        (lambda: masks.prefix(3.0), r"length is 3\.0; it must be 0 or more keys"),
        (lambda: masks.documents([0, 3.5], 4), "cumulative_q is torch.float32 of shape"),
        (lambda: masks.documents([0, 3], None), "length_q is None; it must be 0 or more tokens"),
        (lambda: masks.documents([1, 3], 3), r"cumulative_q is \[1, 3\]; it must start at 0"),
        (lambda: masks.documents([0, 3, 2], 3), r"\[0, 3, 2\]; it must start at 0 and never fall"),
        (lambda: masks.documents([0, 9], 3), "cumulative_q ends at 9; it must end at 3 or before"),
        (lambda: masks.documents([], 3), r"of shape \(0,\); it must be whole numbers \(N \+ 1\)"),
        (lambda: masks.documents([0, 3], 3, [0], 3), "cumulative_k has 0 documents; it must have 1"),
        (lambda: masks.packed(torch.arange(3)), r"position_ids has shape \(3,\); it must be \(B, S\)"),
        (
            lambda: masks.block_sparse(torch.ones(1, 1, dtype=torch.bool), 96, (5, 5)),
            "block is 96; allowed are 64 and the multiples of 128",
        ),
        (
            lambda: masks.block_sparse(torch.ones(1, 2, dtype=torch.bool), 64, (5, 5)),
            r"table is torch.bool of shape \(1, 2\); it must be bool, its last sizes \(1, 1\)",
        ),
    ],
)  # fmt: skip
def test_masks_that_make_no_sense_are_refused(make: Callable[[], Mask], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "causal is None and mask is None; give one of them"),
        ({"causal": True, "mask": masks.FULL}, "mask is of kind full; give one of them"),
        ({"mask": torch.ones(8, 8).bool()}, "mask is a Tensor; it must be made by kernels/attention/masks"),
        ({"mask": "causal"}, "mask is a str; it must be made by"),
        ({"mask": masks.documents([0, 4], 4)}, r"mask is for \(4, 4\) queries and keys; it must be \(8, 8\)"),
        ({"mask": masks.packed(torch.zeros(3, 8))}, "mask has batch size 3; it must be 1 or q's, 1"),
        ({"causal": True, "softcap": 0.0}, r"softcap is 0\.0; it must be a positive finite number"),
        ({"causal": True, "sinks": torch.zeros(3)}, r"sinks has shape \(3,\); it must be \(4,\)"),
        ({"causal": True, "sinks": torch.zeros(4).int()}, "sinks is torch.int32 on cpu; it must be of"),
    ],
)  # fmt: skip
def test_masks_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with pytest.raises(ValueError, match=message):
        flash_attention(q, k, k, **options)


def test_compiled_and_eager_agree_under_masks(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (9, 9), 16)
    sinks = torch.zeros(2, device=DEVICE, requires_grad=True)
    ends = torch.tensor([0, 4, 9], device=DEVICE)

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, ends: Tensor) -> Tensor:
        first = flash_attention(q, k, v, mask=masks.window(3), sinks=sinks, softcap=5.0)
        return (first * flash_attention(q, k, v, mask=masks.documents(ends, 9))).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = (q, k, v, sinks)
    expected = torch.autograd.grad(loss(*leaves, ends), leaves)
    for ours, grad in zip(
        torch.autograd.grad(compiled(*leaves, ends), leaves), expected, strict=True
    ):
        torch.testing.assert_close(ours, grad)


def test_the_kernels_read_no_tile_that_no_row_of_theirs_needs(make_inputs: Make) -> None:
    # fp32 tiles are 32 x 32. With a window of 20 back, queries 64..95 see keys 44..95, which lie in
    # the tiles 32..95; keys 32..63 are seen by queries 32..83, in the tiles 32..95 again.
    q, k, v = (t.detach() for t in make_inputs(1, (1, 1), (130, 130), 16))
    dout = torch.randn_like(q)

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor | None = None) -> Any:
        mask = ("window", [20, 0, 0, 0])
        out, own_lse = attention_forward(q, k, v, False, 0.25, *mask)
        delta = torch.zeros_like(own_lse)
        kept = own_lse if lse is None else lse
        grads = attention_backward(dout, q, k, v, kept, delta, False, 0.25, *mask)
        return out, own_lse, *grads

    def poisoned(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[:, :, :32], tensor[:, :, 96:] = torch.nan, torch.nan
        return tensor

    out, lse, _, dk, dv = run(q, k, v, dout)
    near = run(q, poisoned(k), poisoned(v), dout)[0]
    assert torch.equal(near[:, :, 64:96], out[:, :, 64:96])
    near_grads = run(poisoned(q), k, v, poisoned(dout), lse)
    assert torch.equal(near_grads[3][:, :, 32:64], dk[:, :, 32:64])
    assert torch.equal(near_grads[4][:, :, 32:64], dv[:, :, 32:64])
