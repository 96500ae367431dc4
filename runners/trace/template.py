"""Condense a tape into a template: what each section keeps, and its highest moments.

A live set is a vector: bytes per (component, monomial of dimensions). Of all moments of a section
only those that no other moment of it exceeds in every entry can be the peak of some model, so only
those are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from runners.trace.model import Variant
from runners.trace.step import BACKWARD, FORWARD, LAYER_NAMES, trace_step
from runners.trace.tape import Allocation, Event

LiveSet = Counter[tuple[str, str]]


def build_template(variant: Variant) -> dict[str, Any]:
    """Trace a variant; returns the JSON form read by `planner.memory.templates`.

    "kept" backward sections keep the gradients they produce; in "added" ones autograd adds them
    into buffers that exist already, so each lives for a moment only.
    """
    kept = _classified(trace_step(variant, gradients_exist=False))
    added = _classified(trace_step(variant, gradients_exist=True))
    return {
        "forward": {name: _section(kept, name) for name in FORWARD},
        "kept": {name: _section(kept, name) for name in BACKWARD},
        "added": {name: _section(added, name) for name in BACKWARD},
        "saved": _saved(kept),
    }


def _classified(events: list[Event]) -> list[Event]:
    """Give every allocation its component: what the backward needs is not temporary."""
    saved = {id(allocation) for allocation in _alive_at_turn(events)}
    for event in events:
        event.allocation.kind = _component(event.allocation, id(event.allocation) in saved)
    return events


def _component(allocation: Allocation, is_saved: bool) -> str:
    if allocation.kind == "gradients":
        return "gradients"
    names = allocation.monomial.split("*")
    if "vocab" in names and "seq" in names:
        return "logits"
    if names.count("seq") == 2:
        return "attention"
    return "activations" if is_saved else "temporary"


def _section(events: list[Event], name: str) -> dict[str, Any]:
    mine = [event for event in events if event.section == name]
    shared = _released_by_every_layer(mine, name)
    live: LiveSet = Counter()
    moments: list[LiveSet] = []
    for event in mine:
        allocation = event.allocation
        repeated = _description(allocation) in shared
        if repeated and allocation.section != "layer":
            continue
        monomial = "*".join(filter(None, ("layers" if repeated else "", allocation.monomial)))
        entry = (allocation.kind, monomial)
        live[entry] += event.sign * allocation.coefficient_bytes
        if event.sign > 0:
            moments.append(Counter(live))
    return {"net": _as_json(live), "peaks": [_as_json(m) for m in _undominated(moments)]}


def _description(allocation: Allocation) -> tuple[str, str, int]:
    return (allocation.op, allocation.monomial, allocation.coefficient_bytes)


def _released_by_every_layer(events: list[Event], section: str) -> set[tuple[str, str, int]]:
    """What this section releases once per layer, such as autocast's copies of the weights."""
    if section.removesuffix("_backward") in LAYER_NAMES:
        return set()
    inner = [e.allocation for e in events if e.sign < 0 and e.allocation.section == "layer"]
    return {_description(allocation) for allocation in inner}


def _totals(moment: LiveSet) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (_, monomial), size_bytes in moment.items():
        totals[monomial] += size_bytes
    return totals


def _undominated(moments: list[LiveSet]) -> list[LiveSet]:
    """Drop each moment that another one exceeds or equals in every monomial."""
    kept: list[tuple[Counter[str], LiveSet]] = []
    for moment in moments:
        totals = _totals(moment)
        if any(_covers(other, totals) for other, _ in kept):
            continue
        kept = [pair for pair in kept if not _covers(totals, pair[0])]
        kept.append((totals, moment))
    return [moment for _, moment in kept]


def _covers(high: Counter[str], low: Counter[str]) -> bool:
    return all(high[name] >= low[name] for name in high.keys() | low.keys() if _weighs(name))


def _weighs(monomial: str) -> bool:
    """Whether a term can decide a peak: more than one value per token, a weight, a buffer."""
    if monomial.startswith("flat_"):
        return True
    return len(set(monomial.split("*")) - {"batch", "seq", "top_k"}) > 0 and "*" in monomial


def _as_json(live: LiveSet) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (component, monomial), size_bytes in sorted(live.items()):
        if size_bytes:
            out.setdefault(component, {})[monomial] = size_bytes
    return out


def _saved(events: list[Event]) -> dict[str, list[list[Any]]]:
    """The tensors alive between forward and backward: name, op, shape, dtype, monomial, bytes."""
    saved: dict[str, list[list[Any]]] = {}
    for allocation in _alive_at_turn(events):
        if allocation.section in FORWARD:
            row = [
                _short_name(allocation.name),
                allocation.op.removeprefix("aten.").split(".")[0],
                allocation.shape,
                allocation.dtype,
                allocation.monomial,
                allocation.coefficient_bytes,
            ]
            saved.setdefault(allocation.section, []).append(row)
    return saved


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
