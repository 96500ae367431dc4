"""What others measured of serving engines: weights, cache bytes per token and what the cache holds.

The file (recorded/public/serving.json) holds `cases`, `not_planned` and `left_out` as
`public_cases` does. A case names a model, how it is split and stored, and what the engine printed.
The engine's own bytes (activations, NCCL, graphs) are taken from the report: they belong to its
version, and what is compared is the cache that they leave.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.config_input import spec_from_config
from planner.memory.parallel import stage_specs
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.serving.memory import kv_bytes_per_token, serving_memory
from planner.workload import KvDtype, Parallelism, ServingWorkload, WeightsDtype

OUTCOMES = ("ran", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCase:
    """One published engine start: what it was given and what it printed, bytes per GPU.

    `overhead_bytes` is what the engine counted beside weights and cache; without it or without
    `visible_bytes` and `utilization` no pool is predicted. Of a pipeline the first stage is meant.
    """

    id: str
    report: str
    source: str
    label: str
    model: Mapping[str, Any] = field(hash=False)
    weights_dtype: WeightsDtype
    kv_dtype: KvDtype
    tensor_parallel: int
    pipeline_parallel: int
    context_length: int
    visible_bytes: int | None
    utilization: float | None
    overhead_bytes: int | None
    weights_bytes: int | None
    token_bytes: int | None
    pool_bytes: int | None
    tokens: int | None
    outcome: str | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """Today's prediction for a case; `pool_bytes` is negative where weights leave nothing."""

    case: ServingCase
    weights_bytes: int
    token_bytes: int
    pool_bytes: int | None

    @property
    def tokens(self) -> int | None:
        """Cached tokens that the predicted pool holds, at the bytes of a token in full attention."""
        return None if self.pool_bytes is None else max(0, self.pool_bytes // self.token_bytes)

    @property
    def weights_percent(self) -> float | None:
        """Signed error of the weights."""
        return _percent(self.weights_bytes, self.case.weights_bytes)

    @property
    def capacity_percent(self) -> float | None:
        """Signed error of the tokens that fit, or of the pool's bytes where no tokens are printed."""
        if self.case.tokens is not None:
            return _percent(self.tokens, self.case.tokens)
        return _percent(self.pool_bytes, self.case.pool_bytes)

    @property
    def outcome(self) -> str | None:
        """Whether one request of the case's length fits the predicted pool."""
        if self.tokens is None:
            return None
        return "ran" if self.tokens >= self.case.context_length else "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCases:
    """The cases of a file, and the reports that no case was made of, with the reasons."""

    cases: tuple[ServingCase, ...]
    not_planned: Mapping[str, str] = field(hash=False)
    left_out: Mapping[str, tuple[str, ...]] = field(hash=False)

    @property
    def num_reports(self) -> int:
        """How many reports gave at least one case."""
        return len({case.report for case in self.cases})

    def answers(self) -> Iterator[ServingAnswer]:
        """Predict for each case."""
        return (answer(case) for case in self.cases)


def answer(case: ServingCase) -> ServingAnswer:
    """Predict a case: the weights that its GPU holds, a token's cache, and the pool that is left.

    pool = utilization x visible - weights - what the engine counted beside them.
    """
    part = _first_part(case)
    visible_bytes = case.visible_bytes or 0
    workload = ServingWorkload(weights_dtype=case.weights_dtype, kv_dtype=case.kv_dtype)
    weights_bytes = serving_memory(part, workload, visible_bytes).weights_bytes
    pool_bytes = None
    if case.utilization is not None and case.overhead_bytes is not None:
        left_bytes = int(case.utilization * visible_bytes) - weights_bytes
        pool_bytes = left_bytes - case.overhead_bytes
    return ServingAnswer(
        case=case,
        weights_bytes=weights_bytes,
        token_bytes=kv_bytes_per_token(part, case.kv_dtype),
        pool_bytes=pool_bytes,
    )


def _first_part(case: ServingCase) -> ModelSpec:
    """The first GPU's part of the model: key-value heads are repeated beyond their number."""
    source = case.model
    if "preset" in source:
        spec = resolve_model(source["preset"])
    else:
        spec = spec_from_config(source["config"], name=source["name"])
    split = Parallelism(
        zero_stage=0,
        world_size=1,
        tensor_parallel=case.tensor_parallel,
        pipeline_parallel=case.pipeline_parallel,
    )
    return stage_specs(spec, split)[0]


def _percent(predicted: int | None, reported: int | None) -> float | None:
    if predicted is None or reported is None:
        return None
    return 100 * (predicted - reported) / reported


def read_serving_cases(path: Path) -> ServingCases:
    """Read a file of serving cases; raises ValueError naming a case that says nothing measured."""
    data = json.loads(path.read_text())
    return ServingCases(
        cases=tuple(_case(row) for row in data["cases"]),
        not_planned=data["not_planned"],
        left_out={reason: tuple(ids) for reason, ids in data["left_out"].items()},
    )


_OPTIONAL = (
    *("visible_bytes", "utilization", "overhead_bytes"),
    *("weights_bytes", "token_bytes", "pool_bytes", "tokens", "outcome"),
)


def _case(row: Mapping[str, Any]) -> ServingCase:
    seen = [row.get(name) for name in ("weights_bytes", "token_bytes", "pool_bytes", "tokens")]
    outcome = row.get("outcome")
    if outcome not in (None, *OUTCOMES) or not (outcome or any(value for value in seen)):
        raise ValueError(f"serving case {row['id']}: nothing measured, or no such outcome")
    fields: dict[str, Any] = {name: row.get(name) for name in _OPTIONAL}
    fields |= {name: row[name] for name in ("id", "report", "source", "label", "model", "note")}
    return ServingCase(
        **fields,
        weights_dtype=WeightsDtype(row.get("weights_dtype", "bf16")),
        kv_dtype=KvDtype(row.get("kv_dtype", "bf16")),
        tensor_parallel=row.get("tensor_parallel", 1),
        pipeline_parallel=row.get("pipeline_parallel", 1),
        context_length=row.get("context_length", 1),
    )
