"""Shares of a profiled step and the most that each part's removal brings, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.records import read_file
from planner.time_parts import PART_WORDS, Part
from planner.time_shares import (
    PROFILE_COLUMNS,
    Span,
    account,
    ceilings,
    method_notes,
    profile_cells,
    verdict_sentence,
)
from planner.units import format_seconds

ROOT = Path(__file__).resolve().parents[2]


def span(part: Part, start_s: float, end_s: float) -> Span:
    return Span(part=part, start_s=start_s, end_s=end_s)


def profile(
    base_s: float, alone: dict[Part, float], *, data_s: float = 0.0, clock: str = "gpu"
) -> dict[str, Any]:
    """A profile whose parts do not overlap; what they leave of `base_s` is the host's."""
    busy_s = sum(alone.values())
    return {
        "work": "training",
        "clock": clock,
        "base_s": base_s,
        "busy_s": busy_s,
        "host_s": base_s - busy_s,
        "parts": {str(p): {"calls": 1, "time_s": s, "alone_s": s} for p, s in alone.items()},
        "data": {"time_s": data_s, "tokenizer": "words" if data_s else None, "tokens_per_s": 5e5},
        "world_moves_data": True,
        "kernels": [],
    }


def test_time_of_parts_that_overlap_counts_once_and_alone_only_where_it_is() -> None:
    found = account(
        [
            span(Part.MATMUL, 0.0, 4.0),
            span(Part.COMMUNICATION, 3.0, 6.0),
            span(Part.COMMUNICATION, 5.0, 7.0),
            span(Part.MATMUL, 9.0, 10.0),
        ]
    )
    assert found["busy_s"] == pytest.approx(8.0)
    assert found["shared_s"] == pytest.approx(1.0)
    assert found["parts"]["matmul"] == pytest.approx({"calls": 2, "time_s": 5.0, "alone_s": 4.0})
    sent = {"calls": 2, "time_s": 4.0, "alone_s": 3.0}
    assert found["parts"]["communication"] == pytest.approx(sent)


def test_nothing_takes_no_time() -> None:
    assert account([]) == {"busy_s": 0.0, "shared_s": 0.0, "parts": {}}


def test_the_most_that_a_part_brings_is_amdahl_s() -> None:
    found = {
        one.part: one
        for one in ceilings(
            profile(10.0, {Part.ATTENTION: 2.0, Part.MATMUL: 5.0, Part.COPIES: 1.0})
        )
    }
    # 10 / (10 - 2), 10 / (10 - 1), 10 / (10 - 5); the host's gaps are the 2 that are left.
    assert found[Part.ATTENTION].speedup == pytest.approx(1.25)
    assert found[Part.ATTENTION].halved == pytest.approx(10 / 9)
    assert found[Part.MATMUL].speedup == pytest.approx(2.0)
    assert found[Part.HOST].speedup == pytest.approx(1.25)
    assert found[Part.MATMUL].share == pytest.approx(0.5)


def test_data_counts_in_series_with_the_step() -> None:
    found = {one.part: one for one in ceilings(profile(6.0, {Part.MATMUL: 6.0}, data_s=2.0))}
    assert found[Part.DATA].share == pytest.approx(0.25)
    assert found[Part.DATA].speedup == pytest.approx(8 / 6)
    assert found[Part.MATMUL].speedup == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("measured", "part", "words"),
    [
        (profile(10.0, {Part.MATMUL: 2.0, Part.ATTENTION: 0.5}), Part.HOST,
         "goes to waiting for the host, its launches and its waits. Changing attention will not help: "
         "made free it brings 1.05x at most. Larger batches"),
        (profile(10.0, {Part.COMMUNICATION: 6.0, Part.MATMUL: 3.5, Part.ATTENTION: 0.5}),
         Part.COMMUNICATION,
         "Most of the time, 60 %, goes to the network, in collectives that nothing hides. Changing "
         "attention will not help"),
        (profile(1.0, {Part.MATMUL: 0.8, Part.ATTENTION: 0.2}, data_s=4.0), Part.DATA,
         "Most of the time, 80 %, goes to reading and tokenizing the data. Changing attention will "
         "not help: made free it brings 1.04x at most. Tokenize ahead"),
        (profile(1.0, {Part.MATMUL: 0.85, Part.ATTENTION: 0.15}), Part.MATMUL,
         "goes to matrix products. Changing attention helps little: made free it brings 1.18x"),
        (profile(1.0, {Part.MATMUL: 0.4, Part.ATTENTION: 0.6}), Part.ATTENTION,
         "goes to attention: made free it brings 2.50x at most."),
        (profile(1.0, {Part.MATMUL: 0.2}, clock="cpu"), Part.HOST,
         "goes to Python and the framework around the operations. No attention ran"),
    ],
)  # fmt: skip
def test_where_the_time_goes_decides_whether_attention_helps(
    measured: dict[str, Any], part: Part, words: str
) -> None:
    assert ceilings(measured)[0].part is part
    assert words in verdict_sentence(measured)


def test_the_table_has_a_cell_per_column_and_the_longest_part_first() -> None:
    rows = profile_cells(profile(10.0, {Part.ATTENTION: 2.0, Part.MATMUL: 7.0}))
    assert rows[0] == ("Matrix products", "1", "7 s", "7 s", "70.0 %", "3.33x", "1.54x")
    assert [row[0] for row in rows] == ["Matrix products", "Attention", "Host gaps"]
    assert {len(row) for row in rows} == {len(PROFILE_COLUMNS)}


def test_the_notes_say_what_the_figures_are_not() -> None:
    measured = profile(1.0, {Part.OTHER: 0.5}, clock="cpu")
    measured |= {"world_moves_data": False, "kernels": [["secret_kernel", "other", 3, 0.5]]}
    notes = " ".join(method_notes(measured))
    assert "T / (T - alone)" in notes
    assert "a GPU's are others" in notes
    assert "communication takes no time here" in notes
    assert "No tokenizer was named" in notes
    assert "secret_kernel" in notes


def test_the_documentation_s_figures_are_those_recorded() -> None:
    text = (ROOT / "docs" / "profile.md").read_text()
    for row in read_file(ROOT / "recorded" / "h200-profile.jsonl"):
        seen = row.measured
        found = {one.part: one for one in ceilings(seen)}
        shares = (found[part].share for part in (Part.ATTENTION, Part.MATMUL, Part.HOST))
        cells = [format_seconds(seen["step_time_s"]), *(f"{100 * share:.0f} %" for share in shares)]
        cells += [
            f"{found[Part.ATTENTION].speedup:.2f}x",
            PART_WORDS[ceilings(seen)[0].part].lower(),
        ]
        assert f"| {' | '.join(cells)} |" in text, row.id
