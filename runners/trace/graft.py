"""Put a traced loss after layers that it was not traced with: they do not know each other.

A loss sees the final norm's output only, so tracing it once per compute dtype is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.memory.kinds import END, START, wider_contexts
from planner.memory.sections import SECTIONS
from runners.trace.variants import OTHER_LOSSES, Variant

Template = dict[str, Any]
Rows = list[list[Any]]
_LOSS_CODES = tuple(SECTIONS.index(name) for name in ("loss", "loss_backward"))
_LOSS_ENDS = ("head", "loss", "loss_backward")


def loss_templates(
    traced: Mapping[Variant, Template], build: Callable[[Variant], Template]
) -> dict[Variant, Template]:
    """Return the templates of every traced variant under every other loss.

    `build` traces the losses, after the first variant of each compute dtype and checkpointing, with
    and without adapters.
    """
    alike: dict[tuple[str, str, bool], list[Variant]] = {}
    for variant in traced:
        # Below adapters the head is frozen: it gets no gradient.
        key = (variant.compute, variant.checkpointing, bool(variant.adapters))
        alike.setdefault(key, []).append(variant)
    made: dict[Variant, Template] = {}
    for group in alike.values():
        donor = group[0]
        for loss in OTHER_LOSSES:
            with_loss = build(replace(donor, loss=loss))
            for variant in group:
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
            theirs = (_of_kind(template[part], name, kind) for template in (donor, with_loss))
            grafted[part][name] = _section(part, name.split(" ")[0], rows, *theirs)
    ends = [n for part in ("forward", "kept") for n in base[part] if n.split(" ")[0] in _LOSS_ENDS]
    for part in ("kept_exports", "added_exports"):
        own = {name: e for name, e in base[part].items() if name.split(" ")[0] not in _LOSS_ENDS}
        of_loss = {name: _of_kind(with_loss[part], name, kind) for name in ends}
        grafted[part] = own | {name: e for name, e in of_loss.items() if e is not None}
    return grafted


def _of_kind(sections: Mapping[str, Any], name: str, kind: str) -> Any:
    """The section in a deep model of one kind that lies at the same end, if at any."""
    section, context = name.split(" ")
    before, _, after = context.split("|")
    start, end = START if before == START else kind, END if after == END else kind
    names = (f"{section} {c}" for c in wider_contexts(f"{start}|{kind}|{end}"))
    return next((sections[name] for name in names if name in sections), None)


def _section(part: str, section: str, base: Rows, donor: Rows, with_loss: Rows) -> Rows:
    if part == "saved":
        return with_loss if section in ("head", "loss") else base
    if section in ("loss", "loss_backward"):
        return with_loss
    if section == "head":
        return _with_components(base, with_loss)
    if _without_loss(donor) != _without_loss(with_loss):
        raise ValueError(f"the loss changes {section}")
    # What is released of the loss comes where as many rows are behind it as with the donor's layers.
    backwards = _without_loss(base)[::-1]
    for behind, row in enumerate(reversed(with_loss)):
        if _is_of_loss(row):
            backwards.insert(behind, row)
    return backwards[::-1]


def _is_of_loss(row: list[Any]) -> bool:
    return len(row) == 2 and row[0] in _LOSS_CODES


def _without_loss(rows: Rows) -> Rows:
    return [row for row in rows if not _is_of_loss(row)]


def _with_components(base: Rows, rows: Rows) -> Rows:
    """`base`'s rows, whose tensors are kept or not as in `rows`: a loss may not keep its input."""
    components = (row[0] for row in rows if len(row) == 3)
    return [[next(components), *row[1:]] if len(row) == 3 else row for row in base]
