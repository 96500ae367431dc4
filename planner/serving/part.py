"""The part of a model that each GPU of a tensor-parallel group serves."""

from __future__ import annotations

from functools import lru_cache
from typing import NoReturn

from planner.errors import PlanError
from planner.memory.parallel import stage_specs
from planner.model import ModelSpec
from planner.workload import Parallelism

# Families whose hidden size is that of all heads: what a share of the heads holds is not known of them.
WHOLE_FAMILIES = frozenset(("gpt2", "gpt_neox", "opt", "falcon"))


@lru_cache(maxsize=256)
def serving_part(spec: ModelSpec, tensor_parallel: int) -> ModelSpec:
    """Return a GPU's share of heads, MLP columns and vocabulary; key-value heads are repeated where
    there are fewer of them than GPUs.

    Raises PlanError where these cannot be divided.
    """
    if tensor_parallel == 1:
        return spec
    if spec.family in WHOLE_FAMILIES:
        reason = f"how {spec.family} divides over tensor-parallel GPUs is not predicted"
        _refuse(tensor_parallel, "1", reason)
    for name, size in (
        ("attention heads", spec.num_heads),
        ("MLP columns", spec.intermediate_size),
        ("expert columns", spec.expert_size),
        ("vocabulary rows", spec.vocab_size),
    ):
        if size % tensor_parallel:
            reason = f"{spec.name}'s {size:,} {name} cannot be divided by it"
            _refuse(tensor_parallel, f"a divisor of {size}", reason)
    heads = spec.num_kv_heads
    if heads % tensor_parallel and tensor_parallel % heads:
        reason = f"{spec.name}'s {heads} key-value heads can neither be divided nor repeated by it"
        _refuse(tensor_parallel, f"a divisor or multiple of {heads}", reason)
    split = Parallelism(zero_stage=0, world_size=1, tensor_parallel=tensor_parallel)
    return stage_specs(spec, split)[0]


def _refuse(value: int, allowed: str, reason: str) -> NoReturn:
    sentence = f"tensor_parallel is {value}: {reason}."
    raise PlanError("tensor_parallel", value, allowed, sentence=sentence)
