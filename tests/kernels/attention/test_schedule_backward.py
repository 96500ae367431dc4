"""Which query tiles a program of the Hopper backward walks, and which of them it masks."""

from __future__ import annotations

import pytest

from kernels.attention.schedule import BACKWARD_KEYS, BackwardWork, bounded

SEQS = [(1, 1), (64, 128), (239, 1), (256, 256), (113, 203), (384, 256), (640, 128), (100, 356)]
BOUNDS = [
    *[(None, None), (None, 0), (0, 0), (1, 0), (63, 0), (64, 0), (127, 0), (130, 0), (300, 0)],
    *[(40, 50), (9, 9), (40, None), (None, 9)],
]
ROWS = 64


def make_work(seqs: tuple[int, int], bounds: tuple[int | None, int | None]) -> BackwardWork:
    left, right = bounded(*seqs, *bounds)
    return BackwardWork(seq_q=seqs[0], seq_k=seqs[1], left=left, right=right, queries=ROWS)


def sees(
    seqs: tuple[int, int], bounds: tuple[int | None, int | None], query: int, key: int
) -> bool:
    left, right = bounds
    own = query + seqs[1] - seqs[0]
    inside = 0 <= query < seqs[0] and 0 <= key < seqs[1]
    return inside and (left is None or key >= own - left) and (right is None or key <= own + right)


def test_a_long_window_walks_66_tiles_a_program() -> None:
    # 128 keys are seen by queries up to 4,095 behind the last: 4,223 rows, 66 tiles of 64. The last
    # keys have fewer queries behind them.
    work = make_work((32768, 32768), (4095, 0))
    visited = [len(work.seen_tiles(key)) for key in range(0, 32768, BACKWARD_KEYS)]
    assert visited == [min(66, 512 - 2 * program) for program in range(256)]
    # Causal programs walk 512 + 510 + ... + 2 tiles: 4.15 times as many.
    assert sum(range(2, 514, 2)) / sum(visited) == pytest.approx(4.153, abs=1e-3)
    # Of the 66, the first two (the diagonal) and the last two (the window's edge) are masked.
    assert work.whole_tiles(1280) == range(1280 + 128, 1280 + 64 * 64, 64)


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seqs", SEQS)
def test_every_pair_is_visited_and_whole_tiles_hide_none(
    seqs: tuple[int, int], bounds: tuple[int | None, int | None]
) -> None:
    work = make_work(seqs, bounds)
    for first_key in range(0, seqs[1], BACKWARD_KEYS):
        seen, whole = work.seen_tiles(first_key), work.whole_tiles(first_key)
        keys = range(first_key, first_key + BACKWARD_KEYS)
        for tile in range(0, seqs[0], ROWS):
            queries = range(tile, min(tile + ROWS, seqs[0]))
            pairs = [sees(seqs, bounds, query, key) for query in queries for key in keys]
            assert tile in seen or not any(pairs)
            assert tile not in whole or (tile in seen and all(pairs))


def test_a_program_whose_keys_nobody_sees_walks_nothing() -> None:
    # Query 0 stands at key 299 of 300: with a window of 10 keys the first 256 are out of sight.
    work = make_work((1, 300), (10, 0))
    assert [len(work.seen_tiles(key)) for key in (0, 128, 256)] == [0, 0, 1]
