"""A traced step, section by section: its ordered allocations and releases.

Templates hold, per section, rows of three kinds: [component, monomial, bytes] allocates a tensor of
`bytes` times the monomial; [where, number] releases the tensor that was the `number`-th allocated
`where`; [group] marks that a parameter group's first gradient has arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPONENTS = ("activations", "attention", "logits", "temporary", "gradients")
FLAT_GROUPS = ("flat_embedding", "flat_layer", "flat_head")
FORWARD = ("embed", "first_layer", "layer", "last_layer", "head", "loss")
BACKWARD = (
    "loss_backward",
    "last_layer_backward",
    "layer_backward",
    "first_layer_backward",
    "embed_backward",
)
SECTIONS = (*FORWARD, *BACKWARD)
# Where a released tensor was allocated: in this section; in the one run before it; in a backward,
# in the forward of this layer, of the layer before it in the backward (the one above) or of the one
# below; in the last inner layer alone; or else in the section of that index, where "layer" means
# every inner layer.
THIS, PREVIOUS, OWN_FORWARD, FORWARD_ABOVE, FORWARD_BELOW, LAST_INNER = -1, -2, -3, -4, -5, -6
_LAYERS = ("first_layer", "layer", "last_layer")
# The section that runs before each: inner layers follow one another.
_BEFORE = {
    "first_layer": "embed",
    "layer": "layer",
    "last_layer": "layer",
    "head": "last_layer",
    "loss": "head",
    "loss_backward": "loss",
    "last_layer_backward": "loss_backward",
    "layer_backward": "layer_backward",
    "first_layer_backward": "layer_backward",
    "embed_backward": "first_layer_backward",
}
LiveSet = Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Steps:
    """The sections of one step of one template; row monomials are indices into `monomials`."""

    monomials: tuple[str, ...]
    rows: Mapping[str, Sequence[Sequence[int]]]

    def allocations(self, section: str) -> list[Sequence[int]]:
        """The allocating rows of a section, in order."""
        return [row for row in self.rows[section] if len(row) == 3]


@dataclass(frozen=True, slots=True)
class Extent:
    """What a section leaves alive, and its live sets that can be the highest."""

    net: LiveSet
    peaks: tuple[LiveSet, ...]


def extent(steps: Steps, section: str) -> Extent:
    """Sum a section's rows into live sets: bytes per (component, monomial), from its start."""
    shared = _released_by_every_layer(steps, section)
    live: LiveSet = Counter()
    moments: list[LiveSet] = []
    for row in steps.rows[section]:
        if len(row) == 1:
            live["gradients", FLAT_GROUPS[row[0]]] += 1
        elif len(row) == 3:
            live[_entry(steps, row)] += row[2]
        else:
            _release(steps, section, row, shared, live)
        if len(row) != 2:
            moments.append(Counter(live))
    return Extent(net=live, peaks=tuple(_undominated(moments)))


def _entry(steps: Steps, row: Sequence[int]) -> tuple[str, str]:
    return COMPONENTS[row[0]], steps.monomials[row[1]]


def _release(
    steps: Steps, section: str, row: Sequence[int], shared: frozenset[int], live: LiveSet
) -> None:
    place = place_of(section, row[0])
    allocated = steps.allocations(place)[row[1]]
    component, monomial = _entry(steps, allocated)
    if row[0] >= 0 and place in _LAYERS and row[1] in shared:
        if place != "layer":
            return  # counted once for all layers
        monomial = "*".join(filter(None, ("layers", monomial)))
    live[component, monomial] -= allocated[2]


def place_of(section: str, code: int) -> str:
    """The name of the section that a release code of `section` refers to."""
    if code == THIS:
        return section
    if code == PREVIOUS:
        return _BEFORE[section]
    if code == OWN_FORWARD:
        return forward_of(section)
    if code == FORWARD_ABOVE:
        return forward_of(_BEFORE[section])
    if code == LAST_INNER:
        return "layer"
    return _BEFORE[forward_of(section)] if code == FORWARD_BELOW else SECTIONS[code]


def forward_of(section: str) -> str:
    """The forward section of a backward one; the loss's stands for itself."""
    return section.removesuffix("_backward")


def _released_by_every_layer(steps: Steps, section: str) -> frozenset[int]:
    """What this section releases once per layer, such as autocast's copies of the weights."""
    if section.removesuffix("_backward") in _LAYERS:
        return frozenset()
    inner = SECTIONS.index("layer")
    return frozenset(row[1] for row in steps.rows[section] if len(row) == 2 and row[0] == inner)


def _totals(moment: LiveSet) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (_, monomial), size_bytes in moment.items():
        totals[monomial] += size_bytes
    return totals


def _undominated(moments: list[LiveSet]) -> list[LiveSet]:
    """Drop each moment that another one exceeds or equals in every monomial that matters."""
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
