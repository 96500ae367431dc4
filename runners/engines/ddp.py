"""PyTorch's DistributedDataParallel behind the engine interface: ZeRO stage 0, nothing sharded."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from runners.engines.four_bit import four_bit_states
from runners.engines.parameters import cast_parameters, fill_parameter, materialise
from runners.zero.collectives import Collectives
from runners.zero.groups import decoder_layers, storage_bytes
from runners.zero.optimizer import build_optimizers, state_tensors


class DdpEngine:
    """Wraps `model` in DDP over the default process group, which must exist.

    Gradients are views of DDP's buckets (25 MiB each, the first 1 MiB), so they exist once. DDP has
    no master weights: `mixed` is refused. With `sync_each_micro_batch` False only the last
    micro-batch is reduced; the gradients before it are then tensors beside the buckets. A model
    on the meta device is drawn from `seed`; otherwise its values are kept.
    """

    stages: tuple[int, ...] = (0,)

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
        max_grad_norm: float = 0.0,
    ) -> None:
        if stage not in self.stages:
            raise ValueError(f"{type(self).__name__} has no ZeRO stage {stage!r}")
        if precision == "mixed":
            raise ValueError("DDP keeps no master weights: use autocast or bf16 for mixed")
        self.stage = stage
        self.collectives = collectives
        self._syncs_each, self._max_grad_norm = sync_each_micro_batch, max_grad_norm
        if precision == "bf16":
            cast_parameters(model, torch.bfloat16)
        materialise(model, device, partial(fill_parameter, seed=seed))
        self.module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.module.require_backward_grad_sync = sync_each_micro_batch
        if dist.get_backend() == "fake":
            # DDP reads a hook's annotations, which must not be text: a lambda has none.
            hook = lambda world_size, bucket: _average_alone(world_size, bucket.buffer())  # noqa: E731
            self.module.register_comm_hook(collectives.world_size, hook)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizers = self._build_optimizers(optimizer, lr)

    def _build_optimizers(self, kind: str, lr: float) -> list[torch.optim.Optimizer]:
        if kind != "muon":
            return build_optimizers(kind, self._parameters, lr)
        inside = set(decoder_layers(self.module.module).parameters())
        split = (
            [p for p in self._parameters if (p in inside) == in_layer] for in_layer in (True, False)
        )
        layers, others = split
        return [
            *build_optimizers(kind, layers, lr, in_layer=True),
            *build_optimizers(kind, others, lr, in_layer=False),
        ]

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Run the backward pass of `loss`; DDP's hooks reduce bucket by bucket."""
        if last_micro_batch and not self._syncs_each:
            self._expect_gradients()
        loss.backward()
        if last_micro_batch or self._syncs_each:
            self._count_reduction()

    def _expect_gradients(self) -> None:
        # What a forward pass outside of no_sync() does (nn/parallel/distributed.py, _pre_forward
        # and _post_forward): the reducer ignores gradients that no forward pass announced.
        # Which micro-batch is the last one is known here only.
        self.module.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        self.module.reducer.prepare_for_forward()
        self.module.reducer.prepare_for_backward([])

    def step(self) -> None:
        """Clip where asked to, step this rank's parameters and let go of the gradients."""
        if self._max_grad_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter; every rank has them whole."""
        named = self.module.module.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradient buckets and optimizer states held now."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        return {
            "parameter_bytes": storage_bytes(
                [*self.module.module.parameters(), *four_bit_states(self.module.module)]
            ),
            "gradient_bytes": storage_bytes(gradients),
            "optimizer_bytes": storage_bytes(self._states()),
        }

    def _states(self) -> list[Tensor]:
        return [tensor for o in self._optimizers for tensor in state_tensors(o)]

    def _count_reduction(self) -> None:
        # DDP talks to the process group itself; it says what buckets it made.
        made = self.module._get_ddp_logging_data()
        sizes = made.get("rebuilt_bucket_sizes") or made.get("bucket_sizes", "")
        buckets = [int(size) for size in str(sizes).split(",") if size.strip()]
        size_bytes = sum(p.numel() * p.element_size() for p in self._parameters)
        self.collectives.count("all_reduce", size_bytes, calls=max(len(buckets), 1))


def _average_alone(world_size: int, buffer: Tensor) -> torch.futures.Future[Tensor]:
    # The fake group's work has no result for DDP to wait for: take the other ranks' gradients for
    # zero, in place as the all-reduce would be.
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(world_size))
    return future
