"""Frozen weights in bitsandbytes' 4-bit NormalFloat below adapters (QLoRA); needs `bitsandbytes`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from runners.zero.groups import decoder_layers

_COMPUTE = torch.bfloat16


def store_in_four_bits(model: nn.Module) -> None:
    """Make every linear layer of the decoder layers bitsandbytes' own; `model` is on meta.

    Scales are quantised once more, products are computed in bf16. Embedding, norms and head stay.
    Raises ValueError where bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            "workload.base_dtype 'nf4' needs bitsandbytes: pip install 'peakmark[bitsandbytes]'"
        )
    from bitsandbytes.nn import Linear4bit  # type: ignore[import-not-found]

    for layer in decoder_layers(model):
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):  # or of a class of its own, as Falcon's
                    setattr(parent, name, _like(child, Linear4bit))
    # What peft asks before it chooses its layer for 4-bit weights.
    model.is_loaded_in_4bit = True  # type: ignore[assignment]


def _like(linear: nn.Linear, kind: Callable[..., nn.Module]) -> nn.Module:
    made = kind(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=_COMPUTE,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    return made.requires_grad_(False)


def _four_bit_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if hasattr(module, "quant_state") and isinstance(module, nn.Linear):
            yield name, module


@contextmanager
def quantised(
    model: nn.Module, device: torch.device, fill: Callable[[nn.Parameter, str], None]
) -> Iterator[None]:
    """Give 4-bit layers on meta their weights, each filled whole in bf16 and then quantised.

    Within the context the layers have none, so that what walks over a model's parameters leaves
    them alone.
    """
    made: list[tuple[Any, nn.Parameter]] = []
    for name, module in _four_bit_modules(model):
        if not module.weight.is_meta:
            continue
        whole = nn.Parameter(torch.empty(module.weight.shape, dtype=_COMPUTE, device=device))
        fill(whole, f"{name}.weight")
        made.append((module, _quantise(module, whole.data, device)))
        del whole
    for module, _ in made:
        module.weight = None
    yield
    for module, weight in made:
        module.weight = weight


def _quantise(module: Any, whole: Tensor, device: torch.device) -> nn.Parameter:
    from bitsandbytes.nn import Params4bit

    weight = Params4bit(
        whole, requires_grad=False, compress_statistics=True, quant_type="nf4", module=module
    )
    moved: nn.Parameter = weight.to(device)  # quantises
    return moved


def four_bit_states(model: nn.Module) -> list[Tensor]:
    """What is kept beside the 4-bit weights: their scales, offsets and code books."""
    found = []
    for _, module in _four_bit_modules(model):
        state = module.weight.quant_state
        nested = state.state2
        found += [state.absmax, state.code, state.offset, nested.absmax, nested.code]
    return found
