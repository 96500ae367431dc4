"""What others published about the speed of training, as plans beside what they saw.

recorded/public/training_speed.json holds `cases`: source, plan, either `tokens_per_s_per_gpu` or `step_time_s`
as it was published, and in `note` what the report did otherwise. The curves of an H200 stand behind
all of them, by the ratio of the sheets: nothing was fitted to any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.plan import parse_plan
from planner.throughput import Throughput, training_throughput
from planner.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSpeed:
    """One published speed: seconds of a step, and today's prediction of it."""

    id: str
    report: str
    source: str
    label: str
    note: str
    published_s: float
    predicted: Throughput = field(hash=False)

    @property
    def error_percent(self) -> float:
        """Signed error relative to what was published."""
        return 100 * (self.predicted.step_time_s / self.published_s - 1)


def public_speeds(path: Path) -> list[PublicSpeed]:
    """Read the cases of a file and predict each; raises PlanError for a plan that cannot be."""
    return [_speed(case) for case in json.loads(path.read_text())["cases"]]


def _speed(case: Mapping[str, Any]) -> PublicSpeed:
    plan = parse_plan(case["plan"])
    workload = plan.workload
    assert isinstance(workload, TrainingWorkload)
    found = training_throughput(plan.model, workload, plan.parallelism, plan.hardware)
    published_s = case.get("step_time_s")
    if published_s is None:
        tokens = workload.micro_batch * workload.sequence_length * workload.grad_accumulation
        published_s = tokens / case["tokens_per_s_per_gpu"]
    words = {name: case[name] for name in ("id", "report", "source", "label", "note")}
    return PublicSpeed(**words, published_s=published_s, predicted=found)
