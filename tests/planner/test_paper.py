"""The ZeRO paper's table, cell by cell, as the memory reference prints it (GB = 10^9 bytes)."""

from __future__ import annotations

import pytest

from planner.paper import paper_state_bytes, paper_table

# Printed values with the decimals they are printed with, stages 1 / 2 / 3.
PRINTED = {
    ("7.5B", 1): "120 120 120",
    ("7.5B", 4): "52.5 41.25 30",
    ("7.5B", 16): "35.6 21.6 7.5",
    ("7.5B", 64): "31.4 16.6 1.88",
    ("7.5B", 256): "30.4 15.4 0.47",
    ("7.5B", 1024): "30.1 15.1 0.12",
    ("128B", 1): "2048 2048 2048",
    ("128B", 4): "896 704 512",
    ("128B", 16): "608 368 128",
    ("128B", 64): "536 284 32",
    ("128B", 256): "518 263 8",
    ("128B", 1024): "513.5 257.75 2",
    ("1T", 1): "16000 16000 16000",
    ("1T", 4): "7000 5500 4000",
    ("1T", 16): "4750 2875 1000",
    ("1T", 64): "4187.5 2218.75 250",
    ("1T", 256): "4046.9 2054.7 62.5",
    ("1T", 1024): "4011.7 2013.7 15.6",
}


def test_every_cell_of_the_paper_s_table() -> None:
    rows = {(row.model, row.world_size): row for row in paper_table()}
    assert rows.keys() == PRINTED.keys()
    for key, text in PRINTED.items():
        row = rows[key]
        for value, printed in zip(
            (row.stage_1_gb, row.stage_2_gb, row.stage_3_gb), text.split(), strict=True
        ):
            decimals = len(printed.partition(".")[2])
            assert abs(value - float(printed)) <= 0.5 * 10**-decimals, (key, value, printed)


def test_without_sharding_every_rank_holds_sixteen_bytes_a_parameter() -> None:
    assert paper_state_bytes(10**9, 0, 64) == 16e9


@pytest.mark.parametrize("world_size", [2, 7, 1000])
def test_each_stage_saves_more(world_size: int) -> None:
    sizes = [paper_state_bytes(10**9, stage, world_size) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)


def test_other_models_can_be_asked_for() -> None:
    (row,) = paper_table({"mine": 10**9}, [8])
    assert (row.stage_1_gb, row.stage_2_gb, row.stage_3_gb) == (5.5, 3.75, 2.0)
