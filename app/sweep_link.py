"""A sweep's choices in the address: what is not as the page begins, by the command line's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanError, describe_value
from planner.plan import Plan
from planner.sweep_axes import Limits, axes_of

PREFIX = "sweep_"
# Written for a list that was emptied: the plan's own value.
OWN = "plan"
_OPTIONS: Mapping[str, str] = {"zero_stage": "zero", "sequence_length": "seq"}
_TEXTS = ("engine", "attention", "checkpointing")


def parameter(name: str) -> str:
    """Return the name in the address of an axis or a limit."""
    return PREFIX + _OPTIONS.get(name, name)


@dataclass(slots=True)
class SweepLink:
    """What an address said of a sweep, and what the page's own address shall say.

    `refused` holds a sentence for each parameter that cannot be used.
    """

    plan: Plan
    query: Mapping[str, str]
    own: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def values(self, name: str, begun: Sequence[Any]) -> list[Any]:
        """Return the values of an axis that the address names, else those that the page begins with."""
        text = self.query.get(parameter(name))
        if text is None:
            return list(begun)
        if text == OWN:
            return []
        parts = text.split(",")
        try:
            read: list[Any] = parts if name in _TEXTS else [int(part) for part in parts]
            axes_of(self.plan, {name: read}, Limits())
        except (ValueError, PlanError):
            self._refuse(name, text)
            return list(begun)
        return list(dict.fromkeys(read))

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a limit that the address gives; None where it gives none."""
        text = self.query.get(parameter(name))
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            self._refuse(name, text)
            return None
        return value

    def choice(self, name: str, options: Sequence[str], begun: str) -> str:
        """Return one of some choices that the address names, else the one that the page begins with."""
        text = self.query.get(parameter(name), begun)
        if text not in options:
            self._refuse(name, text)
            return begun
        return text

    def keep(self, name: str, chosen: Any, begun: Any) -> None:
        """Note what was chosen, where it is not what the page begins with."""
        if isinstance(chosen, list | tuple):
            if sorted(map(str, chosen)) != sorted(map(str, begun)):
                self.own[parameter(name)] = ",".join(map(str, chosen)) or OWN
        elif chosen != begun:
            self.own[parameter(name)] = f"{chosen:g}" if isinstance(chosen, float) else str(chosen)

    def _refuse(self, name: str, text: str) -> None:
        given = describe_value(text).replace("`", "'")
        self.refused.append(
            f"The link says `{parameter(name)}` is `{given}`, which cannot be used: the sweep begins "
            "as it does without."
        )
