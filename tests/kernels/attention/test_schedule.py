"""The tile lists of the Hopper forward: every tile once, balanced, and enough masking."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kernels.attention import schedule
from kernels.attention.schedule import ForwardWork, Masking

H200_SMS = 132


def make_work(
    seq_q: int, seq_k: int, *, causal: bool = False, head_dim: int = 128, **bounds: int
) -> ForwardWork:
    """Return the work of 16 heads; `bounds` are left and right."""
    bounds |= {"right": 0} if causal else {}
    return ForwardWork(
        seq_q=seq_q,
        seq_k=seq_k,
        heads=16,
        group=2,
        tile=schedule.forward_tile(head_dim),
        **bounds,
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


def test_a_window_is_visited_and_nothing_else() -> None:
    # 128 rows a tile. Rows 1024 to 1151 of 4096 see 512 keys before their own: 512 to 1151, which
    # blocks 4 to 8 of 128 hold. The first rows see less.
    work = make_work(4096, 4096, causal=True, left=512)
    assert [work.visible_blocks(tile) for tile in (0, 1, 8, 31)] == [1, 2, 5, 5]
    # Sixteen keys to either side: the neighbouring blocks too.
    both = make_work(4096, 4096, left=16, right=16)
    assert [both.visible_blocks(tile) for tile in (0, 8, 31)] == [2, 3, 2]


def test_a_window_of_4k_in_32k_visits_less_than_a_quarter_of_causal() -> None:
    """Pairs by count: 4096 x 32768 - 4096^2 / 2 of 32768^2 / 2, a share of 0.234."""

    def blocks(**bounds: int) -> int:
        work = make_work(32768, 32768, causal=True, **bounds)
        return sum(work.visible_blocks(tile) for tile in range(work.row_tiles))

    assert blocks(left=4095) / blocks() == pytest.approx(0.234, abs=0.012)


@pytest.mark.parametrize(
    ("bounds", "left", "right"),
    [
        ({"left": 412, "right": 299}, None, None),
        ({"left": 411, "right": 298}, 411, 298),
        ({"right": 0}, None, 0),
    ],
)
def test_bounds_that_hide_nothing_are_left_out(
    bounds: dict[str, int], left: int | None, right: int | None
) -> None:
    """Query 0 of 300 stands at key 113 of 413, and the last query at key 412."""
    work = make_work(300, 413, **bounds).bounded()
    assert (work.left, work.right) == (left, right)
    assert make_work(1, 413, right=0).bounded().right is None


def test_a_growing_cache_needs_one_list() -> None:
    """One query, or all keys for all queries: the list does not depend on the number of keys."""
    for bounds in ({"right": 0, "left": 99}, {}):
        lists = {make_work(1, keys, **bounds).dealt() for keys in range(500, 600)}
        assert len(lists) == 1
    full = make_work(4096, 5000)
    assert schedule.forward_lists(full, 132) == schedule.forward_lists(full.dealt(), 132)
    causal = make_work(4096, 5000, causal=True)
    assert causal.dealt() == causal


def visible(work: ForwardWork, row: int, key: int) -> bool:
    place = row + work.seq_k - work.seq_q
    above = work.right is None or key <= place + work.right
    return key < work.seq_k and above and (work.left is None or key >= place - work.left)


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


@pytest.mark.parametrize(
    "bounds", [{"right": 0}, {"left": 70, "right": 0}, {"left": 9, "right": 200}]
)
@pytest.mark.parametrize("seqs", [(300, 413), (640, 128), (250, 250), (1000, 999)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_visited_blocks_hold_every_visible_key(
    seqs: tuple[int, int], bounds: dict[str, int], head_dim: int
) -> None:
    """Counted from the rule itself: what a tile visits spans what its rows see, and no block more."""
    work = make_work(*seqs, head_dim=head_dim, **bounds)
    for tile in range(work.row_tiles):
        rows = range(tile * work.tile.rows, min((tile + 1) * work.tile.rows, work.seq_q))
        seen = [key for key in range(work.seq_k) if any(visible(work, row, key) for row in rows)]
        blocks = max(seen) // 128 - min(seen) // 128 + 1 if seen else 1
        # Rows past the end of the last tile may reach further than its real rows.
        is_last = tile == work.row_tiles - 1
        assert blocks <= work.visible_blocks(tile) <= blocks + is_last
