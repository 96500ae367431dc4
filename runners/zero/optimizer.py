"""The optimizer of one flat buffer, with an fp32 master copy where the buffer is in bf16."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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
# Adafactor means over rows and columns and Muon orthogonalises: both need a weight's own shape.
WHOLE_MATRIX_KINDS = ("adafactor", "muon")
# All of them keep the same states.
ADAMW_KINDS = (*_ADAMW_VARIANTS, "adamw_triton")
KINDS = (*ADAMW_KINDS, "sgd", "adamw_8bit", *WHOLE_MATRIX_KINDS)


def build_optimizers(
    kind: str, tensors: Sequence[Tensor], lr: float, *, in_layer: bool = True
) -> list[torch.optim.Optimizer]:
    """Return the torch optimizers that a plan's `optimizer` names.

    Muon steps the matrices of layers (`in_layer`) and leaves everything else to fused AdamW, so it
    may be two.
    """
    if kind != "muon":
        return [build_optimizer(kind, tensors, lr)]
    matrices = [tensor for tensor in tensors if in_layer and tensor.dim() == 2]
    others = [tensor for tensor in tensors if not (in_layer and tensor.dim() == 2)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=lr))
    return [*optimizers, build_optimizer("adamw_fused", others, lr)] if others else optimizers


def build_optimizer(kind: str, tensors: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return the one torch optimizer that `kind`, any but muon, stands for; else ValueError."""
    if kind == "sgd":
        return torch.optim.SGD(tensors, lr=lr, momentum=SGD_MOMENTUM)
    if kind == "adafactor":
        return torch.optim.Adafactor(tensors, lr=lr)
    if kind == "adamw_8bit":
        return _eight_bit_adamw(list(tensors), lr)
    if kind == "adamw_triton":
        # Imported here: Triton's import takes a while and the others have no use for it.
        from runners.zero.triton_adamw import TritonAdamW

        return TritonAdamW(tensors, lr)
    if kind not in _ADAMW_VARIANTS:
        raise ValueError(f"optimizer {kind!r} is not one of {', '.join(KINDS)}")
    foreach, fused = _ADAMW_VARIANTS[kind]
    return torch.optim.AdamW(tensors, lr=lr, foreach=foreach, fused=fused)


def _eight_bit_adamw(tensors: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
    if not all(tensor.is_cuda for tensor in tensors):
        raise ValueError("adamw_8bit runs on a GPU only: bitsandbytes has no other kernels for it")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError("adamw_8bit needs bitsandbytes: pip install 'peakmark[bitsandbytes]'")
    from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]

    optimizer: torch.optim.Optimizer = AdamW8bit(tensors, lr=lr)
    return optimizer


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the tensors an optimizer keeps per parameter (moments, momentum, step counters)."""
    states = [v for state in optimizer.state.values() for v in state.values()]
    return [v for v in states if isinstance(v, Tensor)]


class ShardOptimizer:
    """Steps one flat buffer [n]; `with_master` keeps an fp32 copy that the steps are taken in.

    A buffer in fp32 is its own master copy.

    `split` cuts a buffer into views of its parameters, which are then stepped one by one instead.
    """

    def __init__(
        self,
        shard: Tensor,
        *,
        kind: str,
        lr: float,
        with_master: bool,
        split: Callable[[Tensor], list[Tensor]] | None = None,
        in_layer: bool = True,
    ) -> None:
        self.kind = kind
        self._shard = shard
        self._with_master = with_master
        self._master = shard.float() if with_master else shard
        self.is_split = split is not None
        self._split = split or (lambda buffer: [buffer])
        self.stepped = self._split(self._master)
        self._optimizers = build_optimizers(kind, self.stepped, lr, in_layer=in_layer)

    def step(self, gradient: Tensor) -> None:
        """Apply `gradient` [n], in the buffer's dtype, to the master copy and the buffer."""
        gradients = self._split(gradient.float() if self._with_master else gradient)
        for tensor, part in zip(self.stepped, gradients, strict=True):
            tensor.grad = part
        for optimizer in self._optimizers:
            optimizer.step()
        for tensor in self.stepped:
            tensor.grad = None
        if self._with_master:
            self._shard.copy_(self._master)

    @property
    def values(self) -> Tensor:
        """The buffer [n] that steps are taken in: the master copy where there is one."""
        return self._master

    def states(self) -> list[dict[str, Tensor]]:
        """Return what is kept for the buffer, or for each tensor it is split into, by name."""
        return [
            {
                name: value
                for o in self._optimizers
                for name, value in o.state.get(tensor, {}).items()
            }
            for tensor in self.stepped
        ]

    def restore(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Continue from `values`, filled already, and `states` as `states()` returned them."""
        for optimizer in self._optimizers:
            saved = optimizer.state_dict()
            mine = [t for group in optimizer.param_groups for t in group["params"]]
            kept = {id(t): state for t, state in zip(self.stepped, states, strict=True)}
            saved["state"] = {i: kept[id(t)] for i, t in enumerate(mine) if kept[id(t)]}
            optimizer.load_state_dict(saved)
        if self._with_master:
            self._shard.copy_(self._master)

    @torch.no_grad()
    def adopt(self, working: Tensor) -> None:
        """Take over what was changed in a working copy [n]; what was not keeps its precision."""
        given = working.to(self.values.device)
        is_new = given != self.values.to(given.dtype)
        self.values.copy_(torch.where(is_new, given.to(self.values.dtype), self.values))

    def state_bytes(self) -> int:
        """Bytes of the optimizers' states and of the master copy."""
        master = [] if self._master is self._shard else [self._master]
        states = [tensor for o in self._optimizers for tensor in state_tensors(o)]
        return storage_bytes([*states, *master])


def shard_optimizer(shard: Tensor, *, kind: str, **options: Any) -> ShardOptimizer:
    """Return the optimizer of one flat buffer [n]; see `ShardOptimizer` for the options."""
    if kind != "adamw_triton":
        return ShardOptimizer(shard, kind=kind, **options)
    # Imported here, as it imports this module.
    from runners.zero.triton_adamw import KernelOptimizer

    return KernelOptimizer(shard, kind=kind, **options)
