"""Measure how fast the planner answers: one plan, and a grid of 100,000 plans.

Run as `python -m planner.bench`. Three steps of a 32-layer model ask the allocator 23,000 times.
Nothing of that can be left out without another result: the layers of a step differ in the blocks
they find, though not in what they ask for. It is served by compiled code; a process serves its first
few plans as Python runs the same code, which is sooner done than to load it. No two plans of the
bench are the same, for one seen before is not replayed again. What a step asks for is recorded for a
model, an engine and its ranks, whatever the batch and the length: the bench has plans of both sorts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from planner.memory.recorder import how_served, load_compiled
from planner.memory.training import plan_segment_share
from planner.plan import default_plan, parse_plan
from planner.predict import predict
from planner.search import grid
from planner.workload import TrainingWorkload

REPEATS = 200
INTERPRETED_REPEATS = 2
GRID_REPEATS = 3


def median_s(action: Callable[[], Any], repeats: int) -> float:
    """Return the median wall time of `action` after one warm call."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Print the median time of a plan, from its JSON to its prediction's JSON, and of the grid."""
    plan = default_plan()
    document = plan.to_dict()
    assert isinstance(plan.workload, TrainingWorkload)
    share = plan_segment_share(plan.model, plan.workload, plan.parallelism, plan.hardware)

    lengths, ranks = count(plan.workload.sequence_length), count(plan.parallelism.world_size)

    def run_plan(segment_share: float | None, world_size: int | None = None) -> None:
        length = next(lengths)
        sizes = {"sequence_length": length, "micro_batch": 1 + length % 2}
        spread = {} if world_size is None else {"world_size": world_size}
        other = {
            **document,
            "workload": {**document["workload"], **sizes},
            "parallelism": {**document["parallelism"], **spread},
        }
        predict(parse_plan(other), segment_share=segment_share).to_dict()

    interpreted_s = median_s(lambda: run_plan(None), INTERPRETED_REPEATS)
    start = time.perf_counter()
    load_compiled()
    loaded_s = time.perf_counter() - start
    plan_s = median_s(lambda: run_plan(share), REPEATS)
    replayed_s = median_s(lambda: run_plan(None), REPEATS)
    recorded_s = median_s(lambda: run_plan(None, next(ranks)), REPEATS)

    def run_grid() -> int:
        return grid(
            plan,
            zero_stages=(0, 1, 2, 3),
            world_sizes=tuple(range(1, 26)),
            micro_batches=tuple(range(1, 21)),
            sequence_lengths=tuple(range(256, 256 * 51, 256)),
        ).size

    grid_s = median_s(run_grid, GRID_REPEATS)
    print(f"one plan, its allocator replayed: {replayed_s * 1e3:.2f} ms (median of {REPEATS})")
    print(f"for ranks that were not recorded: {recorded_s * 1e3:.2f} ms (median of {REPEATS})")
    print(f"by formulas alone: {plan_s * 1e3:.2f} ms (median of {REPEATS})")
    print(f"replayed before compiled code is loaded: {interpreted_s * 1e3:.1f} ms")
    print(f"requests are {how_served()}")
    print(f"compiled code is loaded in {loaded_s:.1f} s (once per machine it is compiled)")
    print(f"{run_grid():,} plans: {grid_s:.3f} s (median of {GRID_REPEATS})")


if __name__ == "__main__":
    main()
