"""A recorded plan as the transformers of its time ran it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.plan import Plan

# Until 5.18 rotary embeddings found their angles with a matrix product before the first layer, from
# 5.19 on they multiply element by element (models/llama/modeling_llama.py and its kin). It is the
# step's first product, so cuBLAS takes its workspace there, before what is gathered for the layer:
# all that comes after lies elsewhere, and segments can be others.
_FIRST_WITHOUT_PRODUCT = (5, 19)


def as_run(plan: Plan, environment: Mapping[str, Any]) -> Plan:
    """Return `plan` as it ran in an environment with these `versions`; the newest if they are unknown."""
    text = str((environment.get("versions") or {}).get("transformers", ""))
    found = re.match(r"(\d+)\.(\d+)", text)
    if not found or tuple(map(int, found.groups())) >= _FIRST_WITHOUT_PRODUCT:
        return plan
    if not plan.model.rotary_dim and plan.model.latent is None:
        return plan
    return replace(plan, model=replace(plan.model, multiplies_for_angles=True))
