"""The least a ZeRO stage can hold with communication that overlaps: what engines are measured by.

Shards to the element, whatever the padding, and whole only what must be at that moment: at stage 3
the unit in use and the one on its way; at stages 1 and 2, that gather once a step, what the forward
has reached and its backward not yet left; from stage 2 on the gradients of the group being made and
of the one being reduced. Master weights exist once: from stage 1 on they are the shards, at stage 0
beside 16-bit parameters. Activations, logits and library workspaces are those of the plan.
"""

from __future__ import annotations

from typing import Any

from planner.hardware import Gpu
from planner.memory.adapters import Trained, trained_groups
from planner.memory.groups import Place, group_numels
from planner.memory.optimizers import optimizer_states, stepped_groups
from planner.memory.overheads import workspace_bytes
from planner.memory.parallel import is_split
from planner.memory.sections import FLAT_GROUPS
from planner.memory.states import (
    Gathered,
    GatheredOnce,
    HeldGroup,
    Parts,
    Precisions,
    compute_bytes,
    first_finished,
    tied_shares,
)
from planner.memory.templates import load_moments, traced
from planner.memory.timeline import Held, Timeline
from planner.model import ModelSpec
from planner.workload import Engine, Parallelism, TrainingWorkload


class IdealStates:
    """What every place of a step must hold beside the model's own tensors at one stage."""

    gradients = "added"

    def __init__(
        self, spec: ModelSpec, workload: TrainingWorkload, stage: int, world_size: int
    ) -> None:
        trained: Trained | None = trained_groups(spec, workload)
        numels = trained.trained if trained else group_numels(spec)
        every = trained.frozen if trained else numels.map(lambda numel: 0)
        self._ranks, self._stage = world_size, stage
        self._sizes = Precisions.of(workload.precision, Engine.PEAKMARK, self._stage)
        self._numels, self._frozen = numels, every
        self._compute, self._precision = compute_bytes(workload.precision), workload.precision
        self._layers = spec.num_layers
        self._accumulates = workload.grad_accumulation > 1
        late = self._stage < 2 or not workload.sync_each_micro_batch
        self._keeps_whole = self._accumulates and late
        is_tied = spec.tie_word_embeddings
        self._tied_numel = spec.vocab_size * spec.hidden_size if is_tied and not trained else 0
        first = trained.first_layer if trained else 0
        # One rank keeps all whole already, unless it keeps it in another type.
        casts = self._sizes.parameter != self._compute
        gathers = stage > 0 and (world_size > 1 or casts)
        parts = [numels, every] if trained and stage == 3 else [numels]
        units: list[Gathered | GatheredOnce] = [
            Gathered(part, spec.num_layers, is_tied, first)
            if stage == 3
            else GatheredOnce(part, spec.num_layers, is_tied, self._accumulates)
            for part in parts
        ]
        self._units = units if gathers else []
        # Of two micro-batches the first finds no gradients and the last frees parameters.
        is_once = stage in (1, 2) and workload.grad_accumulation == 2
        last = GatheredOnce(numels, spec.num_layers, is_tied, accumulates=False)
        self._last_of_two = last if is_once and gathers else None
        # Whole at stages 1 and 2 for long, beside a shard in another type only.
        self._own_share = 1 / world_size if stage in (1, 2) and not casts else 0
        tensors = stepped_groups(spec, workload.optimizer, numels, self._sizes.state)
        states = tensors.map(lambda group: optimizer_states(workload.optimizer, group))
        self._state_bytes = states.map(lambda held: sum(s.size_bytes for s in held)).total()

    def persistent(self) -> Parts:
        """Parameters, whole or this rank's share, and optimizer states, in bytes."""
        sizes, total = self._sizes, self._numels.total()
        share = self._ranks if self._stage else 1
        frozen = self._frozen.total() * self._compute / (self._ranks if self._stage == 3 else 1)
        stepped = total * sizes.master + self._state_bytes
        return {
            "parameters": total * sizes.parameter / share + frozen,
            "optimizer": stepped / share,
        }

    def held_numels(self) -> list[HeldGroup]:
        """Nothing has a name in the ideal."""
        return []

    def at(self, place: Place) -> Parts:
        """Whole parameters, and gradients of groups begun before `place`, in bytes."""
        sizes, tied = self._sizes, tied_shares(place, self._precision) * self._tied_numel
        compute = (1 - self._own_share) * self._compute
        found = [
            {"gathered": gathered * compute, "gradients": gradients * sizes.gradient}
            for gathered, gradients in self._micro_batches(place)
        ]
        highest = max(found, key=lambda parts: sum(parts.values()))
        return {**highest, "temporary": tied * sizes.gradient}

    def _micro_batches(self, place: Place) -> list[tuple[Any, Any]]:
        """Elements whole and of gradients, in those micro-batches that may be the highest."""
        gathered = sum(unit.at(place) for unit in self._units)
        gradients = self._gradients(place, self._accumulates)
        if self._last_of_two is None:
            return [(gathered, gradients)]
        first = gathered, self._gradients(place, False)
        return [first, (self._last_of_two.at(place), gradients)]

    def _gradients(self, place: Place, finds: bool) -> Any:
        """Elements of gradients in a micro-batch that `finds` those of one before it, or does not."""
        share = self._ranks if self._stage >= 2 and not self._keeps_whole else 1
        in_flight = self._in_flight(place) if self._stage >= 2 and self._ranks > 1 else 0
        if finds and self._keeps_whole:
            return self._numels.total()
        if finds:
            return self._numels.total() / share + in_flight
        if not place.in_backward:
            return 0
        done = self._numels.layers.total(first_finished(place, self._layers))
        if place.section != "loss_backward":
            done = done + self._numels.head
        return done / share + (0 if self._keeps_whole else in_flight)

    def _in_flight(self, place: Place) -> Any:
        """Elements of the group finished last, which is being reduced."""
        if not place.in_backward or place.section == "loss_backward":
            return 0
        above = first_finished(place, self._layers)
        return self._numels.head if above == self._layers else self._numels.layers[above]

    def flat(self, place: Place) -> tuple[Any, ...]:
        """Whole gradients of the group that `place` makes, per entry of FLAT_GROUPS, in bytes."""
        if self._keeps_whole:
            return (0, 0, 0)
        sizes = [self._numels.of(name.removeprefix("flat_"), place.layer) for name in FLAT_GROUPS]
        if place.section == "embed_backward":
            # A tied weight's shares are there already; they become its gradient.
            shares = tied_shares(place, self._precision)
            sizes[0] = max(sizes[0] - shares * self._tied_numel, 0)
        return tuple(size * self._sizes.gradient for size in sizes)

    def behind_loss(self) -> Parts:
        """The last layer, in flight while the head's backward goes on."""
        return {"gathered": sum(unit.ahead_of_backward() for unit in self._units) * self._compute}

    def at_section_end(self, place: Place) -> Parts:
        """Nothing: a reduction leaves its shard where the whole was."""
        return {}

    def optimizer_step(self) -> Parts:
        """Gradients alone: an update can work value by value."""
        share = self._ranks if self._stage >= 2 else 1
        return {"gradients": self._numels.total() / share * self._sizes.gradient}


def ideal_bytes(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    hardware: Gpu | None = None,
) -> int | None:
    """Return the least allocated bytes at the peak of a plan's stage; None for a split model."""
    if is_split(parallelism):
        return None
    template = traced(spec, workload, workload.sequence_length)
    states = IdealStates(spec, workload, parallelism.zero_stage, parallelism.world_size)
    held = Held(spec, load_moments(template, states.gradients), states)
    sizes = workload.micro_batch, workload.sequence_length, workload.lora_rank
    timeline = Timeline(spec, held, *sizes)
    return round(float(timeline.peak_bytes())) + workspace_bytes(hardware)
