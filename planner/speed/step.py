"""One training step on one GPU: what the GPU, the host and the links take, and what of it is seen.

The GPU runs its kernels one after another while the host starts later ones, so that a phase ends when its
kernels are done, and not before they were started: a step takes the longer of both, or what the host takes
for the forward and the GPU for the rest. Where the host waits for the gradients before the update, it starts anew.
Collectives run beside the computation: seen of them is what is longer than that, what their kernels
take from it, and the last one of a phase, which nothing is left to hide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from planner.memory.kinds import layer_kinds
from planner.model import ModelSpec
from planner.payloads import step_payloads
from planner.rank import RankSpec
from planner.speed.engine_work import (
    gather_parts,
    gradient_parts,
    trained_parameters,
    update_parts,
)
from planner.speed.gpu_time import Part, micro_batch_parts
from planner.speed.host import HostTime, host_time
from planner.speed.rates import Rates, larger
from planner.speed.traced import traced_parts
from planner.workload import Engine, Optimizer, Parallelism, TrainingWorkload

PHASES = ("forward", "backward", "optimizer")
# NCCL's kernels take multiprocessors (24 channels of an H200's 132) and memory from what computes beside
# them, and a product that filled a wave of all of them takes another: in two steps that kept the GPU busy
# (3dadfdf172155bd6, 4acda044bfbf6549: calibration) kernels took longer by 0.40 and 0.23 of what was sent.
_CONTENTION = 0.31
# Reductions read and add besides sending, and so wait for memory that kernels read, too: in the same steps
# their all-reduces took 1.31 times as long as alone. Gathers did not, nor reductions beside a GPU that waited
# for its host most of the time.
_REDUCTIONS, _SLOWER_BESIDE = ("all_reduce", "reduce_scatter"), 0.31


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One kind of collective of a step: bytes of the full buffers, calls, time, and in which phases."""

    collective: str
    bytes: Any
    calls: Any
    time_s: Any
    shares: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The times of a step; `gpu_s` and `host_s` hold the phases', `exposed_s` is part of `gpu_s`.

    `runs` are the phases between which the host waits for nothing.
    """

    gpu_s: Mapping[str, Any]
    host_s: Mapping[str, Any]
    exposed_s: Mapping[str, Any]
    parts: tuple[Part, ...]
    sent: tuple[Sent, ...]
    runs: tuple[tuple[str, ...], ...] = (PHASES,)

    @property
    def gpu_step_s(self) -> Any:
        """The GPU's time, exposed collectives with it."""
        return sum(self.gpu_s.values())

    @property
    def host_step_s(self) -> Any:
        """The host's time."""
        return sum(self.host_s.values())

    @property
    def step_time_s(self) -> Any:
        """From the step's start to the end of its last phase on the GPU."""
        return self._ends_s()[PHASES[-1]]

    def phase_s(self, name: str) -> Any:
        """The time of a phase: from the end of the one before to its own, on the GPU."""
        ends_s, place = self._ends_s(), PHASES.index(name)
        return ends_s[name] - ends_s[PHASES[place - 1]] if place else ends_s[name]

    def _ends_s(self) -> dict[str, Any]:
        """When each phase ends: its kernels run after those before, and the last not before it is started."""
        found: dict[str, Any] = {}
        started_s: Any = 0.0
        end_s: Any = 0.0
        for run in self.runs:
            for name in run:
                started_s = started_s + self.host_s[name]
                end_s = larger(end_s + self.gpu_s[name], started_s)
                found[name] = end_s
            # The host waits for the GPU before it goes on.
            started_s = end_s
        return found


def training_step(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    rates: Rates,
    *,
    alone: bool = False,
    axes: tuple[Any, Any, Any] | None = None,
    known: list[Part] | None = None,
) -> Step:
    """Return the times of one step on a GPU that holds `spec`, the model or its part of one.

    `alone`: one rank without the others, which fills what it would receive. `axes` are arrays of
    world sizes, rows and tokens in the place of the plan's. `known`: what `micro_batch` said
    already, for a plan that differs in engine, stage, ranks or accumulation alone.
    """
    own = (parallelism.world_size, workload.micro_batch, workload.sequence_length)
    ranks, b, s = own if axes is None else axes
    parts = micro_batch(spec, workload, parallelism, rates, b, s) if known is None else known
    if axes is None:
        beside = _known_beside(spec, workload.of_any_size(), parallelism, rates, alone)
    else:
        beside = _beside(spec, workload, parallelism, rates, alone, ranks)
    every = (*(_times(part, workload.grad_accumulation) for part in parts), *beside.parts)
    busy_s: dict[str, Any] = dict.fromkeys(PHASES, 0)
    for part in every:
        busy_s[part.shown_phase] = busy_s[part.shown_phase] + part.time_s
    launches = {
        name: sum(part.launches for part in parts if part.phase == name)
        for name in ("forward", "backward", "recompute")
    }
    sharers = ranks * parallelism.context_parallel
    host_s = _by_phase(host_time(rates.host, spec, workload, parallelism, launches, sharers))
    if workload.optimizer is Optimizer.ADAFACTOR:
        # It waits for the GPU at every parameter, whose norm it reads (torch.optim._adafactor).
        host_s["optimizer"] = host_s["optimizer"] + busy_s["optimizer"]
    sent = beside.sent if alone else _slowed(beside.sent, busy_s, host_s)
    exposed_s = {name: _exposed_s(busy_s[name], _in_phase(sent, name), alone) for name in PHASES}
    return Step(
        gpu_s={name: busy_s[name] + exposed_s[name] for name in PHASES},
        host_s=host_s,
        exposed_s=exposed_s,
        parts=every,
        sent=sent,
        runs=_runs(workload, parallelism.engine),
    )


class _Beside(NamedTuple):
    """What an engine does in a step beside the model: on the GPU, and over its links."""

    parts: tuple[Part, ...]
    sent: tuple[Sent, ...]


def _beside(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    rates: Rates,
    alone: bool,
    ranks: Any,
) -> _Beside:
    """What an engine does, whatever the rows and tokens of a micro-batch; `ranks` may be an array."""
    engine, stage = parallelism.engine, parallelism.zero_stage
    sharers = ranks * parallelism.context_parallel
    sizes = trained_parameters(spec, workload, engine, sharers * 1.0)
    parts = gradient_parts(workload, engine, stage, sizes, rates)
    parts += gather_parts(workload, engine, stage, sizes, rates)
    if not workload.offload_optimizer:
        parts += update_parts(spec, workload, engine, stage, sizes, rates)
    sent = _sent(spec, workload, engine, stage, sharers, rates, alone)
    return _Beside(tuple(parts), tuple(sent))


@lru_cache(maxsize=256)
def _known_beside(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    rates: Rates,
    alone: bool,
) -> _Beside:
    return _beside(spec, workload, parallelism, rates, alone, parallelism.world_size)


def _runs(workload: TrainingWorkload, engine: Engine) -> tuple[tuple[str, ...], ...]:
    """The phases between which the host waits for nothing.

    DeepSpeed reads the gradients' norm before its update (0.19.8, scaled_global_norm), and
    Adafactor the norm of every parameter.
    """
    if engine is Engine.DEEPSPEED or workload.optimizer is Optimizer.ADAFACTOR:
        return PHASES[:2], PHASES[2:]
    return (PHASES,)


def micro_batch(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    rates: Rates,
    rows: Any,
    tokens: Any,
) -> list[Part]:
    """Return what one micro-batch of `rows` of `tokens` each does on a GPU that holds `spec`."""
    b, s = rows / parallelism.context_parallel, tokens * 1.0
    if spec.trace is not None:
        return traced_parts(spec, workload, rates, b, s)
    longest = int(np.max(s))
    kinds = layer_kinds(spec, workload, longest)
    found = micro_batch_parts(spec, workload, kinds, rates, b, s)
    if not isinstance(spec, RankSpec):
        return found
    return [part for part in found if part.section is None or spec.runs(part.section)]


def _times(part: Part, rounds: int) -> Part:
    if rounds == 1:
        return part
    return Part(
        phase=part.phase,
        name=part.name,
        flops=part.flops * rounds,
        bytes=part.bytes * rounds,
        launches=part.launches * rounds,
        time_s=part.time_s * rounds,
        section=part.section,
    )


def _by_phase(host: HostTime) -> dict[str, Any]:
    return {
        "forward": host.forward_s,
        "backward": host.backward_s,
        "optimizer": host.optimizer_s,
    }


def _slowed(
    sent: tuple[Sent, ...], busy_s: Mapping[str, Any], host_s: Mapping[str, Any]
) -> tuple[Sent, ...]:
    """Let reductions take longer the more the GPU computes of a backward, from half of it on.

    A backward takes what the GPU computes, what the host takes to start it or what is sent in it.
    """
    sent_s = sum((time_s for time_s, _ in _in_phase(sent, "backward")), 0.0)
    computing_s = busy_s["backward"]
    busy = computing_s / larger(larger(computing_s, host_s["backward"]), sent_s)
    slower = 1.0 + _SLOWER_BESIDE * larger(0.0, 2.0 * busy - 1.0)
    return tuple(
        replace(one, time_s=one.time_s * slower) if one.collective in _REDUCTIONS else one
        for one in sent
    )


def _in_phase(sent: Iterable[Sent], phase: str) -> list[tuple[Any, Any]]:
    """(time, calls) of what is sent in a phase."""
    return [
        (one.time_s * one.shares[phase], one.calls * one.shares[phase])
        for one in sent
        if phase in one.shares
    ]


def _exposed_s(busy_s: Any, sent: list[tuple[Any, Any]], alone: bool) -> Any:
    """What a phase takes longer for its collectives than its kernels alone.

    A rank alone computes what it fills: all of it counts.
    """
    total_s = sum(time_s for time_s, _ in sent)
    if alone or not sent:
        return total_s
    last_s = sum(time_s / larger(1.0, calls) for time_s, calls in sent)
    return larger(_CONTENTION * total_s, total_s - busy_s) + last_s


def _sent(
    spec: ModelSpec,
    workload: TrainingWorkload,
    engine: Engine,
    stage: int,
    ranks: Any,
    rates: Rates,
    alone: bool,
) -> list[Sent]:
    is_grid = np.ndim(ranks) > 0
    if not is_grid and ranks == 1:
        return []
    found = []
    take_s = rates.alone_s if alone else rates.collective_s
    for name, size_bytes, calls in step_payloads(spec, workload, engine, stage, ranks):
        time_s = calls * take_s(name, size_bytes / larger(calls * 1.0, 1.0), ranks)
        found.append(
            Sent(
                collective=name,
                bytes=size_bytes,
                calls=calls,
                time_s=np.where(ranks > 1, time_s, 0.0) if is_grid else time_s,
                shares=_shares(name, engine, stage),
            )
        )
    return found


def _shares(name: str, engine: Engine, stage: int) -> dict[str, float]:
    """In which phases an engine's collective runs, and how much of it."""
    if name in _REDUCTIONS:
        return {"backward": 1.0}
    if name == "broadcast" or (engine is Engine.DEEPSPEED and stage < 3):
        return {"optimizer": 1.0}
    return {"forward": 0.5, "backward": 0.5} if stage == 3 else {"forward": 1.0}
