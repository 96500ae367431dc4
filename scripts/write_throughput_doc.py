"""Write docs/throughput.md from recorded/: how far predicted step times are off, and why.

Part of `make accuracy`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from planner.accuracy import AccuracyReport, Residual, accuracy_report, summarize
from planner.as_run import as_run
from planner.comparison import ALONE, compare_paced
from planner.plan import parse_plan
from planner.public_speed import PublicSpeed, public_speeds
from planner.records import Kind, RecordedRow, Role, read_file
from planner.speed.calibrated import rates_of, rows_used
from planner.speed.step import training_step
from planner.speed.time_range import PACES, history_table, inside_without_itself, pace_of
from planner.units import format_signed
from planner.workload import TrainingWorkload

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "throughput.md"
HISTORY = ROOT / "planner" / "data" / "time_history.json"
PUBLIC = ROOT / "recorded" / "public" / "training_speed.json"
QUANTITIES = {"step_time": "whole step", ALONE: "one rank alone"}
# A published time that is off by more than this is explained.
EXPLAINED_PERCENT = 20.0
GROUPS = {
    "Engine and stage": ("engine", "stage"),
    "World size": ("world size",),
    "Architecture": ("architecture",),
    "Attention": ("attention",),
    "Checkpointing": ("checkpointing",),
    "Precision": ("precision",),
    "Optimizer": ("optimizer",),
}
HEAD = """# How far predicted times are off

Written by `make accuracy` from `recorded/`; do not edit. How a step is timed stands in
[throughput-model.md](throughput-model.md). Error in percent: 100 x (predicted - measured) / measured, of steps on an
H200 with the shipped curves. **whole step**: one GPU, or two with NCCL. **one rank alone**: one of N,
without the others (world `solo`). Rows held out were chosen before anything was tuned and used for nothing since.
"""
PACED_STEPS = """
**The host's pace.** After all else a run takes a few steps more, each between two readings of its host's pace
(`host_pace`, recorded/README.md). Errors of these steps where the host sets the pace or needs nearly as long: predicted with the
shipped host, at the usual pace, and with the pace that was read, as a `peakmark calibrate` at that moment would:
"""
USED = """
{n} rows set a constant of the host (its pace, FSDP2's updates of several tensors, DeepSpeed's work per parameter) and count nowhere:
{rows}.
"""
BOUND = """
Where the GPU sets the pace its kernels are predicted one by one. Where it waits for the host that starts
them, a step takes as long as a process on a shared machine happens to take: the same plan, run again,
differs by as much as the next table says. No number for a plan can be nearer than the median of its runs.
"""
RANGES = """
**The range of a step** that a plan shows: of the ratios of measured to predicted time of whole steps like it, the
middle nine tenths (order statistics). The last column asks each step whether the range of all others holds it.
"""
FAR = """
## Rows more than {percent:.0f} % off

{n} of {of} rows. Of {waiting} the host sets the pace or nearly does; {offloaded} more step their optimizer in host memory,
whose threads the row does not tell. The others, whose GPU should set the pace:
"""
# Why steps whose GPU should set the pace took longer or less, by row.
EXPLAINED = {
    "c97382c5b8f9bca9": "not known: every step's backward took three times what its kernels should; its experts' "
    "gradients, 0.9 billion elements in one tensor, were never timed at such a size",
    "debaed2db79e012d": "memory was short: the allocator gave cached segments back 29 times in 13 steps "
    "(`num_alloc_retries`), 60 ms each",
    "fd8f4cad1f8c4b3a": "a profile shows its experts' biases, whose gradients add thousands of rows into 32, one after "
    "another, and copies of scores; both are timed by what is like them",
}
REPEATS = """
**Plans that were run more than once**: each run beside the median of the others, what is left when everything
about a plan is known but the moment; and beside the median of all, itself among them.
"""
PUBLISHED = """
Step times that others published, on GPUs whose curves were never measured: what an H200 reaches of its sheet
is assumed of theirs. `bubble` and `group` are the parts of the predicted step that wait for a pipeline and
for tensor, context or expert parallel GPUs.
"""
SPLITS = """
## What splitting a model costs

All of it is in a plan's step time: `pipeline.bubble` and `group.exposed` of its operations.

| split | cost | source |
|---|---|---|
| pipeline p | waits (p - 1) / micro-batches of the working time; activations to the next stage and gradients to the one before | Narayanan et al. 2021 (arXiv 2104.04473), section 2.2: the bubble of 1F1B |
| tensor t | two all-reduces of tokens x hidden size per layer and direction, 2 (t - 1) / t of the volume each; with sequence parallelism gathers and reduce-scatters of the same volume | Shoeybi et al. 2019 (arXiv 1909.08053), section 3; Korthikanti et al. 2022 (arXiv 2205.05198), section 4.2 |
| context c | c - 1 blocks of keys and values around the ring, in the backward their gradients too | Liu et al. 2023 (arXiv 2310.01889), section 3 |
| expert e | every token's copies out and back in two all-to-alls per layer and direction, (e - 1) / e of them | Lepikhin et al. 2020 (arXiv 2006.16668), section 3.2 |
"""
RULE = "|---|--:|--:|--:|--:|--:|"


def recorded_rows(root: Path) -> list[RecordedRow]:
    """Return all recorded rows, by file."""
    return [
        row
        for path in sorted((root / "recorded").glob("*.jsonl"))
        for row in read_file(path)
        if row.kind is Kind.TRAIN_STEP
    ]


def pace_of_row(row: RecordedRow) -> str:
    """Return what the planner says sets a row's pace."""
    plan = as_run(parse_plan(row.spec["plan"]), row.environment)
    assert isinstance(plan.workload, TrainingWorkload)
    is_alone = row.spec["world"] == "solo" and plan.parallelism.world_size > 1
    rates = rates_of(plan.hardware)
    step = training_step(plan.model, plan.workload, plan.parallelism, rates, alone=is_alone)
    return pace_of(float(step.gpu_step_s), float(step.host_step_s))


def paces_of(rows: Sequence[RecordedRow], timed: Sequence[Residual]) -> dict[str, str]:
    """Return by id what sets the pace of every row whose time is compared."""
    ids = {residual.row_id for residual in timed}
    return {row.id: pace_of_row(row) for row in rows if row.id in ids}


def whole_steps(timed: Sequence[Residual], paces: Mapping[str, str]) -> list[tuple[str, float]]:
    """Return the pace and measured / predicted of whole steps."""
    return [
        (paces[r.row_id], r.comparison.measured / r.comparison.predicted)
        for r in timed
        if r.comparison.quantity == "step_time"
    ]


def timed_of(report: AccuracyReport) -> list[Residual]:
    """Return the residuals of step times that count."""
    return [r for r in report.counted() if r.comparison.quantity in QUANTITIES]


def history_text(rows: Sequence[RecordedRow], report: AccuracyReport) -> str:
    """Return the text of the table that ranges of step times rest on."""
    timed = timed_of(report)
    return json.dumps(history_table(whole_steps(timed, paces_of(rows, timed))), indent=1) + "\n"


def render(rows: Sequence[RecordedRow], report: AccuracyReport, public: Path = PUBLIC) -> str:
    """Return the document's text."""
    timed = timed_of(report)
    paces = paces_of(rows, timed)
    host_bound = {name for name, pace in paces.items() if pace == "host"}
    lines = [HEAD, "## Errors\n", *_overall(timed, paces), BOUND]
    lines += [RANGES, *_ranges(whole_steps(timed, paces))]
    lines += [REPEATS, *_repeats(rows, host_bound, set(paces))]
    lines += _paced(rows, timed, paces)
    lines.append(USED.format(n=len(rows_used()), rows=_listed(sorted(rows_used()))))
    for title, names in GROUPS.items():
        lines += [f"\n### {title}\n", *_grouped(timed, names)]
    lines += _far_off(rows, timed, paces)
    lines += ["\n## Published times", PUBLISHED, *_published(public_speeds(public)), SPLITS]
    return "\n".join(lines).rstrip() + "\n"


def _listed(ids: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in ids)


def _line(words: str, errors: Sequence[float]) -> str:
    found = summarize(errors)
    return (
        f"| {words} | {found.n} | {format_signed(found.mean_percent, 1)} | "
        f"{found.mean_absolute_percent:.1f} % | {found.p90_percent:.1f} % | {format_signed(found.worst_percent, 1)} |"
    )


def _table(first: str) -> list[str]:
    return [f"| {first} | n | mean | mean absolute | p90 | worst |", RULE]


def _overall(timed: Sequence[Residual], paces: Mapping[str, str]) -> Iterator[str]:
    """Errors of each quantity: all rows, those held out, by what bounds the step."""
    choices = {"all": tuple(PACES), "the GPU sets the pace": ("gpu", "both")}
    choices |= {"the host needs less than 0.6 of the GPU's time": ("gpu",)}
    choices |= {"the host needs nearly as long": ("both",), "the host sets the pace": ("host",)}
    yield from _table("rows")
    for quantity, words in QUANTITIES.items():
        for name, chosen in choices.items():
            found = [
                r for r in timed if r.comparison.quantity == quantity and paces[r.row_id] in chosen
            ]
            held_out = [r for r in found if r.role is Role.HOLDOUT]
            for more, some in (("", found), (", held out", held_out)):
                if some:
                    yield _line(
                        f"{words}: {name}{more}", [r.comparison.error_percent for r in some]
                    )


def _ranges(steps: Sequence[tuple[str, float]]) -> Iterator[str]:
    """The range of each pace, and how often it holds for a step that had no part in it."""
    yield "| what sets the pace | n | measured / predicted | inside without itself |"
    yield "|---|--:|--:|--:|"
    inside = inside_without_itself(steps)
    for pace, bounds in history_table(steps).items():
        held, n = inside[pace]
        ends = f"{bounds['low']:.2f} to {bounds['high']:.2f}"
        yield f"| {PACES[pace]} | {bounds['n']} | {ends} | {held} of {n} ({100 * held / n:.0f} %) |"
    yield ""


def _paced(
    rows: Iterable[RecordedRow], timed: Sequence[Residual], paces: Mapping[str, str]
) -> Iterator[str]:
    """Errors of steps that wait for a host whose pace was read: at the usual one, and at its own."""
    waiting = {r.row_id: r.comparison for r in timed if paces[r.row_id] != "gpu"}
    errors: dict[str, list[float]] = defaultdict(list)
    read: set[str] = set()
    for row in rows:
        if row.id not in waiting:
            continue
        plan, usual = as_run(parse_plan(row.spec["plan"]), row.environment), waiting[row.id]
        for step in compare_paced(plan, row.measured, alone=usual.quantity == ALONE):
            words = QUANTITIES[usual.quantity]
            at_usual = 100 * (usual.predicted / step.measured - 1)
            errors[f"{words}: at the usual pace"].append(at_usual)
            errors[f"{words}: at the pace that was read"].append(step.error_percent)
            read.add(row.id)
    if errors:
        yield PACED_STEPS
        yield from _table("steps")
        yield from (_line(words, found) for words, found in errors.items())
        yield f"\nThese are {len(read)} runs: too few to say whether a reading tells more of the next step than the usual pace."


def _repeats(rows: Iterable[RecordedRow], host_bound: set[str], ids: set[str]) -> Iterator[str]:
    """How far runs of one plan lie from the median of its other runs."""
    plans: dict[str, list[RecordedRow]] = defaultdict(list)
    for row in rows:
        if row.id in ids:
            key = [row.spec["plan"], row.spec["world"], row.spec.get("rank")]
            plans[json.dumps(key, sort_keys=True)].append(row)
    errors: dict[str, list[float]] = defaultdict(list)
    for same in plans.values():
        times_s = [float(row.measured["step_time_s"]) for row in same]
        words = f"the {'host' if same[0].id in host_bound else 'GPU'} sets the pace: beside"
        for i, time_s in enumerate(times_s):
            if others := times_s[:i] + times_s[i + 1 :]:
                errors[f"{words} the others"].append(100 * (median(others) / time_s - 1))
                errors[f"{words} all"].append(100 * (median(times_s) / time_s - 1))
    yield from _table("runs")
    for words in sorted(errors):
        yield _line(words, errors[words])


def _grouped(timed: Sequence[Residual], names: Sequence[str]) -> Iterator[str]:
    parted: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for residual in timed:
        key = (QUANTITIES[residual.comparison.quantity], *(residual.groups[n] for n in names))
        parted[key].append(residual.comparison.error_percent)
    yield from _table(" ".join(names))
    for key in sorted(parted, key=lambda k: (k[0] != "whole step", [_natural(v) for v in k[1:]])):
        yield _line(f"{key[0]}: {' '.join(key[1:])}", parted[key])


def _natural(value: str) -> tuple[int, str]:
    return (int(value), "") if value.isdigit() else (0, value)


def far_off(
    rows: Iterable[RecordedRow], timed: Sequence[Residual], paces: Mapping[str, str]
) -> list[Residual]:
    """Return the steps more than EXPLAINED_PERCENT off whose GPU should set the pace."""
    offloaded = _offloaded(rows)
    return [
        r
        for r in timed
        if abs(r.comparison.error_percent) > EXPLAINED_PERCENT
        and paces[r.row_id] == "gpu"
        and r.row_id not in offloaded
    ]


def _offloaded(rows: Iterable[RecordedRow]) -> set[str]:
    return {row.id for row in rows if row.spec["plan"]["workload"].get("offload_optimizer")}


def _far_off(
    rows: Sequence[RecordedRow], timed: Sequence[Residual], paces: Mapping[str, str]
) -> Iterator[str]:
    """How many rows are far off and why, one by one where the GPU should set the pace."""
    far = [r for r in timed if abs(r.comparison.error_percent) > EXPLAINED_PERCENT]
    offloaded = {r.row_id for r in far} & _offloaded(rows)
    waiting = sum(paces[r.row_id] != "gpu" and r.row_id not in offloaded for r in far)
    numbers = {"n": len(far), "of": len(timed), "waiting": waiting, "offloaded": len(offloaded)}
    yield FAR.format(percent=EXPLAINED_PERCENT, **numbers)
    for r in sorted(far_off(rows, timed, paces), key=lambda r: -abs(r.comparison.error_percent)):
        why = EXPLAINED.get(r.row_id, "not explained")
        name = f"{r.groups['architecture']}, {r.groups['engine']} {r.groups['stage']}"
        yield f"- `{r.row_id}` ({name}) {format_signed(r.comparison.error_percent, 0)}: {why}."


def _published(cases: Sequence[PublicSpeed]) -> Iterator[str]:
    yield "| run | published | predicted | error | bound | bubble | group |"
    yield "|---|--:|--:|--:|---|--:|--:|"
    for case in cases:
        spent = {op.name: op.time_s for op in case.predicted.operations}
        shares = [
            f"{100 * spent.get(name, 0.0) / case.predicted.step_time_s:.0f} %"
            for name in ("pipeline.bubble", "group.exposed")
        ]
        yield (
            f"| {case.label} | {case.published_s:.3g} s | {case.predicted.step_time_s:.3g} s | "
            f"{format_signed(case.error_percent, 0)} | {case.predicted.bound} | {' | '.join(shares)} |"
        )
    yield ""
    errors = [case.error_percent for case in cases]
    found = summarize(errors)
    yield (
        f"{found.n} runs: mean {format_signed(found.mean_percent, 1)}, mean absolute "
        f"{found.mean_absolute_percent:.1f} %, worst {format_signed(found.worst_percent, 0)}. "
        f"More than {EXPLAINED_PERCENT:.0f} % off:\n"
    )
    notes: dict[str, list[str]] = defaultdict(list)
    for case in cases:
        if abs(case.error_percent) > EXPLAINED_PERCENT:
            notes[case.note].append(case.label)
    yield from (f"- {'; '.join(labels)}: {note}" for note, labels in notes.items())
    yield "\nSources: " + "; ".join(dict.fromkeys(case.source for case in cases)) + "."


if __name__ == "__main__":
    every = recorded_rows(ROOT)
    report = accuracy_report(every)
    HISTORY.write_text(history_text(every, report))
    DOCUMENT.write_text(render(every, report))
