"""Runs with a GPU for each rank beside the same plan as one rank alone, as the ZeRO page shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app import services
from db.database import display_name, resolve_url
from db.measurements import measurements
from db.types import RunKind
from planner.plan import Plan
from planner.real_ranks import real_runs
from planner.units import format_rate
from planner.zero import work_of

STORED_TTL_S = 20
Show = Callable[[float], str]


def real_lines(plan: Plan) -> tuple[bool, list[dict[str, Any]]]:
    """Return runs over NCCL, of the plan's work where there is one, else of any; and which.

    Each is a line of `RealRun.to_dict` with `plan`, its work in words.
    """
    work = work_of(plan.to_dict())[0]
    found = _stored(display_name(resolve_url(None)))
    own = [line for line in found if line["work"] == work]
    return bool(own), own or found


@st.cache_data(max_entries=2, ttl=STORED_TTL_S, show_spinner=False)
def _stored(url: str) -> list[dict[str, Any]]:
    runs = real_runs(measurements(services.database(), kinds=[RunKind.TRAIN_STEP]))
    return [
        {
            "work": work_of(document)[0],
            "plan": _model(document),
            **run.to_dict(),
            "holds_waits": run.holds_waits,
        }
        for run in runs
        if (document := run.row.spec["plan"])
    ]


def _model(document: Mapping[str, Any]) -> str:
    """Name the model and, where layers are checkpointed, how."""
    model, workload = document["model"], document.get("workload", {})
    name = str(model.get("preset") or model.get("name") or "custom").rsplit("/", 1)[-1]
    checkpointing = workload.get("checkpointing", "none")
    tokens = f"{workload.get('micro_batch', 1):,} × {workload.get('sequence_length', 0):,} tokens"
    kept = "" if checkpointing == "none" else f", checkpointing {checkpointing}"
    return f"{name}, {tokens}{kept}"


def real_table(lines: Sequence[Mapping[str, Any]], show: Show) -> list[dict[str, Any]]:
    """Return the lines for people: sizes in their unit, times in ms to a tenth."""
    return [_for_people(line, show) for line in lines]


def _for_people(line: Mapping[str, Any], show: Show) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, value in line.items():
        words = name.removesuffix("_bytes").replace("_ms", " ms").replace("_", " ")
        if name in ("work", "collectives", "holds_waits"):
            continue
        if name.endswith("_bytes"):
            shown[words] = None if value is None else show(value)
        elif name.endswith("_ms"):
            shown[words] = None if value is None else round(value, 1)
        elif name == "loss_distance":
            shown["losses apart"] = None if value is None else f"{value:.1e}"
        else:
            shown[words] = value
    return shown


def collective_table(lines: Sequence[Mapping[str, Any]], show: Show) -> list[dict[str, Any]]:
    """Return one line for people per collective of every run: full buffers, time, bandwidth."""
    return [
        {
            **{name: line[name] for name in ("plan", "engine", "stage", "ranks")},
            "collective": one.collective.replace("_", "-"),
            "calls": one.calls,
            "payload": show(one.payload_bytes),
            "time ms": round(1000 * one.time_s, 1),
            "with waits": "yes" if line["holds_waits"] else "no",
            "bus bandwidth": format_rate(one.bus_bytes_s, "B"),
        }
        for line in lines
        for one in line["collectives"]
    ]
