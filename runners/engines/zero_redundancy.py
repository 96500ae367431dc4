"""PyTorch's ZeroRedundancyOptimizer over DDP: ZeRO stage 1 by whole parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer

from runners.engines.ddp import DdpEngine
from runners.zero.optimizer import build_optimizer, state_tensors

_REFUSED = ("muon", "adamw_8bit")


class ZeroRedundancyEngine(DdpEngine):
    """DDP whose optimizer steps only this rank's parameters; their owners broadcast them after it.

    The optimizer deals out whole parameters, largest first, each to the rank that has the fewest
    elements so far. It wraps one optimizer of torch: muon (two) and adamw_8bit are refused.
    """

    stages = (1,)

    def _build_optimizers(self, kind: str, lr: float) -> list[torch.optim.Optimizer]:
        if kind in _REFUSED:
            raise ValueError(f"ZeroRedundancyOptimizer does not take {kind}")

        def local(groups: Any, lr: float) -> torch.optim.Optimizer:
            return build_optimizer(kind, groups, lr)

        self._sharded = ZeroRedundancyOptimizer(self._parameters, local, lr=lr)  # type: ignore[arg-type]
        return [self._sharded]

    def step(self) -> None:
        """Step this rank's parameters, receive the others', let go of the gradients."""
        super().step()
        size_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self.collectives.count("broadcast", size_bytes, calls=len(self._parameters))

    def _states(self) -> list[Tensor]:
        return state_tensors(self._sharded.optim)
