"""AdamW over flat shards by our own kernel (kernels/adamw): a step in which nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.adamw.triton import adamw_step
from kernels.launch import INTERPRETED
from runners.zero.optimizer import ShardOptimizer

KIND = "adamw_triton"


class TritonAdamW(torch.optim.Optimizer):
    """Keeps what torch's AdamW keeps of flat fp32 tensors [n], with the step counter on the host.

    Torch's `.grad` has the dtype of its tensor, so gradients are handed to `step_with` instead. Raises
    ValueError for tensors in another dtype, or where Triton cannot run.
    """

    def __init__(self, tensors: Iterable[Tensor], lr: float) -> None:
        options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
        super().__init__(tensors, options)
        for tensor in self._tensors():
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"{KIND} steps fp32 values, not {tensor.dtype}: use precision mixed, fp32 or "
                    "autocast, or another optimizer"
                )
            if not (tensor.is_cuda or INTERPRETED):
                raise ValueError(f"{KIND} is a Triton kernel and needs a GPU: use adamw_fused here")

    def step_with(self, tensor: Tensor, gradient: Tensor, copy: Tensor | None = None) -> None:
        """Step one tensor with a gradient [n] in any float dtype; round the new values to `copy`."""
        state = self.state[tensor]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(tensor)
            state["exp_avg_sq"] = torch.zeros_like(tensor)
        state["step"] += 1
        [group] = self.param_groups
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        moments = state["exp_avg"], state["exp_avg_sq"]
        adamw_step(tensor, gradient, *moments, step=int(state["step"]), copy=copy, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from any of torch's AdamW variants: the fused one counts on the device."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["step"] = state["step"].cpu()

    def _tensors(self) -> list[Tensor]:
        return [tensor for group in self.param_groups for tensor in group["params"]]


class KernelOptimizer(ShardOptimizer):
    """Steps one flat buffer [n] by the kernel, which takes a gradient as it was reduced and writes
    the buffer of a master copy itself."""

    def step(self, gradient: Tensor) -> None:
        """Apply `gradient` [n] to the fp32 values, and to the buffer that copies them."""
        [optimizer] = self._optimizers
        assert isinstance(optimizer, TritonAdamW)
        copy = None if self.values is self._shard else self._shard
        optimizer.step_with(self.values, gradient, copy)
