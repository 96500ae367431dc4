"""Run a Hugging Face model's small operations by our fused kernels while it decodes.

A decode step moves few bytes per operation, so the number of kernels counts: a norm, a rotary embedding
and a gated activation become one kernel each; the two products of a gated MLP become one product, and so
do those of query, key and value.
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
_QKV = ("q_proj", "k_proj", "v_proj")
# Their rotary embedding is transformers' own for Llama, over whole heads.
ROPE_FAMILIES = frozenset(("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"))


@contextmanager
def fused_operations(model: nn.Module) -> Iterator[dict[str, int]]:
    """Replace what we have kernels for inside the block; yields how many of each kind."""
    counts = {"rms_norm": 0, "gated_mlp": 0, "joined_qkv": 0, "rope": 0}
    with ExitStack() as stack:
        for module in model.modules():
            if _is_rms_norm(module):
                stack.enter_context(patch.object(module, "forward", _norm_of(module)))
                counts["rms_norm"] += 1
            elif _is_gated(module):
                stack.enter_context(patch.object(module, "forward", _mlp_of(module)))
                counts["gated_mlp"] += 1
            elif _projects_apart(module):
                for name, forward in _qkv_of(module).items():
                    stack.enter_context(patch.object(getattr(module, name), "forward", forward))
                counts["joined_qkv"] += 1
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
    width = module.gate_proj.weight.shape[0]
    joined = _joined([module.gate_proj.weight, module.up_proj.weight])

    def forward(hidden: Tensor) -> Tensor:
        both = linear(hidden, joined)
        out: Tensor = module.down_proj(swiglu(both[..., :width], both[..., width:]))
        return out

    return forward


@torch.no_grad()
def _joined(parameters: list[nn.Parameter]) -> Tensor:
    """Return parameters in one tensor, of which they become views."""
    joined = torch.cat(list(parameters))
    parts = joined.split([len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return joined


def _projects_apart(module: Any) -> bool:
    """Say whether a module has plain projections of one input to query, key and value."""
    parts = [getattr(module, name, None) for name in _QKV]
    return all(type(part) is nn.Linear for part in parts)


def _qkv_of(module: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Compute all three where the first is asked for; the others find theirs, of the same input."""
    linears = [getattr(module, name) for name in _QKV]
    weight = _joined([one.weight for one in linears])
    biases = [one.bias for one in linears]
    bias = None if biases[0] is None else _joined(biases)
    sizes = [one.out_features for one in linears]
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def first(hidden: Tensor) -> Tensor:
        query, key, value = linear(hidden, weight, bias).split(sizes, -1)
        kept.update({"k_proj": (hidden, key), "v_proj": (hidden, value)})
        out: Tensor = query
        return out

    def later(name: str, own: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            source, found = kept.pop(name, (None, hidden))
            return found if source is hidden else linear(hidden, own.weight, own.bias)

        return forward

    return {"q_proj": first} | {
        name: later(name, one) for name, one in zip(_QKV[1:], linears[1:], strict=True)
    }


def _rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    return apply_rope(q, k, cos, sin)
