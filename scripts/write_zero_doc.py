"""Write docs/zero.md from recorded/: stages and engines side by side. Part of `make accuracy`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from planner.accuracy import AccuracyReport
from planner.beside_runs import CROWDED, kernel_lines, offloaded_lines
from planner.calibration import Curve, bandwidth_lines
from planner.real_lines import real_line
from planner.real_ranks import RealRun, real_runs
from planner.records import Kind, RecordedRow, read_file
from planner.same_run import SameRunPair, geometric_mean, same_run_pairs
from planner.saved_runs import alike_lines, alike_place, saved_lines
from planner.stage_cells import (
    Cell,
    Known,
    PeakLine,
    count_cells,
    ideals_by_ranks,
    out_of_memory_places,
    peak_lines,
)
from planner.stage_pairs import Pair, engine_pairs, expandable_bytes, reserved_bytes
from planner.stage_points import Point, stage_points, work_title
from planner.units import GIB_BYTES, MIB_BYTES, format_count, format_signed
from planner.workload import Engine
from planner.zero import work_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "zero.md"
# What blocks that are left uncut explain (WHY_HIGHER); more would need another reason.
SAME_PEAK = 0.001
WORLD_SIZES = (1, 2, 8, 64, 512, 1024)
# From this percentage above the ideal on, the document says what it is.
TOLD_PERCENT = 0.5
HEAD = """# ZeRO stages and engines

Written by `make accuracy` from `recorded/`; do not edit. Every row is one rank of N that really
trained, on an H200 (world `solo` unless it says otherwise: honest for memory and for its own
computing, not for communication). Sizes are GiB of **allocated** memory, rank 0, steady step.

- **measured**, **predicted**: the peak, and today's prediction of it.
- **after step**: what stays between steps: the rank's parameters and optimizer states.
- **ideal**: the least the stage can hold with communication that overlaps: shards to the element, and
  whole only what must be at the worst moment (at stage 3 the layer in use and the one in flight, at
  stages 1 and 2, that gather once a step, what the forward has reached and the backward not left, from
  stage 2 on the gradients being made and those being reduced), beside the plan's own activations.
  **above** is how far the measured peak is from it.
- The split is the prediction's, at the peak. Gradients being reduced count as gradients; "rest" are
  temporaries, library workspaces and the rounding to blocks.
- In tables of peaks *in italics* is what other numbers of ranks measured, all alike; "too much" is a
  predicted peak that does not fit into the GPU with what is beside it, "out of memory" one that was tried.
- **sent**: full buffers of all collectives of a step as the run counted them. "=" says that calls and
  bytes of every collective equal the formula exactly (`planner/payloads.py`): 2 P for stages 0 to 2
  (an all-reduce counts twice: a ring passes it twice), 3 P less the ends for stage 3, plus padding.
"""
WHY_DEEPSPEED_3 = """
Stage 3 shards the parameters too and still peaks higher, with DeepSpeed's default knobs. Three things
are there that stage 2 does not have at its peak (read in DeepSpeed 0.19.8, and counted in the split
above): the reduction bucket of 5e8 elements is allocated once and stays (0.93 GiB, at stage 2 it lives
in the backward only); the coordinator lets up to 1e9 parameters live and keeps what is used again within
1e9 (up to 1.86 GiB gathered), and it fetches ahead into one buffer besides; gradients have a partition
of their own from the start. What it saves, 2 P (1 - 1/N) bytes of parameters, is less than that for a
model of this size; a larger one saves more than they take. All three are knobs
(`reduce_bucket_size`, `stage3_max_live_parameters`, `stage3_max_reuse_distance`). What stays gathered
is not fetched again for the backward: where the whole model stays, stage 3 sends no more than stage 2.
"""
WHY_ABOVE = """
  What is more than half a percent above is a peak of the optimizer's step: fused AdamW takes gradients in
  fp32, so one group's bf16 gradient at a time is copied to fp32 (the embedding's is the largest). The
  ideal's update works value by value, as that of `adamw_triton` does."""
WHY_HIGHER = """: no tensor more, but
  blocks that the allocator leaves uncut, of up to 1 MiB for each shard ("rest").
"""
WHY_RESERVED = """:
  no tensor more, but whole parameters, which DeepSpeed's stages 1 and 2 keep in one buffer and ours give back in each
  backward, are taken anew among the next forward's activations, and what they leave is cut for smaller tensors.
"""
HOW_PEAKS = """
Peak by stage and number of ranks: **measured**, one rank alone; in brackets predicted, where nothing was.
"""
HOW_OFFLOADED = """
`offload_optimizer` keeps and steps the optimizer in host memory. **here** is the device's peak, **kept** that of the
same plan with its optimizer there, **host** what the run held in host memory and, predicted, with pinned buffers rounded
up as torch does; **adds** what it adds to a step, predicted.
"""
WHY_CROWDED = """
\\* with a thread on each of 32 CPUs that others used too: 24 ms a group, be it 6 or 27 million elements. There are half
as many now: 2 and 10 ms.
"""
HOW_OWN_KERNEL = """
`adamw_triton` beside the newest run of the same plan with `adamw_fused`: peaks beside the least that the stage can
hold, the optimizer's phase and the whole step, one rank alone.
"""
HOW_TIMED = """
`python -m runners.bench_engines recorded/matrices/same_run.json OUT` runs each plan four times on one
GPU, ours, FSDP2, FSDP2, ours, each in a fresh process with at least 10 timed steps; the medians are over
both turns. **busy** is how long the GPU ran anything in a step (from a trace of one step more), **idle**
the rest: it waits for launches, for the host. **host** is how long the host took to start a step; where
the GPU is behind, it waits for room in the queue, and this is a bound. Alone (`solo`), local copies stand in
for gathers and reductions.
"""
HOW_REAL = """
World `nccl`, one process per GPU, beside the same plan in `solo` (alone); rank 0, sizes in GiB.
**exposed** is how long only collectives ran in a traced step, on the rank where that was least: what a
step waits for. A collective's time is that of its NCCL kernels, each call's on the rank that came last
(where calls were kept apart; else a rank's sum, *with waits* for the other); GB/s are bus bandwidth.
**losses**: the largest difference of a step's loss from our engine's at the lowest stage that ran, over the
steps that both measured (attention's backward adds up in no fixed order). FSDP2 begins with fp32 numbers that ours rounds to bf16:
from the rounded ones it trains alike, bit by bit (tests/runners/engines/test_mixed_alike.py). Steps of the
two smaller models wait for the host, which takes a tenth more or less from run to run: engines are
compared in turns, above.
"""
HOW_ALIKE = """, tiny models, deterministic kernels, sums of two.
Bit by bit: all ranks' losses, what was reduced, the parameters at the end. One rank has two micro-batches for two's
one; FSDP2, where it is among them, begins with numbers that bf16 holds, to which the others round.
"""


def recorded_rows(root: Path) -> list[RecordedRow]:
    """Return the rows of every file, in the order of their names."""
    return [row for path in sorted((root / "recorded").glob("*.jsonl")) for row in read_file(path)]


def gather(root: Path, report: AccuracyReport | None = None) -> dict[str, list[Point]]:
    """Predict for the rows that are shown; `report` spares it where all rows were predicted."""
    return stage_points(recorded_rows(root), report)


def render(groups: Mapping[str, Sequence[Point]], rows: Sequence[RecordedRow]) -> str:
    """Return the document; the same rows always give the same text."""
    pairs = same_run_pairs((row.spec, row.measured) for row in rows)
    failed = out_of_memory_places(rows)
    peaks = {
        title: peak_lines(points, WORLD_SIZES, failed.get(title, ()))
        for title, points in groups.items()
    }
    parts = [HEAD.rstrip("\n"), *_summary(groups, peaks, pairs)]
    for title, points in groups.items():
        parts += _group(title, points, peaks[title], pairs)
    parts += _timed(pairs)
    parts += _real(real_runs(rows))
    parts += _bandwidth(rows)
    parts += _alike(ROOT / "recorded" / "equality")
    parts += _saved(rows)
    parts += _offloaded(rows)
    parts += _own_kernel(rows)
    parts += _deepspeed(groups)
    return "\n".join(parts) + "\n"


def _summary(
    groups: Mapping[str, Sequence[Point]],
    peaks: Mapping[str, Sequence[PeakLine]],
    timed: Sequence[SameRunPair],
) -> Iterator[str]:
    points = [point for found in groups.values() for point in found]
    yield "\n## In short\n"
    yield f"Measured steps: {len(points)}. Models with their workloads: {len(groups)}."
    yield f"{_cells_in_short(count_cells(peaks))}\n"
    counted = [point for point in points if point.counted or not point.formula()]
    equal = sum(point.counted == point.formula() for point in counted)
    early = len(points) - len(counted)
    more = f"; {early} of DeepSpeed ran before it was counted" if early else ""
    yield (
        f"- Communication: of {len(counted)} runs that were counted, {equal} equal the formula to the "
        f"byte{more}."
    )
    ours = [point for point in points if point.plan.parallelism.engine is Engine.PEAKMARK]
    if ours:
        far = [point.above_percent for point in ours]
        yield (
            f"- Our engine above the ideal: median {format_signed(median(far), 2)}, most {format_signed(max(far), 2)} "
            f"({len(ours)} runs)."
        )
        if max(far) > TOLD_PERCENT:
            yield WHY_ABOVE.lstrip("\n")
    yield from _against_peers(groups)
    yield from _timed_in_short(timed)


def _cells_in_short(counts: Mapping[Known, int]) -> str:
    failed, too_much = counts[Known.OUT_OF_MEMORY], counts[Known.DOES_NOT_FIT]
    left = [
        f"{number} {words}"
        for number, words in (
            (counts[Known.ANOTHER_NUMBER], "are measured at other numbers of ranks (stage 0)"),
            (failed, "ran out of memory"),
            (too_much, "do not fit into the GPU (predicted)"),
            (counts[Known.PREDICTED], "would fit and are not measured"),
        )
        if number
    ]
    return (
        f"Of {sum(counts.values())} cells of their tables of peaks {counts[Known.MEASURED]} are "
        f"measured; {', '.join(left) or 'none is left'}."
    )


def _against_peers(groups: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    pairs = [pair for points in groups.values() for pair in engine_pairs(points)]
    if not pairs:
        return
    lower = sum(pair.ratio <= 1 for pair in pairs)
    yield f"- Our peak is at or below a peer's at the same plan, to the byte, in {lower} of {len(pairs)} pairs."
    highest = max(pairs, key=lambda pair: pair.ratio)
    if highest.ratio > 1:
        why = WHY_HIGHER.rstrip() if highest.ratio <= 1 + SAME_PEAK else "."
        over = format_signed(100 * (highest.ratio - 1), 2)
        yield f"  The most it is above one is {over} ({_named(highest.peer)}){why}"
    yield from _reserved(pairs)


def _reserved(pairs: Sequence[Pair]) -> Iterator[str]:
    """Compare what segments take; say of the pair in which ours take most more than the peer's why."""
    known = [(ratio, n) for n, pair in enumerate(pairs) if (ratio := pair.reserved_ratio)]
    lower = sum(ratio <= 1 for ratio, _ in known)
    yield (
        "- Reserved memory, segments with what lies free in them: ours is at or below the peer's in "
        f"{lower} of {len(known)} pairs."
    )
    if lower < len(known):
        worst = pairs[max(known)[1]]
        both = (worst.own, worst.peer)
        ours, theirs = (_gib(reserved_bytes(point)) for point in both)
        grown = [_gib(expandable_bytes(point.plan)) for point in both]
        yield (
            f"  The most it is above: {ours} against {theirs} GiB ({_named(worst.peer)}); with "
            f"expandable segments {grown[0]} against {grown[1]} (predicted){WHY_RESERVED.rstrip()}"
        )


def _named(point: Point) -> str:
    spread = point.plan.parallelism
    place = f"{spread.engine} {spread.zero_stage} x {spread.world_size}"
    return f"{place}, {work_title(point.plan)}"


def _timed_in_short(timed: Sequence[SameRunPair]) -> Iterator[str]:
    if not timed:
        return
    ratios = [pair.ratio for pair in timed]
    faster = sum(ratio <= 1.0 for ratio in ratios)
    busy = [ratio for pair in timed if (ratio := pair.busy_ratio) is not None]
    alone = f"; of the GPU's busy time alone {geometric_mean(busy):.3f}" if busy else ""
    yield (
        f"- Step time, ours / FSDP2 in turns on one GPU in one run: geometric mean "
        f"{geometric_mean(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}, at or below 1.00 in "
        f"{faster} of {len(ratios)} pairs{alone}."
    )


def _time_ratio(peer: Point, timed: Sequence[SameRunPair]) -> float | None:
    """Step time of the peer over ours, from the newest run that timed both in turns."""
    work = work_of(peer.row.spec["plan"])[0]
    spread = peer.plan.parallelism
    place = (str(spread.engine), spread.zero_stage, spread.world_size)
    found = [p for p in timed if p.place == place and work_of(p.plan)[0] == work]
    return 1 / found[-1].ratio if found and peer.row.spec["world"] == "solo" else None


def _group(
    title: str,
    points: Sequence[Point],
    peaks: Sequence[PeakLine],
    timed: Sequence[SameRunPair],
) -> Iterator[str]:
    model = points[0].plan.model
    yield f"\n## {title}\n"
    yield f"{format_count(model.parameters)} parameters, {model.num_layers} layers.\n"
    yield from _peaks(points, peaks)
    yield (
        "\n| engine | stage | N | measured | predicted | error | after step | ideal | above "
        "| parameters | gradients | states | gathered | activations | logits | rest | sent |"
    )
    yield "|---|--:|--:|" + "--:|" * 13 + "--:|"
    for point in points:
        yield _line(point)
    yield from _side_by_side(points, timed)


def _peaks(points: Sequence[Point], lines: Sequence[PeakLine]) -> Iterator[str]:
    """Tabulate peaks by number of ranks: the ideal of each stage, then its engines."""
    yield HOW_PEAKS.lstrip("\n")
    yield f"| stage | engine | {' | '.join(f'{number:,}' for number in WORLD_SIZES)} |"
    yield "|--:|---|" + "--:|" * len(WORLD_SIZES)
    for stage, found in groupby(lines, key=lambda line: line.stage):
        sizes = ideals_by_ranks(points[0], stage, WORLD_SIZES)
        yield f"| {stage} | ideal | {' | '.join(map(_gib, sizes))} |"
        for line in found:
            yield f"| {stage} | {line.engine} | {' | '.join(map(_cell, line.cells))} |"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    size = _gib(cell.size_bytes)
    return {
        Known.MEASURED: f"**{size}**",
        Known.ANOTHER_NUMBER: f"*{size}*",
        Known.OUT_OF_MEMORY: f"**out of memory** ({size})",
        Known.DOES_NOT_FIT: f"too much ({size})",
        Known.PREDICTED: f"({size})",
    }[cell.known]


def _line(point: Point) -> str:
    spread, parts = point.plan.parallelism, point.parts
    world = point.row.spec["world"]
    name = str(spread.engine) if world == "solo" else f"{spread.engine} ({world})"
    after = (point.row.measured.get("phases") or {}).get("after_step_bytes")
    error = 100 * (point.predicted_bytes / point.measured_bytes - 1)
    cells = (
        name,
        str(spread.zero_stage),
        f"{spread.world_size:,}",
        _gib(point.measured_bytes),
        _gib(point.predicted_bytes),
        format_signed(error, 2),
        _gib(after) if after else "-",
        _gib(point.ideal_bytes),
        format_signed(point.above_percent, 1),
        *(_gib(parts[key]) for key in ("parameters", "gradients", "optimizer", "gathered")),
        _gib(parts["activations"] + parts["attention"]),
        _gib(parts["logits"]),
        _gib(parts["other"]),
        _sent(point),
    )
    return f"| {' | '.join(cells)} |"


def _sent(point: Point) -> str:
    counted, formula = point.counted, point.formula()
    if not counted:
        return "none" if not formula else "not counted"
    whole = sum((2 if name == "all_reduce" else 1) * size for name, (_, size) in counted.items())
    return f"{_gib(whole)} {'=' if counted == formula else 'differs'}"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB_BYTES:.2f}"


def _side_by_side(points: Sequence[Point], timed: Sequence[SameRunPair]) -> Iterator[str]:
    pairs = engine_pairs(points)
    if not pairs:
        return
    yield "\nPeers beside our engine at the same stage and N: peak, and step time in the same run.\n"
    yield "| stage | N | peer | peer's peak / ours | peer's time / ours |\n|--:|--:|---|--:|--:|"
    for pair in sorted(pairs, key=lambda pair: (pair.peer.place[1:], pair.peer.place[0])):
        peer = pair.peer
        spread, time = peer.plan.parallelism, _time_ratio(peer, timed)
        world = "" if peer.row.spec["world"] == "solo" else f" ({peer.row.spec['world']})"
        yield (
            f"| {spread.zero_stage} | {spread.world_size:,} | {spread.engine}{world} "
            f"| {1 / pair.ratio:.3f} | {f'{time:.3f}' if time else '-'} |"
        )


def _timed(timed: Sequence[SameRunPair]) -> Iterator[str]:
    """Tabulate the pairs timed in turns, in milliseconds."""
    if not timed:
        return
    yield "\n## Step time in the same run"
    yield HOW_TIMED
    yield (
        "| model | checkpointing | stage | N | ours | FSDP2 | ours / FSDP2 | busy: ours | FSDP2 "
        "| ours / FSDP2 | idle: ours | FSDP2 | host: ours | FSDP2 |"
    )
    yield "|---|---|--:|--:|" + "--:|" * 10
    for pair in timed:
        cells = pair.to_dict()
        busy = (*_ms_of(cells, "busy"), _ratio_cell(pair.busy_ratio))
        figures = (
            *(f"{cells['ours_ms']:.1f}", f"{cells['peer_ms']:.1f}", f"{pair.ratio:.3f}"),
            *(*busy, *_ms_of(cells, "idle"), *_ms_of(cells, "host")),
        )
        name = str(cells["model"]).rsplit("/", 1)[-1]
        place = (name, cells["checkpointing"], str(cells["stage"]), f"{cells['ranks']:,}")
        yield f"| {' | '.join((*place, *figures))} |"


def _ms_of(cells: Mapping[str, Any], figure: str) -> tuple[str, ...]:
    values = (cells[f"{side}_{figure}_ms"] for side in ("ours", "peer"))
    return tuple("-" if value is None else f"{value:.1f}" for value in values)


def _ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _real(runs: Sequence[RealRun]) -> Iterator[str]:
    """Tabulate runs over NCCL beside the same plan alone."""
    if not runs:
        return
    yield "\n## Real ranks beside one alone"
    yield HOW_REAL
    apart = [run.ranks_apart_bytes for run in runs]
    yield (
        f"Allocated, reserved and device bytes of all ranks are equal in {apart.count(0)} of {len(runs)} "
        f"runs, and at most {max(apart) / MIB_BYTES:.1f} MiB apart."
    )
    yield from _plain_table(list(map(real_line, runs)))


def _alike(directory: Path) -> Iterator[str]:
    """Tabulate trainings that were compared value by value (tests/runners/zero/numerics_main.py)."""
    for path in sorted(directory.glob("*.jsonl")):
        first, *compared = map(json.loads, path.read_text().splitlines())
        title, where = alike_place(first["environment"])
        yield f"\n## Alike value by value over {title}\n"
        yield where + HOW_ALIKE.rstrip("\n")
        yield from _plain_table(alike_lines(compared))


def _bandwidth(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Tabulate what links carried by size, as `calibrate` measured it between GPUs."""
    for row in (row for row in rows if row.kind is Kind.CALIBRATE):
        lines = bandwidth_lines(map(Curve.from_dict, row.measured["curves"]))
        if lines:
            yield f"\n## Collectives by size, {row.spec['calibration']['world_size']} GPUs"
            yield from _plain_table(lines)


def _saved(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Tabulate runs that saved their training, or went on from a saved one."""
    lines = saved_lines((row.spec, row.measured) for row in rows)
    if lines:
        yield "\n## Saved by some ranks, continued by others"
        yield from _plain_table(lines)


def _plain_table(lines: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield f"\n| {' | '.join(lines[0])} |\n|{'---|' * len(lines[0])}"
    for line in lines:
        yield f"| {' | '.join(line.values())} |"


def _offloaded(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Tabulate runs whose optimizer was in host memory beside the same plans with it on the device."""
    lines = offloaded_lines(_in_time(rows))
    if lines:
        yield "\n## The optimizer in host memory"
        yield HOW_OFFLOADED.rstrip("\n")
        yield from _plain_table(lines)
        if any(CROWDED in line["step ms"] for line in lines):
            yield WHY_CROWDED.rstrip("\n")


def _in_time(rows: Sequence[RecordedRow]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    ordered = sorted(rows, key=lambda row: row.recorded_at)
    return [(row.spec, row.measured) for row in ordered]


def _own_kernel(rows: Sequence[RecordedRow]) -> Iterator[str]:
    """Tabulate runs that our AdamW kernel stepped, beside torch's."""
    lines = kernel_lines(_in_time(rows))
    if lines:
        yield "\n## Our AdamW kernel"
        yield HOW_OWN_KERNEL.rstrip("\n")
        yield from _plain_table(lines)


def _deepspeed(groups: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    """Name the plans in which DeepSpeed's stage 3 peaks above its own stage 2, and why."""
    found = []
    for title, points in groups.items():
        own = {p.place[1:]: p for p in points if p.plan.parallelism.engine is Engine.DEEPSPEED}
        for (stage, ranks), three in own.items():
            two = own.get((2, ranks))
            if stage == 3 and two is not None and three.measured_bytes > two.measured_bytes:
                found.append((title, ranks, two, three))
    if not found:
        return
    yield "\n## DeepSpeed's stage 3 above its own stage 2\n"
    yield "| plan | N | stage 2 | stage 3 | gathered | kept for gradients | saved parameters |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for title, ranks, two, three in found:
        saved = two.parts["parameters"] - three.parts["parameters"]
        yield (
            f"| {title} | {ranks:,} | {_gib(two.measured_bytes)} | {_gib(three.measured_bytes)} "
            f"| {_gib(three.parts['gathered'])} | {_gib(three.parts['gradients'])} | {_gib(saved)} |"
        )
    yield WHY_DEEPSPEED_3.rstrip("\n")


def main() -> None:
    """Write the document of this repository."""
    DOCUMENT.write_text(render(gather(ROOT), recorded_rows(ROOT)))


if __name__ == "__main__":
    main()
