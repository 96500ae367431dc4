"""The host's time to start a step's work: kernels, and what engines and checkpointing add to them.

`peakmark calibrate` trains small models whose kernels are quicker than the host that starts them. What a
step takes then, over its kernels, is a family's time per kernel (with the module's, autograd's and the
allocator's work around it); what an engine or checkpointing adds is told in kernels of a plain step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.model import ModelSpec
from planner.workload import Checkpointing, Parallelism, TrainingWorkload

PHASES = ("forward", "backward", "optimizer")
_CHECKPOINT = "checkpoint"
# DeepSpeed was not measured on its own: its hooks are as many as those of the engine it resembles.
_LIKE = {
    "deepspeed/1": "zero_redundancy/1",
    "deepspeed/2": "zero_redundancy/1",
    "deepspeed/3": "fsdp2/3",
}


@dataclass(frozen=True, slots=True)
class HostTable:
    """Measured times of one host.

    `kernel_s` holds seconds per kernel of the forward and backward by family, under "" the median of
    all; `step_s` what forward and backward take besides; `extra_kernels` what "engine/stage" and "checkpoint" add to them for every layer; `update_s`
    seconds per layer of an optimizer's step by "engine/stage" and by optimizer. All were measured on a
    host without other work; one that trains for hours has some, and takes `pace` times as long.
    """

    kernel_s: Mapping[str, tuple[float, float]]
    step_s: tuple[float, float]
    extra_kernels: Mapping[str, tuple[float, float]]
    update_s: Mapping[str, float]
    pace: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> HostTable:
        """Read the JSON form."""
        pairs = ("kernel_s", "extra_kernels")
        read = {name: {k: (v[0], v[1]) for k, v in data[name].items()} for name in pairs}
        first, second = data["step_s"]
        return cls(
            **read,
            step_s=(first, second),
            update_s=dict(data["update_s"]),
            pace=float(data["pace"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds that the host takes for the phases of one step."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


def host_time(
    table: HostTable,
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    launches: Mapping[str, float],
) -> HostTime:
    """Return the host's time for one step; `launches` counts a micro-batch's kernels by phase.

    Those that are launched again for the backward cost as in the forward.
    """
    forward_s, backward_s = table.kernel_s.get(spec.family) or table.kernel_s[""]
    engine = f"{parallelism.engine}/{parallelism.zero_stage}"
    engine = _LIKE.get(engine, engine)
    added = table.extra_kernels.get(engine, (0.0, 0.0))
    again = table.extra_kernels[_CHECKPOINT]
    layers, rounds = spec.num_layers, workload.grad_accumulation
    recomputed = 0.0
    if workload.checkpointing is not Checkpointing.NONE:
        recomputed = layers / workload.checkpoint_every
    trained = layers - workload.frozen_layers
    in_forward = launches["forward"] + layers * added[0] + recomputed * again[0]
    in_backward = launches["backward"] + trained * added[1] + recomputed * again[1]
    update_s = max(
        table.update_s.get(engine, table.update_s["peakmark/0"]),
        table.update_s.get(str(workload.optimizer), 0.0),
    )
    started_s = in_backward * backward_s + launches["recompute"] * forward_s
    return HostTime(
        forward_s=table.pace * rounds * (in_forward * forward_s + table.step_s[0]),
        backward_s=table.pace * rounds * (started_s + table.step_s[1]),
        optimizer_s=table.pace * trained * update_s,
    )
