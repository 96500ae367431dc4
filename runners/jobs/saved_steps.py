"""A job that goes on from a saved training, or saves its own (docs/checkpoints.md)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from planner.plan import Plan
from planner.saved_training import check_saved_training
from runners.contract import JobSpec
from runners.engines.base import TrainingEngine
from runners.jobs.harness import JobSession
from runners.zero.checkpoint_files import (
    Description,
    check_step_is_free,
    find_step,
    read_description,
)
from runners.zero.engine import ZeroEngine
from runners.zero.saving import load_checkpoint, save_checkpoint

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSteps:
    """What a job loads before its first step, and what it saves after its last.

    `source` is the saved step's folder, `first` its number (0 without one), `target` the folder to
    save to and `last` the number of the step that is saved.
    """

    source: Path | None
    target: Path | None
    first: int
    last: int

    @classmethod
    def of(cls, spec: JobSpec, plan: Plan, num_steps: int) -> SavedSteps:
        """Find what `spec` asks for, before anything is built; the job trains `num_steps`.

        Raises PlanError or CheckpointError where it cannot be loaded, or a step is in the way.
        """
        check_saved_training(plan, spec.world, spec.save_to, spec.load_from)
        source = None if spec.load_from is None else find_step(Path(spec.load_from))
        first = 0 if source is None else read_description(source).step
        target = None if spec.save_to is None else Path(spec.save_to)
        if target is not None:
            check_step_is_free(target, first + num_steps)
        return cls(source=source, target=target, first=first, last=first + num_steps)

    def load(self, session: JobSession, engine: TrainingEngine) -> None:
        """Load the saved training into an engine that has not stepped yet, if there is one."""
        if self.source is None:
            return
        source = self.source
        session.events.phase("load")
        _, time_s = _timed(session, lambda: load_checkpoint(_ours(engine), source))
        if session.device.type == "cuda":
            # What reading needed is no part of the steps that are measured.
            torch.cuda.empty_cache()
        session.measured["loaded"] = _said(source, time_s)

    def save(self, session: JobSession, engine: TrainingEngine) -> None:
        """Save the training as it stands, if it is asked for."""
        if self.target is None:
            return
        target = self.target
        session.events.phase("save")
        path, time_s = _timed(
            session, lambda: save_checkpoint(_ours(engine), target, step=self.last)
        )
        session.measured["saved"] = _said(path, time_s)


def _ours(engine: TrainingEngine) -> ZeroEngine:
    assert isinstance(engine, ZeroEngine), "plans of other engines are refused before"
    return engine


def _timed(session: JobSession, act: Callable[[], Answer]) -> tuple[Answer, float]:
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    began_s = time.perf_counter()
    answer = act()
    if session.device.type == "cuda":
        torch.cuda.synchronize(session.device)
    return answer, time.perf_counter() - began_s


def _said(path: Path, time_s: float) -> dict[str, Any]:
    """What a result says of a saved step: where, which, by whom, the bytes of all ranks, how long."""
    description: Description = read_description(path)
    return {
        "path": str(path),
        "step": description.step,
        "zero_stage": description.stage,
        "world_size": description.world_size,
        "bytes": sum(description.files.values()),
        "time_s": time_s,
    }
