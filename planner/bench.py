"""Measure how fast the planner answers: one plan, and a grid of 100,000 plans.

Run as `python -m planner.bench`. Without the replay of the allocator a plan takes about 2 ms. With
it, some 25: three steps of a 32-layer model ask the allocator 23,000 times, at about half a
microsecond each in pure Python. Nothing of that can be left out without another result: where the
third step begins as the second did it is not run, but mostly the second reserves more; and the
layers of a step differ in the blocks they find, though not in what they ask for. A plan seen before
is not replayed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from planner.memory.replay_engines import replay_training
from planner.memory.training import plan_segment_share
from planner.plan import default_plan, parse_plan
from planner.predict import predict
from planner.search import grid
from planner.workload import TrainingWorkload

REPEATS = 200
REPLAY_REPEATS = 20
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

    def run_plan(segment_share: float | None) -> None:
        replay_training.cache_clear()
        predict(parse_plan(document), segment_share=segment_share).to_dict()

    plan_s = median_s(lambda: run_plan(share), REPEATS)
    replayed_s = median_s(lambda: run_plan(None), REPLAY_REPEATS)
    known_s = median_s(lambda: predict(parse_plan(document)).to_dict(), REPEATS)

    def run_grid() -> int:
        return grid(
            plan,
            zero_stages=(0, 1, 2, 3),
            world_sizes=tuple(range(1, 26)),
            micro_batches=tuple(range(1, 21)),
            sequence_lengths=tuple(range(256, 256 * 51, 256)),
        ).size

    grid_s = median_s(run_grid, GRID_REPEATS)
    print(f"one plan: {plan_s * 1e3:.2f} ms (median of {REPEATS})")
    print(f"with the allocator replayed: {replayed_s * 1e3:.1f} ms (median of {REPLAY_REPEATS})")
    print(f"the same plan once more: {known_s * 1e3:.2f} ms (median of {REPEATS})")
    print(f"{run_grid():,} plans: {grid_s:.3f} s (median of {GRID_REPEATS})")


if __name__ == "__main__":
    main()
