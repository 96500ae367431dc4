"""The moments of a step for one engine: totals as arrays, parts of a moment when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from planner.memory.groups import Place
from planner.memory.sections import COMPONENTS
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
    """What an engine holds in a step beside the model's own tensors; values may be arrays.

    It does not change once made, and so may be the key of what follows from it.
    """

    gradients: str

    def __hash__(self) -> int: ...

    def persistent(self) -> Parts: ...

    def held_numels(self) -> list[HeldGroup]: ...

    def at(self, place: Place) -> Parts: ...

    def flat(self, place: Place) -> tuple[Any, ...]: ...

    def behind_loss(self) -> Parts: ...

    def at_section_end(self, place: Place) -> Parts: ...

    def optimizer_step(self) -> Parts: ...


@dataclass(frozen=True)
class Moment:
    """One moment of a step: where in it, and its bytes by part."""

    place: Place
    parts: Parts

    @cached_property
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


class _Likes(NamedTuple):
    """Moments of one place at which an engine holds the same: their rows."""

    place: Place
    flat_key: int
    at_end: bool
    is_behind_loss: bool
    rows: tuple[int, ...]


@lru_cache(maxsize=512)
def _likes(moments: Moments) -> tuple[_Likes, ...]:
    """All moments, place by place in the order of the step."""
    # Bytes per logit: an fp32 loss has more alive, behind it is their gradient at most.
    logits = moments.constant[:, COMPONENTS.index("logits")].sum(axis=1)
    found: dict[tuple[Place, int, bool, bool], list[int]] = {}
    for row, place in enumerate(moments.place):
        is_behind = place.section == "loss_backward" and bool(logits[row] <= _GRADIENT_BYTES)
        key = place, moments.flat_key[row], moments.at_end[row], is_behind
        found.setdefault(key, []).append(row)
    return tuple(_Likes(*key, tuple(rows)) for key, rows in found.items())


class _Phase(NamedTuple):
    """The moments of a phase, the preferred one of equally high ones first: rows, likes, engine's bytes."""

    name: str
    rows: NDArray[np.intp]
    likes: tuple[_Likes, ...]
    held_bytes: NDArray[np.float64]


class Held:
    """What an engine holds at the traced moments of a step, and what is beside it.

    It depends on no micro-batch's rows or length, unless what is `beside` does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        moments: Moments,
        states: EngineStates,
        beside: PartsAt | None = None,
    ) -> None:
        self.moments, self.states, self._beside = moments, states, beside
        self._num_layers = spec.num_layers
        self._persistent = states.persistent()
        # By place, as they are asked for.
        self._parts_at: dict[Place, Parts] = {}
        self._total_at: dict[Place, Any] = {}
        self._flat_at: dict[Place, tuple[Any, ...]] = {}
        self._parts_of_row: dict[int, Parts] = {}
        likes = _likes(moments)
        if isinstance(spec, RankSpec):
            likes = tuple(like for like in likes if spec.runs(like.place.section))
        self.likes = likes

    @cached_property
    def phases(self) -> tuple[_Phase, ...]:
        """The phases with their moments (scalars only): later places first, earlier rows of one."""
        found: dict[str, list[tuple[Place, int, _Likes]]] = {}
        for like in self.likes:
            phase = phase_of(like.place, self._num_layers)
            found.setdefault(phase, []).extend((like.place, -row, like) for row in like.rows)
        return tuple(self._phase(name, moments) for name, moments in found.items())

    def _phase(self, name: str, moments: list[tuple[Place, int, _Likes]]) -> _Phase:
        moments.sort(key=lambda moment: moment[:2], reverse=True)
        _, rows, likes = zip(*moments, strict=True)
        held_bytes = [float(self.total(like)) for like in likes]
        return _Phase(name, -np.array(rows), likes, np.array(held_bytes))

    @cached_property
    def optimizer_parts(self) -> Parts:
        """Bytes by part while the optimizer steps."""
        return add_parts(self._persistent, self.states.optimizer_step())

    def _parts_before(self, place: Place) -> Parts:
        """What engine and all that is beside it hold as a place begins."""
        if place not in self._parts_at:
            parts = add_parts(self._persistent, self.states.at(place))
            if self._beside is not None:
                parts = add_parts(parts, self._beside(place))
            self._parts_at[place] = parts
        return self._parts_at[place]

    def parts(self, like: _Likes) -> Parts:
        """Bytes by part at these moments."""
        if like.rows[0] not in self._parts_of_row:
            more = self._parts_more(like)
            self._parts_of_row[like.rows[0]] = add_parts(self._parts_before(like.place), *more)
        return self._parts_of_row[like.rows[0]]

    def total(self, like: _Likes) -> Any:
        """Bytes at these moments."""
        if like.place not in self._total_at:
            self._total_at[like.place] = sum(self._parts_before(like.place).values())
        total = self._total_at[like.place]
        for more in self._parts_more(like):
            for size_bytes in more.values():
                total = total + size_bytes
        return total

    def _parts_more(self, like: _Likes) -> Iterator[Parts]:
        """What the engine holds at these moments beyond what it held as the place began."""
        place = like.place
        if like.flat_key and place.in_backward:
            if place not in self._flat_at:
                self._flat_at[place] = self.states.flat(place)
            sizes = enumerate(self._flat_at[place])
            yield {"gradients": sum(size for bit, size in sizes if like.flat_key >> bit & 1)}
        if like.is_behind_loss:
            yield self.states.behind_loss()
        if like.at_end:
            yield self.states.at_section_end(place)


class Timeline:
    """A model's traced moments under one engine, for one plan or an array of plans."""

    def __init__(
        self,
        spec: ModelSpec,
        held: Held,
        micro_batch: Any,
        sequence_length: Any,
        lora_rank: int = 0,
    ) -> None:
        self._held = held
        values = monomial_values(
            spec, held.moments.monomials, micro_batch, sequence_length, lora_rank
        )
        self._live: Any = np.tensordot(held.moments.constant, values, axes=1)
        self._live_total: Any = self._live.sum(axis=1)

    def highest(self) -> dict[str, Moment]:
        """The highest moment of every phase (scalars only); of equal ones that of the later place."""
        found = {OPTIMIZER_STEP: Moment(Place(OPTIMIZER_STEP), self._held.optimizer_parts)}
        for name, rows, likes, held_bytes in self._held.phases:
            highest = int((self._live_total[rows] + held_bytes).argmax())
            found[name] = self._moment(likes[highest], int(rows[highest]))
        return {name: found[name] for name in PHASES if name in found}

    def peak_bytes(self) -> Any:
        """The highest total over all moments, elementwise over arrays of plans."""
        peak = sum(self._held.optimizer_parts.values())
        for like in self._held.likes:
            live = self._live_total[list(like.rows)].max(axis=0)
            peak = np.maximum(peak, live + self._held.total(like))
        return peak

    def _moment(self, like: _Likes, row: int) -> Moment:
        live = dict(zip(COMPONENTS, self._live[row].tolist(), strict=True))
        return Moment(like.place, add_parts(self._held.parts(like), live))


def add_parts(*many: Parts) -> Parts:
    """Sum parts by name."""
    total: Parts = {}
    for parts in many:
        for name, size_bytes in parts.items():
            total[name] = total.get(name, 0) + size_bytes
    return total
