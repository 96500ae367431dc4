"""A sweep beside the pages: it tells how far it is, and can be cancelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any

from planner.choice import Aim, Best, best_of, cost_per_million_tokens, front_rows
from planner.plan import Plan
from planner.sweep import Swept, sweep
from planner.sweep_axes import Axes, Limits

# So many points that are not on the front are drawn: a browser slows down with more.
MOST_OTHERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished sweep: its rows, those on the front (fastest first), and the best of either aim."""

    swept: Swept
    front: tuple[int, ...]
    best: Mapping[Aim, Best | None]


class _CancelledError(Exception):
    """A person stopped the sweep."""


class SweepJob:
    """Sweeps in a thread of its own, from its making on."""

    def __init__(self, plan: Plan, axes: Axes, limits: Limits) -> None:
        self.done, self.total = 0, axes.combinations
        self._stopped = Event()
        self._answer: Answer | None = None
        self._failure: Exception | None = None
        self._thread = Thread(target=self._run, args=(plan, axes, limits), daemon=True)
        self._thread.start()

    def answer(self, wait_s: float) -> Answer | None:
        """Return the answer; None if it takes longer than `wait_s` or was cancelled.

        Raises what ended the sweep.
        """
        self._thread.join(wait_s)
        if self._failure is not None:
            raise self._failure
        return None if self.is_cancelled else self._answer

    @property
    def is_cancelled(self) -> bool:
        """Whether a person stopped it."""
        return self._stopped.is_set()

    def cancel(self) -> None:
        """Stop at the next combination."""
        self._stopped.set()

    def _run(self, plan: Plan, axes: Axes, limits: Limits) -> None:
        try:
            swept = sweep(plan, axes, limits, self._told)
            best = {aim: best_of(swept, aim) for aim in Aim}
            front = tuple(front_rows(swept).tolist())
            self._answer = Answer(swept=swept, front=front, best=best)
        except _CancelledError:
            return
        except Exception as error:
            # Told by the page that asks next; a thread's own traceback would reach nobody.
            self._failure = error

    def _told(self, done: int, _: int) -> None:
        self.done = done
        if self._stopped.is_set():
            raise _CancelledError


def priced(row: dict[str, Any], gpu_hour_cost: float | None) -> dict[str, Any]:
    """Return a row with its cost per million tokens, where a price is given."""
    if gpu_hour_cost is None:
        return row
    cost = cost_per_million_tokens(row["tokens_per_s_per_gpu"], gpu_hour_cost)
    return {**row, "cost_per_million_tokens": cost}


def front_of(answer: Answer, gpu_hour_cost: float | None) -> list[dict[str, Any]]:
    """Return the rows of the front, fastest first, each with its number in `row`."""
    return _rows(answer.swept, answer.front, gpu_hour_cost)


def others_of(answer: Answer, gpu_hour_cost: float | None) -> list[dict[str, Any]]:
    """Return admissible rows that are not on the front, evenly taken where there are many."""
    on_front = set(answer.front)
    rows = [row for row in answer.swept.is_admissible.nonzero()[0].tolist() if row not in on_front]
    step = -(-len(rows) // MOST_OTHERS) or 1
    return _rows(answer.swept, rows[::step], gpu_hour_cost)


def _rows(swept: Swept, rows: Sequence[int], gpu_hour_cost: float | None) -> list[dict[str, Any]]:
    return [{"row": row, **priced(swept.record(row), gpu_hour_cost)} for row in rows]
