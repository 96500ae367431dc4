"""A recorded plan as transformers and the kernels of its time ran it, and its world."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.memory.attention import DIRECTIONS
from planner.memory.overheads import outside_bytes
from planner.plan import Plan
from planner.workload import Attention, TrainingWorkload

# Until 5.18 rotary embeddings found their angles with a matrix product before the first layer, from
# 5.19 on they multiply element by element (models/llama/modeling_llama.py and its kin). It is the
# step's first product, so cuBLAS takes its workspace there, before what is gathered for the layer:
# all that comes after lies elsewhere, and segments can be others.
_FIRST_WITHOUT_PRODUCT = (5, 19)
# Until 5.17 experts wrote zeros over the rows of experts on other ranks, wherever they were: copies
# of all rows after each product (integrations/moe.py, grouped_mm_experts_forward).
_FIRST_WITHOUT_MASKS = (5, 18)
# What a row's environment says of our attention kernels: by direction, those that ran. Rows from
# before it was noted ran Triton's portable backward everywhere, and a forward for Hopper without its
# tiles' list in any prediction.
ATTENTION_KERNELS, PORTABLE = "attention_kernels", "triton"


def as_run(plan: Plan, environment: Mapping[str, Any]) -> Plan:
    """Return `plan` as it ran in an environment with these `versions`; the newest if they are unknown."""
    text = str((environment.get("versions") or {}).get("transformers", ""))
    found = re.match(r"(\d+)\.(\d+)", text)
    if not found:
        return plan
    version = tuple(map(int, found.groups()))
    model = plan.model
    if isinstance(plan.workload, TrainingWorkload) and plan.workload.attention is Attention.TRITON:
        model = replace(model, portable_attention=_portable_attention(environment))
    has_angles = model.rotary_dim or model.latent is not None
    if version < _FIRST_WITHOUT_PRODUCT and has_angles:
        model = replace(model, multiplies_for_angles=True)
    if version < _FIRST_WITHOUT_MASKS and model.num_experts:
        model = replace(model, masks_experts=True)
    return plan if model is plan.model else replace(plan, model=model)


def alone(plan: Plan) -> Plan:
    """Return the plan of a rank that ran alone: what its communicator would hold, segments can.

    That decides where a step nearly fills the GPU, and whether segments were given back.
    """
    if not isinstance(plan.workload, TrainingWorkload) or plan.hardware is None:
        return plan
    ranks, engine = plan.parallelism.world_size, plan.parallelism.engine
    nccl_bytes = outside_bytes(plan.workload, engine, ranks, plan.hardware).nccl_bytes
    visible_bytes = plan.hardware.visible_bytes + nccl_bytes
    return replace(plan, hardware=replace(plan.hardware, visible_bytes=visible_bytes))


def _portable_attention(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """The directions in which no layer ran a kernel for Hopper; none that was not reached."""
    ran = environment.get(ATTENTION_KERNELS)
    if not isinstance(ran, Mapping):
        return DIRECTIONS
    return tuple(way for way in DIRECTIONS if list(ran.get(way) or ()) == [PORTABLE])
