"""Put a traced loss after layers that it was not traced with: they do not know each other.

A loss sees the final norm's output only, so tracing it once per compute dtype is enough. What its
sections release of the layers, and they of it, has another number in every variant, in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.memory.kinds import END, START
from planner.memory.sections import PREVIOUS, SECTIONS, THIS
from runners.trace.variants import OTHER_LOSSES, Variant

Template = dict[str, Any]
Rows = list[list[Any]]
_LOSS_CODES = tuple(SECTIONS.index(name) for name in ("loss", "loss_backward"))
_OWN_CODES = (THIS, PREVIOUS, SECTIONS.index("head"), *_LOSS_CODES)


def loss_templates(
    traced: Mapping[Variant, Template], build: Callable[[Variant], Template]
) -> dict[Variant, Template]:
    """Return the templates of every traced variant under every other loss.

    `build` traces the losses, after the first variant of each compute dtype and checkpointing.
    """
    alike: dict[tuple[str, str], list[Variant]] = {}
    for variant in traced:
        alike.setdefault((variant.compute, variant.checkpointing), []).append(variant)
    made: dict[Variant, Template] = {}
    for donor, *others in alike.values():
        for loss in OTHER_LOSSES:
            with_loss = made[replace(donor, loss=loss)] = build(replace(donor, loss=loss))
            for variant in others:
                made[replace(variant, loss=loss)] = graft(traced[variant], traced[donor], with_loss)
    return made


def graft(base: Template, donor: Template, with_loss: Template) -> Template:
    """Return `base` with the loss of `with_loss`, which is `donor` with another loss.

    All are templates by set of kinds; `with_loss` needs one kind of layer only. Raises ValueError
    where the loss changes more than it can.
    """
    (kind,) = with_loss
    return {kinds: _graft(own, donor[kind], with_loss[kind], kind) for kinds, own in base.items()}


def _graft(base: Template, donor: Template, with_loss: Template, kind: str) -> Template:
    grafted = dict(base)
    for part in ("forward", "kept", "added", "saved"):
        grafted[part] = {}
        for name, rows in base[part].items():
            section, context = name.split(" ")
            same = f"{section} {_homogeneous(context, kind)}"
            theirs = donor[part][same], with_loss[part][same]
            grafted[part][name] = _section(part, section, context, rows, *theirs)
    return grafted


def _homogeneous(context: str, kind: str) -> str:
    """The context in a deep model of one kind that lies at the same end, if at any."""
    before, _, after = context.split("|")
    if after == END:
        return f"{kind}|{kind}|{END}"
    return f"{START if before == START else kind}|{kind}|{kind}"


def _section(
    part: str, section: str, context: str, base: Rows, donor: Rows, with_loss: Rows
) -> Rows:
    if part == "saved":
        return with_loss if section in ("head", "loss") else base
    if section in ("loss", "loss_backward"):
        return _renumbered(with_loss, _references(donor, _of_layers), _references(base, _of_layers))
    if section == "head":
        return _with_components(base, with_loss)
    if section == "layer_backward" and context.endswith(END):
        theirs, ours = _references(with_loss, _previous), _references(base, _previous)
        base = _renumbered(base, ours, theirs)
        donor = _renumbered(donor, _references(donor, _previous), theirs)
    if _without_loss(donor) != _without_loss(with_loss):
        raise ValueError(f"the loss changes {section} {context}")
    return [*_without_loss(base), *_references(with_loss, _of_loss)]


def _of_layers(code: int) -> bool:
    return code not in _OWN_CODES


def _of_loss(code: int) -> bool:
    return code in _LOSS_CODES


def _previous(code: int) -> bool:
    return code == PREVIOUS


def _references(rows: Rows, chosen: Callable[[int], bool]) -> Rows:
    return [row for row in rows if len(row) == 2 and chosen(row[0])]


def _without_loss(rows: Rows) -> Rows:
    return [row for row in rows if len(row) != 2 or not _of_loss(row[0])]


def _renumbered(rows: Rows, old: Rows, new: Rows) -> Rows:
    """`rows` with the `old` releases replaced by the `new` ones, one by one."""
    if len(old) != len(new):
        raise ValueError(f"{len(old)} releases cannot stand for {len(new)}")
    number = {tuple(a): b for a, b in zip(old, new, strict=True)}
    return [number.get(tuple(row), row) if len(row) == 2 else row for row in rows]


def _with_components(base: Rows, rows: Rows) -> Rows:
    """`base`'s rows, whose tensors are kept or not as in `rows`: a loss may not keep its input."""
    components = (row[0] for row in rows if len(row) == 3)
    return [[next(components), *row[1:]] if len(row) == 3 else row for row in base]
