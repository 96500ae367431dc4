"""The tile lists of the Hopper forward: every tile once, balanced, and enough masking."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kernels.attention import schedule
from kernels.attention.schedule import ForwardWork, Masking

H200_SMS = 132


def make_work(seq_q: int, seq_k: int, *, causal: bool, head_dim: int = 128) -> ForwardWork:
    return ForwardWork(
        seq_q=seq_q,
        seq_k=seq_k,
        heads=16,
        group=2,
        tile=schedule.forward_tile(head_dim),
        right=0 if causal else None,
    )


def test_tiles_by_hand() -> None:
    # 128 rows a tile: 300 queries make 3. With 413 keys the last rows of the tiles are 127, 255 and
    # 299, and see 241, 369 and all 413 keys: 2, 3 and 4 blocks of 128.
    work = make_work(300, 413, causal=True)
    assert [work.visible_blocks(tile) for tile in range(work.row_tiles)] == [2, 3, 4]
    full = replace(work, right=None)
    assert [full.visible_blocks(tile) for tile in range(full.row_tiles)] == [4, 4, 4]
    # 192 rows a tile at head sizes up to 64.
    assert make_work(300, 413, causal=True, head_dim=40).row_tiles == 2


def test_a_tile_that_sees_no_key_still_visits_one_masked_block() -> None:
    work = make_work(640, 128, causal=True)
    assert [work.visible_blocks(tile) for tile in range(5)] == [1, 1, 1, 1, 1]
    assert schedule.forward_masking(work) == Masking.EVERY_BLOCK


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqs", [(1, 1), (300, 413), (640, 128), (4096, 4096)])
@pytest.mark.parametrize("workers", [1, 7, H200_SMS])
def test_every_tile_is_computed_once(seqs: tuple[int, int], causal: bool, workers: int) -> None:
    work = make_work(*seqs, causal=causal)
    lists = schedule.forward_lists(work, workers)
    tiles = sorted(itertools.chain.from_iterable(lists))
    assert tiles == list(range(16 * work.row_tiles))
    assert all(lists) and len(lists) == min(workers, len(tiles))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("exponent", range(11, 16))
def test_no_worker_of_an_h200_waits_long(head_dim: int, exponent: int) -> None:
    """The fullest worker takes at most 1 % more steps than the mean, at 32,768 tokens in all."""
    seq = 2**exponent
    heads = 2**15 // seq * 2048 // head_dim
    work = ForwardWork(
        seq_q=seq,
        seq_k=seq,
        heads=heads,
        group=1,
        tile=schedule.forward_tile(head_dim),
        right=0,
    )
    lists = schedule.forward_lists(work, H200_SMS)
    tiles = work.row_tiles
    loads = [sum(1 + work.visible_blocks(tile % tiles) for tile in tiles_) for tiles_ in lists]
    assert max(loads) <= 1.01 * sum(loads) / len(loads)


def test_long_tiles_of_a_section_come_first() -> None:
    # One worker: head sections of 24 MiB / (4 * 4096 keys * 128) = 12, times a group of 2: all 16.
    work = make_work(4096, 4096, causal=True)
    (tiles,) = schedule.forward_lists(work, 1)
    assert [tile % 32 for tile in tiles] == [row for row in reversed(range(32)) for _ in range(16)]


def test_the_table_says_where_lists_begin_and_then_the_tiles() -> None:
    work = replace(make_work(128, 128, causal=False), heads=3)
    assert schedule.forward_table(work, 2) == [0, 2, 3, 0, 2, 1]


def test_a_growing_cache_needs_one_list() -> None:
    full = make_work(4096, 5000, causal=False)
    assert schedule.forward_lists(full, H200_SMS) == schedule.forward_lists(full.dealt(), H200_SMS)
    assert len({make_work(1, keys, causal=False).dealt() for keys in range(500, 600)}) == 1
    causal = make_work(4096, 5000, causal=True)
    assert causal.dealt() == causal


def visible(work: ForwardWork, row: int, key: int) -> bool:
    in_reach = work.right is None or key <= row + work.seq_k - work.seq_q
    return key < work.seq_k and in_reach


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "seqs", [(64, 128), (128, 192), (256, 256), (113, 203), (384, 256), (250, 250), (100, 356)]
)
def test_blocks_that_are_not_masked_are_seen_whole(seqs: tuple[int, int], causal: bool) -> None:
    """Of a group of 64 rows, what `forward_masking` leaves unmasked hides no key of a real row."""
    work = make_work(*seqs, causal=causal)
    masking = schedule.forward_masking(work)
    if masking == Masking.EVERY_BLOCK:
        return
    for first in range(0, work.seq_q, 64):
        end = work.seq_k
        if causal:
            end = min(end, first + 64 + work.seq_k - work.seq_q)
        blocks = max(1, -(-end // 128))
        unmasked = range((blocks - (masking == Masking.FIRST_BLOCK)) * 128)
        rows = range(first, min(first + 64, work.seq_q))
        assert all(visible(work, row, key) for row in rows for key in unmasked)
        # Each row sees a key of the first block visited, or its peak would be -inf.
        last = range((blocks - 1) * 128, blocks * 128)
        assert all(any(visible(work, row, key) for key in last) for row in rows)
