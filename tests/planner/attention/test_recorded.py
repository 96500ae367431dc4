"""Recorded runs of the job attention: every variant held what is predicted, to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.attention.answer import answer
from planner.attention.measured import Seen, seen_in_row
from planner.attention.memory import footprint
from planner.calibration import sheet_of
from planner.hardware import resolve_gpu
from planner.records import Kind, RecordedRow, read_file

PORTABLE = resolve_gpu("a100-sxm4-80gb")
RECORDED = Path(__file__).resolve().parents[3] / "recorded"
ROWS = [
    row
    for path in sorted(RECORDED.glob("*attention*.jsonl"))
    for row in read_file(path)
    if row.kind is Kind.ATTENTION
]


def counted(row: RecordedRow) -> list[Seen]:
    """The variants of a row whose requested bytes were counted."""
    seen = seen_in_row(row.spec, row.measured, row.environment, row=row.id, here=False)
    return [one for one in seen if one.forward_peak_requested_bytes is not None]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_every_variant_held_what_is_predicted_to_the_byte(row: RecordedRow) -> None:
    gpu = sheet_of(row.environment)
    assert gpu is not None and counted(row)
    for one in counted(row):
        problem = one.problem
        # Windows' backwards of older rows ran on the portable kernel, as everything does elsewhere.
        ran_on = PORTABLE if one.backward_backend == "triton" else gpu
        held = footprint(problem, one.variant, ran_on, float(problem.sequence_length))
        assert held.forward_peak_bytes() == one.forward_peak_requested_bytes
        assert held.saved_bytes() == one.saved_requested_bytes
        if one.backward_peak_requested_bytes is not None:
            assert held.backward_peak_bytes() == one.backward_peak_requested_bytes


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_ran_out_of_memory_does_not_fit_and_what_ran_does(row: RecordedRow) -> None:
    gpu = sheet_of(row.environment)
    assert gpu is not None
    for one in seen_in_row(row.spec, row.measured, row.environment, row=row.id, here=False):
        found = answer(one.problem, (one.variant,), gpu).variants[0]
        assert found.fits is (one.outcome == "done")
        if one.outcome == "done":
            # A roofline is a bound from below.
            assert one.forward_s is not None and one.forward_s >= found.forward.roofline_s
