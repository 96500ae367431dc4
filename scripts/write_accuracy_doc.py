"""Write docs/accuracy.md and planner/data/error_history.json from recorded/: `make accuracy`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.accuracy import (
    DONE,
    FAR_OFF_PERCENT,
    OUT_OF_MEMORY,
    AccuracyReport,
    Statistics,
    accuracy_report,
    device_ratios,
)
from planner.comparison import MEMORY_QUANTITIES
from planner.error_history import (
    ALL,
    EXTREMES,
    TAIL,
    forget_history,
    history_table,
    inside_without_itself,
)
from planner.public_cases import FAR_OFF_PERCENT as PUBLIC_FAR_OFF_PERCENT
from planner.public_cases import Answer, PublicCases, read_cases
from planner.public_serving import ServingAnswer, ServingCases, read_serving_cases
from planner.records import RecordedRow, read_file
from planner.units import format_bytes, format_signed
from planner.verdict import State

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "accuracy.md"
HISTORY = ROOT / "planner" / "data" / "error_history.json"
HEAD = """# Accuracy

Written by `make accuracy` from `recorded/`; do not edit. Error in percent:
100 x (predicted - measured) / measured, with today's planner. `allocated`, `reserved` and `device`
are bytes of GPU memory; `step_time` and `communication_time` (all collectives of a traced step) are
compared only where the world keeps time (docs/architecture.md), and collectives only where a row keeps their calls
apart: in sums of older rows a rank waits for the other. p90 is the 90th percentile of the absolute error, worst keeps its sign.
Reserved and device bytes are not compared of DDP as one rank alone, of ranks that share a GPU, and of runs that went
on from a saved step: those reserve more (docs/checkpoints.md).
Rows held out were chosen before the formulas were tuned; one that led to a correction is held out no longer
(recorded/README.md). The intervals of verdicts rest on all rows, on these too.
"""
COLUMNS = "| n | mean | mean absolute | p90 | worst |\n|---|--:|--:|--:|--:|--:|"
BYTE_COLUMNS = "n | " + " | ".join(MEMORY_QUANTITIES)
CELLS = "mean absolute (worst)"
# Every engine, stage and number of ranks has a table of its own.
SHOWN_APART = ("engine", "stage", "world size", "GPU filled")
NEARLY_FULL = "85 % or more"
STATE_WORDS = {State.FITS: "fits", State.TIGHT: "tight", State.DOES_NOT_FIT: "does not fit"}


@dataclass(frozen=True, slots=True)
class Sources:
    """What the document is made of, beside the rows."""

    report: AccuracyReport
    bounds: Mapping[str, Any]
    explanations: Mapping[str, str]
    history: Mapping[str, Any]
    cases: PublicCases
    serving: ServingCases


def recorded_rows(directory: Path) -> list[RecordedRow]:
    """Return the rows of every file of a directory, in the order of their names."""
    return [row for path in sorted(directory.glob("*.jsonl")) for row in read_file(path)]


def gather(root: Path) -> Sources:
    """Predict for every recorded row and public case of a repository."""
    recorded = root / "recorded"
    report = accuracy_report(recorded_rows(recorded))
    return Sources(
        report=report,
        bounds=json.loads((recorded / "bounds.json").read_text()),
        explanations=json.loads((recorded / "explanations.json").read_text()),
        history=history_table(device_ratios(report)),
        cases=read_cases(recorded / "public" / "training.json"),
        serving=read_serving_cases(recorded / "public" / "serving.json"),
    )


def render(sources: Sources) -> str:
    """Return the document; the same rows always give the same text."""
    report = sources.report
    parts = (
        _summary(report),
        _verdicts(report),
        _bounds(sources.bounds),
        _engines(report),
        _real_ranks(report),
        _groups(report),
        _nearly_full(report),
        _far_off(report, sources.explanations),
        _history(sources.history, report),
        _public(sources.cases),
        _public_serving(sources.serving),
    )
    return "\n".join([HEAD, *(line for part in parts for line in part)]) + "\n"


def _summary(report: AccuracyReport) -> Iterator[str]:
    yield (
        f"{report.evidence_rows} rows of evidence, {report.holdout_rows} of them held out; "
        f"{report.calibration_rows} calibration rows and {report.other_rows} rows of other kinds "
        f"are not counted. Not predicted: {len(report.not_predicted)}."
    )
    yield f"\n## All rows but those of calibration\n\n| quantity {COLUMNS}"
    for quantity, statistics in report.overall().items():
        yield _line(quantity, statistics)
    yield "\n## Rows held out\n"
    if not report.holdout_rows:
        yield "None yet."
        return
    yield f"| quantity {COLUMNS}"
    for quantity, statistics in report.holdout().items():
        yield _line(quantity, statistics)


def _verdicts(report: AccuracyReport) -> Iterator[str]:
    yield "\n## Verdicts\n"
    yield (
        f"False 'fits': {len(report.false_fits)}. "
        f"False 'does not fit': {len(report.false_does_not_fit)}. "
        "Tight says that the capacity lies inside the interval: either may happen.\n"
    )
    yield "| verdict | ran | ran out of memory |\n|---|--:|--:|"
    for state, outcomes in report.confusion().items():
        words = STATE_WORDS[State(state)]
        yield f"| {words} | {outcomes[DONE]} | {outcomes[OUT_OF_MEMORY]} |"


def _bounds(bounds: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Bounds that the tests hold\n"
    yield "| rows | quantity | bound | limit |\n|---|---|---|--:|"
    for rows, quantities in (("all", bounds), ("held out", bounds["holdout"])):
        for quantity, limits in quantities["quantities"].items():
            for name, limit in limits.items():
                words = name.removesuffix("_percent").replace("_", " ")
                yield f"| {rows} | {quantity} | {words} | {limit} % |"


def _engines(report: AccuracyReport) -> Iterator[str]:
    yield f"\n## By engine, stage and number of ranks\n\nEach cell: {CELLS}.\n"
    yield f"| engine | stage | ranks | {BYTE_COLUMNS} |\n|---|--:|--:|--:|--:|--:|--:|"
    for values, found in report.crossed("engine", "stage", "world size").items():
        if _bytes_of(found):
            yield f"| {' | '.join(values)} | {_byte_cells(found)} |"


def _real_ranks(report: AccuracyReport) -> Iterator[str]:
    """Yield errors over NCCL alone: memory, the whole step, and all of its collectives."""
    columns = f"{BYTE_COLUMNS} | step_time | communication_time"
    yield (
        "\n## Real ranks over NCCL\n\n"
        "One process per GPU. What a rank alone had said for the same plans is beside each run in "
        f"docs/zero.md. Each cell: {CELLS}.\n"
    )
    yield f"| engine | stage | ranks | {columns} |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for values, found in report.crossed("world", "engine", "stage", "world size").items():
        if values[0] == "nccl":
            times = [_error_cell(found.get(name)) for name in ("step_time", "communication_time")]
            yield f"| {' | '.join((*values[1:], _byte_cells(found), *times))} |"


def _groups(report: AccuracyReport) -> Iterator[str]:
    """Yield a table per group; a group of one value tells nothing new."""
    yield f"\n## By group\n\nEach cell: {CELLS}.\n"
    yield f"| group | value | {BYTE_COLUMNS} |\n|---|---|--:|--:|--:|--:|"
    for group, values in report.by_group().items():
        if group in SHOWN_APART or len(values) < 2:
            continue
        for value, found in values.items():
            if _bytes_of(found):
                yield f"| {group} | {value} | {_byte_cells(found)} |"


def _nearly_full(report: AccuracyReport) -> Iterator[str]:
    yield "\n## Plans that nearly fill the GPU\n"
    yield "Predicted device bytes of 85 % of the GPU or more, those too large for it included.\n"
    judged = [j for j in report.judged if j.groups["GPU filled"] == NEARLY_FULL]
    if not judged:
        yield "None yet."
        return
    found = report.by_group().get("GPU filled", {}).get(NEARLY_FULL, {})
    if _bytes_of(found):
        yield f"| {BYTE_COLUMNS} |\n|--:|--:|--:|--:|\n| {_byte_cells(found)} |\n"
    yield "| verdict | ran | ran out of memory |\n|---|--:|--:|"
    for state in State:
        ends = [j.outcome for j in judged if j.state is state]
        yield f"| {STATE_WORDS[state]} | {ends.count(DONE)} | {ends.count(OUT_OF_MEMORY)} |"


def _far_off(report: AccuracyReport, explanations: Mapping[str, str]) -> Iterator[str]:
    yield f"\n## Rows off by more than {FAR_OFF_PERCENT:.0f} %\n"
    rows: dict[str, list[str]] = {}
    for residual in report.far_off():
        seen = (
            f"{residual.comparison.quantity} {format_signed(residual.comparison.error_percent, 1)}"
        )
        rows.setdefault(residual.row_id, []).append(seen)
    if not rows:
        yield "None."
        return
    yield "| row | errors | why |\n|---|---|---|"
    for row_id, errors in rows.items():
        yield f"| `{row_id}` | {', '.join(errors)} | {explanations.get(row_id, '')} |"


def _history(history: Mapping[str, Any], report: AccuracyReport) -> Iterator[str]:
    yield "\n## What the intervals of verdicts rest on\n"
    yield (
        "Measured / predicted device bytes of earlier rows (docs/memory-model.md): the plan's own "
        "engine, stage and attention, else its engine. A plan with something that was never measured "
        "gets the extremes.\n"
    )
    plans = device_ratios(report)
    if plans:
        share = inside_without_itself(plans) / len(plans)
        yield (
            f"Each row left out in turn, {share:.0%} of the rows lie inside the interval that the "
            f"others give; {1 - 2 * TAIL:.0%} are meant to.\n"
        )
    yield "| plans like | n | low | high |\n|---|--:|--:|--:|"
    groups = history["groups"]
    first = [name for name in (ALL, EXTREMES) if name in groups]
    for name in (*first, *(other for other in groups if other not in first)):
        found = groups[name]
        yield f"| {name} | {found['n']} | {found['low']:.3f} | {found['high']:.3f} |"


def _public(cases: PublicCases) -> Iterator[str]:
    answers = list(cases.answers())
    yield "\n## What others measured\n"
    yield from _public_summary(cases, answers)
    yield "| case | plan | counter | measured | predicted | error |\n|---|---|---|--:|--:|--:|"
    for answer in answers:
        yield _public_line(answer)
    yield from _public_far_off(answers)
    yield from _listed("What the reports leave open", ((a.case.note, a) for a in answers))
    refused = [(a.refusal, a) for a in answers if a.refusal]
    if refused:
        yield from _listed("Not predicted", refused)
    yield from _not_planned(cases.not_planned, cases.left_out)


def _public_summary(cases: PublicCases, answers: Sequence[Answer]) -> Iterator[str]:
    left_out = sum(len(ids) for ids in cases.left_out.values())
    complete = cases.num_reports + len(cases.not_planned)
    predicted = [answer for answer in answers if answer.refusal is None]
    yield (
        f"Of {complete + left_out} public reports {complete} are of training runs and say enough; "
        f"{cases.num_reports} of them can be said as plans, in {len(answers)} cases "
        f"(`recorded/public/training.json`). **{len(predicted)} of {len(answers)} cases are "
        "predicted.** They are not ours and not on our versions; a range was printed as one or as a "
        "rounded number, and the error is to its nearer end.\n"
    )
    errors = [abs(a.error_percent) for a in predicted if a.error_percent is not None]
    left = [abs(a.explained_percent) for a in predicted if a.explained_percent is not None]
    near, nearer = (
        sum(error <= PUBLIC_FAR_OFF_PERCENT for error in found) for found in (errors, left)
    )
    outcomes = [a.error_text for a in predicted if a.case.outcome]
    words = ", ".join(f"{outcomes.count(word)} {word}" for word in ("right", "open", "wrong"))
    yield (
        f"Of {len(errors)} with bytes, {near} are within {PUBLIC_FAR_OFF_PERCENT:.0f} %, and "
        f"{nearer} once what the runs did otherwise is counted (mean absolute error "
        f"{sum(errors) / len(errors):.1f} % and {sum(left) / len(left):.1f} %; the differences are "
        f"worked out from the reports, not fitted). Of {len(outcomes)} that say "
        f"whether a run fitted: {words} (open: the verdict is tight).\n"
    )


def _public_far_off(answers: Sequence[Answer]) -> Iterator[str]:
    yield f"\n### What explains more than {PUBLIC_FAR_OFF_PERCENT:.0f} %\n"
    yield (
        "What the run did otherwise than a plan can say, worked out in bytes, and the error that "
        "is left with it. Where nothing is worked out, the list below says what is known.\n"
    )
    yield "| case | error | the run, beside the plan | error left |\n|---|--:|---|--:|"
    for answer in answers:
        if not answer.is_far_off:
            continue
        found = answer.case.differences
        what = "; ".join(difference.text for difference in found) or "not worked out"
        left = format_signed(answer.explained_percent, 1) if found else "-"
        yield f"| `{answer.case.id}` | {answer.error_text} | {what} | {left} |"


def _not_planned(
    not_planned: Mapping[str, str], left_out: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    yield "\n### Complete, but not to be said as a plan\n"
    reasons: dict[str, list[str]] = {}
    for report, reason in not_planned.items():
        reasons.setdefault(reason, []).append(report)
    for reason, reports in reasons.items():
        yield f"- {', '.join(reports)}: {reason}"
    yield "\n### Left out\n\n| why | reports |\n|---|--:|"
    for reason, ids in left_out.items():
        yield f"| {reason} | {len(ids)} |"


def _public_serving(cases: ServingCases) -> Iterator[str]:
    answers = list(cases.answers())
    complete = cases.num_reports + len(cases.not_planned)
    yield "\n## What others measured of serving engines\n"
    yield (
        f"Of {complete + sum(map(len, cases.left_out.values()))} reports {complete} say enough; "
        f"{cases.num_reports} of them can be planned, in {len(answers)} cases, all predicted "
        "(`recorded/public/serving.json`). What the engine counted beside weights and cache "
        "(activations, NCCL) is taken from the report, as it belongs to the engine's version. "
        "Per GPU; the error of the cache is that of its tokens, or of its bytes where no tokens are "
        "printed.\n"
    )
    yield from _serving_summary(answers)
    yield (
        "| case | engine | weights | predicted | error | B a token | predicted | cache | predicted "
        "| error | started | predicted |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|"
    )
    for answer in answers:
        yield _serving_line(answer)
    yield "\n### What these reports leave open\n"
    notes: dict[str, list[str]] = {}
    for answer in answers:
        notes.setdefault(answer.case.note, []).append(answer.case.id)
    for note, ids in notes.items():
        yield f"- {', '.join(f'`{name}`' for name in ids)}: {note}"
    yield from _not_planned(cases.not_planned, cases.left_out)


def _serving_summary(answers: Sequence[ServingAnswer]) -> Iterator[str]:
    weights = [abs(a.weights_percent) for a in answers if a.weights_percent is not None]
    cache = [abs(a.capacity_percent) for a in answers if a.capacity_percent is not None]
    starts = [a for a in answers if a.case.outcome is not None]
    right = sum(a.case.outcome == a.outcome for a in starts)
    yield (
        f"Weights: {len(weights)} cases, mean absolute error {sum(weights) / len(weights):.2f} %, "
        f"worst {max(weights):.1f} %. Cache: {len(cache)} cases, {sum(cache) / len(cache):.2f} %, "
        f"worst {max(cache):.1f} %. Whether a request of the length was accepted: {right} of "
        f"{len(starts)} right.\n"
    )


def _serving_line(answer: ServingAnswer) -> str:
    case = answer.case
    cells = (
        f"`{case.id}` ({case.source})",
        case.label,
        *(
            _size(case.weights_bytes),
            _size(answer.weights_bytes),
            format_signed(answer.weights_percent),
        ),
        "-" if case.token_bytes is None else f"{case.token_bytes:,}",
        f"{answer.token_bytes:,}",
        *(_size(case.pool_bytes), _size(answer.pool_bytes), format_signed(answer.capacity_percent)),
        *(case.outcome or "-", (case.outcome and answer.outcome) or "-"),
    )
    return f"| {' | '.join(cells)} |"


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else format_bytes(size_bytes)


def _listed(title: str, said: Iterable[tuple[str, Answer]]) -> Iterator[str]:
    """Yield a list of sentences, each with the cases that it is true of."""
    yield f"\n### {title}\n"
    cases: dict[str, list[str]] = {}
    for sentence, answer in said:
        cases.setdefault(sentence, []).append(answer.case.id)
    for sentence, ids in cases.items():
        yield f"- {', '.join(f'`{name}`' for name in ids)}: {sentence}"


def _public_line(answer: Answer) -> str:
    case = answer.case
    cells = (
        f"`{case.id}` ({case.source})",
        case.label,
        case.counter,
        case.measured_text,
        answer.predicted_text,
        answer.error_text,
    )
    return f"| {' | '.join(cells)} |"


def _bytes_of(found: Mapping[str, Statistics]) -> int:
    """The most rows of any memory quantity."""
    return max((found[q].n for q in MEMORY_QUANTITIES if q in found), default=0)


def _byte_cells(found: Mapping[str, Statistics]) -> str:
    cells = [_error_cell(found.get(quantity)) for quantity in MEMORY_QUANTITIES]
    return " | ".join([str(_bytes_of(found)), *cells])


def _error_cell(seen: Statistics | None) -> str:
    return f"{seen.mean_absolute_percent:.2f} % ({seen.worst_percent:+z.2f})" if seen else "-"


def _line(name: str, found: Statistics) -> str:
    return (
        f"| {name} | {found.n} | {format_signed(found.mean_percent, 2)} | {found.mean_absolute_percent:.2f} % "
        f"| {found.p90_percent:.2f} % | {format_signed(found.worst_percent, 2)} |"
    )


def history_text(history: Mapping[str, Any]) -> str:
    """Return the table as it is committed."""
    return json.dumps(history, indent=1) + "\n"


def main() -> None:
    """Write both files of this repository: the history first, as verdicts rest on it."""
    sources = gather(ROOT)
    text = history_text(sources.history)
    if HISTORY.read_text() != text:
        HISTORY.write_text(text)
        forget_history()
        sources = gather(ROOT)
    DOCUMENT.write_text(render(sources))


if __name__ == "__main__":
    main()
