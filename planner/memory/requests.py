"""A micro-batch as one flat list of requests to the allocator, cut where an engine may step in.

Every tensor has a slot. What is the same for all sizes of a model is laid out once per template and
layers; a plan adds only its sizes, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from planner.memory.blocks import NOTHING, ROUNDING_BYTES
from planner.memory.groups import Place
from planner.memory.sections import COMPONENTS, MARKS, Row, StepSequence, allocations

# Cuts of a section beside its marks: behind the gradient of the head's weight in the loss's
# backward, behind the first product there, behind the gradient of the embedding's weight; and before
# that first product, where the gradient of the logits is all that is left of the loss.
HEAD_GRADIENT, FIRST_PRODUCT, EMBEDDING_GRADIENT = range(len(MARKS), len(MARKS) + 3)
LOSS_IS_BEHIND = len(MARKS) + 3
# Before a gradient is released where it was made: what it is for has been done with it.
GRADIENT = LOSS_IS_BEHIND + 1
# Behind the gradients of a fused attention's queries, keys and values.
ATTENTION_GRADIENTS = GRADIENT + 1
# While the kernel runs that sums the rows of the embedding's gradient.
EMBEDDING_KERNEL = ATTENTION_GRADIENTS + 1
NO_CUT = -1
_GRADIENTS = COMPONENTS.index("gradients")
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a step: its `stretches` of requests, as (first, behind the last, cut).

    `gradients` are the requests for gradients that are still there as it ends.
    """

    place: Place
    stretches: tuple[tuple[int, int, int], ...]
    gradients: tuple[int, ...]

    @property
    def span(self) -> slice:
        """Where the section's requests are."""
        return slice(self.stretches[0][0], self.stretches[-1][1])


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The requests of a micro-batch without their sizes, and where its sections are among them.

    Request i is for slot `slots[i]`: a tensor of component `components[i]` and kind `kinds[i]`, which
    is of `factors` bytes times a monomial; NOTHING as a kind releases what is there. `request_of`
    gives, by the cut behind it, the request for each gradient of a vocabulary-sized weight.
    """

    forward: tuple[Section, ...]
    backward: tuple[Section, ...]
    slots: Integers
    kinds: Integers
    components: Integers
    factors: Integers
    monomials: Integers
    num_slots: int
    request_of: dict[int, int]

    @property
    def no_tensor(self) -> int:
        """The kind, of 0 bytes, of a tensor that a plan does without: the last one."""
        return len(self.factors) - 1

    def sizes_bytes(self, doubled_values: Integers) -> Integers:
        """The size of each kind, from the values of all monomials.

        Values come twofold, for a head's dimension may be odd.
        """
        sizes: Integers = doubled_values[self.monomials] * self.factors // 2
        return sizes


def rounded_sizes(sizes_bytes: Integers) -> Integers:
    """Round sizes up as the allocator does."""
    rounded: Integers = -(-sizes_bytes // ROUNDING_BYTES) * ROUNDING_BYTES
    return rounded


@lru_cache(maxsize=64)
def lay_out(
    sequence: StepSequence, stops_at_gradients: bool = False, stops_at_attention: bool = False
) -> Layout:
    """Lay out the requests of a template's steps for a model's layers.

    `stops_at_gradients` cuts before the release of every gradient too, `stops_at_attention` behind
    the gradients that a fused attention makes.
    """
    return _Builder(sequence, stops_at_gradients, stops_at_attention).layout()


class _Builder:
    """Numbers the tensors of all sections, then lays the sections out one behind the other."""

    def __init__(
        self, sequence: StepSequence, stops_at_gradients: bool, stops_at_attention: bool
    ) -> None:
        self._sequence, self._stops_at_gradients = sequence, stops_at_gradients
        self._stops_at_attention = stops_at_attention
        self._first_slot: dict[Place, int] = {}
        self._num_slots = 0
        for place in (*sequence.forward(), *sequence.backward()):
            self._first_slot[place] = self._num_slots
            self._num_slots += len(allocations(sequence.rows(place)))
        loss, embed = Place("loss_backward"), Place("embed_backward")
        numbers = {
            (loss, HEAD_GRADIENT): _weight_gradient(sequence, loss),
            (loss, FIRST_PRODUCT): _first_product(sequence, loss),
            (embed, EMBEDDING_GRADIENT): _weight_gradient(sequence, embed),
        }
        self._cut_slots = {
            cut: self._first_slot[place] + number
            for (place, cut), number in numbers.items()
            if number >= 0
        }
        # Of each request slot, kind and component.
        self._requests: list[tuple[int, int, int]] = []
        self._kinds: dict[tuple[int, int], int] = {}
        self._request_of: dict[int, int] = {}
        self._attention_gradients: dict[int, int | None] = {}

    def layout(self) -> Layout:
        """The finished layout."""
        forward = tuple(self._section(place) for place in self._sequence.forward())
        backward = tuple(self._section(place) for place in self._sequence.backward())
        slots, kinds, components = np.array(self._requests, dtype=np.int64).T.copy()
        monomials, factors = np.array([*self._kinds, (0, 0)], dtype=np.int64).T.copy()
        return Layout(
            *(forward, backward, slots, kinds, components, factors, monomials),
            num_slots=self._num_slots,
            request_of=self._request_of,
        )

    def _section(self, place: Place) -> Section:
        requests, slot = self._requests, self._first_slot[place]
        first, stretches = len(requests), []
        gradients: dict[int, int] = {}
        stops = self._stops_at_gradients and place.section.endswith("_backward")
        weight_gradients: set[int] = set()
        attention = self._attention_slot(place)
        for row in self._rows(place):
            cuts: list[int] = []
            if len(row) == 1:
                cuts = [row[0]]
            elif len(row) == 2:
                for where, number in self._sequence.released(place, row):
                    released = self._first_slot[where] + number
                    if released in weight_gradients:
                        stretches.append((first, len(requests), GRADIENT))
                        first = len(requests)
                    requests.append((released, NOTHING, 0))
                    gradients.pop(released, None)
            else:
                if slot == self._cut_slots.get(FIRST_PRODUCT):
                    stretches.append((first, len(requests), LOSS_IS_BEHIND))
                    first = len(requests)
                kind = self._kinds.setdefault((row[1], row[2]), len(self._kinds))
                if row[0] == _GRADIENTS:
                    gradients[slot] = len(requests)
                elif stops and _is_of_weight(self._sequence.steps.monomials[row[1]]):
                    weight_gradients.add(slot)
                cuts = [cut for cut, behind in self._cut_slots.items() if behind == slot]
                self._request_of |= dict.fromkeys(cuts, len(requests))
                cuts = [EMBEDDING_KERNEL if c == EMBEDDING_GRADIENT else c for c in cuts]
                cuts += [ATTENTION_GRADIENTS] if slot == attention else []
                requests.append((slot, kind, row[0]))
                slot += 1
            for cut in cuts:
                stretches.append((first, len(requests), cut))
                first = len(requests)
        stretches.append((first, len(requests), NO_CUT))
        return Section(place, tuple(stretches), tuple(gradients.values()))

    def _rows(self, place: Place) -> Sequence[Row]:
        """The rows of a section; in the embedding's backward with the cut behind its kernel.

        The gradient that the kernel reads goes with it, before autograd does anything with the
        result (torch/csrc/autograd/engine.cpp, call_function; seen so in recorded timelines). A trace
        may hold on to it.
        """
        rows, slot = self._sequence.rows(place), self._cut_slots.get(EMBEDDING_GRADIENT)
        if place.section != "embed_backward" or slot is None:
            return rows
        number = slot - self._first_slot[place]
        behind = [at for at, row in enumerate(rows, start=1) if len(row) == 3][number]
        read = [row for row in rows[behind:] if self._is_read(place, row)]
        left = [row for row in rows[behind:] if row not in read]
        return [*rows[:behind], *read, [EMBEDDING_GRADIENT], *left]

    def _is_read(self, place: Place, row: Row) -> bool:
        """Whether a row of a section releases another section's tensors, none of them a scalar."""
        if len(row) != 2:
            return False
        names = self._sequence.steps.monomials
        released = list(self._sequence.released(place, row))
        others = [allocations(self._sequence.rows(at))[n] for at, n in released if at != place]
        return len(others) == len(released) > 0 and all(names[other[1]] for other in others)

    def _attention_slot(self, place: Place) -> int | None:
        """The slot of the last gradient of a layer's fused attention, if it is to be known."""
        if not self._stops_at_attention or place.section != "layer_backward":
            return None
        rows = self._sequence.rows(place)
        # By identity: the sequence holds rows, which many layers share, as long as this.
        if id(rows) not in self._attention_gradients:
            names = self._sequence.steps.monomials
            self._attention_gradients[id(rows)] = _last_attention_gradient(rows, names)
        number = self._attention_gradients[id(rows)]
        return None if number is None else self._first_slot[place] + number


def _last_attention_gradient(rows: Sequence[Row], names: Sequence[str]) -> int | None:
    """Which allocation is the last of the three gradients that a fused attention makes in a row.

    Before queries with all heads, keys and values with theirs, come the sums of all heads' rows. A
    forward that runs again can have such tensors too, but earlier.
    """
    found = None
    for number, (sums, queries, keys, values) in _allocations_in_a_row(rows, 4):
        sizes = [(names[row[1]], row[2]) for row in (queries, keys, values)]
        if _is_sum_of_heads(names[sums[1]]) and sums[2] == 4 and _are_heads(*sizes):
            found = number + 3
    return found


def _allocations_in_a_row(rows: Sequence[Row], length: int) -> Iterator[tuple[int, Sequence[Row]]]:
    """Yield so many allocations with nothing between them, with the number of the first."""
    number = 0
    for first, row in enumerate(rows):
        run = rows[first : first + length]
        if len(run) == length and all(len(other) == 3 for other in run):
            yield number, run
        number += len(row) == 3


def _is_sum_of_heads(monomial: str) -> bool:
    return set(monomial.split("*")) - {"group"} == {"batch", "seq", "kv_heads"}


def _are_heads(queries: tuple[str, int], keys: tuple[str, int], values: tuple[str, int]) -> bool:
    """Whether these monomials and bytes are of queries of all heads, keys and values of theirs.

    Where no heads share keys and values, all three are alike.
    """
    factors = queries[0].split("*")
    shared = "*".join(factor for factor in factors if factor != "group")
    is_one_size = queries[1] == keys[1] and keys == values
    return "half_head_dim" in factors and is_one_size and keys[0] in (queries[0], shared)


def _is_of_weight(monomial: str) -> bool:
    """Whether a backward's tensor is a weight's gradient: it has no tokens, and is no scalar."""
    names = monomial.split("*")
    tokens = {"batch", "seq", "half_seq_and_one", "chunk", "top_k"}
    return bool(monomial) and ":" not in monomial and not tokens.intersection(names)


def _weight_gradient(sequence: StepSequence, place: Place) -> int:
    """Which allocation of a section is the gradient of a vocabulary-sized weight: the last such.

    A loss in chunks adds to one buffer from the start: there it is the first. -1: there is none.
    """
    found = -1
    for number, row in enumerate(allocations(sequence.rows(place))):
        names = sequence.steps.monomials[row[1]].split("*")
        if "chunk" in names and found >= 0:
            break
        if "vocab" in names and "seq" not in names and "chunk" not in names:
            found = number
    return found


def _first_product(sequence: StepSequence, place: Place) -> int:
    """Which allocation of the loss's backward is the first product's: the first not of logits."""
    for number, row in enumerate(allocations(sequence.rows(place))):
        names = sequence.steps.monomials[row[1]].split("*")
        if len(names) > 1 and not {"vocab", "seq"} <= set(names):
            return number
    return -1
