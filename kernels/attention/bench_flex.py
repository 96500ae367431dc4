"""Time the portable attention beside FlexAttention over a grid: `python -m kernels.attention.bench_flex`.

The shapes are those of `bench` up to S = 16k: D = 64 and 128, all heads alike and grouped, full and
causal, forward and backward. FlexAttention is compiled for each shape (static, fullgraph), which
takes far longer than timing it: several processes with `--compile-share K/N` compile a part of the
grid each and time nothing, and one process after them finds the code in torch's cache. Cases whose
rows are in the file already are passed over.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.attention import bench
from kernels.attention.bench import Case, figures_of, geometric_mean, make_inputs
from kernels.attention.bench_masks import (
    MAX_DIFFERENCE,
    Attend,
    difference,
    prepare_flex,
    results,
    timed,
)
from kernels.attention.dispatch import Backend, Direction, forced_backend
from kernels.attention.triton import flash_attention
from kernels.timing import Report, require, times_in_turns

# The middle of the range first: a run that is cut off has spread rows.
SEQUENCES = (8192, 2048, 16384, 4096)
CASE_FIELDS = tuple(field.name for field in fields(Case))


def cases() -> Iterator[Case]:
    """Yield the shapes of `bench` with up to 16,384 tokens, by length as in SEQUENCES."""
    for seq in SEQUENCES:
        yield from (case for case in bench.cases() if case.seq == seq)


def ours(case: Case) -> Attend:
    """Return our attention for a case."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=case.causal)

    return attend


def flex(case: Case) -> Attend:
    """Return compiled FlexAttention for a case, its block mask made beforehand."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j <= i

    made = create_block_mask(causal, None, None, case.seq, case.seq) if case.causal else None
    grouped = case.heads != case.kv_heads

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q, k, v, block_mask=made, enable_gqa=grouped)

    compiled: Attend = torch.compile(attend, dynamic=False, fullgraph=True)
    return compiled


def checked(case: Case, inputs: list[Tensor]) -> dict[str, Attend]:
    """Return both after a forward and a backward of each.

    Raises RuntimeError where their results differ.
    """
    calls = {"ours": ours(case), "flex": flex(case)}
    with forced_backend(Backend.TRITON):
        found = [results(attend, inputs, list(Direction)) for attend in calls.values()]
    require("ours, by FlexAttention's result,", difference(*found), MAX_DIFFERENCE)
    return calls


def compare(report: Report, case: Case) -> dict[Direction, float]:
    """Add a row for each direction; return FlexAttention's times over ours."""
    inputs = make_inputs(case)
    calls, ratios = checked(case, inputs), {}
    for direction in Direction:
        chosen = {n: timed(f, inputs, direction, Backend.TRITON) for n, f in calls.items()}
        times = times_in_turns(chosen)
        figures = figures_of(case, direction, times["ours"], times["flex"])
        named = {"backend": Backend.TRITON.value, "peer": "FlexAttention"}
        report.add(asdict(case), direction=direction.value, **named, **figures)
        ratios[direction] = figures["ratio"]
    return ratios


def share_of(text: str) -> tuple[int, int]:
    """Read `K/N`, 0 <= K < N; raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; it must be K/N with K below N")
    return int(found[1]), int(found[2])


def compile_share(grid: Sequence[Case], share: tuple[int, int]) -> None:
    """Compile every N-th case from the K-th on, for the processes that come later."""
    for case in grid[share[0] :: share[1]]:
        started = time.monotonic()
        checked(case, make_inputs(case))
        print(f"compiled {case} in {time.monotonic() - started:.1f} s", flush=True)


def left_of(grid: Sequence[Case], path: Path | None) -> list[Case]:
    """Return the cases of which `path`, where it is there, holds no row in each direction."""
    if path is None or not path.exists():
        return list(grid)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    there = {
        (str(row["direction"]), *(row[name] for name in CASE_FIELDS))
        for row in rows
        if "ratio" in row
    }

    def is_there(case: Case) -> bool:
        of_case = tuple(getattr(case, name) for name in CASE_FIELDS)
        return all((direction.value, *of_case) in there for direction in Direction)

    return [case for case in grid if not is_there(case)]


def main() -> None:
    """Print a line for each row and write it as JSON; stop starting cases after `--seconds`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append one JSON object per row to this file")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case after this")
    parser.add_argument(
        "--compile-share", type=share_of, metavar="K/N", help="compile this part, time nothing"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: the benchmark times GPU kernels")
    prepare_flex()
    grid, started = left_of(list(cases()), arguments.json), time.monotonic()
    if arguments.compile_share:
        compile_share(grid, arguments.compile_share)
        return
    report = Report("attention_flex", arguments.json)
    ratios: dict[Direction, list[float]] = {direction: [] for direction in Direction}
    for case in grid:
        if time.monotonic() - started > arguments.seconds:
            print(f"no time left for {case}", flush=True)
            continue
        with report.surviving(asdict(case)):
            for direction, ratio in compare(report, case).items():
                ratios[direction].append(ratio)
    for direction, found in ratios.items():
        if found:
            mean, worst = geometric_mean(found), min(found)
            print(f"{direction}: {mean:.3f}x FlexAttention's speed, worst {worst:.3f}")


if __name__ == "__main__":
    main()
