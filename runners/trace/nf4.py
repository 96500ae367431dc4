"""A linear layer of 4-bit weights as bitsandbytes holds memory for it; it computes nothing.

bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit: it keeps its 4-bit weight only, and makes a
16-bit one for the length of the product, in the forward (on Hopper from 512 tokens on at the latest:
backends/cuda/ops.py) and again in the backward. What unpacking the scales of its blocks takes, 1/8
of a byte per weight beside two, is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from runners.zero.groups import decoder_layers

_COMPUTE = torch.bfloat16


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        whole = torch.empty(weight.shape, dtype=rows.dtype, device=rows.device)
        return functional.linear(rows, whole, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        (weight,) = ctx.saved_tensors
        whole = torch.empty(weight.shape, dtype=_COMPUTE, device=gradient.device)
        return gradient @ whole, None, None


class _FourBitLinear(nn.Linear):
    """bitsandbytes/nn/modules.py, Linear4bit: computes in bf16, answers in its input's dtype."""

    has_adapter = False

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows [..., out_features] in the dtype of `rows` [..., in_features]."""
        bias = None if self.bias is None else self.bias.to(_COMPUTE)
        out: Tensor = _FourBitProduct.apply(rows.to(_COMPUTE), self.weight, bias)  # type: ignore[no-untyped-call]
        out = out.to(rows.dtype)
        # peft/tuners/lora/bnb.py: adapters are added to a copy.
        return out.clone() if self.has_adapter else out


def store_in_four_bits(model: nn.Module) -> None:
    """Let the linear layers of every decoder layer hold their weights in four bits."""
    for layer in decoder_layers(model):
        for module in layer.modules():
            if isinstance(module, nn.Linear):  # Falcon's linear layers are a class of their own
                module.__class__ = _FourBitLinear


def mark_adapted(model: nn.Module) -> None:
    """Tell the layers below adapters that their result is copied."""
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and isinstance(module, _FourBitLinear):
            module.has_adapter = True
