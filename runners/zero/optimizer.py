"""The optimizer of one flat shard, with an fp32 master copy where the shard is in bf16."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from runners.zero.groups import storage_bytes

SGD_MOMENTUM = 0.9
# (foreach, fused) of each variant; neither is the plain loop over parameters.
_ADAMW_VARIANTS = {
    "adamw_fused": (False, True),
    "adamw_foreach": (True, False),
    "adamw_loop": (False, False),
}


def build_optimizer(kind: str, tensors: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return the torch optimizer that a plan's `optimizer` names; raises ValueError otherwise."""
    if kind == "sgd":
        return torch.optim.SGD(tensors, lr=lr, momentum=SGD_MOMENTUM)
    if kind not in _ADAMW_VARIANTS:
        raise ValueError(f"optimizer {kind!r} is not one of {', '.join(_ADAMW_VARIANTS)}, sgd")
    foreach, fused = _ADAMW_VARIANTS[kind]
    return torch.optim.AdamW(tensors, lr=lr, foreach=foreach, fused=fused)


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors an optimizer keeps per parameter (moments, momentum, step counters)."""
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [v for v in states if isinstance(v, Tensor)]


class ShardOptimizer:
    """Steps one flat shard [n]; `with_master` keeps an fp32 copy that the steps are taken in."""

    def __init__(self, shard: Tensor, *, kind: str, lr: float, with_master: bool) -> None:
        self._shard = shard
        self._with_master = with_master
        self._stepped = shard.float() if with_master else shard
        self._optimizer = build_optimizer(kind, [self._stepped], lr)

    def step(self, gradient: Tensor) -> None:
        """Apply `gradient` [n], in the shard's dtype, to the master copy and the shard."""
        self._stepped.grad = gradient.float() if self._with_master else gradient
        self._optimizer.step()
        self._stepped.grad = None
        if self._with_master:
            self._shard.copy_(self._stepped)

    def state_bytes(self) -> int:
        """Bytes of the optimizer's states and of the master copy."""
        master = [self._stepped] if self._with_master else []
        return storage_bytes([*state_tensors(self._optimizer), *master])
