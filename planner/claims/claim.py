"""A claim, what it needs, what the planner computes of it, what runs measured, and the verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from planner.attention.problem import AttentionProblem, Variant
from planner.plan import Plan


class Unit(StrEnum):
    """What a claim's number counts: bytes, a factor, a share of one, or tokens."""

    BYTES = "bytes"
    TIMES = "times"
    SHARE = "share"
    TOKENS = "tokens"


class Verdict(StrEnum):
    """Whether what is computed agrees with a claim in all, some or none of the cases."""

    HOLDS = "holds"
    ONLY_WHEN = "holds only when"
    NOT = "does not hold"


class Topic(StrEnum):
    """What a claim is about."""

    ATTENTION = "attention"
    TRAINING = "training"
    EXAMPLES = "examples"
    ZERO = "zero"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A text that makes claims: its title, the title in English, its file."""

    title: str
    english: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One numeric claim: in English, the words it was made in, and where."""

    id: str
    topic: Topic
    says: str
    quote: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What agrees with a claim: from `low` to `high`, both included; None: no limit."""

    unit: Unit
    low: float | None = None
    high: float | None = None

    def take(self, value: float) -> bool:
        """Whether a value agrees with the claim."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opens:
    """What shows a figure's numbers in full: a plan, or an attention problem beside it."""

    plan: Plan
    problem: AttentionProblem | None = None
    variants: tuple[Variant, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "plan": self.plan.to_dict(),
            "attention": None if self.problem is None else self.problem.to_dict(),
            "variants": [str(variant) for variant in self.variants],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What the planner computes under one condition, and from what; `own`: for the person's plan."""

    condition: str
    value: float
    how: str
    opens: Opens | None = None
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What stored runs saw; `rows` are their ids, `here`: this database's own runs made all."""

    condition: str
    value: float
    rows: tuple[str, ...]
    gpu: str
    world: str
    here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was found out about a claim.

    `needs` are the conditions that the number rests on, `because` the reason of the verdict.
    `left_out` says why the person's own plan has no figure.
    """

    bounds: Bounds
    needs: str
    because: str
    figures: tuple[Figure, ...]
    measured: tuple[Measured, ...] = ()
    left_out: str | None = None

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the claim's own cases; the person's plan does not move it."""
        agree = {self.bounds.take(figure.value) for figure in self.figures if not figure.own}
        if agree == {True}:
            return Verdict.HOLDS
        return Verdict.ONLY_WHEN if True in agree else Verdict.NOT


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A claim with what was found."""

    claim: Claim
    found: Findings

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; every figure says whether it agrees with the claim."""
        claim, found = self.claim, self.found
        return {
            "id": claim.id,
            "topic": str(claim.topic),
            "says": claim.says,
            "quote": claim.quote,
            "said_in": asdict(claim.source),
            "unit": str(found.bounds.unit),
            "claimed": {"low": found.bounds.low, "high": found.bounds.high},
            "needs": found.needs,
            "computed": [self._figure(figure) for figure in found.figures],
            "measured": [self._measured(seen) for seen in found.measured],
            "left_out": found.left_out,
            "verdict": str(found.verdict),
            "because": found.because,
        }

    def _figure(self, figure: Figure) -> dict[str, Any]:
        return {
            "condition": figure.condition,
            "value": figure.value,
            "agrees": self.found.bounds.take(figure.value),
            "how": figure.how,
            "own_plan": figure.own,
            "opens": None if figure.opens is None else figure.opens.to_dict(),
        }

    def _measured(self, seen: Measured) -> dict[str, Any]:
        return {
            "condition": seen.condition,
            "value": seen.value,
            "agrees": self.found.bounds.take(seen.value),
            "rows": list(seen.rows),
            "gpu": seen.gpu,
            "world": seen.world,
            "here": seen.here,
        }


@cache
def all_claims() -> tuple[Claim, ...]:
    """Return every claim of data/claims.json, in its order."""
    data = json.loads(files("planner").joinpath("data/claims.json").read_text(encoding="utf-8"))
    sources: Mapping[str, Source] = {key: Source(**one) for key, one in data["sources"].items()}
    return tuple(
        Claim(
            id=row["id"],
            topic=Topic(row["topic"]),
            says=row["says"],
            quote=row["quote"],
            source=sources[row["source"]],
        )
        for row in data["claims"]
    )
