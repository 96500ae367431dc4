"""The one function that writes a plan for a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.errors import PlanError
from planner.export.accelerate import accelerate_draft
from planner.export.deepspeed import deepspeed_draft
from planner.export.fsdp2 import fsdp2_draft
from planner.export.launch import checked_script, sbatch_draft, torchrun_draft
from planner.export.target import Draft, Export, Target, finished
from planner.export.torchtitan import torchtitan_draft
from planner.export.vllm import vllm_draft
from planner.plan import Plan

DEFAULT_SCRIPT = "train.py"
_WRITERS: Mapping[Target, Callable[[Plan], Draft]] = {
    Target.DEEPSPEED: deepspeed_draft,
    Target.ACCELERATE: accelerate_draft,
    Target.FSDP2: fsdp2_draft,
    Target.TORCHTITAN: torchtitan_draft,
    Target.VLLM: vllm_draft,
}


def parse_target(value: object) -> Target:
    """Return a target by its name; raises PlanError naming the allowed ones."""
    names = [str(target) for target in Target]
    if not isinstance(value, str) or value not in names:
        raise PlanError("export.to", value, f"one of {', '.join(names)}")
    return Target(value)


def export(plan: Plan, target: Target, script: str = DEFAULT_SCRIPT) -> Export:
    """Return a plan's files for a target, with a sentence for all that they cannot say.

    `script` is what torchrun starts. Raises PlanError where the target cannot run the plan.
    """
    if target is Target.TORCHRUN:
        return finished(plan, target, torchrun_draft(plan, checked_script(script)))
    if target is Target.SBATCH:
        return finished(plan, target, sbatch_draft(plan, checked_script(script)))
    return finished(plan, target, _WRITERS[target](plan))
