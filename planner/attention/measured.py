"""What runs of the job `attention` and the kernels' benchmarks saw, matched to a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from planner.attention.problem import AttentionProblem, Variant, parse_job
from planner.errors import PlanError

# What a variant's figures depend on beside the problem's shape.
_PATTERN: Mapping[Variant, tuple[str, ...]] = {
    Variant.WINDOW: ("window",),
    Variant.GLOBAL_LOCAL: ("window", "global_tokens"),
    Variant.BLOCK_SPARSE: ("block", "block_stride"),
}
_SHAPE = ("heads", "kv_heads", "head_dim", "causal", "dtype")
_BYTES = ("forward_peak", "saved", "backward_peak")
# The benchmarks of kernels/attention hold this many tokens a call, in bf16, as many heads as make
# 2,048 columns where their rows do not say, and a window of 4,096.
_BENCH_TOKENS, _BENCH_COLUMNS, _BENCH_WINDOW = 32768, 2048, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One variant as it was measured; what was not measured is None.

    `*_bytes` are allocated, `*_requested_bytes` what tensors asked for, both beside Q, K, V and the
    upstream gradient. `error` is the output's error against float64 of the same function, norm over norm,
    `apart_from_exact` its distance from softmax attention, the same row by row and then the mean.
    `here`: a run of this database made it.
    """

    variant: Variant
    problem: AttentionProblem
    outcome: str
    gpu: str
    world: str
    here: bool
    row: str | None = None
    stage: str | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    forward_backend: str | None = None
    backward_backend: str | None = None
    forward_peak_bytes: int | None = None
    saved_bytes: int | None = None
    backward_peak_bytes: int | None = None
    forward_peak_requested_bytes: int | None = None
    saved_requested_bytes: int | None = None
    backward_peak_requested_bytes: int | None = None
    error: float | None = None
    apart_from_exact: float | None = None
    copy_bytes_s: float | None = None
    product_flop_s: float | None = None
    requested_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "variant": self.variant.value}

    def is_of(
        self, problem: AttentionProblem, *, any_length: bool = False, any_batch: bool = False
    ) -> bool:
        """Whether this was measured at `problem`, or at another length or batch of it."""
        names = [*_SHAPE, *_PATTERN.get(self.variant, ())]
        names += [] if any_length else ["sequence_length"]
        names += [] if any_batch else ["batch"]
        return all(getattr(self.problem, name) == getattr(problem, name) for name in names)


def seen_in_row(
    spec: Mapping[str, Any],
    measured: Mapping[str, Any],
    environment: Mapping[str, Any],
    *,
    row: str | None,
    here: bool,
) -> list[Seen]:
    """Return the variants that a stored run of the job `attention` measured, skipped ones not."""
    try:
        problem, _ = parse_job(spec.get("attention"))
    except PlanError:
        # A row of a version whose problems had other fields.
        return []
    gpu = str((environment.get("gpu") or {}).get("name") or "CPU")
    card = measured.get("card") or {}
    common: dict[str, Any] = {
        "problem": problem,
        "gpu": gpu,
        "world": str(spec.get("world")),
        "here": here,
        "row": row,
        "copy_bytes_s": card.get("copy_bytes_s"),
        "product_flop_s": card.get("product_flop_s"),
    }
    return [
        Seen(variant=Variant(name), **common, **_figures(found))
        for name, found in (measured.get("kernels") or {}).items()
        if name in set(Variant) and found["outcome"] != "skipped"
    ]


def _figures(found: Mapping[str, Any]) -> dict[str, Any]:
    backend = found.get("backend") or {}
    figures: dict[str, Any] = {
        "outcome": str(found["outcome"]),
        "stage": found.get("stage"),
        "error": (found.get("error", {}).get("output") or {}).get("relative"),
        "apart_from_exact": (found.get("apart_from_exact") or {}).get("mean_of_rows"),
        "requested_bytes": found.get("requested_bytes"),
    }
    for direction in ("forward", "backward"):
        figures[f"{direction}_s"] = (found.get(direction) or {}).get("median_s")
        figures[f"{direction}_backend"] = backend.get(direction)
    for name in _BYTES:
        figures[f"{name}_bytes"] = found.get(f"{name}_bytes")
        figures[f"{name}_requested_bytes"] = found.get(f"{name}_requested_bytes")
    return figures


def seen_in_benches(rows: Iterable[Mapping[str, Any]]) -> list[Seen]:
    """Return what rows of recorded/kernels/ say of ours, torch's and windowed attention.

    Forward and backward of a problem are rows of their own there.
    """
    found: dict[tuple[Variant, AttentionProblem], Seen] = {}
    for row in rows:
        for variant, seconds, backend in _benched(row):
            problem = _bench_problem(row)
            blank = Seen(
                variant=variant,
                problem=problem,
                outcome="done",
                gpu=str(row["device"]),
                world="nccl",
                here=False,
            )
            figures: dict[str, Any] = {
                f"{row['direction']}_s": seconds,
                f"{row['direction']}_backend": backend,
            }
            found[variant, problem] = replace(found.get((variant, problem), blank), **figures)
    return list(found.values())


def _benched(row: Mapping[str, Any]) -> Iterator[tuple[Variant, float, str]]:
    """Yield each variant of a row with its time and backend."""
    if "error" in row or row.get("direction") not in ("forward", "backward"):
        return
    if row.get("operation") == "attention":
        yield Variant.TRITON, row["ours_s"], row["backend"]
        yield Variant.SDPA, row["peer_s"], row["peer"]
    elif row.get("operation") == "attention_masks" and row.get("mask") == "window 4k":
        yield Variant.WINDOW, row["ours_s"], row.get("backend", "triton")


def _bench_problem(row: Mapping[str, Any]) -> AttentionProblem:
    heads = row.get("heads") or _BENCH_COLUMNS // row["head_dim"]
    return AttentionProblem(
        batch=_BENCH_TOKENS // row["seq"],
        heads=heads,
        kv_heads=row.get("kv_heads") or heads,
        head_dim=row["head_dim"],
        sequence_length=row["seq"],
        causal=row.get("causal", True),
        window=_BENCH_WINDOW,
    )


def best_of(seen: Iterable[Seen]) -> dict[Variant, Seen]:
    """Return one measurement for each variant: a run here before one recorded elsewhere, the newest.

    `seen` are in order of time; benchmark rows of one direction give way to runs of both.
    """
    ranked = sorted(seen, key=lambda one: (one.here, one.row is not None))
    return {one.variant: one for one in ranked}
