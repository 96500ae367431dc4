"""Trace one variant of a model at its own dimensions: its sections, kinds and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.memory.groups import Place
from planner.memory.sections import FORWARD
from runners.trace.own_model import OwnModel, UntraceableError, copied
from runners.trace.own_sizes import OwnSizes, two_sizes
from runners.trace.own_tape import Cost, OwnTape, counted_experts
from runners.trace.patterns import Pattern
from runners.trace.step import collected_on_demand, record_step
from runners.trace.tape import Event
from runners.trace.template import build_template
from runners.trace.variants import Variant

ANY_ROWS, ONE_ROW = "any", "one"


@dataclass(frozen=True, slots=True)
class Range:
    """Sequence lengths over which a model runs the same operations."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class OwnTemplate:
    """What one variant of a model was seen to do over a range of sequence lengths."""

    key: str
    rows: str
    range: Range
    kinds: tuple[str, ...]
    template: Mapping[str, Any]
    costs: Mapping[str, list[dict[str, Any]]]

    @property
    def name(self) -> str:
        """The name under which the template is stored."""
        return f"{self.key}/{self.range.low}-{self.range.high}/{self.rows}"

    def head(self) -> dict[str, Any]:
        """What the file says of the variant beside its template."""
        return {
            "name": self.name,
            "key": self.key,
            "rows": self.rows,
            "first": self.range.low,
            "last": self.range.high,
            "kinds": list(self.kinds),
            **self.costs,
        }


def trace_variant(model: OwnModel, variant: Variant, lengths: Range) -> list[OwnTemplate]:
    """Trace a variant for any number of rows and, where one row runs otherwise, for one.

    Raises UntraceableError where the model's tensors are no products of rows and tokens, which a
    second trace with other numbers of both shows.
    """
    sizes = two_sizes(lengths.low, lengths.high, model.dimensions(), model.vocab)
    if sizes is None:
        return []
    first, second = sizes
    found = _Traced(model, variant, first)
    again = _Traced(model, variant, second)
    if found.template != again.template:
        raise UntraceableError(
            f"{model.name}: what {variant.key.replace('/', ', ')} keeps is no product of rows and "
            f"tokens: {_first_difference(found.template, again.template)}."
        )
    result = [found.stored(ANY_ROWS, lengths)]
    single = _Traced(model, variant, replace(first, batch=1))
    if _sized(found.template, first) != _sized(single.template, first):
        result.append(single.stored(ONE_ROW, lengths))
    return result


class _Traced:
    """One variant traced at one pair of sizes."""

    def __init__(self, model: OwnModel, variant: Variant, sizes: OwnSizes) -> None:
        self._model, self._variant, self._sizes = model, variant, sizes
        self._base = model.prepared(variant.implementation, variant.compute, variant.checkpointing)
        self._costs: dict[Place, Cost] = {}
        self._pattern = model.kinds[: model.num_traced]
        self.template = build_template(variant, [self._pattern], self._trace)

    def _trace(self, variant: Variant, pattern: Pattern, gradients_exist: bool) -> list[Event]:
        tape = OwnTape(self._sizes)
        shape = (self._sizes.batch, self._sizes.seq)
        with collected_on_demand(), counted_experts(tape):
            # A copy that nobody else holds: its parameters go with it.
            autocasts = variant.compute == "autocast"
            events = record_step(copied(self._base), tape, shape, autocasts, gradients_exist)
        self._costs = tape.costs
        return events

    def stored(self, rows: str, lengths: Range) -> OwnTemplate:
        """What was traced, as the file keeps it for these rows and lengths."""
        kinds = self._model.kinds
        return OwnTemplate(
            self._variant.key, rows, lengths, kinds, self.template, self._whole_costs()
        )

    def _whole_costs(self) -> dict[str, list[dict[str, Any]]]:
        """Sum forward and backward over all layers of the model; a kind's last traced layer counts."""
        total: dict[str, Cost] = {"forward": Counter(), "backward": Counter()}
        last_of = {kind: layer for layer, kind in enumerate(self._pattern)}
        layers = Counter(self._model.kinds)
        for place, cost in self._costs.items():
            times = 1
            if place.in_layer:
                kind = self._pattern[place.layer]
                times = layers[kind] if last_of[kind] == place.layer else 0
            into = total["forward" if place.section in FORWARD else "backward"]
            for key, count in cost.items():
                into[key] += count * times
        fields = ("kind", "unit", "rows", "tokens", "count")
        return {
            name: [
                dict(zip(fields, (*key, count), strict=True))
                for key, count in sorted(cost.items())
                if count
            ]
            for name, cost in total.items()
        }


def _sized(template: Mapping[str, Any], sizes: OwnSizes) -> Any:
    """A template's rows with bytes at one row, whatever dimensions their monomials name."""
    value = {"batch": 1, "seq": sizes.seq, "vocab": sizes.vocab}

    def size(row: list[Any]) -> list[Any]:
        if len(row) != 3:
            return row
        if row[1].startswith("sum:"):
            return [row[0], row[1].replace("*batch", "").replace("batch*", "")]
        count = row[2]
        for name in filter(None, row[1].split("*")):
            count *= value.get(name, 1)
        return [row[0], count]

    def part(sections: Mapping[str, Any]) -> Any:
        return {name: [size(row) for row in rows] for name, rows in sections.items()}

    return {
        kinds: {
            **{name: part(parts[name]) for name in ("forward", "kept", "added")},
            **{name: parts[name] for name in ("late", "kept_exports", "added_exports", "holders")},
        }
        for kinds, parts in template.items()
    }


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for kinds in one:
        for part in ("saved", "forward", "kept", "added"):
            for name, rows in one[kinds][part].items():
                others = other.get(kinds, {}).get(part, {}).get(name, [])
                for row, changed in zip(rows, others, strict=False):
                    if row != changed:
                        return f"in {name.split(' ')[0]}, {row} and {changed}"
    return "the traces have different operations"
