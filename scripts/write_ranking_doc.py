"""Write docs/ranking.md from recorded/: is the step that is predicted to be fastest the fastest?

Part of `make accuracy`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planner.comparison import ALONE
from planner.ranking import AIM_SHARE, GOOD_PERCENT, RankedGroup, RankingReport, ranking_report
from planner.records import Kind, RecordedRow, read_file
from planner.units import format_seconds, format_share

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ranking.md"
HEAD = """# Is the predicted best the best?

Written by `make accuracy` from `recorded/`; do not edit. A group holds recorded H200 steps that compute the same with as
many ranks on the same versions and differ in how they are run (engine, stage, attention, checkpointing, loss, offload,
allocator). Of each group the alternative that is predicted to be fastest is taken and compared with the fastest measured
(`planner/ranking.py`); an alternative that was run more than once counts with its median. Rows of calibration and those
that set a constant are left out. **whole step**: one GPU, or two with NCCL. **one rank alone**: one of N.
"""
REPEATS = """
## What repeats can tell

`told apart` is the difference from which on two alternatives are not the same by chance: 1.96 standard errors, from the
spread of ln(time) between runs of one and the same plan of that model and workload, over the runs that the two have. It is
large where the GPU waits for a host that others use too. A choice that loses less than that may be the best or not.
`exact` is how often runs that spread like this would call the choice good if every predicted time of the group were exact:
the fastest of many single runs is one that had luck.
"""
COLUMNS = (
    "| group | step | alternatives | chosen | is slower by | told apart from | exact | verdict |\n"
    "|---|---|--:|---|--:|--:|--:|---|"
)
QUANTITIES = {"step_time": "whole", ALONE: "alone"}


def recorded_rows(root: Path) -> list[RecordedRow]:
    """Return all recorded training steps, by file."""
    return [
        row
        for path in sorted((root / "recorded").glob("*.jsonl"))
        for row in read_file(path)
        if row.kind is Kind.TRAIN_STEP
    ]


def verdict(group: RankedGroup) -> str:
    """Return whether a choice was a good one, in words."""
    if group.is_good:
        return "good"
    if group.is_lost:
        return "**lost**"
    return "not told by the runs"


def _told(group: RankedGroup) -> str:
    told = group.told_apart_percent
    return "no repeats" if told is None else f"{told:.1f} %"


def _exact(group: RankedGroup) -> str:
    return "-" if group.spread is None else format_share(group.exact_share, 0)


def group_lines(report: RankingReport) -> Iterator[str]:
    """Yield the table of all groups, the largest loss first."""
    yield COLUMNS
    for group in report.groups:
        lost = f"{group.regret_percent:.1f} %"
        yield (
            f"| {group.title} | {QUANTITIES[group.quantity]} | {len(group.alternatives)} | "
            f"{group.chosen.words} | {lost} | {_told(group)} | "
            f"{_exact(group)} | {verdict(group)} |"
        )


def missed_lines(report: RankingReport) -> Iterator[str]:
    """Yield, for every group whose choice was no good one, chosen and fastest beside one another."""
    missed = [group for group in report.groups if not group.is_good]
    if not missed:
        return
    yield "\n## The groups that are missed\n"
    for group in missed:
        spread = "nothing was run twice" if group.spread is None else _spread_words(group.spread)
        yield f"- **{group.title}**, {QUANTITIES[group.quantity]} step ({verdict(group)}; {spread}):"
        for name, one in (("chosen", group.chosen), ("fastest", group.fastest)):
            runs = f"{one.runs} run{'' if one.runs == 1 else 's'}"
            yield (
                f"  {name}: {one.words}: predicted {format_seconds(one.predicted_s)}, measured "
                f"{format_seconds(one.measured_s)} ({runs})."
            )


def _spread_words(spread: tuple[float, int]) -> str:
    more = "one run" if spread[1] == 1 else f"{spread[1]} runs"
    return f"runs of one plan spread by {100 * spread[0]:.1f} % (standard deviation, {more} more than one)"


def summary_lines(report: RankingReport) -> Iterator[str]:
    """Yield the figures in words, for whole steps and ranks alone together and apart."""
    yield report.sentence()
    yield report.repeats_sentence()
    good = [group for group in report.groups if group.is_good]
    vague = sum((group.told_apart_percent or 100.0) > GOOD_PERCENT for group in good)
    yield (
        f"The same holds for good choices: of {len(good)}, {vague} are in groups whose runs cannot tell "
        f"{GOOD_PERCENT:.0f} % apart, or where nothing was run twice."
    )
    number = max(1, len(report.groups))
    aim = "reached" if report.good / number >= AIM_SHARE else "missed"
    yield f"The aim, {format_share(AIM_SHARE, 0)} of the groups within {GOOD_PERCENT:.0f} %, is {aim}."
    whole = RankingReport(groups=tuple(g for g in report.groups if g.quantity != ALONE))
    yield f"Of steps whose ranks were all real alone: {whole.good} of {len(whole.groups)} groups."


def render(report: RankingReport) -> str:
    """Return the document."""
    lines = [HEAD, *summary_lines(report), REPEATS, *group_lines(report), *missed_lines(report)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(render(ranking_report(recorded_rows(ROOT))))


if __name__ == "__main__":
    main()
