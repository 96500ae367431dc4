"""Print the two constants of DeepSpeed's stage 3 that fit the rows set aside for them best.

python scripts/fit_stage3.py recorded/h200-*.jsonl

They are STAGE3_S of scripts/write_speed_rates.py: of a grid, the pair with the smallest mean error of
the step times of STAGE3_ROWS, which are no evidence for times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from write_speed_rates import STAGE3_ROWS

from planner.as_run import as_run
from planner.plan import Plan, parse_plan
from planner.speed.calibrated import rates_of
from planner.speed.step import training_step
from planner.workload import TrainingWorkload

_PARAMETER_S = np.arange(20, 101, 4) * 1e-5
_PIECE_S = np.arange(1, 9) * 1e-6


def rows_of(paths: Iterable[Path]) -> list[tuple[Plan, float]]:
    """Return plan and measured step time of each of STAGE3_ROWS."""
    found = []
    for path in paths:
        for line in path.read_text().splitlines():
            row: Mapping[str, Any] = json.loads(line)
            if row["id"] in STAGE3_ROWS:
                plan = as_run(parse_plan(row["spec"]["plan"]), row["environment"])
                found.append((plan, float(row["measured"]["step_time_s"])))
    return found


def mean_error(rows: Iterable[tuple[Plan, float]], stage3_s: Mapping[str, float]) -> float:
    """Return the mean absolute error of the step times, as a share."""
    errors = []
    for plan, measured_s in rows:
        workload, rates = plan.workload, rates_of(plan.hardware)
        assert isinstance(workload, TrainingWorkload)
        rates = replace(rates, host=replace(rates.host, stage3_s=stage3_s))
        is_alone = plan.parallelism.world_size > 1
        step = training_step(plan.model, workload, plan.parallelism, rates, alone=is_alone)
        errors.append(abs(float(step.step_time_s) / measured_s - 1))
    return sum(errors) / len(errors)


def main(paths: Iterable[Path]) -> None:
    """Print the best pair and its error."""
    rows = rows_of(paths)
    tried = [
        {"parameter": float(parameter_s), "piece": float(piece_s)}
        for parameter_s, piece_s in product(_PARAMETER_S, _PIECE_S)
    ]
    best = min(tried, key=lambda stage3_s: mean_error(rows, stage3_s))
    print(f"{best}: {100 * mean_error(rows, best):.1f} % over {len(rows)} rows")


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]))
