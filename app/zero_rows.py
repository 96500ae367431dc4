"""What the ZeRO page shows, as plain data: predictions, stored measurements of the same work, words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app import services
from app.predictions import PlanKey, plan_key
from db.database import display_name, resolve_url
from db.measurements import measurements
from planner.communication import NETWORK_ID, link_bytes_s
from planner.interconnects import interconnect, interconnects
from planner.plan import Plan
from planner.same_run import geometric_mean, same_run_pairs
from planner.units import format_share
from planner.workload import Engine
from planner.zero import plan_links, remainder, stage_savings, training, work_of, zero_table

MEASURED_TTL_S = 20
OWN_LINK = "the GPU's own"
Show = Callable[[float], str]


def link_choices(between_nodes: bool) -> dict[str, str]:
    """Return the names of the links of one kind by id."""
    wanted = [x for x in interconnects() if (x.between_nodes if between_nodes else x.in_node)]
    return {link.id: link.name for link in wanted}


def zero_rows(
    plan: Plan,
    engines: Sequence[str],
    stages: Sequence[int],
    world_sizes: Sequence[int],
    in_node: str,
    network: str = NETWORK_ID,
) -> dict[str, Any]:
    """Return `rows` (see `ZeroRow`) and `refused` (sentence by engine); kept per plan and choice."""
    choice = (tuple(engines), tuple(stages), tuple(world_sizes), in_node, network)
    return _zero_rows(plan_key(plan), choice, plan)


@st.cache_data(max_entries=200, show_spinner=False)
def _zero_rows(key: PlanKey, choice: tuple[Any, ...], _plan: Plan) -> dict[str, Any]:
    engines, stages, world_sizes, in_node, network = choice
    gpu = _plan.hardware
    own = float(link_bytes_s(gpu, 1))
    rate = own if in_node == OWN_LINK else interconnect(in_node).bytes_s
    table = zero_table(
        _plan,
        engines=[Engine(name) for name in engines],
        stages=stages,
        world_sizes=world_sizes,
        links=plan_links(gpu, rate, interconnect(network).bytes_s),
    )
    pairs = stage_savings(table.rows)
    return {
        "rows": [row.to_dict() for row in table.rows],
        "refused": {str(engine): sentence for engine, sentence in table.refused.items()},
        "savings": [(below.to_dict(), row.to_dict()) for below, row in pairs],
    }


def zero_remainder(plan: Plan) -> dict[str, Any]:
    """Return what no stage takes away (see `Remainder`), kept per plan."""
    return _remainder(plan_key(plan), plan)


@st.cache_data(max_entries=100, show_spinner=False)
def _remainder(key: PlanKey, _plan: Plan) -> dict[str, Any]:
    found = remainder(_plan)
    return {
        "engine": str(found.engine),
        "zero_stage": found.zero_stage,
        "allocated_bytes": found.allocated_bytes,
        "state_bytes": found.state_bytes,
        "model_bytes": found.model_bytes,
        "is_dominated": found.is_dominated,
        "levers": [lever._asdict() for lever in found.levers],
    }


def measured_like(plan: Plan) -> list[dict[str, Any]]:
    """Return stored measurements of the plan's model, workload and split on a GPU, newest last.

    Engine, stage and world size may be any; of one choice the newest stays.
    """
    return _measured(display_name(resolve_url(None)), work_of(plan.to_dict())[0])


@st.cache_data(max_entries=20, ttl=MEASURED_TTL_S, show_spinner=False)
def _measured(url: str, work: str) -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for seen in measurements(services.database()):
        row = measured_row(work, seen.spec.get("plan"), seen.measured)
        if row is not None and str(seen.outcome) == "done":
            place = (row["engine"], row["zero_stage"], row["world_size"])
            found[place] = {**row, "id": seen.id, "world": str(seen.spec["world"])}
    return list(found.values())


def timed_like(plan: Plan) -> list[dict[str, Any]]:
    """Return the pairs of engines timed in turns at the plan's work (see `SameRunPair.to_dict`)."""
    return _timed(display_name(resolve_url(None)), work_of(plan.to_dict())[0])


@st.cache_data(max_entries=20, ttl=MEASURED_TTL_S, show_spinner=False)
def _timed(url: str, work: str) -> list[dict[str, Any]]:
    seen = measurements(services.database())
    pairs = same_run_pairs((one.spec, one.measured) for one in seen)
    return [pair.to_dict() for pair in pairs if work_of(pair.plan)[0] == work]


def timed_sentence(lines: Sequence[Mapping[str, Any]]) -> str:
    """Say how our engine's step compares with its peers' in the same run."""
    ratios = [line["ratio"] for line in lines]
    peers = ", ".join(dict.fromkeys(str(line["peer"]) for line in lines))
    return (
        f"Step time of ours over {peers}, in turns on one GPU in one run: geometric mean "
        f"**{geometric_mean(ratios):.3f}** over {len(ratios)} "
        f"{'pair' if len(ratios) == 1 else 'pairs'}. Busy: the GPU runs something; idle: it waits for "
        "launches; host: the time to start a step's work. One rank alone: copies stand in for gathers."
    )


def timed_table(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the pairs for people: times in ms to a tenth, ratios to three digits."""
    skipped = ("model", "checkpointing")
    return [
        {
            name.replace("_", " "): round(value, 3 if name == "ratio" else 1)
            if isinstance(value, float)
            else value
            for name, value in line.items()
            if name not in skipped
        }
        for line in lines
    ]


def measured_row(
    work: str, plan: Mapping[str, Any] | None, measured: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the figures of a measurement of `work` (see `work_of`); None for other, or no GPU."""
    if plan is None or not measured.get("allocated_bytes"):
        return None
    own, spread = work_of(plan)
    if own != work:
        return None
    state = measured.get("state") or {}
    return {
        **spread,
        "allocated_bytes": measured["allocated_bytes"],
        "step_time_s": measured.get("step_time_s"),
        "parameters": state.get("parameter_bytes", 0),
        "optimizer": state.get("optimizer_bytes", 0),
    }


def saving_sentences(savings: Sequence[Sequence[Mapping[str, Any]]], show: Show) -> list[str]:
    """Say what each stage saves over the one below it, and what it sends more."""
    return [_saving(below, row, show) for below, row in savings]


def _saving(below: Mapping[str, Any], row: Mapping[str, Any], show: Show) -> str:
    saved = below["allocated_bytes"] - row["allocated_bytes"]
    share = abs(saved) / below["allocated_bytes"]
    stage, ranks = row["zero_stage"], row["world_size"]
    name = f"**Stage {stage}**, {row['engine']} × {ranks}"
    if share < 0.001:
        effect = "saves nothing at the peak"
    else:
        word = "saves" if saved > 0 else "costs"
        part = format_share(share, 0)
        effect = f"{word} **{show(abs(saved))}** ({part} of stage {stage - 1}'s peak)"
    sent = _sent_bytes(row) - _sent_bytes(below)
    if abs(sent) <= 0.01 * max(_sent_bytes(below), 1):
        return f"{name} {effect} and sends as much."
    return f"{name} {effect} and sends {show(abs(sent))} {'more' if sent > 0 else 'less'} a step."


def _sent_bytes(row: Mapping[str, Any]) -> float:
    return float(sum(one["sent_bytes"] for one in row["sent"]))


def remainder_sentences(found: Mapping[str, Any], show: Show) -> list[str]:
    """Say whether ZeRO is the answer at this plan, with the numbers, and what is instead."""
    peak, model = found["allocated_bytes"], found["model_bytes"]
    share = model / peak
    stage = f"{found['engine']} at stage {found['zero_stage']}"
    if not found["is_dominated"]:
        return [
            f"With {stage}, parameters, gradients and optimizer states are still "
            f"{show(found['state_bytes'])} of {show(peak)} at the peak: more ranks lower it "
            f"further, down to the {show(model)} of activations and logits."
        ]
    sentences = [
        f"**ZeRO is not the answer here:** with {stage}, activations, logits and temporaries are "
        f"{show(model)} of {show(peak)} at the peak ({format_share(share, 0)}). No stage and no number of ranks "
        f"goes below that; all that sharding can still take is {show(found['state_bytes'])}."
    ]
    if found["levers"]:
        options = [
            f"{lever['change']} ({show(lever['allocated_bytes'])}, "
            f"−{format_share(1 - lever['allocated_bytes'] / peak, 0)})"
            for lever in found["levers"]
        ]
        sentences.append(f"What would lower the peak instead: {'; '.join(options)}.")
    return sentences


def table_rows(
    rows: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]],
    timed: Sequence[Mapping[str, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the page's table in bytes: prediction, measurement and ideal of each row.

    `timed` are lines of `timed_like`: a peer's step time over ours in the same run, the newest.
    """
    seen = {(m["engine"], m["zero_stage"], m["world_size"]): m for m in measured}
    ratios = {(line["peer"], line["stage"], line["ranks"]): 1 / line["ratio"] for line in timed}
    lines = []
    for row in rows:
        place = (row["engine"], row["zero_stage"], row["world_size"])
        found, ratio = seen.get(place, {}), ratios.get(place)
        actual, step_s = found.get("allocated_bytes"), found.get("step_time_s")
        predicted = row["allocated_bytes"]
        lines.append(
            {
                "engine": row["engine"],
                "stage": row["zero_stage"],
                "ranks": row["world_size"],
                "predicted_bytes": predicted,
                "measured_bytes": actual,
                "error_percent": round(100 * (predicted - actual) / actual, 3) if actual else None,
                "ideal_bytes": row["ideal_bytes"],
                "above_ideal_percent": _rounded(row["distance_percent"]),
                "verdict": row["verdict"].replace("_", " "),
                "peak_in": row["peak_phase"].replace("_", " "),
                **{f"{name}_bytes": size for name, size in row["parts"].items()},
                "reserved_bytes": row["reserved_bytes"],
                "device_bytes": row["device_bytes"],
                "measured_in_world": found.get("world"),
                "measured_step_ms": round(1000 * step_s, 1) if step_s else None,
                "step_over_ours_in_the_same_run": None if ratio is None else round(ratio, 3),
            }
        )
    return lines


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def communication_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line per collective of every row: calls, bytes and predicted time of a step."""
    return [
        {
            "engine": row["engine"],
            "stage": row["zero_stage"],
            "ranks": row["world_size"],
            "collective": one["collective"].replace("_", "-"),
            "calls": one["calls"],
            "payload_bytes": one["payload_bytes"],
            "sent_bytes": round(one["sent_bytes"]),
            "time_ms": round(1000 * one["time_s"], 3),
        }
        for row in rows
        for one in row["sent"]
    ]


def check_trains(plan: Plan) -> None:
    """Raise PlanError for a plan that serves."""
    training(plan)
