"""Runs and recorded measurements that can be put into an experiment, by their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from app import services
from app.experiment_rows import spec_words
from db import repository
from db.database import resolve_url
from db.measurements import measurements
from db.types import Origin, RunKind
from planner.workload import TrainingWorkload, flat_dict

CANDIDATES_SHOWN = 200
CANDIDATES_TTL_S = 20
# What an example varies is engine and stage alone: all else of the step is as plans begin.
_PLAIN, _SHAPE = TrainingWorkload(), ("sequence_length", "micro_batch")


def candidates(search: str) -> list[dict[str, Any]]:
    """Return runs and recorded measurements whose words hold all of `search`, newest first."""
    wanted = search.casefold().split()
    found = [
        line
        for line in _candidates(resolve_url(None).render_as_string())
        if all(word in line["all"] for word in wanted)
    ]
    return found[:CANDIDATES_SHOWN]


@st.cache_data(max_entries=4, ttl=CANDIDATES_TTL_S, show_spinner=False)
def _candidates(url: str) -> list[dict[str, Any]]:
    database = services.database()
    seen = [one for one in measurements(database) if one.origin is Origin.RECORDED]
    rows = [
        _candidate(spec_words(one.spec), one.spec, str(one.outcome), one.recorded_at, row_id=one.id)
        for one in reversed(seen)
    ]
    runs = []
    for run in repository.list_runs(database, limit=CANDIDATES_SHOWN):
        detail = repository.get_run(database, run.id)
        if detail is not None:
            words = spec_words(detail.spec)
            runs.append(_candidate(words, detail.spec, str(run.state), "", run_id=run.id))
    return [*runs, *rows]


def _candidate(
    words: str,
    spec: Mapping[str, Any],
    outcome: str,
    recorded_at: str,
    *,
    run_id: str | None = None,
    row_id: str | None = None,
) -> dict[str, Any]:
    line = {
        "what": words,
        "world": str(spec.get("world")),
        "outcome": outcome.replace("_", " "),
        "made": "here" if run_id else f"recorded {recorded_at[:10]}",
        "id": run_id or row_id,
    }
    text = " ".join((*map(str, line.values()), str(spec.get("kind")))).casefold()
    return {**line, "run_id": run_id, "row_id": row_id, "all": text}


EXAMPLE = "Example: stages and engines of Qwen3-1.7B on 8 ranks"


def example_rows() -> list[str]:
    """Return the recorded steps of one model and batch that differ in engine and stage; with repeats."""
    return [
        seen.id
        for seen in measurements(services.database(), kinds=[RunKind.TRAIN_STEP])
        if seen.origin is Origin.RECORDED and str(seen.outcome) == "done" and _is_example(seen.spec)
    ]


def _is_example(spec: Mapping[str, Any]) -> bool:
    plan = spec["plan"]
    workload, spread = plan.get("workload") or {}, plan.get("parallelism") or {}
    plain = {name: value for name, value in flat_dict(_PLAIN).items() if name not in _SHAPE}
    return (
        plan["model"].get("preset") == "Qwen/Qwen3-1.7B"
        and spec["world"] == "solo"
        and spread.get("world_size") == 8
        and spread.get("engine", "peakmark") in ("peakmark", "fsdp2")
        and workload.get("sequence_length", 4096) == 4096
        and workload.get("micro_batch", 1) == 1
        and all(workload.get(name, value) == value for name, value in plain.items())
    )
