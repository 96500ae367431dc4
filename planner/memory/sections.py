"""A traced step, section by section: its ordered allocations and releases.

Sections are embed, layer, head, loss and their backwards. Templates hold one for every context: the
kinds of the layer before, this layer and the layer after (see `kinds`), or one for the kind of
layer where its neighbours make no difference. The sections around the layers go by the layer they
touch. Rows are of three kinds: [component, monomial, bytes] allocates a tensor of `bytes` times the
monomial; [where, number] releases the tensor that was the `number`-th allocated `where`; [group]
marks that a parameter group's first gradient has arrived, [group + 3] that its last one has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import PlanError
from planner.memory.groups import Place
from planner.memory.kinds import contexts, wider_contexts

COMPONENTS = ("activations", "attention", "logits", "temporary", "gradients")
FLAT_GROUPS = ("flat_embedding", "flat_layer", "flat_head")
MARKS = (*FLAT_GROUPS, "done_embedding", "done_layer", "done_head")
FORWARD = ("embed", "layer", "head", "loss")
BACKWARD = ("loss_backward", "layer_backward", "embed_backward")
SECTIONS = (*FORWARD, *BACKWARD)
# Where a released tensor was allocated: in this section; in the one run before it; in a backward,
# in the forward of this layer, of the one above or of the one below (below the first: embed); in
# the forward of the last layer or of the one before it; in embed, if no lower layer holds it; in
# every layer, whatever its context keeps until this section; or else in the section of that index.
THIS, PREVIOUS, OWN_FORWARD, FORWARD_ABOVE, FORWARD_BELOW = -1, -2, -3, -4, -5
LAST_LAYER, SECOND_TO_LAST, SHARED, EVERY_LAYER = -6, -7, -8, -9
# Of other layers, and of what is around them, a release numbers not all tensors but those that such
# releases name: so it is the same whatever kind of layer is there.
EXPORTED = (PREVIOUS, FORWARD_ABOVE, FORWARD_BELOW, LAST_LAYER, SECOND_TO_LAST)
Entry = tuple[str, str]
LiveSet = Counter[Entry]
Integers = npt.NDArray[np.int64]
Row = Sequence[int]
Released = tuple[Place, int]


@dataclass(frozen=True, slots=True)
class Steps:
    """The sections of one template's steps, by "section context".

    Row monomials are indices into `monomials`. `exports[section][code]` numbers what other sections
    release of a section, and `late[layer section][section]` what a layer allocates and that later
    section releases. `holders[n]` names the kinds of layer whose backward needs the n-th tensor of
    embed.
    """

    monomials: tuple[str, ...]
    rows: Mapping[str, Sequence[Row]]
    exports: Mapping[str, Mapping[str, Sequence[int]]]
    late: Mapping[str, Mapping[str, Sequence[int]]]
    holders: Mapping[int, Sequence[str]]
    known_extents: dict[Any, Extent] = field(default_factory=dict, compare=False)
    equal_extents: dict[Any, Extent] = field(default_factory=dict, compare=False)
    known_allocations: dict[int, list[Row]] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Extent:
    """What a section leaves alive, and its live sets that can be the highest."""

    net: LiveSet
    peaks: tuple[LiveSet, ...]

    def content(self) -> tuple[frozenset[Any], ...]:
        """What makes two extents equal, to look one up by."""
        live_sets = (self.net, *self.peaks)
        return tuple(frozenset(item for item in live.items() if item[1]) for live in live_sets)


class StepSequence:
    """The sections of a template in the order in which a model with these layers runs them."""

    def __init__(self, steps: Steps, kinds: Sequence[str]) -> None:
        self.steps, self.kinds = steps, tuple(kinds)
        self.contexts = contexts(kinds)
        self._wider = [wider_contexts(context) for context in self.contexts]
        self.last = len(kinds) - 1
        for place in (Place("layer", layer) for layer in range(len(kinds))):
            if self.look_up(steps.rows, place) is None:
                raise _not_traced(self.contexts[place.layer])

    def forward(self) -> Iterator[Place]:
        """Yield the places of the forward."""
        yield Place("embed")
        yield from (Place("layer", layer) for layer in range(self.last + 1))
        yield from (Place("head"), Place("loss"))

    def backward(self) -> Iterator[Place]:
        """Yield the places of the backward."""
        yield Place("loss_backward")
        yield from (Place("layer_backward", layer) for layer in range(self.last, -1, -1))
        yield Place("embed_backward")

    def _layer_beside(self, place: Place) -> int:
        at_start = place.section.startswith("embed")
        return place.layer if place.in_layer or at_start else self.last

    def look_up(self, mapping: Mapping[str, Any], place: Place) -> Any:
        """What a mapping by "section context" says of a place, or None."""
        names = (f"{place.section} {c}" for c in self._wider[self._layer_beside(place)])
        return next((mapping[name] for name in names if name in mapping), None)

    def rows(self, place: Place) -> Sequence[Row]:
        """The rows that run at a place; none below frozen layers."""
        return self.look_up(self.steps.rows, place) or ()

    @cached_property
    def _lowest_holder(self) -> dict[int, int]:
        """The lowest layer that holds each tensor of embed which layers share."""
        return {
            number: next(i for i, kind in enumerate(self.kinds) if kind in kinds)
            for number, kinds in self.steps.holders.items()
            if set(kinds) & set(self.kinds)
        }

    def released(self, place: Place, row: Row) -> list[Released]:
        """What a releasing row of `place` releases: (where allocated, number)."""
        code, number = row
        if code == SHARED:
            is_lowest = self._lowest_holder.get(number) == place.layer
            return [(Place("embed"), number)] if is_lowest else []
        if code == EVERY_LAYER:
            return list(self._late(place.section))
        where = self._where(place, code)
        if where is None:
            return []
        if code in EXPORTED:
            number = self._exported(where, code, number)
        return [(where, number)]

    def _exported(self, where: Place, code: int, index: int) -> int:
        numbers = (self.look_up(self.steps.exports, where) or {}).get(str(code), ())
        if index >= len(numbers):
            raise _not_traced(self.contexts[self._layer_beside(where)])
        return int(numbers[index])

    def _late(self, section: str) -> Iterator[Released]:
        for layer in range(self.last + 1):
            place = Place("layer", layer)
            for number in (self.look_up(self.steps.late, place) or {}).get(section, ()):
                yield place, number

    def _where(self, place: Place, code: int) -> Place | None:
        if code == THIS:
            return place
        if code == PREVIOUS:
            return self.before(place)
        if code == OWN_FORWARD:
            return Place("layer", place.layer)
        if code == FORWARD_ABOVE:  # the first layer is above embed's backward
            return Place("layer", place.layer + 1 if place.in_layer else 0)
        if code == FORWARD_BELOW:
            return Place("layer", place.layer - 1) if place.layer else Place("embed")
        if code == LAST_LAYER:
            return Place("layer", self.last)
        if code == SECOND_TO_LAST:
            return Place("layer", self.last - 1) if self.last else None
        return Place(SECTIONS[code])

    def before(self, place: Place) -> Place:
        """The place that runs before another (embed's is itself)."""
        section, layer = place
        if section == "layer":
            return Place("layer", layer - 1) if layer else Place("embed")
        if section == "layer_backward":
            return Place(section, layer + 1) if layer < self.last else Place("loss_backward")
        if section in ("head", "embed_backward"):
            return Place("layer", self.last) if section == "head" else Place("layer_backward", 0)
        return Place(SECTIONS[max(SECTIONS.index(section) - 1, 0)])

    def extent(self, place: Place) -> Extent:
        """Sum a place's rows into live sets; places that give equal sets share one object."""
        known = self.steps.known_extents
        signature = self._signature(place)
        if signature not in known:
            found = self._sum(place)
            # Pages and the accuracy job predict in threads, over the same templates: `setdefault`
            # gives all of them the first.
            content = (place.section, found.content())
            known[signature] = self.steps.equal_extents.setdefault(content, found)
        return known[signature]

    def _signature(self, place: Place) -> tuple[Any, ...]:
        """What the extent depends on: the rows, and those of the places whose tensors go."""
        if not place.in_layer:
            return (place.section, self.contexts)
        around = self.contexts[max(place.layer - 1, 0) : place.layer + 2]
        holds = self._lowest_holder.items() if place.in_backward else ()
        return (place.section, around, *(n for n, layer in holds if layer == place.layer))

    def _sum(self, place: Place) -> Extent:
        """Bytes per (component, monomial) from the place's start, at its moments and its end."""
        columns: dict[Entry, int] = {}
        changes: list[tuple[int, int]] = []
        # How many changes, and of how many entries, lie before each moment.
        moments: list[tuple[int, int]] = []
        for row in self.rows(place):
            for entry, size_bytes in self._changes(place, row):
                changes.append((columns.setdefault(entry, len(columns)), size_bytes))
            if len(row) == 3 or (len(row) == 1 and row[0] < len(FLAT_GROUPS)):
                moments.append((len(changes), len(columns)))
        live = np.zeros((len(changes) + 1, len(columns)), dtype=np.int64)
        for number, (column, size_bytes) in enumerate(changes, start=1):
            live[number, column] = size_bytes
        np.cumsum(live, axis=0, out=live)
        entries = list(columns)
        highest = _undominated(live[[end for end, _ in moments]], entries)
        peaks = (
            _live_set(entries[:seen], live[end]) for end, seen in map(moments.__getitem__, highest)
        )
        return Extent(net=_live_set(entries, live[-1]), peaks=tuple(peaks))

    def _changes(self, place: Place, row: Row) -> Iterator[tuple[Entry, int]]:
        """What a row of a place takes or, below zero, gives back; a flat group counts as one byte."""
        if len(row) == 3:
            yield self._entry(row), row[2]
        elif len(row) == 2:
            for where, number in self.released(place, row):
                allocated = self._allocation(where, number)
                yield self._entry(allocated), -allocated[2]
        elif row[0] < len(FLAT_GROUPS):
            yield ("gradients", FLAT_GROUPS[row[0]]), 1

    def _allocation(self, place: Place, number: int) -> Row:
        rows = self.rows(place)
        known = self.steps.known_allocations
        # By identity: the template holds its rows as long as this.
        if id(rows) not in known:
            known[id(rows)] = allocations(rows)
        return known[id(rows)][number]

    def _entry(self, row: Row) -> tuple[str, str]:
        return COMPONENTS[row[0]], self.steps.monomials[row[1]]


def allocations(rows: Sequence[Row]) -> list[Row]:
    """The allocating rows of a section, in order."""
    return [row for row in rows if len(row) == 3]


def _not_traced(context: str) -> PlanError:
    before, kind, after = context.split("|")
    sentence = (
        f"workload: this pattern of layers has not been traced: a layer '{kind}' after '{before}' "
        f"and before '{after}' ('^' and '$' are the model's ends)."
    )
    return PlanError("workload", context, "a pattern that has been traced", sentence=sentence)


def _live_set(entries: Sequence[Entry], sizes_bytes: Integers) -> LiveSet:
    return Counter(dict(zip(entries, sizes_bytes.tolist(), strict=False)))


def _undominated(live: Integers, entries: Sequence[Entry]) -> list[int]:
    """Which moments no other one exceeds or, before them, equals in every monomial that matters.

    `live` is [moments, entries] in bytes, of (component, monomial).
    """
    names = sorted({monomial for _, monomial in entries if _weighs(monomial)})
    belongs = np.array([[monomial == name for name in names] for _, monomial in entries])
    totals = live @ belongs.reshape(len(entries), len(names)).astype(np.int64)
    _, first = np.unique(totals, axis=0, return_index=True)
    first.sort()
    distinct = totals[first]
    covers = (distinct[:, None] >= distinct[None]).all(axis=2)
    return [int(number) for number in first[covers.sum(axis=0) == 1]]


@cache
def _weighs(monomial: str) -> bool:
    """Whether a term can decide a peak: more than one value per token, a weight, a buffer."""
    if monomial.startswith("flat_"):
        return True
    return len(set(monomial.split("*")) - {"batch", "seq", "top_k"}) > 0 and "*" in monomial
