"""How a decode step is cut, by hand."""

from __future__ import annotations

import pytest

from kernels.decode.splits import choose_splits, choose_tile, is_even, packed_rows

MULTIPROCESSORS = 132


@pytest.mark.parametrize(
    ("seq_q", "group", "rows"), [(1, 1, 16), (1, 8, 16), (5, 4, 32), (4, 8, 32), (3, 7, 32)]
)
def test_a_groups_heads_are_one_tile_of_at_least_sixteen_rows(
    seq_q: int, group: int, rows: int
) -> None:
    assert packed_rows(seq_q, group) == rows


def test_many_rows_are_not_split() -> None:
    # 32 x 8 programs fill 256 of 264 slots; two splits would need 512 of 528: no better.
    assert choose_splits(32, 8, 32768, 64, MULTIPROCESSORS) == 1


def test_one_row_is_split_until_the_chip_is_full() -> None:
    # 8 programs: 29 splits make 232 of 264 slots, 0.88; the best is 33, 264 of 264.
    # 0.85 x 1.0 of 264 is 224.4, so 29 is the first that reaches it (28: 224).
    assert choose_splits(1, 8, 32768, 64, MULTIPROCESSORS) == 29


def test_a_short_row_keeps_four_tiles_per_split() -> None:
    assert choose_splits(1, 1, 1024, 64, MULTIPROCESSORS) == 4
    assert choose_splits(1, 1, 64, 64, MULTIPROCESSORS) == 1
    assert choose_splits(0, 8, 4096, 64, MULTIPROCESSORS) == 1


def test_splits_never_exceed_their_bound() -> None:
    assert choose_splits(1, 1, 1 << 24, 64, 10_000) <= 128


@pytest.mark.parametrize(
    ("head_dim", "element_bytes", "keys"),
    [(128, 2, 64), (128, 1, 128), (64, 1, 128), (256, 2, 32), (256, 1, 64), (128, 4, 32)],
)
def test_a_tile_has_as_many_keys_as_its_elements_leave_room_for(
    head_dim: int, element_bytes: int, keys: int
) -> None:
    assert choose_tile(head_dim, element_bytes).keys == keys


@pytest.mark.parametrize(
    ("head_dim", "layouts", "even"),
    [(128, [(0, 1024, 128, 64)], True), (64, [(0, 64), (2, 64)], True),
     # An odd head size, an odd start and an odd stride split a pair.
     (33, [(0, 66)], False), (64, [(1, 64)], False), (64, [(0, 64), (0, 65)], False)],
)  # fmt: skip
def test_words_need_whole_pairs(head_dim: int, layouts: list[tuple[int, ...]], even: bool) -> None:
    assert is_even(head_dim, layouts) is even
