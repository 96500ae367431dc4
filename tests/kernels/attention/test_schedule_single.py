"""Which blocks the Hopper forward of windows and large heads visits and masks, and its tile lists."""

from __future__ import annotations

import pytest

from kernels.attention.schedule import (
    GROUP_ROWS,
    ForwardWork,
    SingleWork,
    is_persistent,
    single_tile,
)

SEQS = [(1, 1), (64, 128), (128, 192), (256, 256), (113, 203), (384, 256), (250, 250), (100, 356)]
BOUNDS = [(None, None), (None, 0), (0, 0), (1, 0), (63, 0), (127, 0), (130, 0), (40, 50), (None, 9)]


def make_work(
    seqs: tuple[int, int], bounds: tuple[int | None, int | None], head_dim: int = 128
) -> SingleWork:
    left, right = bounds
    tile = single_tile(head_dim, head_dim)
    work = SingleWork(seq_q=seqs[0], seq_k=seqs[1], left=left, right=right, tile=tile)
    return work.bounded()


def sees(work: SingleWork, bounds: tuple[int | None, int | None], row: int, key: int) -> bool:
    left, right = bounds
    own = row + work.seq_k - work.seq_q
    above = left is None or key >= own - left
    return 0 <= key < work.seq_k and above and (right is None or key <= own + right)


def test_a_long_window_visits_33_blocks_a_tile() -> None:
    # 128 rows and the 4,095 keys before the first: 33 blocks of 128; the first tiles see fewer.
    work = make_work((32768, 32768), (4095, 0))
    visited = [len(work.seen_blocks(row, row + 128)) for row in range(0, 32768, 128)]
    assert visited == [min(tile + 1, 33) for tile in range(256)]
    # Causal tiles visit 1 + ... + 256 blocks: 4.15 times as many.
    assert sum(range(257)) / sum(visited) == pytest.approx(4.153, abs=1e-3)
    # Of the 33, the first and the last are masked.
    assert [len(work.whole_blocks(row)) for row in (32640, 32704)] == [31, 31]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seqs", SEQS)
def test_every_seen_key_is_visited_and_whole_blocks_hide_none(
    seqs: tuple[int, int], bounds: tuple[int | None, int | None], head_dim: int
) -> None:
    work = make_work(seqs, bounds, head_dim)
    keys, tile_rows = work.tile.keys, work.tile.rows
    for first in range(0, work.seq_q, tile_rows):
        visited = work.seen_blocks(first, first + tile_rows)
        for row in range(first, first + tile_rows, GROUP_ROWS):
            own, whole = work.seen_blocks(row, row + GROUP_ROWS), work.whole_blocks(row)
            assert visited.start <= own.start < own.stop <= visited.stop
            assert own.start <= whole.start <= whole.stop <= own.stop
            rows = range(row, min(row + GROUP_ROWS, work.seq_q))
            seen = {k // keys for k in range(seqs[1]) for r in rows if sees(work, bounds, r, k)}
            assert seen <= set(own)
            hidden = (
                not sees(work, bounds, r, k)
                for r in rows
                for k in range(whole.start * keys, whole.stop * keys)
            )
            assert not any(hidden)


def test_bounds_that_hide_nothing_are_left_out() -> None:
    assert (make_work((100, 356), (355, 99)).left, make_work((100, 356), (355, 99)).right) == (
        None,
        None,
    )
    work = make_work((100, 356), (354, 98))
    assert (work.left, work.right, work.lower, work.upper) == (354, 98, -98, 354)


@pytest.mark.parametrize(
    ("sizes", "columns", "extra", "keys"),
    [
        ((40, 64), 64, 0, 128),
        ((64, 128), 128, 0, 128),
        ((192, 128), 128, 64, 128),
        ((136, 128), 128, 64, 128),
        ((192, 192), 256, 0, 64),
        ((256, 256), 256, 0, 64),
    ],
)
def test_tiles_hold_the_heads(sizes: tuple[int, int], columns: int, extra: int, keys: int) -> None:
    tile = single_tile(*sizes)
    assert (tile.columns, tile.extra, tile.keys) == (columns, extra, keys)
    # bf16: queries and outputs share memory, two blocks of keys and of values lie in rings.
    rows_bytes = 2 * tile.rows * (columns + extra)
    ring_bytes = 2 * 2 * keys * (2 * columns + extra)
    assert rows_bytes + ring_bytes <= 227 * 1024 - 1024


@pytest.mark.parametrize(
    ("bounds", "is_listed"),
    [
        ((None, 0), True),
        ((None, 7), True),
        ((4095, 0), False),
        ((40, 50), False),
        ((None, None), False),
    ],
)
def test_tiles_that_grow_with_their_row_are_dealt_out_by_a_list(
    bounds: tuple[int | None, int | None], is_listed: bool
) -> None:
    assert make_work((8192, 8192), bounds).is_listed is is_listed


@pytest.mark.parametrize("sizes", [(192, 128), (256, 256), (64, 128)])
@pytest.mark.parametrize("seqs", [(300, 413), (640, 128), (2048, 2048)])
def test_the_list_counts_the_blocks_that_a_tile_visits(
    seqs: tuple[int, int], sizes: tuple[int, int]
) -> None:
    tile = single_tile(*sizes)
    work = SingleWork(seq_q=seqs[0], seq_k=seqs[1], left=None, right=9, tile=tile)
    dealt = ForwardWork(seq_q=seqs[0], seq_k=seqs[1], heads=6, group=2, tile=tile, right=9)
    assert dealt.row_tiles == work.row_tiles
    for row_tile in range(work.row_tiles):
        first = row_tile * tile.rows
        visited = work.seen_blocks(first, first + tile.rows)
        assert dealt.visible_blocks(row_tile) == len(visited)


def test_sections_of_large_heads_hold_keys_and_values() -> None:
    # 24 MiB / (2 * 2048 keys * (192 + 128) columns) = 19 heads, times a group of 2.
    work = ForwardWork(
        seq_q=2048, seq_k=2048, heads=64, group=2, tile=single_tile(192, 128), right=0
    )
    assert work.section_heads == 38


def test_what_the_persistent_kernel_takes() -> None:
    assert is_persistent(128, 128, None, 0) and is_persistent(96, 96, None, None)
    for call in ((128, 128, 4095, 0), (192, 128, None, 0), (256, 256, None, 0), (64, 64, None, 3)):
        assert not is_persistent(*call)
