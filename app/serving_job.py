"""The runs that prove what the Serving page shows: one batch decoded, or its trace served."""

from __future__ import annotations

from typing import Any

import psutil

from app.proof import HOST_SHARE
from app.serving_rows import TraceChoice, poisson_of, server_of_point, trace_of
from db import repository
from db.database import Database
from planner.decode_run import CacheDtype, WeightDtype, parse_decode
from planner.plan import Plan
from planner.serve_run import parse_serve
from planner.serving_levers import ServingPoint, capacity_of
from planner.units import format_bytes
from planner.workload import KvDtype

# A step takes as long for the hundredth new token as for the first.
MOST_DECODED, DEADLINE_S = 64, 1800.0
_ONE_BYTE = {KvDtype.FP8: CacheDtype.FP8, KvDtype.INT8: CacheDtype.INT8}


def unprovable(point: ServingPoint, world: str) -> str | None:
    """Return why no run here serves as the point says, in one sentence; None where one does."""
    kept = {str(point.weights_dtype), *(str(dtype) for dtype in _ONE_BYTE)}
    if str(point.weights_dtype) not in list(WeightDtype):
        return (
            f"Weights in {point.weights_dtype} are planned, not proven: runs here decode with bf16, fp16 "
            "or fp32 weights."
        )
    if str(point.kv_dtype) not in kept:
        return (
            f"A cache in {point.kv_dtype} beside weights in {point.weights_dtype} is planned, not proven: a "
            "run's cache is as its weights, fp8 or int8."
        )
    if point.tensor_parallel > 1:
        return "Several GPUs for one copy are planned, not proven: a run here serves from one."
    return _too_big_for_host(point) if world == "cpu" else None


def _too_big_for_host(point: ServingPoint) -> str | None:
    """Return why the CPU cannot hold the point, in fp32 there; None where it can."""
    held = capacity_of(point)
    requests = point.batch * point.held_tokens * held.token_bytes
    needed, free = 4 * point.spec.parameters + 2 * requests, psutil.virtual_memory().available
    if needed <= free * HOST_SHARE:
        return None
    return (
        f"Without a GPU the CPU would hold about {format_bytes(needed)}, this host can give "
        f"{format_bytes(int(free * HOST_SHARE))}: choose a smaller model or attach a GPU."
    )


def decode_spec(plan: Plan, point: ServingPoint, world: str) -> dict[str, Any]:
    """Return the job spec that decodes the point's batch. Raises PlanError naming what cannot be."""
    asked = {
        **_common(plan, point, world),
        "batch": point.batch,
        "context": point.prompt_tokens,
        "new_tokens": max(2, min(MOST_DECODED, point.new_tokens)),
        "cache": "paged" if point.paged else "contiguous",
    }
    run, _ = parse_decode(asked)
    return _spec("decode", run.to_dict(), world)


def serve_spec(plan: Plan, point: ServingPoint, choice: TraceChoice, world: str) -> dict[str, Any]:
    """Return the job spec that serves the choice's trace. Raises PlanError naming what cannot be."""
    server = server_of_point(point, choice)
    longest = max(one.prompt_tokens + one.new_tokens for one in trace_of(point, choice))
    # No more than all its rows can fill.
    pages = min(server.pages, server.rows * server.pages_of(longest))
    trace: Any = poisson_of(point, choice)
    if choice.text is not None:
        trace = [one.to_dict() for one in trace_of(point, choice)]
    asked = {
        **_common(plan, point, world),
        "trace": trace,
        "rows": server.rows,
        "pages": pages,
        "chunk_tokens": server.chunk_tokens,
    }
    run, _ = parse_serve(asked)
    return _spec("serve", run.to_dict(), world)


def _common(plan: Plan, point: ServingPoint, world: str) -> dict[str, Any]:
    cache = "model" if world == "cpu" else str(_ONE_BYTE.get(point.kv_dtype, CacheDtype.MODEL))
    return {
        "model": plan.to_dict()["model"],
        "page_size": point.page_size,
        "cache_dtype": cache,
        "dtype": "fp32" if world == "cpu" else str(point.weights_dtype),
        "attention": "torch" if world == "cpu" else "peakmark",
    }


def _spec(kind: str, asked: dict[str, Any], world: str) -> dict[str, Any]:
    return {"schema": 1, "kind": kind, "world": world, kind: asked, "deadline_s": DEADLINE_S}


def queue(database: Database, spec: dict[str, Any], *, key: str) -> str:
    """Queue a run; the same key never queues twice. Returns its id."""
    return repository.create_run(database, spec, idempotency_key=key, who="page")
