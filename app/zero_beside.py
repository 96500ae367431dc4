"""What stored runs say of choices that ZeRO plans have besides, and of trainings compared bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import streamlit as st

from app import services
from db.database import display_name, resolve_url
from db.measurements import measurements
from db.recorded import RECORDED_DIRECTORY
from db.types import RunKind
from planner.beside_runs import Seen, kernel_lines, offloaded_lines
from planner.plan import Plan
from planner.saved_runs import alike_lines
from planner.workload import Optimizer
from planner.zero import training, work_of

STORED_TTL_S = 20
Lines = list[dict[str, str]]
_ALL_ALIKE = {"losses", "gradients", "parameters"}


def offloaded_like(plan: Plan) -> Lines:
    """Return runs of the plan's work with the optimizer in host memory (`offloaded_lines`)."""
    return _stored(display_name(resolve_url(None)), _plain_work(plan), "offloaded")


def kernels_like(plan: Plan) -> Lines:
    """Return runs of the plan's work that our AdamW kernel stepped (`kernel_lines`)."""
    return _stored(display_name(resolve_url(None)), _plain_work(plan), "kernels")


def _plain_work(plan: Plan) -> str:
    """The plan's work as `work_of` writes it, with torch's AdamW on the device."""
    plain = replace(training(plan), offload_optimizer=False, optimizer=Optimizer.ADAMW_FUSED)
    return work_of(replace(plan, workload=plain).to_dict())[0]


_LINES: dict[str, Callable[[Iterable[Seen], str], Lines]] = {
    "offloaded": offloaded_lines,
    "kernels": kernel_lines,
}


@st.cache_data(max_entries=20, ttl=STORED_TTL_S, show_spinner=False)
def _stored(url: str, work: str, kind: str) -> Lines:
    seen = measurements(services.database(), kinds=[RunKind.TRAIN_STEP])
    lines = _LINES[kind]([(one.spec, one.measured) for one in seen], work)
    # All are of one model and workload, the page's.
    return [{name: value for name, value in line.items() if name != "plan"} for line in lines]


@st.cache_data(max_entries=1, show_spinner=False)
def alike() -> Lines:
    """Return the trainings that were compared value by value (recorded/equality)."""
    compared = [
        json.loads(line)
        for path in sorted((RECORDED_DIRECTORY / "equality").glob("*.jsonl"))
        for line in path.read_text().splitlines()[1:]
    ]
    return alike_lines(compared)


def alike_sentence(lines: Sequence[dict[str, str]]) -> str:
    """Say how many of the trainings gave the same numbers as the one each is held to."""
    equal = sum("differ" not in (line[name] for name in _ALL_ALIKE) for line in lines)
    return (
        f"{equal} of {len(lines)} trainings of tiny models by several ranks have the losses, reduced "
        "gradients and parameters of the one beside them, bit by bit (on GPUs with deterministic kernels, "
        "DeepSpeed's on CPUs too; docs/zero.md). Over two, three and four CPU ranks tests hold them so, or within the bound of "
        "their roundings."
    )
