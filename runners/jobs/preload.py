"""Import what training jobs need, in a process that is then forked for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.plan import Plan
from runners.jobs.train_step import build_model, engine_class


def preload(plans: Sequence[Plan]) -> None:
    """Import the engines of `plans` and each model's own module; nothing touches CUDA.

    One thread from here on: a pool of threads does not survive a fork.
    """
    torch.set_num_threads(1)
    for engine in {plan.parallelism.engine for plan in plans}:
        engine_class(engine)
    for plan in {plan.model.name: plan for plan in plans}.values():
        build_model(plan)
