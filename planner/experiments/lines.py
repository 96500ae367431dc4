"""One line per thing that a run measured: its variables, its figures, where it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanError
from planner.experiments.variables import (
    KINDS,
    MODEL_DIMENSIONS,
    Kind,
    Variables,
    attention_variants,
    base_variables,
    spec_variables,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A quantity that runs measure: its unit ("s", "bytes", "per_s" or "ratio"), and which way is better."""

    name: str
    unit: str
    lower_is_better: bool = True


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(name="step time", unit="s"),
        Figure(name="tokens per second", unit="per_s", lower_is_better=False),
        Figure(name="allocated", unit="bytes"),
        Figure(name="reserved", unit="bytes"),
        Figure(name="device", unit="bytes"),
        Figure(name="host memory", unit="bytes"),
        Figure(name="forward time", unit="s"),
        Figure(name="backward time", unit="s"),
        Figure(name="optimizer time", unit="s"),
        Figure(name="prefill time", unit="s"),
        Figure(name="duration", unit="s"),
        Figure(name="time to first token, p50", unit="s"),
        Figure(name="time to first token, p99", unit="s"),
        Figure(name="time per token, p50", unit="s"),
        Figure(name="time per token, p99", unit="s"),
        Figure(name="cache", unit="bytes"),
        Figure(name="forward peak", unit="bytes"),
        Figure(name="saved for the backward", unit="bytes"),
        Figure(name="backward peak", unit="bytes"),
        Figure(name="error of the output", unit="ratio"),
    )
}
# Where a run's result keeps each figure.
_PATHS: Mapping[str, tuple[str, ...]] = {
    "step time": ("step_time_s",),
    "tokens per second": ("tokens_per_s",),
    "allocated": ("allocated_bytes",),
    "reserved": ("reserved_bytes",),
    "device": ("device_bytes",),
    "host memory": ("host_bytes",),
    "forward time": ("forward_time_s",),
    "backward time": ("backward_time_s",),
    "optimizer time": ("optimizer_time_s",),
    "prefill time": ("prefill_time_s",),
    "duration": ("duration_s",),
    "time to first token, p50": ("latency", "ttft_s", "p50"),
    "time to first token, p99": ("latency", "ttft_s", "p99"),
    "time per token, p50": ("latency", "tpot_s", "p50"),
    "time per token, p99": ("latency", "tpot_s", "p99"),
    "cache": ("cache_bytes",),
}
_PEER_PATHS = {
    **{name: _PATHS[name] for name in ("tokens per second", "prefill time")},
    "step time": ("decode_time_s",),
    "allocated": ("peak_allocated_bytes",),
}
_ATTENTION_PATHS: Mapping[str, tuple[str, ...]] = {
    "forward time": ("forward", "median_s"),
    "backward time": ("backward", "median_s"),
    "forward peak": ("forward_peak_bytes",),
    "saved for the backward": ("saved_bytes",),
    "backward peak": ("backward_peak_bytes",),
    "error of the output": ("error", "output", "relative"),
}
# What a peer of a decode run chooses for itself: ours says nothing of it.
_OURS_ALONE = ("attention", "cache layout", "page size", "fused kernels", "CUDA graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """A run as the database knows it; `measured` and `environment` are empty until it has ended."""

    id: str
    spec: Mapping[str, Any] = field(hash=False)
    outcome: str
    measured: Mapping[str, Any] = field(hash=False)
    environment: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of an experiment: a run, or one variant of attention or peer that a run measured.

    `problem` says why `variables` are few: this version cannot read the run's spec.
    """

    run: SeenRun = field(hash=False)
    part: str
    variables: Mapping[str, Any] = field(hash=False)
    figures: Mapping[str, float] = field(hash=False)
    outcome: str
    problem: str | None = None


def lines_of(run: SeenRun) -> list[Line]:
    """Return the lines of a run: one for each variant of an attention run and each peer."""
    try:
        if run.spec.get("kind") == "attention":
            return list(_attention_lines(run))
        own = spec_variables(run.spec)
    except PlanError as error:
        return [_line(run, "", base_variables(run.spec), _PATHS, run.measured, str(error))]
    own["attention that ran"] = run.measured.get("attention_backend")
    return [_line(run, "", own, _PATHS, run.measured), *_peer_lines(run, own)]


def _attention_lines(run: SeenRun) -> Iterator[Line]:
    base, kernels = base_variables(run.spec), run.measured.get("kernels") or {}
    for variant, chosen in attention_variants(run.spec).items():
        seen = kernels.get(variant, {})
        backend = seen.get("backend") or {}
        ran = " / ".join(dict.fromkeys(str(one) for one in backend.values() if one))
        values = {**base, **chosen, "attention that ran": ran or None}
        yield _line(run, variant, values, _ATTENTION_PATHS, seen)


def _peer_lines(run: SeenRun, own: Variables) -> Iterator[Line]:
    if run.spec.get("kind") != "decode":
        return
    for name, seen in (run.measured.get("peers") or {}).items():
        values = {key: None if key in _OURS_ALONE else value for key, value in own.items()}
        values |= {"engine": f"transformers {name}".replace("_", " ")}
        values |= {"cache dtype": own["weights dtype"], "attention that ran": None}
        yield _line(run, f"transformers {name}".replace("_", " "), values, _PEER_PATHS, seen)


def _line(
    run: SeenRun,
    part: str,
    variables: Variables,
    paths: Mapping[str, tuple[str, ...]],
    seen: Mapping[str, Any],
    problem: str | None = None,
) -> Line:
    found = {name: _number(seen, path) for name, path in paths.items()}
    return Line(
        run=run,
        part=part,
        variables={name: variables[name] for name in KINDS if variables.get(name) is not None},
        figures={name: value for name, value in found.items() if value is not None},
        outcome=str(seen.get("outcome", run.outcome)) if part else run.outcome,
        problem=problem,
    )


def _number(seen: Mapping[str, Any], path: tuple[str, ...]) -> float | None:
    value: Any = seen
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def columns(lines: list[Line], *, only_varying: bool = True) -> list[tuple[str, Kind]]:
    """Return the columns of lines in their order, each with its kind: those that vary, or all.

    A dimension that varies only with the model's name goes without saying, as does a variable that
    has one value where there is any.
    """
    names = [name for name in KINDS if any(name in line.variables for line in lines)]
    if only_varying:
        names = [name for name in names if _varies(lines, name)]
    return [(name, KINDS[name]) for name in names]


def _varies(lines: list[Line], name: str) -> bool:
    values: dict[str, set[str]] = {}
    for line in lines:
        model = str(line.variables.get("model")) if name in MODEL_DIMENSIONS else ""
        if name in line.variables:
            values.setdefault(model, set()).add(str(line.variables[name]))
    return any(len(own) > 1 for own in values.values())
