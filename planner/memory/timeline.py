"""The moments of a step for one engine: totals as arrays, parts of a moment when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from planner.memory.groups import Place
from planner.memory.sections import COMPONENTS, FLAT_GROUPS
from planner.memory.states import HeldGroup, Parts
from planner.memory.templates import Moments, monomial_values
from planner.model import ModelSpec
from planner.rank import RankSpec

OPTIMIZER_STEP = "optimizer"
_GRADIENT_BYTES = 4
# Bytes by part of what is alive at a place beside the model's and the engine's own tensors.
PartsAt = Callable[[Place], Parts]
# The phases people read, in the order of a step.
PHASES: Mapping[str, str] = {
    "forward": "Forward",
    "loss_forward": "Logits and loss",
    "loss_backward": "Loss backward",
    "backward_first": "Backward of the last layers",
    "backward_last": "Backward of the first layers",
    "optimizer": "Optimizer step",
}


class EngineStates(Protocol):
    """What an engine holds in a step beside the model's own tensors; values may be arrays."""

    gradients: str

    def persistent(self) -> Parts: ...

    def held_numels(self) -> list[HeldGroup]: ...

    def at(self, place: Place) -> Parts: ...

    def flat(self, place: Place) -> tuple[Any, ...]: ...

    def behind_loss(self) -> Parts: ...

    def at_section_end(self, place: Place) -> Parts: ...

    def optimizer_step(self) -> Parts: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a step: where in it, and its bytes by part."""

    place: Place
    parts: Parts

    @property
    def total_bytes(self) -> float:
        """Bytes of all parts."""
        return float(sum(self.parts.values()))


def phase_of(place: Place, num_layers: int) -> str:
    """The phase that a place of the step belongs to; the backward's has two halves."""
    if place.section == "layer_backward":
        return "backward_first" if 2 * place.layer >= num_layers else "backward_last"
    named = {"loss": "loss_forward", "embed_backward": "backward_last"}
    named |= {name: name for name in ("loss_backward", OPTIMIZER_STEP)}
    return named.get(place.section, "forward")


@lru_cache(maxsize=512)
def _rows_by_place(places: tuple[Place, ...]) -> dict[Place, list[int]]:
    rows: dict[Place, list[int]] = {}
    for row, place in enumerate(places):
        rows.setdefault(place, []).append(row)
    return rows


class Timeline:
    """A model's traced moments under one engine, for one plan or an array of plans."""

    def __init__(
        self,
        spec: ModelSpec,
        moments: Moments,
        states: EngineStates,
        micro_batch: Any,
        sequence_length: Any,
        beside: PartsAt | None = None,
        lora_rank: int = 0,
    ) -> None:
        self._moments, self._states, self._beside = moments, states, beside
        self._num_layers = spec.num_layers
        values = monomial_values(spec, moments.monomials, micro_batch, sequence_length, lora_rank)
        self._live: Any = np.tensordot(moments.constant, values, axes=1)
        self._live_total: Any = self._live.sum(axis=1)
        self._persistent = states.persistent()
        self._engine_totals: dict[tuple[Place, int, bool, bool], Any] = {}
        rows = _rows_by_place(moments.place)
        if isinstance(spec, RankSpec):
            rows = {place: r for place, r in rows.items() if spec.runs(place.section)}
        self._rows = rows
        # Bytes per logit: an fp32 loss has more alive, behind it is their gradient at most.
        logits = moments.constant[:, COMPONENTS.index("logits")].sum(axis=1)
        backward = rows.get(Place("loss_backward"), [])
        self._behind_loss = {row for row in backward if logits[row] <= _GRADIENT_BYTES}

    def highest(self) -> dict[str, Moment]:
        """The highest moment of every phase (scalars only)."""
        best: dict[str, tuple[float, Place, int]] = {}
        for place, rows in self._rows.items():
            totals = [float(self._total(place, row)) for row in rows]
            top = int(np.argmax(totals))
            candidate = (totals[top], place, rows[top])
            phase = phase_of(place, self._num_layers)
            best[phase] = max(best.get(phase, candidate), candidate)
        found = {phase: self._moment(place, row) for phase, (_, place, row) in best.items()}
        found[OPTIMIZER_STEP] = Moment(Place(OPTIMIZER_STEP), self._optimizer_parts())
        return {name: found[name] for name in PHASES if name in found}

    def peak_bytes(self) -> Any:
        """The highest total over all moments, elementwise over arrays of plans."""
        peak = sum(self._optimizer_parts().values())
        for place, rows in self._rows.items():
            for row in rows:
                peak = np.maximum(peak, self._total(place, row))
        return peak

    def _optimizer_parts(self) -> Parts:
        return add_parts(self._persistent, self._states.optimizer_step())

    def _engine_parts(self, place: Place, row: int) -> Parts:
        states, moments = self._states, self._moments
        parts = add_parts(self._persistent, states.at(place))
        if self._beside is not None:
            parts = add_parts(parts, self._beside(place))
        if place.in_backward and moments.flat_key[row]:
            sizes = zip(FLAT_GROUPS, states.flat(place), strict=True)
            begun = sum(size for name, size in sizes if moments.has_begun(row, name))
            parts["gradients"] = parts["gradients"] + begun
        if row in self._behind_loss:
            parts = add_parts(parts, states.behind_loss())
        if moments.at_end[row]:
            parts = add_parts(parts, states.at_section_end(place))
        return parts

    def _total(self, place: Place, row: int) -> Any:
        return self._live_total[row] + self._engine_total(place, row)

    def _engine_total(self, place: Place, row: int) -> Any:
        # Moments of one section differ in the model's tensors; the engine's change once or twice.
        moments = self._moments
        key = (place, moments.flat_key[row], moments.at_end[row], row in self._behind_loss)
        if key not in self._engine_totals:
            self._engine_totals[key] = sum(self._engine_parts(place, row).values())
        return self._engine_totals[key]

    def _moment(self, place: Place, row: int) -> Moment:
        live = dict(zip(COMPONENTS, self._live[row].tolist(), strict=True))
        return Moment(place, add_parts(self._engine_parts(place, row), live))


def add_parts(*many: Parts) -> Parts:
    """Sum parts by name."""
    total: Parts = {}
    for parts in many:
        for name, size_bytes in parts.items():
            total[name] = total.get(name, 0) + size_bytes
    return total
