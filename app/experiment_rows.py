"""What an experiment says, as plain data: groups of repeats, runs, conditions, findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from app.plan_words import plan_line
from db.database import Database
from db.experiments import Member, experiment_members
from db.types import FINAL_STATES
from planner.difference import percent
from planner.errors import PlanError
from planner.experiments.conditions import cautions, clocks_of, drifts, watched
from planner.experiments.groups import (
    Group,
    Judgement,
    changes,
    flags,
    group_lines,
    judge_difference,
)
from planner.experiments.lines import FIGURES, Line, SeenRun, columns, lines_of
from planner.experiments.variables import Kind, spec_variables
from planner.units import format_seconds, format_share
from planner.workload import Parallelism, ServingWorkload, TrainingWorkload, flat_dict

SHORT_ID = 8
LABEL_VARIABLES = 3
# How the flag of a comparison begins that changes both kinds of variables at once.
MIXED = "changes both"
Show = Callable[[float], str]


def figure_text(figure: str, value: float | None, size: Show) -> str:
    """Return a figure's value as people read it; empty where there is none."""
    if value is None:
        return ""
    shows: Mapping[str, Show] = {
        "bytes": size,
        "s": format_seconds,
        "per_s": lambda rate: f"{rate:,.0f}" if rate >= 100 else f"{rate:,.3g}",
        "ratio": lambda ratio: f"{ratio:.2e}",
    }
    return shows[FIGURES[figure].unit](value)


def spec_words(spec: Mapping[str, Any]) -> str:
    """Return what a spec runs in one line: model and plan, or the shape of attention or decoding."""
    kind, plan = str(spec.get("kind")), spec.get("plan")
    if isinstance(plan, Mapping) and plan.get("model"):
        return _plan_words(plan)
    with suppress(PlanError):
        values = spec_variables(spec)
        if kind == "decode":
            return (
                f"{values['model']}: decode {values['batch']} × {values['context']}, "
                f"{values['cache layout']} cache in {values['cache dtype']}"
            )
        if kind == "serve":
            return f"{values['model']}: serve {values['requests']}"
    shape = spec.get("attention")
    if kind == "attention" and isinstance(shape, Mapping):
        heads = f"{shape.get('heads')}/{shape.get('kv_heads')} heads of {shape.get('head_dim')}"
        return f"attention {shape.get('batch', 1):,} × {shape.get('sequence_length', 0):,}, {heads}"
    return kind


def _plan_words(plan: Mapping[str, Any]) -> str:
    """Name the model and the choices of a stored plan, without the time it takes to check it."""
    model, job = plan["model"], plan.get("job", "train")
    name = str(model.get("preset") or model.get("name") or "custom model").rsplit("/", 1)[-1]
    workload = flat_dict(ServingWorkload() if job == "serve" else TrainingWorkload())
    whole = {
        "job": job,
        "workload": {**workload, **(plan.get("workload") or {})},
        "parallelism": {**flat_dict(Parallelism()), **(plan.get("parallelism") or {})},
    }
    return f"{name}: {plan_line(whole)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """An experiment worked out: lines of its runs, groups of repeats, and what could not be read."""

    members: Sequence[Member]
    lines: Sequence[Line]
    groups: Sequence[Group]
    notes: Sequence[str]


def analyse(database: Database, experiment_id: int) -> Analysis:
    """Work out an experiment; raises PlanError where there is none."""
    members = experiment_members(database, experiment_id)
    lines = [line for member in members for line in _lines(member)]
    return Analysis(
        members=members, lines=lines, groups=group_lines(lines), notes=_notes(members, lines)
    )


def member_name(member: Member) -> str:
    """Return the id that a member's lines carry."""
    return str(member.run_id or member.row_id)


def _lines(member: Member) -> list[Line]:
    if member.spec is None:
        return []
    seen = member.measurement
    return lines_of(
        SeenRun(
            id=member_name(member),
            spec=member.spec,
            outcome=str(member.state),
            measured=seen.measured if seen else {},
            environment=seen.environment if seen else {},
        )
    )


def _notes(members: Sequence[Member], lines: Sequence[Line]) -> list[str]:
    """Say which members have no line, or one that says little."""
    notes = [
        f"Measurement {member.row_id} has been withdrawn and is no longer in the database."
        for member in members
        if member.spec is None
    ]
    final = {str(state) for state in FINAL_STATES}
    waiting = [member_name(m) for m in members if m.state and m.state not in final]
    if waiting:
        notes.append(f"Not ended yet, without figures until then: {', '.join(waiting)}.")
    failed = [line for line in lines if line.outcome in final and line.outcome != "done"]
    notes += [
        f"{line.run.id} {line.part} ended as {line.outcome.replace('_', ' ')}: it has no figures "
        "that count."
        for line in failed
    ]
    notes += [f"{line.run.id} cannot be read: {line.problem}" for line in lines if line.problem]
    return notes


def varying(analysis: Analysis, *, every: bool) -> list[tuple[str, Kind]]:
    """Return the columns of variables that differ between the runs, or all of them."""
    return columns(list(analysis.lines), only_varying=not every)


def column_label(name: str, kind: Kind) -> str:
    """Return a variable's column heading with its kind."""
    return f"{name} ({kind})"


def shown(value: Any) -> str:
    """Return a variable's value as text; a dash where a run has no such variable."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("_", " ")


def judged(analysis: Analysis, baseline: int, figure: str) -> list[Judgement | None]:
    """Return how each group differs from the baseline; None for the baseline itself."""
    base = analysis.groups[baseline]
    return [
        None if index == baseline else judge_difference(base, group, figure)
        for index, group in enumerate(analysis.groups)
    ]


def group_rows(
    analysis: Analysis, baseline: int, figure: str, size: Show, *, every: bool
) -> list[dict[str, Any]]:
    """Return one line per group for people: its variables, how repeats lie, and the answer."""
    named, answers = varying(analysis, every=every), judged(analysis, baseline, figure)
    base = analysis.groups[baseline]
    rows = [
        {
            "group": number,
            # Figures first: a table of many variables is wider than the page.
            **_spread_words(group, figure, size),
            "vs baseline": percent(answer.ratio - 1) if answer and answer.ratio else "",
            "is it real?": str(answer.answer) if answer else "baseline",
            "changes": _change_words(base, group) if answer else "",
            **_variables(group, [column for column in named if column[1] is not Kind.WORK]),
            **_variables(group, [column for column in named if column[1] is Kind.WORK]),
        }
        for number, (group, answer) in enumerate(
            zip(analysis.groups, answers, strict=True), start=1
        )
    ]
    empty = {name for name in rows[0] if not any(row[name] for row in rows)}
    return [{name: row[name] for name in row if name not in empty} for row in rows]


def _variables(group: Group, named: Sequence[tuple[str, Kind]]) -> dict[str, str]:
    return {column_label(name, kind): shown(group.variables.get(name)) for name, kind in named}


def _spread_words(group: Group, figure: str, size: Show) -> dict[str, str]:
    spread = group.spread(figure)
    several = spread is not None and spread.count > 1
    low, high = (figure_text(figure, getattr(spread, name, None), size) for name in ("low", "high"))
    return {
        "runs": f"{spread.count if spread else 0} of {len(group.lines)}",
        "median": figure_text(figure, spread.median if spread else None, size),
        "min to max": f"{low} to {high}" if several else "",
        "variation": format_share(spread.variation, 2)
        if spread and spread.variation is not None
        else "",
    }


def _change_words(base: Group, group: Group) -> str:
    kinds = [str(kind) for kind, found in changes(base, group).items() if found]
    if {Kind.ALGORITHM, Kind.SYSTEM} <= {*kinds}:
        return "BOTH: " + " + ".join(kinds)
    return " + ".join(kinds) or "nothing of both"


def group_csv(analysis: Analysis, baseline: int, figure: str) -> list[dict[str, Any]]:
    """Return the groups for a file: every variable, and plain numbers in bytes, seconds or rates."""
    named, answers = varying(analysis, every=True), judged(analysis, baseline, figure)
    base = analysis.groups[baseline]
    rows = []
    for index, (group, answer) in enumerate(zip(analysis.groups, answers, strict=True)):
        spread = group.spread(figure)
        found = flags(base, group) if answer else []
        rows.append(
            {
                "group": index + 1,
                **{column_label(name, kind): group.variables.get(name) for name, kind in named},
                "figure": figure,
                "unit": FIGURES[figure].unit,
                "n": spread.count if spread else 0,
                **{
                    name: getattr(spread, name, None)
                    for name in ("median", "low", "high", "variation")
                },
                "ratio": answer.ratio if answer else None,
                "answer": str(answer.answer) if answer else "baseline",
                "reason": answer.sentence if answer else "",
                "flags": " ".join(found),
                "cautions": "; ".join(cautions(base.lines, group.lines, figure)) if answer else "",
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the comparisons with a baseline say in words, each with the numbers of its groups.

    `answers` are whether differences are real and why, `mixed` the comparisons that change both kinds of
    variables, `cautions` what else to know.
    """

    answers: Mapping[str, Sequence[int]]
    mixed: Mapping[str, Sequence[int]]
    cautions: Mapping[str, Sequence[int]]


def findings(analysis: Analysis, baseline: int, figure: str) -> Findings:
    """Return what the comparisons with a baseline say; groups of which the same is said are together."""
    base = analysis.groups[baseline]
    answers: dict[str, list[int]] = {}
    mixed: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    found = judged(analysis, baseline, figure)
    for number, (group, answer) in enumerate(zip(analysis.groups, found, strict=True), start=1):
        if answer is None:
            continue
        answers.setdefault(f"{answer.answer}. {answer.sentence}", []).append(number)
        for flag in flags(base, group):
            kind = mixed if flag.startswith(MIXED) else others
            kind.setdefault(flag, []).append(number)
        for caution in cautions(base.lines, group.lines, figure):
            others.setdefault(f"{caution}.", []).append(number)
    return Findings(answers=answers, mixed=mixed, cautions=others)


def groups_named(numbers: Sequence[int]) -> str:
    """Return groups by their numbers, such as "Groups 2, 3"."""
    return f"Group{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def short_labels(analysis: Analysis) -> list[str]:
    """Return a name for each group: its number and the few variables that tell groups apart best."""
    variables = [group.variables for group in analysis.groups]
    names = [name for name, _ in varying(analysis, every=False)]
    chosen: list[str] = []

    def told_apart(extra: str) -> int:
        return len({tuple(shown(own.get(n)) for n in (*chosen, extra)) for own in variables})

    while names and len(chosen) < LABEL_VARIABLES:
        best = max(names, key=told_apart)
        chosen.append(best)
        names.remove(best)
        if told_apart(best) == len(variables):
            break
    chosen.sort(key=[name for name, _ in varying(analysis, every=False)].index)
    words = [[_named(name, own[name]) for name in chosen if name in own] for own in variables]
    return [
        ": ".join((str(i), ", ".join(own))) if own else str(i) for i, own in enumerate(words, 1)
    ]


def _named(name: str, value: Any) -> str:
    """Return a value with what it is of where a bare number would not say."""
    is_word = isinstance(value, str) and not value.isdecimal()
    return shown(value) if is_word else f"{name} {shown(value)}"


def run_rows(analysis: Analysis, figure: str, size: Show | None) -> list[dict[str, Any]]:
    """Return one line per run and part: its group, figure, clocks and environment.

    Without `size` the figure is a plain number, for a file.
    """
    rows = []
    for index, group in enumerate(analysis.groups):
        for line in group.lines:
            clocks, value = clocks_of(line.run.environment), line.figures.get(figure)
            rows.append(
                {
                    "group": index + 1,
                    "run": line.run.id,
                    "part": line.part,
                    "what": spec_words(line.run.spec),
                    "outcome": line.outcome.replace("_", " "),
                    figure: value if size is None else figure_text(figure, value, size),
                    "throttled": _throttled(line),
                    "clock at the end": clocks.words(),
                    **(watched(line.run.environment) if line.run.environment else {}),
                }
            )
    return rows


def _throttled(line: Line) -> str:
    clocks = clocks_of(line.run.environment)
    if clocks.sm_clock_mhz is None:
        return ""
    return "yes" if clocks.is_throttled else "no"


def throttled_sentence(analysis: Analysis) -> str | None:
    """Say how many runs ended with lowered clocks and why; None where none did."""
    seen = {line.run.id: clocks_of(line.run.environment) for line in analysis.lines}
    slowed = {name: clocks for name, clocks in seen.items() if clocks.is_throttled}
    if not slowed:
        return None
    lines = "; ".join(f"{name[:SHORT_ID]}: {clocks.words()}" for name, clocks in slowed.items())
    return (
        f"{len(slowed)} of {len(seen)} runs ended with clocks that the driver had lowered: {lines}. Their "
        "times are longer than those of a cool GPU at full clock; bytes do not change."
    )


def drift_sentence(analysis: Analysis) -> str | None:
    """Say what of the environment is not the same in all runs; None where all is."""
    found = [drift.words() for drift in drifts(analysis.lines)]
    return f"The runs had different environments: {'; '.join(found)}." if found else None
