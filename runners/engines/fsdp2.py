"""PyTorch's FSDP2 behind the engine interface: stage 2 keeps gathered layers, stage 3 frees them.

Every decoder layer is one FSDP unit and the rest of the model another, which FSDP2 never frees
after the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from runners.engines.parameters import cast_parameters, materialise
from runners.zero.collectives import Collectives
from runners.zero.groups import decoder_layers, initialise_parameter, storage_bytes
from runners.zero.optimizer import build_optimizer, state_tensors


class Fsdp2Engine:
    """Shards `model` with `fully_shard` over the default process group, which must exist.

    In `mixed` the sharded parameters are fp32, the computation bf16 and the reduction fp32. With
    accumulation every micro-batch is reduced, as FSDP2 does by default, or only the last: then
    whole gradients are kept up to it, in the reduction's dtype. A model on the meta device is drawn from `seed`; otherwise its values are kept, and must be equal on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int,
        optimizer: str,
        precision: str,
        lr: float,
        device: torch.device,
        collectives: Collectives,
        seed: int = 0,
        sync_each_micro_batch: bool = True,
        reduce_dtype: str = "auto",
        max_grad_norm: float = 0.0,
    ) -> None:
        if stage not in (2, 3):
            raise ValueError(f"FSDP2 has no ZeRO stage {stage!r}: it shards like stage 2 or 3")
        self.stage = stage
        self.collectives = collectives
        self._syncs_each = sync_each_micro_batch
        self.module = model
        if precision == "bf16":
            cast_parameters(model, torch.bfloat16)
        self._shard_modules(_policy(precision, reduce_dtype), device)
        materialise(model, device, partial(_fill_shard, collectives=collectives, seed=seed))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer(optimizer, trained, lr)
        self._trained, self._max_grad_norm = trained, max_grad_norm

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Run the backward pass of `loss`; FSDP2's hooks reduce when they are told to."""
        self.module.set_requires_gradient_sync(last_micro_batch or self._syncs_each)  # type: ignore[operator]
        loss.backward()

    def step(self) -> None:
        """Clip where asked to, step the optimizer on the shards and free their gradients."""
        if self._max_grad_norm:
            nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, gathered from all ranks (not counted)."""
        return {
            name: parameter.full_tensor().detach().clone()
            for name, parameter in self.module.named_parameters()
            if isinstance(parameter, DTensor)
        }

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of sharded parameters, gradients and optimizer states held now."""
        parameters = list(self.module.parameters())
        return {
            "parameter_bytes": _local_bytes(parameters),
            "gradient_bytes": _local_bytes([p.grad for p in parameters if p.grad is not None]),
            "optimizer_bytes": _local_bytes(state_tensors(self._optimizer)),
        }

    def _shard_modules(self, policy: MixedPrecisionPolicy, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (self.collectives.world_size,))
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        layers = decoder_layers(self.module)
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.stage == 3, **options)
        fully_shard(self.module, **options)
        for unit in (*layers, self.module):
            unit.set_custom_all_gather(_AllGather(self.collectives))
            unit.set_custom_reduce_scatter(_ReduceScatter(self.collectives))


def _policy(precision: str, reduce_dtype: str) -> MixedPrecisionPolicy:
    """`mixed` computes in bf16 and, left to itself, reduces in fp32; `bf16` does all in bf16."""
    reduced = {"bf16": torch.bfloat16, "fp32": torch.float32}.get(reduce_dtype)
    if precision == "mixed":
        return MixedPrecisionPolicy(torch.bfloat16, reduced or torch.float32)
    return MixedPrecisionPolicy(reduce_dtype=reduced)


class _DefaultAllocation:
    """Allocates as FSDP2's own collectives do, so that memory stays what it is without us."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised buffer of `size` elements."""
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_DefaultAllocation):
    """FSDP2's all-gather through our counted collectives, which the solo world can replace."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._collectives.all_gather(output_tensor, input_tensor)


class _ReduceScatter(_DefaultAllocation):
    """FSDP2's reduce-scatter through our counted collectives."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._collectives.reduce_scatter(output_tensor, input_tensor, op)


@torch.no_grad()
def _fill_shard(parameter: nn.Parameter, name: str, *, collectives: Collectives, seed: int) -> None:
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    full = torch.empty(parameter.shape, dtype=local.dtype, device=local.device)
    initialise_parameter(full, name, seed)
    rows = torch.chunk(full, collectives.world_size)
    if local.numel():
        local.copy_(rows[collectives.rank])


def _local_bytes(tensors: Sequence[Tensor]) -> int:
    return storage_bytes([t.to_local() if isinstance(t, DTensor) else t for t in tensors])
