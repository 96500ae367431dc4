"""The bridge from pages to planner and database: plans, GPUs and runs as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import streamlit as st

from app.predictions import prediction_here, with_calibration
from app.proof import job_spec
from app.run_words import run_words as words_of
from db import repository
from db.database import Database, resolve_url
from db.engine import open_database
from db.problems import DatabaseProblem
from db.types import FINAL_STATES, RunState
from planner.attached import AttachedGpu, attached_gpus
from planner.config_input import parse_config_text, spec_from_config
from planner.errors import PlanError
from planner.hardware import Gpu, gpu_presets
from planner.hub import fetch_hub_config
from planner.plan import Plan, parse_plan
from planner.presets import model_presets, resolve_model

# What a page shows as one sentence instead of failing.
PROBLEMS = (PlanError, DatabaseProblem)
FINAL_STATE_NAMES = frozenset(str(state) for state in FINAL_STATES)


def model_ids() -> list[str]:
    """Return the ids of the model presets."""
    return [preset.id for preset in model_presets()]


def gpu_rows() -> list[dict[str, Any]]:
    """Return the GPU presets as rows: numbers, notes and sources."""
    return [_gpu_row(gpu) for gpu in gpu_presets()]


def _gpu_row(gpu: Gpu) -> dict[str, Any]:
    return {
        "id": gpu.id,
        "name": gpu.name,
        "visible_bytes": gpu.visible_bytes,
        "mem_bandwidth_bytes_s": gpu.mem_bandwidth_bytes_s,
        "bf16_flop_s": gpu.peak_dense_flop_s.get("bf16"),
        "interconnect_bytes_s": gpu.interconnect_bytes_s,
        "notes": " ".join(gpu.notes),
        "source": "; ".join(gpu.source),
    }


def attached() -> list[dict[str, Any]]:
    """Return the GPUs of this machine with their present state; empty without a driver."""
    return _attached()[0]


def why_none_attached() -> str:
    """Return why no GPU is seen, as a sentence."""
    return _attached()[1] or ""


@st.cache_data(ttl=2, max_entries=1, show_spinner=False)
def _attached() -> tuple[list[dict[str, Any]], str | None]:
    found = attached_gpus()
    return [_attached_row(gpu) for gpu in found.gpus], found.reason


def _attached_row(gpu: AttachedGpu) -> dict[str, Any]:
    """One GPU as plain data; `hardware` is its part of a plan, None where its speed is unknown."""
    known = gpu.to_gpu()
    return {**asdict(gpu), "hardware": None if known is None else known.to_dict()}


def read_config(text: str) -> dict[str, Any]:
    """Parse a pasted config.json; raises PlanError with one sentence."""
    return parse_config_text(text)


def hub_config(hub_id: str) -> dict[str, Any]:
    """Fetch the configuration of a model from the hub; raises PlanError when it cannot."""
    return fetch_hub_config(hub_id)


def check_plan(mapping: Mapping[str, Any]) -> Plan:
    """Check what a person entered; raises PlanError with one sentence.

    Its GPU has the calibration that was made on this machine, if there is one.
    """
    return with_calibration(parse_plan(mapping), database)


def model_summary(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the derived dimensions of a plan's model, by their names in config.json."""
    if "preset" in model:
        spec = resolve_model(model["preset"])
    else:
        spec = spec_from_config(model["config"], name=model.get("name", "custom model"))
    return {
        "is_traced": spec.trace is not None,
        "family": spec.family,
        "parameters": spec.parameters,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "sliding_window": spec.sliding_window,
        "num_local_experts": spec.num_experts or None,
        "num_experts_per_tok": spec.experts_per_token or None,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }


def prediction_of(plan: Plan) -> dict[str, Any]:
    """Return the prediction of a plan as plain data, kept per plan."""
    return prediction_here(plan, database)


def database() -> Database:
    """Return the opened database of this server; raises DatabaseProblem."""
    return _database(database_url())


def database_url() -> str:
    """Return the address of this server's database, with what opens it."""
    return resolve_url(None).render_as_string(hide_password=False)


@st.cache_resource(show_spinner=False)
def _database(url: str) -> Database:
    return open_database(url)


def worker_alive() -> bool:
    """Say whether a worker showed a sign of life lately."""
    return repository.worker_alive(database())


def submit_proof(
    plan: Plan,
    world: str,
    idempotency_key: str,
    *,
    save_to: str | None = None,
    load_from: str | None = None,
) -> str:
    """Queue a run that proves `plan`; the same key never queues twice. Returns the run id.

    Raises PlanError where `save_to` or `load_from` cannot be what it is for.
    """
    return repository.create_run(
        database(),
        job_spec(plan, world, save_to=save_to, load_from=load_from),
        plan.to_dict(),
        prediction_of(plan),
        idempotency_key=idempotency_key,
        who="page",
    )


def run_lines(states: Sequence[str] = (), limit: int = 200) -> list[dict[str, Any]]:
    """Return the newest runs as plain lines of the table."""
    wanted = [RunState(state) for state in states]
    return [run.to_dict() for run in repository.list_runs(database(), states=wanted, limit=limit)]


def run_words(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a listed run in a few words and, once it has ended, its figures.

    `predicted_bytes` and `measured_bytes` are of the counter `counter` that its world measures.
    """
    return _run_words(database_url(), run["id"], str(run["state"]))


@st.cache_data(max_entries=4000, show_spinner=False)
def _run_words(url: str, run_id: str, state: str) -> dict[str, Any]:
    detail = repository.get_run(database(), run_id)
    if detail is None:
        raise DatabaseProblem(f"There is no run {run_id} any more.")
    return words_of(detail)


def run_detail(run_id: str) -> dict[str, Any] | None:
    """Return everything known of a run with its history; None when there is no such run."""
    detail = repository.get_run(database(), run_id)
    if detail is None:
        return None
    history = repository.run_events(database(), run_id)
    events = [
        {"at_ms": e.at_ms, "who": e.who, "from": e.from_state, "to": e.to_state, "why": e.why}
        for e in history
    ]
    return {**detail.to_dict(), "events": events}


def cancel_run(run_id: str) -> bool:
    """Ask for a run to stop; False when it has ended already."""
    return repository.request_cancel(database(), run_id, who="page")


def rerun(run_id: str, idempotency_key: str) -> str:
    """Queue the same run again; returns the new id."""
    return repository.rerun(database(), run_id, idempotency_key=idempotency_key, who="page")
