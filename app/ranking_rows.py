"""What the Accuracy page shows of the choice: is the alternative predicted to be fastest the fastest?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from planner.accuracy import AccuracyReport
from planner.ranking import RankedGroup, ranking_report
from planner.records import RecordError, parse_row


def ranking_of(rows: Iterable[Mapping[str, Any]], report: AccuracyReport) -> dict[str, Any]:
    """Return the ranking over stored rows: its JSON form, with `sentences` and table `lines`."""
    known = []
    for row in rows:
        # What this version cannot read was not predicted either.
        with suppress(RecordError):
            known.append(parse_row(row))
    found = ranking_report(known, report.residuals)
    return {
        **found.to_dict(),
        "sentences": [found.sentence(), found.repeats_sentence()],
        "lines": [_line(group) for group in found.groups],
    }


def _line(group: RankedGroup) -> dict[str, Any]:
    told = group.told_apart_percent
    verdict = "good" if group.is_good else "lost" if group.is_lost else "not told by the runs"
    return {
        "group": group.title,
        "alternatives": len(group.alternatives),
        "chosen": group.chosen.words,
        "is slower by %": round(group.regret_percent, 1),
        "told apart from %": None if told is None else round(told, 1),
        "verdict": verdict,
    }
