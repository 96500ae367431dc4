"""The only bridge from the pages to planner and database: plain data in, plain data out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import streamlit as st

from app.accuracy_job import AccuracyJob
from app.engine_stages import possible_stages
from app.plan_words import plan_line
from app.predictions import prediction_here, with_calibration
from app.proof import job_spec
from app.ranking_rows import ranking_of
from db import repository
from db.database import Database, resolve_url
from db.engine import open_database
from db.measurements import measurements
from db.problems import DatabaseProblem
from db.types import FINAL_STATES, RunState
from planner.accuracy import AccuracyReport
from planner.attached import AttachedGpu, attached_gpus
from planner.comparison import compare
from planner.config_input import parse_config_text, spec_from_config
from planner.config_keys import modelled_keys
from planner.errors import PlanError
from planner.hardware import Gpu, gpu_presets
from planner.hub import fetch_hub_config
from planner.memory.kinds import layer_kinds
from planner.memory.timeline_series import step_timeline, why_no_timeline
from planner.plan import Plan, parse_plan, plan_hash
from planner.predict import predict
from planner.presets import model_presets, resolve_model
from planner.search import grid
from planner.workload import TrainingWorkload

# What a page shows as one sentence instead of failing.
PROBLEMS = (PlanError, DatabaseProblem)
FINAL_STATE_NAMES = frozenset(str(state) for state in FINAL_STATES)
CURVE_LENGTHS = tuple(2**power for power in range(9, 18))
KERNELS = ("eager", "sdpa", "triton")
GRID_WORLDS = tuple(2**power for power in range(11))
SMALL_PROOF_CONFIG: Mapping[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}


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


def _canonical(plan: Plan) -> str:
    return json.dumps(plan.to_dict(), sort_keys=True, separators=(",", ":"))


def prediction_of(plan: Plan) -> dict[str, Any]:
    """Return the prediction of a plan as plain data, kept per plan."""
    return prediction_here(plan, database)


def timeline_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a plan's replayed step, or the reason why there is none.

    `sections` are dictionaries of label, words and bytes (high point, end, parts, reserved).
    """
    checked = parse_plan(plan)
    return _timeline(plan_hash(checked), _canonical(checked))


@st.cache_data(max_entries=100, show_spinner=False)
def _timeline(digest: str, _plan_text: str) -> dict[str, Any]:
    plan = parse_plan(json.loads(_plan_text))
    reason = why_no_timeline(plan)
    sections = [] if reason else [section.to_dict() for section in step_timeline(plan)]
    return {"reason": reason, "sections": sections}


def stage_grid(plan: Plan) -> list[dict[str, Any]]:
    """Return device memory and verdict for every ZeRO stage and world size of this plan."""
    return _stage_grid(plan_hash(plan), _canonical(plan))


@st.cache_data(max_entries=100, show_spinner=False)
def _stage_grid(digest: str, _plan_text: str) -> list[dict[str, Any]]:
    plan = parse_plan(json.loads(_plan_text))
    stages = possible_stages(plan.parallelism.engine)
    # Ranks that split experts are a divisor of all.
    worlds = sorted(
        {world for world in GRID_WORLDS if world % plan.parallelism.expert_parallel == 0}
        | {plan.parallelism.world_size}
    )
    return list(grid(plan, zero_stages=stages, world_sizes=worlds).records())


def attention_curves(plan: Plan) -> dict[str, list[dict[str, int]]]:
    """Return device memory by sequence length for each attention kernel that can run this model."""
    return _attention_curves(plan_hash(plan), _canonical(plan))


@st.cache_data(max_entries=100, show_spinner=False)
def _attention_curves(digest: str, _plan_text: str) -> dict[str, list[dict[str, int]]]:
    document = json.loads(_plan_text)
    lengths = sorted({*CURVE_LENGTHS, document["workload"]["sequence_length"]})
    share = _segment_share(prediction_of(parse_plan(document))["memory"])
    curves = {
        kernel: [
            point for length in lengths if (point := _curve_point(document, kernel, length, share))
        ]
        for kernel in KERNELS
    }
    return {kernel: points for kernel, points in curves.items() if points}


def refused_kernels(plan: Plan) -> dict[str, str]:
    """Return why each attention kernel without a curve cannot run this plan, by kernel."""
    document = json.loads(_canonical(plan))
    reasons = {}
    for kernel in sorted({*KERNELS} - {*attention_curves(plan)}):
        workload = {**document["workload"], "attention": kernel}
        try:
            predict(parse_plan({**document, "workload": workload}), segment_share=0.0)
        except PlanError as refusal:
            reasons[kernel] = str(refusal)
    return reasons


def _segment_share(memory: Mapping[str, Any]) -> float:
    """What the allocator's segments of a replayed plan hold beside tensors, of its peak."""
    return float((memory["reserved_bytes"] - memory["allocated_bytes"]) / memory["allocated_bytes"])


def _curve_point(
    document: Mapping[str, Any], kernel: str, length: int, segment_share: float
) -> dict[str, int] | None:
    """One point of a curve; None where the kernel or the model cannot run that length."""
    workload = {**document["workload"], "attention": kernel, "sequence_length": length}
    try:
        plan = parse_plan({**document, "workload": workload})
        memory = predict(plan, segment_share=segment_share).to_dict()["memory"]
    except PlanError:
        return None
    scores = max(phase["parts"].get("attention", 0) for phase in memory["phases"])
    return {
        "sequence_length": length,
        "device_bytes": memory["device_bytes"],
        "scores_bytes": scores,
    }


def small_proof(plan: Plan) -> Plan:
    """Return a plan of the same choices that any host can run: a few narrow layers, two ranks."""
    document = plan.to_dict()
    editable = modelled_keys(plan.model.family)
    overrides = {key: value for key, value in SMALL_PROOF_CONFIG.items() if key in editable}
    if isinstance(plan.workload, TrainingWorkload):
        several_kinds = len(set(layer_kinds(plan.model, plan.workload))) > 1
        # Where layers differ, first and last have one between them, as in the model.
        overrides["num_hidden_layers"] = 3 if several_kinds else 2
    if plan.model.latent is not None:
        overrides["num_key_value_heads"] = overrides["num_attention_heads"]
    if plan.model.num_experts:
        # Groups of experts need two each.
        overrides["num_local_experts"] = min(
            plan.model.num_experts, max(8, 2 * plan.model.expert_groups)
        )
    config = {key: v for key, v in plan.model.hf_config.items() if key != "layer_types"}
    model = {"config": config, "name": f"small {plan.model.family}", "overrides": overrides}
    workload = {**document["workload"], "sequence_length": 64, "micro_batch": 1}
    ranks = min(2, plan.parallelism.world_size)
    parallelism = {**document["parallelism"], "world_size": ranks}
    changed = {"model": model, "workload": workload, "parallelism": parallelism}
    return parse_plan({**document, **changed})


def database() -> Database:
    """Return the opened database of this server; raises DatabaseProblem."""
    return _database(_database_url())


def _database_url() -> str:
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
    return _run_words(_database_url(), run["id"], str(run["state"]))


@st.cache_data(max_entries=4000, show_spinner=False)
def _run_words(url: str, run_id: str, state: str) -> dict[str, Any]:
    detail = repository.get_run(database(), run_id)
    figures = ("counter", "predicted_bytes", "measured_bytes")
    words: dict[str, Any] = {"plan": "", **dict.fromkeys(figures)}
    if detail is None or detail.plan is None:
        return words
    words["plan"] = plan_line(detail.plan)
    if detail.prediction is None:
        return words
    memory = detail.prediction["memory"]
    words |= {"counter": "allocated", "predicted_bytes": memory["allocated_bytes"]}
    found = compare(detail.prediction, detail.measured or {}, detail.spec["world"])
    if not found:
        return words
    if detail.spec["world"] == "cpu":
        words |= {"counter": "state", "predicted_bytes": int(sum(c.predicted for c in found))}
        return words | {"measured_bytes": int(sum(c.measured for c in found))}
    return words | {"measured_bytes": (detail.measured or {}).get("allocated_bytes")}


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


def accuracy(wait_s: float | None = None) -> dict[str, Any]:
    """Compare today's predictions with every stored measurement.

    Beside the report, `names` says in a few words what each row measured, and `ranking` how good the choice
    of the alternative predicted to be fastest is. Where it takes longer
    than `wait_s`, only `done` and `total`, in measurements: ask again.
    """
    rows = [seen.to_row() for seen in measurements(database())]
    job = _accuracy_job(_database_url())
    report = job.report(rows, wait_s)
    if report is None:
        return {"done": job.done(rows), "total": len(rows)}
    return _accuracy(json.dumps([row["id"] for row in rows]), report, rows)


@st.cache_resource(show_spinner=False)
def _accuracy_job(url: str) -> AccuracyJob:
    return AccuracyJob()


@st.cache_data(max_entries=4, show_spinner=False)
def _accuracy(digest: str, _report: AccuracyReport, _rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = {row["id"]: _row_words(row["spec"]) for row in _rows}
    return {**_report.to_dict(), "names": names, "ranking": ranking_of(_rows, _report)}


def _row_words(spec: Mapping[str, Any]) -> str:
    asked: Mapping[str, Any] = next(
        filter(None, map(spec.get, ("plan", "decode", "serve", "quality"))), {}
    )
    model = asked.get("model")
    if not model:
        return str(spec.get("kind", ""))
    name = str(model.get("preset") or model.get("name", "custom model")).rsplit("/", 1)[-1]
    whole = _whole_plan(spec.get("plan"))
    return f"{name}: {spec.get('kind') if whole is None else plan_line(whole)}"


def _whole_plan(plan: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a stored plan with its defaults written out; None where it cannot be planned."""
    with suppress(PlanError):
        return None if plan is None else parse_plan(plan).to_dict()
    return None


def measurement_detail(row_id: str) -> dict[str, Any] | None:
    """Return a stored measurement as `run_detail` returns a run; None when there is none.

    One that a run of this database made has that run's id in `run_id`; one that was recorded
    elsewhere has no history, and today's prediction beside it.
    """
    seen = next((m for m in measurements(database()) if m.id == row_id), None)
    if seen is None:
        return None
    plan = _whole_plan(seen.spec.get("plan"))
    return {
        "run_id": seen.run_id,
        "recorded_at": seen.recorded_at,
        "role": str(seen.role),
        "summary": {
            "id": seen.id,
            "state": str(seen.outcome),
            "world": str(seen.spec["world"]),
            "cancelling": False,
            "model_name": _row_words(seen.spec).split(":")[0],
        },
        "spec": seen.spec,
        "plan": plan,
        "prediction": None if plan is None else prediction_of(parse_plan(plan)),
        "measured": seen.measured,
        "environment": seen.environment,
        "error": None,
    }
