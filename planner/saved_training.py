"""What a run can be asked to save and to go on from, checked where a person asks for it."""

from __future__ import annotations

from pathlib import Path

from planner.errors import PlanError
from planner.plan import Plan
from planner.workload import Engine, Optimizer, TrainingWorkload

MAX_PATH_CHARACTERS = 1024


def check_folder(field: str, value: object) -> str | None:
    """Return `value` if it is None or the absolute path of a folder, as any process would find it.

    Nothing is looked up: the run may be on another host. Raises PlanError with one sentence.
    """
    if value is None:
        return None
    is_path = isinstance(value, str) and value.isprintable() and len(value) <= MAX_PATH_CHARACTERS
    if not is_path or not Path(str(value)).is_absolute() or ".." in Path(str(value)).parts:
        allowed = f"an absolute path without .., of at most {MAX_PATH_CHARACTERS} characters"
        raise PlanError(field, value, allowed)
    return str(value)


def check_saved_training(
    plan: Plan, world: str, save_to: str | None, load_from: str | None
) -> None:
    """Raise PlanError where a run of `plan` in `world` cannot save or load its training."""
    for field, value in (("save_to", save_to), ("load_from", load_from)):
        if check_folder(field, value) is not None:
            _check_can_be_saved(field, plan, world)


def _check_can_be_saved(field: str, plan: Plan, world: str) -> None:
    if not isinstance(plan.workload, TrainingWorkload):
        raise PlanError(field, plan.job, "left out: a plan that serves trains nothing to save")
    engine, ranks = plan.parallelism.engine, plan.parallelism.world_size
    reason = None
    if engine is not Engine.PEAKMARK:
        reason = f"the engine {engine} is run to be measured, and only peakmark saves and loads"
        reason += " (parallelism.engine)"
    elif plan.workload.optimizer is Optimizer.ADAMW_8BIT:
        reason = "adamw_8bit keeps its moments in blocks of a rank's shard, which no other number "
        reason += "of ranks cuts alike: use another workload.optimizer"
    elif world == "solo" and ranks > 1:
        reason = f"in the world solo one of {ranks} ranks runs, and the others' shards do not "
        reason += "exist: use nccl, shared or cpu"
    if reason is not None:
        sentence = f"{field} cannot be done: {reason}."
        raise PlanError(field, None, "a plan whose training can be saved", sentence=sentence)
