"""Which of many swept plans to run: the Pareto front, the best that fits, and why it is the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.plan import Plan
from planner.predict import predict
from planner.sweep import SIZES, SPREAD, WORK, Swept
from planner.units import format_bytes, format_count, format_share
from planner.verdict import State
from planner.workload import field_words

# Step times are predicted no better than this: closer plans are as good as one another.
ALIKE = 0.03
MOST_TRIED = 40
_HOUR_S = 3600
_SPLIT_WORDS = {
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "context_parallel": "CP",
    "expert_parallel": "EP",
}


class Aim(StrEnum):
    """What is best: most tokens per second of all GPUs, or per GPU, which is least cost per token."""

    FASTEST = "fastest"
    CHEAPEST = "cheapest"


_COLUMN = {Aim.FASTEST: "tokens_per_s", Aim.CHEAPEST: "tokens_per_s_per_gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best swept plan whose own replay fits with the margin.

    `row` is its choices and figures with the replayed bytes; `refuted` counts better ones that the
    formulas let fit and the replay did not. `alike` counts admissible ones within `ALIKE` of it,
    `leanest` being the one of them with the least memory. `better` is the best of those that do not
    fit or keep no margin, None where none is better.
    """

    aim: Aim
    plan: Plan
    row: Mapping[str, Any] = field(hash=False)
    refuted: int
    admissible: int
    margin: float
    alike: int
    leanest: Mapping[str, Any] | None = field(hash=False)
    better: Mapping[str, Any] | None = field(hash=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "aim": str(self.aim),
            "plan": self.plan.to_dict(),
            "row": dict(self.row),
            "refuted": self.refuted,
            "alike": self.alike,
            "leanest": self.leanest and dict(self.leanest),
            "better": self.better and dict(self.better),
            "sentence": self.sentence(),
        }

    def sentence(self, show: Callable[[int], str] = format_bytes) -> str:
        """Return what to run and why, in one sentence; sizes as `show` writes them."""
        row, name = self.row, "fastest" if self.aim is Aim.FASTEST else "cheapest per token"
        most = show(self.plan.hardware.visible_bytes)
        number = _number(self.admissible, "combination")
        margin = f" with {format_share(self.margin, 0)} of the GPU free" if self.margin else ""
        found = (
            f"Run {choice_words(row)}: the {name} of {number} that fit{margin}, "
            f"{format_count(row['tokens_per_s'])} tokens/s "
            f"({format_count(row['tokens_per_s_per_gpu'])} per GPU) with "
            f"{show(row['device_bytes'])} of {most} per GPU"
        )
        return f"{found}; {self._why(show)}."

    def _why(self, show: Callable[[int], str]) -> str:
        reasons = [self._limit(show)]
        if self.alike:
            others = f"{self.alike:,} other{'s are' if self.alike > 1 else ' is'} within {format_share(ALIKE, 0)}"
            if self.leanest is not None:
                size = show(self.leanest["device_bytes"])
                others += f", the leanest with {size} ({differences(self.leanest, self.row)})"
            reasons.append(others)
        return "; ".join(reasons)

    def _limit(self, show: Callable[[int], str]) -> str:
        """Say what keeps a better one away."""
        if self.better is None:
            return "nothing that was left open is better"
        column = _COLUMN[self.aim]
        gain = self.better[column] / self.row[column] - 1
        size = show(self.better["device_bytes"])
        why = {
            State.DOES_NOT_FIT: f"needs {size} and does not fit",
            State.TIGHT: f"needs {size}, which is tight",
            State.FITS: f"needs {size}, which leaves too little",
        }[State(self.better["verdict"])]
        return (
            f"{differences(self.better, self.row)} would be {format_share(gain)} better but {why}"
        )


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def choice_words(row: Mapping[str, Any]) -> str:
    """Return the choices of a swept row in words."""
    split = "".join(f" × {word} {row[k]}" for k, word in _SPLIT_WORDS.items() if row[k] > 1)
    gpus = f"{row['gpus']:,} GPU{'s' if row['gpus'] > 1 else ''}"
    rounds = row["grad_accumulation"]
    return (
        f"{row['engine']} ZeRO-{row['zero_stage']} on {gpus}{split}, micro-batch "
        f"{row['micro_batch']}{f' × {rounds} accumulated' if rounds > 1 else ''} of "
        f"{row['sequence_length']:,} tokens, {row['attention']}, checkpointing {row['checkpointing']}"
    )


def differences(row: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the choices of a row that another has not, in words."""
    names = [name for name in ("gpus", *SPREAD, *WORK) if row[name] != other[name]]
    # With more GPUs and the same split, the ranks say nothing new.
    if "gpus" in names and "world_size" in names:
        names.remove("world_size")
    shown = {"gpus": "GPUs", "zero_stage": "ZeRO stage", "world_size": "ranks"}
    return ", ".join(f"{shown.get(n, field_words(n))} {row[n]}" for n in names) or "the same"


def pareto_front(
    tokens_per_s: NDArray[Any], device_bytes: NDArray[Any], gpus: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the rows that no other equals or beats in all of speed, memory and GPUs and beats in one.

    Cost per token is a price x GPUs / tokens per second: what no row beats in these, none beats
    with it.
    """
    kept: list[NDArray[np.int64]] = []
    for number in np.unique(gpus):
        group = np.flatnonzero(gpus == number)
        speed, size = tokens_per_s[group], device_bytes[group].astype(np.float64)
        order = np.lexsort((size, -speed))
        # Least memory of all that are faster, and of those as fast.
        first = np.searchsorted(-speed[order], -speed[order], side="left")
        least = np.minimum.accumulate(size[order])
        faster = np.where(first > 0, least[np.maximum(first - 1, 0)], np.inf)
        ahead = (size[order] < faster) & (size[order] == size[order][first])
        front = group[order[ahead]]
        for fewer in kept:
            beaten = _beaten(tokens_per_s, device_bytes, front, fewer)
            front = front[~beaten]
        kept.append(front)
    return np.sort(np.concatenate(kept)) if kept else np.array([], dtype=np.int64)


def _beaten(
    speed: NDArray[Any], size: NDArray[Any], rows: NDArray[np.int64], fewer: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which rows are no faster and no leaner than one of the front of fewer GPUs."""
    if not fewer.size:
        return np.zeros(rows.size, bool)
    # The front is sorted from fast to slow, and so from large to small.
    at = np.searchsorted(-speed[fewer], -speed[rows], side="right") - 1
    found: NDArray[np.bool_] = (at >= 0) & (size[fewer[np.maximum(at, 0)]] <= size[rows])
    return found


def front_rows(swept: Swept) -> NDArray[np.int64]:
    """Return the rows of the Pareto front of those that fit and keep the margin, fastest first."""
    columns, rows = swept.columns, np.flatnonzero(swept.is_admissible)
    at = pareto_front(*(columns[name][rows] for name in ("tokens_per_s", "device_bytes", "gpus")))
    found = rows[at]
    order: NDArray[np.int64] = found[np.argsort(-columns["tokens_per_s"][found], kind="stable")]
    return order


def cost_per_million_tokens(tokens_per_s_per_gpu: Any, cost_per_gpu_hour: float) -> Any:
    """Return price per GPU-hour / tokens per GPU-hour x 10^6, in the price's currency."""
    return cost_per_gpu_hour * 1e6 / (_HOUR_S * tokens_per_s_per_gpu)


def best_of(swept: Swept, aim: Aim = Aim.FASTEST) -> Best | None:
    """Return the best admissible plan, its allocator replayed; None where none fits.

    The formulas' candidates are replayed from the best on until one fits and keeps the margin.
    """
    columns, value = swept.columns, swept.columns[_COLUMN[aim]]
    rows = np.flatnonzero(swept.is_admissible)
    ordered = rows[np.lexsort((columns["device_bytes"][rows], -value[rows]))]
    most_bytes = (1 - swept.limits.margin) * swept.plan.hardware.visible_bytes
    for refuted, row in enumerate(ordered[:MOST_TRIED].tolist()):
        plan = swept.plan_at(row)
        prediction = predict(plan)
        needed = prediction.verdict.needed_bytes
        if prediction.verdict.state is not State.FITS or needed > most_bytes:
            continue
        replayed = {name: prediction.memory[name] for name in SIZES}
        behind = ordered[refuted + 1 :]
        near = behind[value[behind] >= (1 - ALIKE) * value[row]]
        return Best(
            aim=aim,
            plan=plan,
            row=swept.record(row) | replayed,
            refuted=refuted,
            admissible=int(rows.size),
            margin=swept.limits.margin,
            alike=int(near.size),
            leanest=_leanest(swept, near, needed),
            better=_better(swept, aim, float(value[row])),
        )
    return None


def _leanest(swept: Swept, rows: NDArray[np.int64], needed_bytes: int) -> dict[str, Any] | None:
    sizes = swept.columns["device_bytes"][rows]
    if not rows.size or sizes.min() >= needed_bytes:
        return None
    return swept.record(int(rows[sizes.argmin()]))


def _better(swept: Swept, aim: Aim, reached: float) -> dict[str, Any] | None:
    """Return the best of those that are kept out, where it is better than what is `reached`."""
    value = np.where(swept.is_admissible, 0.0, swept.columns[_COLUMN[aim]])
    row = int(value.argmax())
    return swept.record(row) if value[row] > reached else None
