"""Encode a tape as a template: the ordered allocations and releases of every section of a step.

The planner reads them back (`planner.memory.sections`): it sums them into live sets, and replays
them through the caching allocator. A release names its tensor by the place where it was allocated,
relative to the section, so that one inner layer stands for any number of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from planner.memory.sections import (
    BACKWARD,
    COMPONENTS,
    FLAT_GROUPS,
    FORWARD,
    FORWARD_ABOVE,
    FORWARD_BELOW,
    LAST_INNER,
    OWN_FORWARD,
    PREVIOUS,
    SECTIONS,
    THIS,
)
from runners.trace.step import LAYER_NAMES, trace_step
from runners.trace.tape import Allocation, Event
from runners.trace.variants import Variant

Encoded = list[list[Any]]


def build_template(variant: Variant) -> dict[str, Any]:
    """Trace a variant; returns {"forward", "kept", "added", "saved"}: events by section name.

    "kept" backward sections keep the gradients they produce; in "added" ones autograd adds them
    into buffers that exist already, so each lives for a moment only.
    """
    kept = _Encoder(trace_step(variant, gradients_exist=False))
    added = _Encoder(trace_step(variant, gradients_exist=True))
    return {
        "forward": kept.sections(FORWARD),
        "kept": kept.sections(BACKWARD),
        "added": added.sections(BACKWARD),
        "saved": kept.saved(),
    }


def _component(allocation: Allocation, is_saved: bool) -> str:
    """What the backward needs is an activation; what it does not is temporary."""
    if allocation.kind == "gradients":
        return "gradients"
    names = allocation.monomial.split("*")
    if "vocab" in names and ("seq" in names or "chunk" in names):
        return "logits"
    if names.count("seq") == 2:
        return "attention"
    return "activations" if is_saved else "temporary"


class _Encoder:
    """Numbers the allocations of each section and writes releases as references to them."""

    def __init__(self, events: list[Event]) -> None:
        self._saved = {id(allocation): allocation for allocation in _alive_at_turn(events)}
        self._events: dict[str, list[Event]] = defaultdict(list)
        self._place: dict[int, tuple[str, int]] = {}
        count: dict[str, int] = defaultdict(int)
        for event in events:
            self._events[event.section].append(event)
            if event.sign > 0 and event.allocation.op != "mark":
                section = event.section
                self._place[id(event.allocation)] = (section, count[section])
                count[section] += 1
        self._order = list(self._events)

    def sections(self, names: Iterable[str]) -> dict[str, Encoded]:
        """The encoded events of the named sections; all inner layers must agree."""
        for inner in ("layer", "layer_backward"):
            if inner in names:
                other = inner.replace("layer", "other_layer", 1)
                if self._encode(inner) != self._encode(other):
                    raise ValueError(f"{inner} and {other} allocate differently")
        return {name: self._encode(name) for name in names}

    def _encode(self, section: str) -> Encoded:
        rows = [self._row(section, event) for event in self._events[section]]
        every_inner = SECTIONS.index("layer")
        rows = [
            row
            for row in rows
            if row[0] != LAST_INNER or len(row) != 2 or [every_inner, row[1]] not in rows
        ]
        encoded: Encoded = []
        # Releases with nothing between them may come in any order: autocast's cache has none.
        for is_release, run in groupby(rows, key=lambda row: len(row) == 2):
            ordered = list(run)
            encoded += sorted(ordered) if is_release else ordered
        return encoded

    def _row(self, section: str, event: Event) -> list[Any]:
        allocation = event.allocation
        if allocation.op == "mark":
            return [FLAT_GROUPS.index(allocation.monomial)]
        if event.sign > 0:
            component = _component(allocation, id(allocation) in self._saved)
            size = allocation.coefficient_bytes
            return [COMPONENTS.index(component), allocation.monomial, size]
        place, number = self._place[id(allocation)]
        return [self._code(section, place), number]

    def _code(self, section: str, place: str) -> int:
        """How `section` refers to what was allocated in `place`."""
        if place == section:
            return THIS
        before = self._order[self._order.index(section) - 1]
        if place == before:
            return PREVIOUS
        if section == place + "_backward" and place in LAYER_NAMES:
            return OWN_FORWARD
        if before == place + "_backward" and place in LAYER_NAMES:
            return FORWARD_ABOVE
        forward = section.removesuffix("_backward")
        if forward in LAYER_NAMES and place == self._order[self._order.index(forward) - 1]:
            return FORWARD_BELOW
        return LAST_INNER if place == "other_layer" else SECTIONS.index(place)

    def saved(self) -> dict[str, list[list[Any]]]:
        """The tensors alive between forward and backward: name, op, shape, dtype, monomial, B."""
        rows: dict[str, list[list[Any]]] = defaultdict(list)
        for allocation in self._saved.values():
            if allocation.section in FORWARD:
                rows[allocation.section].append(_saved_row(allocation))
        return dict(rows)


def _saved_row(allocation: Allocation) -> list[Any]:
    return [
        _short_name(allocation.name),
        allocation.op.removeprefix("aten.").split(".")[0],
        allocation.shape,
        allocation.dtype,
        allocation.monomial,
        allocation.coefficient_bytes,
    ]


def _alive_at_turn(events: list[Event]) -> Iterable[Allocation]:
    alive: dict[int, Allocation] = {}
    for event in events:
        if event.section.endswith("_backward"):
            break
        if event.sign > 0:
            alive[id(event.allocation)] = event.allocation
        else:
            alive.pop(id(event.allocation), None)
    return alive.values()


def _short_name(module: str) -> str:
    """Strip the path down to the part inside its layer: "self_attn.q_proj"."""
    parts = module.split(".")
    return ".".join(
        part for part in parts[1:] if not part.isdigit() and part not in ("layers", "h")
    )
