"""One measurement beside today's prediction: which counters compare, and what groups it is in.

Error in percent: 100 x (predicted - measured) / measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.collective_times import are_calls_apart, collective_times_s
from planner.memory.overheads import NCCL_OVERHEAD
from planner.offload import host_step
from planner.plan import Plan
from planner.records import RecordedRow
from planner.speed.calibrated import rates_of
from planner.speed.rates import Rates
from planner.speed.step import training_step
from planner.workload import Engine, Parallelism, TrainingWorkload

MEMORY_QUANTITIES = ("allocated", "reserved", "device")
PHASE_TIMES = ("forward_time", "backward_time", "optimizer_time")
# A rank alone sends nothing: its step is compared with that of a rank alone.
ALONE = "step_time_alone"
# A step timed by itself, between two readings of its host's pace.
PACED = "paced_step"
TIME_QUANTITIES = ("step_time", ALONE, *PHASE_TIMES, "communication_time")
_DDP = (Engine.DDP, Engine.ZERO_REDUNDANCY)
# The component of the prediction, and its name in a measurement.
STATE_FIELDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
}
# From this share of the GPU on, a plan is reported among those that nearly fill it.
NEARLY_FULL = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One quantity predicted and measured, in bytes or seconds."""

    quantity: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        """Signed error relative to the measurement."""
        return 100 * (self.predicted - self.measured) / self.measured


def compare(
    prediction: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> list[Comparison]:
    """Pair a prediction's dictionary with what a run measured, where the world is honest for it.

    On the CPU, where device counters are null, the bytes of the training state are compared. Of
    DDP as one rank alone only allocated bytes are: it lacks the first bucket that NCCL holds on to
    while the lasting ones are made, which real ranks reserve beside them (see `replay_ddp`). So of a
    run that went on from a saved step: its states were there before its first activations, and its
    segments lie otherwise.
    """
    parallelism = prediction["plan"]["parallelism"]
    pairs = _memory_pairs(prediction["memory"], measured, world)
    lacks_bucket = world == "solo" and parallelism["world_size"] > 1
    if (lacks_bucket and parallelism["engine"] in _DDP) or measured.get("loaded"):
        pairs = pairs[:1]
    if world == "cpu":
        pairs = _state_pairs(prediction, measured)
    # A rank alone does not communicate: its step is a whole one only when the plan has one rank.
    if world == "nccl" or (world == "solo" and parallelism["world_size"] == 1):
        pairs += _time_pairs(prediction["throughput"], measured)
    if world == "nccl":
        pairs.append(("communication_time", *_communication_s(prediction, measured)))
    return [
        Comparison(quantity=name, predicted=float(ours), measured=float(seen))
        for name, ours, seen in pairs
        if ours is not None and seen
    ]


def _time_pairs(
    speed: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[tuple[str, float | None, float | None]]:
    phases = speed.get("phases_s") or {}
    pairs = [("step_time", speed["step_time_s"], measured.get("step_time_s"))]
    for name in PHASE_TIMES:
        phase = name.removesuffix("_time")
        pairs.append((name, phases.get(phase), measured.get(f"{name}_s")))
    return pairs


def compare_alone(plan: Plan, measured: Mapping[str, Any]) -> list[Comparison]:
    """Pair the step of one rank of several, run alone, with the step predicted for it alone."""
    seen, workload = measured.get("step_time_s"), plan.workload
    if not seen or plan.parallelism.world_size == 1 or not isinstance(workload, TrainingWorkload):
        return []
    predicted_s = _step_s(plan, workload, rates_of(plan.hardware), alone=True)
    return [Comparison(quantity=ALONE, predicted=predicted_s, measured=float(seen))]


def compare_paced(plan: Plan, measured: Mapping[str, Any], *, alone: bool) -> list[Comparison]:
    """Pair the steps that a run took between readings of its host's pace with those predicted at that pace.

    So a calibration made at that moment would have them. Of several ranks the slowest counts, as a host and
    as a step. Empty where the run did not measure it, or is no training.
    """
    ranks, workload = measured.get("host_pace") or (), plan.workload
    if not isinstance(workload, TrainingWorkload):
        return []
    rates, found = rates_of(plan.hardware), []
    # The first rows with a pace have no such steps.
    for together in zip(*(rank.get("steps", ()) for rank in ranks), strict=True):
        slowest = {name: max(one[name] for one in together) for name in together[0]}
        host = rates.host.at_pace(1e-6 * slowest["forward_us"], 1e-6 * slowest["backward_us"])
        predicted_s = _step_s(plan, workload, replace(rates, host=host), alone=alone)
        seen_s = slowest["step_time_s"]
        found.append(Comparison(quantity=PACED, predicted=predicted_s, measured=seen_s))
    return found


def _step_s(plan: Plan, workload: TrainingWorkload, rates: Rates, *, alone: bool) -> float:
    step = training_step(plan.model, workload, plan.parallelism, rates, alone=alone)
    seconds = float(step.step_time_s)
    if workload.offload_optimizer:
        ranks = plan.parallelism.world_size
        seconds += float(host_step(plan.model, workload, ranks, plan.hardware).time_s)
    return seconds


def _communication_s(
    prediction: Mapping[str, Any], measured: Mapping[str, Any]
) -> tuple[float | None, float | None]:
    """Return the time of all collectives of a step, predicted and in the traced step.

    Where a row does not tell calls apart, a rank's waits for the others are in its sums: what the
    collectives themselves took is not known.
    """
    ranks = measured.get("kernel_times") or ()
    if not are_calls_apart(ranks):
        return None, None
    seen = collective_times_s(ranks)
    predicted = sum(item["time_s"] for item in prediction["throughput"]["communication"])
    return predicted, sum(seen.values())


def _memory_pairs(
    memory: Mapping[str, Any], measured: Mapping[str, Any], world: str
) -> list[tuple[str, float | None, float | None]]:
    """Pair the counters of one rank.

    Ranks that share a GPU see one another's device bytes. What they reserve has gloo's copies in it: it
    clones what it reduces on the device, from the same allocator, and no engine's plan has those (torch
    2.11, torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, reduce_scatter_tensor_coalesced). Device bytes are read as a run ends: fewer than the most that was reserved say that segments
    had been given back by then, and not what the run needed.
    """
    predicted = {name: memory.get(f"{name}_bytes") for name in MEMORY_QUANTITIES}
    seen = {name: measured.get(f"{name}_bytes") or 0 for name in ("reserved", "device")}
    if world == "shared":
        predicted["reserved"] = predicted["device"] = None
    if seen["device"] < seen["reserved"]:
        predicted["device"] = None
    if world == "solo" and predicted["device"] is not None:
        # A rank alone has no communicator.
        predicted["device"] -= sum(
            row["bytes"] for row in memory.get("overheads", ()) if row["name"] == NCCL_OVERHEAD
        )
    return [(name, ours, measured.get(f"{name}_bytes")) for name, ours in predicted.items()]


def _state_pairs(
    prediction: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[tuple[str, float | None, float | None]]:
    """Pair the bytes of parameters, gradients and optimizer states as the optimizer step begins."""
    phases = {phase["name"]: phase["parts"] for phase in prediction["memory"]["phases"]}
    seen = measured.get("state") or {}
    return [
        (f"{component} state", phases["optimizer"].get(component), seen.get(name))
        for component, name in STATE_FIELDS.items()
    ]


def gpu_name(environment: Mapping[str, Any]) -> str:
    """Return the name of the GPU that a run had, "none" on the CPU."""
    gpu = environment.get("gpu")
    return str(gpu.get("name")) if isinstance(gpu, Mapping) else "none"


def groups_of(
    plan: Plan, workload: TrainingWorkload, row: RecordedRow, device_bytes: int
) -> dict[str, str]:
    """Return what a row is grouped by: the traits of its plan, its world and its GPU."""
    filled = device_bytes / plan.hardware.visible_bytes
    return {
        **plan_traits(plan, workload),
        "world": str(row.spec.get("world")),
        "gpu": gpu_name(row.environment),
        "GPU filled": "85 % or more" if filled >= NEARLY_FULL else "less than 85 %",
    }


def plan_traits(plan: Plan, workload: TrainingWorkload) -> dict[str, str]:
    """Return the choices of a plan that errors are grouped by, as words."""
    parallelism = plan.parallelism
    return {
        "job": plan.job.value,
        "engine": parallelism.engine.value,
        "stage": str(parallelism.zero_stage),
        "world size": str(parallelism.world_size),
        "attention": workload.attention.value,
        "checkpointing": _checkpointing(workload),
        "precision": workload.precision.value,
        "optimizer": workload.optimizer.value,
        "loss": workload.loss.value,
        "accumulation": _accumulation(workload),
        "LoRA": _adapters(workload),
        "variant": _variant(workload, parallelism),
        "architecture": plan.model.family,
    }


def _checkpointing(workload: TrainingWorkload) -> str:
    every = workload.checkpoint_every
    return workload.checkpointing.value + (f", every {every}" if every > 1 else "")


def _accumulation(workload: TrainingWorkload) -> str:
    if workload.grad_accumulation == 1:
        return "none"
    return "reduced each time" if workload.sync_each_micro_batch else "reduced at the end"


def _adapters(workload: TrainingWorkload) -> str:
    if not workload.lora_rank:
        return "none"
    return f"{workload.lora_targets}, base {workload.base_dtype}".replace("_", " ")


def _variant(workload: TrainingWorkload, parallelism: Parallelism) -> str:
    """Name whatever else is unusual, "none" for nothing."""
    named = [
        ("frozen layers", workload.frozen_layers),
        ("packed", workload.packed),
        ("expandable segments", workload.expandable_segments),
        ("optimizer offloaded", workload.offload_optimizer),
        ("clipped", workload.max_grad_norm),
        (f"reduced in {workload.reduce_dtype}", workload.reduce_dtype != "auto"),
        ("tensor parallel", parallelism.tensor_parallel > 1),
        ("pipeline parallel", parallelism.pipeline_parallel > 1),
        ("context parallel", parallelism.context_parallel > 1),
        ("expert parallel", parallelism.expert_parallel > 1),
    ]
    return ", ".join(name for name, is_used in named if is_used) or "none"
