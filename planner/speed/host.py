"""The host's time to start a step's work: kernels, and what engines and checkpointing add to them.

`peakmark calibrate` trains small models whose kernels are quicker than the host that starts them. What a
step takes then, over its kernels, is a family's time per kernel (with the module's, autograd's and the
allocator's work around it); what an engine or checkpointing adds is told in kernels of a plain step.
DeepSpeed's stage 3 works in Python on every parameter it handles and, in loops, on every rank's piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.model import ModelSpec
from planner.payloads import stage3_parameters
from planner.workload import Checkpointing, Engine, Parallelism, TrainingWorkload

PHASES = ("forward", "backward", "optimizer")
_CHECKPOINT = "checkpoint"
# Stages 1 and 2 of DeepSpeed were not measured on their own: their hooks are as many as those of the
# engine they resemble.
_LIKE = {"deepspeed/1": "zero_redundancy/1", "deepspeed/2": "zero_redundancy/1"}
# A rank's piece of a gathered parameter is narrowed, joined and noted for its stream
# (deepspeed 0.19.8, partition_parameters.py, AllGatherCoalescedHandle.wait), one of a reduced gradient
# sliced (coalesced_collectives.py, reduce_scatter_coalesced).
_GATHERED_PIECE, _REDUCED_PIECE = 3, 1


@dataclass(frozen=True, slots=True)
class HostTable:
    """Measured times of one host.

    `kernel_s` holds seconds per kernel of the forward and backward by family, under "" the median of
    all; `step_s` what forward and backward take besides; `extra_kernels` what "engine/stage" and
    "checkpoint" add to them for every layer; `update_s` seconds per layer of an optimizer's step by
    "engine/stage", by optimizer and by "engine/optimizer". `stage3_s` are seconds of DeepSpeed's stage 3 per
    "parameter" that it fetches or reduces and per operation on one rank's "piece".

    All hold for a host that goes forward and back through a small module (runners/jobs/host_pace.py) in
    `module_s`; this one takes `paces` times as long: forward and update, and backward, which another
    thread starts.
    """

    kernel_s: Mapping[str, tuple[float, float]]
    step_s: tuple[float, float]
    extra_kernels: Mapping[str, tuple[float, float]]
    update_s: Mapping[str, float]
    stage3_s: Mapping[str, float]
    module_s: tuple[float, float]
    paces: tuple[float, float]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostTable:
        """Read the JSON form."""
        tables = ("kernel_s", "extra_kernels")
        pairs: dict[str, Any] = {
            name: {k: (v[0], v[1]) for k, v in data[name].items()} for name in tables
        }
        pairs |= {name: (data[name][0], data[name][1]) for name in ("step_s", "module_s", "paces")}
        return cls(**pairs, update_s=dict(data["update_s"]), stage3_s=dict(data["stage3_s"]))

    def at_pace(self, forward_s: float, backward_s: float) -> HostTable:
        """Return the times of a host that goes through a small module in so many seconds."""
        return replace(self, paces=(forward_s / self.module_s[0], backward_s / self.module_s[1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds that the host takes for the phases of one step."""

    forward_s: Any
    backward_s: Any
    optimizer_s: Any

    @property
    def step_s(self) -> Any:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


def host_time(
    table: HostTable,
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    launches: Mapping[str, float],
    ranks: Any = 1,
) -> HostTime:
    """Return the host's time for one step; `launches` counts a micro-batch's kernels by phase.

    Those that are launched again for the backward cost as in the forward. `ranks` share the state.
    """
    forward_s, backward_s = table.kernel_s.get(spec.family) or table.kernel_s[""]
    engine = f"{parallelism.engine}/{parallelism.zero_stage}"
    added = table.extra_kernels.get(_LIKE.get(engine, engine), (0.0, 0.0))
    again = table.extra_kernels[_CHECKPOINT]
    layers, rounds = spec.num_layers, workload.grad_accumulation
    recomputed = 0.0
    if workload.checkpointing is not Checkpointing.NONE:
        recomputed = layers / workload.checkpoint_every
    trained = layers - workload.frozen_layers
    own = table.extra_kernels.get(str(workload.attention), (0.0, 0.0))
    # Selective checkpointing hands every operation to Python to choose, when it runs and when it runs
    # again (torch.utils.checkpoint, _CachingTorchDispatchMode): as much work as to start it.
    chosen = launches["recompute"] if workload.checkpointing is Checkpointing.SELECTIVE else 0.0
    in_forward = launches["forward"] + layers * (added[0] + own[0]) + recomputed * again[0] + chosen
    in_backward = launches["backward"] + trained * (added[1] + own[1]) + recomputed * again[1]
    started_s = in_backward * backward_s + (launches["recompute"] + chosen) * forward_s
    more = _stage3_s(table, spec, workload, parallelism, ranks)
    ahead, back = table.paces
    return HostTime(
        forward_s=ahead * (rounds * (in_forward * forward_s + table.step_s[0]) + more[0]),
        backward_s=back * (rounds * (started_s + table.step_s[1]) + more[1]),
        optimizer_s=ahead * (trained * _update_s(table, workload, parallelism) + more[2]),
    )


def _update_s(table: HostTable, workload: TrainingWorkload, parallelism: Parallelism) -> float:
    """Seconds per layer of the optimizer's step: the engine's, or a slower one of the optimizer's own."""
    engine = f"{parallelism.engine}/{parallelism.zero_stage}"
    own = table.update_s.get(_LIKE.get(engine, engine), table.update_s["peakmark/0"])
    together = f"{parallelism.engine}/{workload.optimizer}"
    return max(
        own, table.update_s.get(str(workload.optimizer), 0.0), table.update_s.get(together, 0.0)
    )


def _stage3_s(
    table: HostTable,
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    ranks: Any,
) -> tuple[Any, Any, Any]:
    """What DeepSpeed's stage 3 adds to forward, backward and optimizer.

    It fetches and reduces every micro-batch, and gathers what it keeps whole after the step.
    """
    if parallelism.engine is not Engine.DEEPSPEED or parallelism.zero_stage < 3:
        return 0.0, 0.0, 0.0
    recomputes = workload.checkpointing is Checkpointing.FULL
    counted, rounds = stage3_parameters(spec, recomputes), workload.grad_accumulation
    again = counted.fetched - counted.forward
    parameter_s, piece_s = table.stage3_s["parameter"], table.stage3_s["piece"] * ranks
    gathered_s = parameter_s + _GATHERED_PIECE * piece_s
    reduced_s = parameter_s + _REDUCED_PIECE * piece_s
    return (
        rounds * counted.forward * gathered_s,
        rounds * (again * gathered_s + counted.every * reduced_s),
        counted.kept * _GATHERED_PIECE * piece_s,
    )
