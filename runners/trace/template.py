"""Encode tapes as a template: the ordered allocations and releases of every section of a step.

The planner reads them back (`planner.memory.sections`): it sums them into live sets, and replays
them through the caching allocator. A release names its tensor by the place where it was allocated,
relative to the section, so that a section stands for every layer of the same context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any

from planner.memory.groups import Place
from planner.memory.kinds import contexts, kind_set, wider_contexts
from planner.memory.sections import (
    BACKWARD,
    COMPONENTS,
    EVERY_LAYER,
    EXPORTED,
    FORWARD,
    FORWARD_ABOVE,
    FORWARD_BELOW,
    LAST_LAYER,
    MARKS,
    OWN_FORWARD,
    PREVIOUS,
    SECOND_TO_LAST,
    SECTIONS,
    SHARED,
    THIS,
)
from runners.trace.patterns import Pattern, traced_patterns
from runners.trace.step import trace_step
from runners.trace.tape import Allocation, Event
from runners.trace.variants import Variant

Encoded = list[list[Any]]


def build_template(
    variant: Variant,
    patterns: Iterable[Pattern] | None = None,
    trace: Callable[[Variant, Pattern, bool], list[Event]] = trace_step,
) -> dict[str, Any]:
    """Trace a variant with its patterns of layers, or these; returns templates by set of kinds.

    Each has the parts "forward", "kept" and "added" (rows by "section context"), "saved" (tensors),
    "late", "kept_exports" and "added_exports" (what other sections release, see
    `planner.memory.sections`) and "holders". "kept" backward sections keep the gradients they
    produce; in "added" ones autograd adds them into buffers that exist already, so each lives for a
    moment only.
    """
    merged: dict[str, _Merged] = defaultdict(_Merged)
    for pattern in traced_patterns(variant) if patterns is None else patterns:
        into = merged[kind_set(pattern)]
        parts, holders = pattern_parts(variant, pattern, trace)
        for part, sections in parts.items():
            into.add(part, sections)
        into.hold(holders)
    return {name: into.template() for name, into in merged.items()}


def pattern_parts(
    variant: Variant, pattern: Pattern, trace: Callable[[Variant, Pattern, bool], list[Event]]
) -> tuple[dict[str, Mapping[str, Any]], dict[int, str]]:
    """Trace a variant with one pattern; returns the parts by exact "section context", and holders."""
    kept = _Encoder(trace(variant, pattern, False), pattern)
    added = _Encoder(trace(variant, pattern, True), pattern)
    parts: dict[str, Mapping[str, Any]] = {
        "forward": kept.sections(FORWARD),
        "kept": kept.sections(BACKWARD),
        "added": added.sections(BACKWARD),
        "saved": kept.saved(),
        "late": kept.late,
        "kept_exports": kept.exports(),
        "added_exports": added.exports(),
    }
    return parts, kept.holders()


class _Merged:
    """The sections of one set of kinds, from several tapes that must agree."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[str, Any]] = defaultdict(dict)
        self._holders: dict[int, set[str]] = defaultdict(set)

    def add(self, part: str, sections: Mapping[str, Any]) -> None:
        """Add one tape's sections; raises ValueError where another's differ."""
        known = self._parts[part]
        for name, found in sections.items():
            both = united(known.setdefault(name, found), found)
            if both is None:
                difference = _difference(known[name], found)
                raise ValueError(f"{part} {name}: traces differ: {difference}")
            known[name] = both

    def hold(self, holders: Mapping[int, str]) -> None:
        """Add which kind of layer was seen to hold a tensor of embed."""
        for number, kind in holders.items():
            self._holders[number].add(kind)

    def parts(self, part: str) -> Mapping[str, Any]:
        """The sections of one part by "section context"."""
        return self._parts[part]

    def template(self) -> dict[str, Any]:
        """The parts, as `build` stores them: contexts that agree go by their kind alone."""
        holders = {str(number): sorted(kinds) for number, kinds in sorted(self._holders.items())}
        parts = {part: _by_kind(sections) for part, sections in self._parts.items()}
        return {**parts, "holders": holders}


def _by_kind(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Put sections whose layers' neighbours make no difference under wider contexts."""
    for width in (2, 1):
        groups: dict[str, list[str]] = defaultdict(list)
        for name in sections:
            section, context = name.split(" ")
            groups[f"{section} {wider_contexts(context)[width]}"].append(name)
        wider: dict[str, Any] = {}
        for group, names in groups.items():
            both = sections[names[0]]
            for name in names[1:]:
                both = None if both is None else united(both, sections[name])
            wider |= {group: both} if both is not None else {n: sections[n] for n in names}
        sections = wider
    return dict(sections)


def united(one: Any, other: Any) -> Any:
    """What two traces of a section say together, or None where they contradict each other.

    Only the lowest layer that holds a shared tensor releases it, and only layers with a certain
    neighbour are asked for some of their tensors.
    """
    if isinstance(one, dict):
        agree = all(one[key] == other[key] for key in one.keys() & other.keys())
        return {**one, **other} if agree else None
    if one == other:
        return one
    if _unshared(one) == _unshared(other):
        fewer, more = sorted((one, other), key=len)
        return more if all(row in more for row in fewer) else None
    return None


def _unshared(rows: Encoded) -> Encoded:
    return [row for row in rows if not (len(row) == 2 and row[0] == SHARED)]


def _difference(one: Any, other: Any) -> str:
    pairs = zip(one, other, strict=False) if isinstance(one, list) else [(one, other)]
    return next((f"{a} and {b}" for a, b in pairs if a != b), "one is longer")


def _component(allocation: Allocation, is_saved: bool) -> str:
    """What the backward needs is an activation; what it does not is temporary."""
    if allocation.kind == "gradients":
        return "gradients"
    names = allocation.monomial.split("*")
    if "vocab" in names and ("seq" in names or "chunk" in names):
        return "logits"
    if names.count("seq") + names.count("half_seq_and_one") == 2:
        return "attention"
    return "activations" if is_saved else "temporary"


class _Encoder:
    """Numbers the allocations of each place and writes releases as references to them."""

    def __init__(self, events: list[Event], pattern: Pattern) -> None:
        self._kinds, self._contexts = pattern, contexts(pattern)
        self._last = len(pattern) - 1
        self._saved = {id(allocation): allocation for allocation in _alive_at_turn(events)}
        self._events: dict[Place, list[Event]] = defaultdict(list)
        self._number: dict[int, int] = {}
        count: dict[Place, int] = defaultdict(int)
        for event in events:
            self._events[event.place].append(event)
            if event.sign > 0 and event.allocation.op != "mark":
                self._number[id(event.allocation)] = count[event.place]
                count[event.place] += 1
        self._order = self._all_places()
        self._exports = self._find_exports()
        self.late: dict[str, dict[str, list[int]]] = {}

    def _all_places(self) -> list[Place]:
        layers = range(self._last + 1)
        return [
            Place("embed"),
            *(Place("layer", layer) for layer in layers),
            *(Place("head"), Place("loss"), Place("loss_backward")),
            *(Place("layer_backward", layer) for layer in reversed(layers)),
            Place("embed_backward"),
        ]

    def _find_exports(self) -> dict[Place, dict[int, list[int]]]:
        """The numbers of each place's tensors that others release, by how these refer to it."""
        exports: dict[Place, dict[int, list[int]]] = defaultdict(dict)
        for place, events in self._events.items():
            released = [e.allocation for e in events if e.sign < 0 and place in self._order]
            for allocation in released:
                code = self._code(place, allocation.place)
                if code in EXPORTED:
                    numbers = exports[allocation.place].setdefault(code, [])
                    numbers.append(self._number[id(allocation)])
                    numbers.sort()
        return exports

    def exports(self) -> dict[str, dict[str, list[int]]]:
        """The exports by "section context" and code."""
        merged = _Merged()
        for place, by_code in self._exports.items():
            merged.add("exports", {self._key(place): {str(c): n for c, n in by_code.items()}})
        return dict(merged.parts("exports"))

    def _key(self, place: Place) -> str:
        at_start = place.section.startswith("embed")
        layer = place.layer if place.in_layer or at_start else self._last
        return f"{place.section} {self._contexts[layer]}"

    def sections(self, names: Iterable[str]) -> dict[str, Encoded]:
        """The encoded events of the named sections; places of equal context must agree."""
        merged = _Merged()
        for place in self._order:
            if place.section in names:
                merged.add("rows", {self._key(place): self._encode(place)})
        return dict(merged.parts("rows"))

    def _encode(self, place: Place) -> Encoded:
        rows = [self._row(place, event) for event in self._events[place]]
        encoded: Encoded = []
        # Releases with nothing between them may come in any order: autocast's cache has none.
        for is_release, run in groupby(rows, key=lambda row: len(row) == 2):
            ordered = list(run)
            if is_release:
                ordered = sorted(list(row) for row in {tuple(row) for row in ordered})
            encoded += ordered
        return encoded

    def _row(self, place: Place, event: Event) -> list[Any]:
        allocation = event.allocation
        if allocation.op == "mark":
            return [MARKS.index(allocation.monomial)]
        if event.sign > 0:
            component = _component(allocation, id(allocation) in self._saved)
            size = allocation.coefficient_bytes
            return [COMPONENTS.index(component), allocation.monomial, size]
        number = self._number[id(allocation)]
        code = self._code(place, allocation.place)
        if code == EVERY_LAYER:
            self._release_late(allocation.place, place.section, number)
            return [EVERY_LAYER, 0]
        if code in EXPORTED:
            number = self._exports[allocation.place][code].index(number)
        return [code, number]

    def _release_late(self, place: Place, section: str, number: int) -> None:
        numbers = self.late.setdefault(self._key(place), {}).setdefault(section, [])
        if number not in numbers:
            numbers.append(number)
            numbers.sort()

    def _code(self, place: Place, other: Place) -> int:
        """How `place` refers to what was allocated at `other`."""
        if other == place:
            return THIS
        if place.section == "loss" and other.in_layer:
            return EVERY_LAYER
        if other == self._order[self._order.index(place) - 1]:
            return PREVIOUS
        if not other.in_layer:
            return self._code_outside(place, other)
        if place.section == "layer_backward" or place.section == "embed_backward":
            return self._code_nearby(place, other)
        named = {self._last: LAST_LAYER, self._last - 1: SECOND_TO_LAST}
        if other.section == "layer" and other.layer in named and not place.in_layer:
            return named[other.layer]
        raise ValueError(f"{place} releases what {other} allocated")

    def _code_outside(self, place: Place, other: Place) -> int:
        if place.section == "layer_backward" and other.section == "embed":
            return FORWARD_BELOW if place.layer == 0 else SHARED
        return SECTIONS.index(other.section)

    def _code_nearby(self, place: Place, other: Place) -> int:
        layer = place.layer if place.in_layer else -1
        near = {layer: OWN_FORWARD, layer + 1: FORWARD_ABOVE, layer - 1: FORWARD_BELOW}
        if other.section != "layer" or other.layer not in near:
            raise ValueError(f"{place} releases what {other} allocated")
        return near[other.layer]

    def holders(self) -> dict[int, str]:
        """Which tensors of embed the backward of a layer releases, and that layer's kind."""
        return {
            self._number[id(event.allocation)]: self._kinds[place.layer]
            for place, events in self._events.items()
            if place.section == "layer_backward"
            for event in events
            if event.sign < 0 and event.allocation.place.section == "embed"
        }

    def saved(self) -> dict[str, list[list[Any]]]:
        """The tensors alive between forward and backward: name, op, shape, dtype, monomial, B."""
        rows: dict[Place, list[list[Any]]] = {place: [] for place in self._order}
        for allocation in self._saved.values():
            rows[allocation.place].append(_saved_row(allocation))
        merged = _Merged()
        for place, saved in rows.items():
            if place.section in FORWARD:
                merged.add("saved", {self._key(place): saved})
        return dict(merged.parts("saved"))


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
        if event.place.in_backward:
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
