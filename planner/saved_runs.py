"""Trainings that some ranks saved and others went on with, and trainings compared value by value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from planner.units import GIB_BYTES
from planner.zero import work_of

_SHOWN_LOSSES = 3
# What a peer's gradients are reduced in where it leaves no choice (runners/engines).
_REDUCES_IN = {"fsdp2": "fp32"}


def saved_lines(
    seen: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> list[dict[str, str]]:
    """Return a plain line of each run among `seen`, (spec, measured) each, that saved or loaded."""
    return [
        _saved_line(spec, measured)
        for spec, measured in seen
        if measured.get("saved") or measured.get("loaded")
    ]


def _saved_line(spec: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, str]:
    model, spread = spec["plan"]["model"], work_of(spec["plan"])[1]
    losses = (measured.get("losses") or ())[:_SHOWN_LOSSES]
    return {
        "model": str(model.get("preset") or model.get("name")).rsplit("/", 1)[-1],
        "world": str(spec["world"]),
        "ranks": str(spread["world_size"]),
        "stage": str(spread["zero_stage"]),
        "went on from": _step_words(measured.get("loaded")),
        "saved": _step_words(measured.get("saved")),
        "losses of rank 0": ", ".join("-" if one is None else f"{one:.3f}" for one in losses),
    }


def _step_words(kept: Mapping[str, Any] | None) -> str:
    if not kept:
        return "-"
    ranks = kept["world_size"]
    return (
        f"step {kept['step']} of {ranks} {'rank' if ranks == 1 else 'ranks'} at stage "
        f"{kept['zero_stage']}, {kept['bytes'] / GIB_BYTES:.2f} GiB in {kept['time_s']:.1f} s"
    )


def alike_place(environment: Mapping[str, Any]) -> tuple[str, str]:
    """Return over what ranks were compared (first line of a file in recorded/equality), and where."""
    ranks, gpu = environment["ranks"], environment["gpu"]
    title, devices, backend = {
        "nccl": ("NCCL", f"{ranks} x {gpu}", f"NCCL {environment.get('nccl')}"),
        "shared": ("gloo, sharing one GPU", f"1 x {gpu}", "gloo"),
        "cpu": ("gloo on CPUs", "CPUs", "gloo"),
    }[environment["world"]]
    used = [devices, f"torch {environment['torch']}", backend]
    if "deepspeed" in environment:
        used.append(f"DeepSpeed {environment['deepspeed']}")
    return title, f"{', '.join(used)}: {ranks} ranks"


def alike_lines(compared: Iterable[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return a plain line of each training that was held to another (recorded/equality)."""
    return [_alike_line(one) for one in compared if len(set(_sides(one))) == 2]


def _alike_line(one: Mapping[str, Any]) -> dict[str, str]:
    trained, reference = _sides(one)
    gradients = one.get("gradients_worst")
    return {
        "model": ", ".join(
            (one["model"], one["precision"], *(n for n in ("checkpointing", "lora") if one[n]))
        ),
        "trained by": trained,
        "compared with": reference,
        "steps": str(one["steps"]),
        "losses": _equal(one["losses_equal"]),
        "gradients": "-" if gradients is None else _equal(gradients == 0),
        "parameters": _equal(one["parameters_equal"]),
    }


def _sides(one: Mapping[str, Any]) -> tuple[str, str]:
    if one["check"] == "alike":
        # FSDP2 reduces in fp32, so it is held to our engine doing so too.
        in_fp32 = "fp32" in (one.get("reduce_dtype"), _REDUCES_IN.get(one["engine"]))
        reduced = ", gradients reduced in fp32" if in_fp32 else ""
        return f"{one['engine']}, stage {one['stage']}", f"peakmark, stage 0{reduced}"
    ranks = f"{one['ranks']} {'rank' if one['ranks'] == 1 else 'ranks'}"
    return (
        f"{ranks} at stage {one['stage']}, from what was saved",
        f"the {one['saved_ranks']} at stage {one['saved_stage']} that saved it",
    )


def _equal(are_equal: bool) -> str:
    return "equal" if are_equal else "differ"
