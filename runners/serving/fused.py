"""Run a Hugging Face model's small operations by our fused kernels while it decodes.

A decode step moves few bytes per operation, so the number of kernels counts: a norm, a rotary embedding
and a gated activation become one kernel each, and the two products of a gated MLP one product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kernels.rms_norm.triton import rms_norm
from kernels.rope.triton import apply_rope
from kernels.swiglu.triton import swiglu

_ROPE = "apply_rotary_pos_emb"
# Their rotary embedding is transformers' own for Llama, over whole heads.
ROPE_FAMILIES = frozenset(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"))


@contextmanager
def fused_operations(model: nn.Module) -> Iterator[dict[str, int]]:
    """Replace what we have kernels for inside the block; yields how many of each kind."""
    counts = {"rms_norm": 0, "gated_mlp": 0, "rope": 0}
    with ExitStack() as stack:
        for module in model.modules():
            if _is_rms_norm(module):
                stack.enter_context(patch.object(module, "forward", _norm_of(module)))
                counts["rms_norm"] += 1
            elif _is_gated(module):
                stack.enter_context(patch.object(module, "forward", _mlp_of(module)))
                counts["gated_mlp"] += 1
        config: Any = model.config
        if config.model_type in ROPE_FAMILIES:
            stack.enter_context(patch.object(sys.modules[type(model).__module__], _ROPE, _rope))
            counts["rope"] = 1
        yield counts


def _is_rms_norm(module: Any) -> bool:
    """Llama's form: weight times the normalised row, no bias, no one added to the weight."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _norm_of(module: Any) -> Callable[[Tensor], Tensor]:
    return lambda hidden: rms_norm(hidden, module.weight, eps=module.variance_epsilon)


def _is_gated(module: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    parts = [getattr(module, name, None) for name in names]
    plain = all(type(part) is nn.Linear and part.bias is None for part in parts)
    return plain and isinstance(module.act_fn, nn.SiLU | _silu_class())


def _silu_class() -> type:
    from transformers.activations import ACT2FN

    found: type = type(ACT2FN["silu"])
    return found


def _mlp_of(module: Any) -> Callable[[Tensor], Tensor]:
    """Join gate and up: both become views of one weight, so nothing is held twice."""
    gate, up = module.gate_proj, module.up_proj
    width = gate.weight.shape[0]
    with torch.no_grad():
        joined = torch.cat([gate.weight, up.weight])
        gate.weight.data, up.weight.data = joined[:width], joined[width:]

    def forward(hidden: Tensor) -> Tensor:
        both = linear(hidden, joined)
        out: Tensor = module.down_proj(swiglu(both[..., :width], both[..., width:]))
        return out

    return forward


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return apply_rope(q, k, cos, sin)
