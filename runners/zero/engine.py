"""ZeRO stages 0 to 3 around a Hugging Face causal language model, on the default stream.

Stage 0 keeps everything on every rank, 1 shards the optimizer, 2 also the gradients, 3 also the
parameters. Gradients are summed over the ranks and divided by the world size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runners.engines.precision import COMPUTE_DTYPES
from runners.zero.collectives import Collectives, LocalCollectives
from runners.zero.groups import (
    FlatGroup,
    decoder_layers,
    partition_parameters,
    refill_buffers,
    storage_bytes,
)
from runners.zero.optimizer import WHOLE_MATRIX_KINDS, ShardOptimizer


class ZeroEngine:
    """Shards the training state of `model` by `stage`; the model's code stays as it is.

    `model` may be on the meta device: its parameters are then drawn from `seed`, equal on every
    rank. Otherwise its values are kept, and must be equal on every rank. Call `backward` for
    each micro-batch's loss (already divided by their number), then `step`. With
    `sync_each_micro_batch` False stages 2 and 3 keep whole gradients up to the last one, as stages
    0 and 1 always do.
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
        collectives: Collectives | None = None,
        seed: int = 0,
        sync_each_micro_batch: bool = True,
    ) -> None:
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"ZeRO stage {stage!r} is not one of 0, 1, 2, 3")
        self.stage, self.module = stage, model
        self.collectives = collectives or LocalCollectives(rank=0, world_size=1)
        self._syncs_each = sync_each_micro_batch
        self.groups = [
            FlatGroup(
                members,
                rank=self.collectives.rank,
                world_size=self.collectives.world_size,
                dtype=COMPUTE_DTYPES[precision],
                device=device,
                seed=seed,
                sharded_parameters=stage == 3,
            )
            for members in partition_parameters(model)
        ]
        self.trained = [group for group in self.groups if not group.is_frozen]
        refill_buffers(model, device)
        whole = optimizer in WHOLE_MATRIX_KINDS
        if whole and stage != 0:
            raise ValueError(f"{optimizer} steps whole matrices, which stage {stage} shards")
        self._optimizers = [
            ShardOptimizer(
                group.flat if stage == 0 else group.shard,
                kind=optimizer,
                lr=lr,
                with_master=precision == "mixed",
                split=group.layout.views if whole else None,
                in_layer=group.name.startswith("layer."),
            )
            for group in self.trained
        ]
        self._awaited: list[FlatGroup] = []
        self._is_in_backward = False
        self._reduces_now = False
        self._hook_gradients()
        if stage == 3:
            self._hook_layers(decoder_layers(model))
            self._hook_outer_modules()

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Run the backward pass of `loss`; reduce what the stage reduces in this micro-batch."""
        self._reduces_now = last_micro_batch or (self._syncs_each and self.stage >= 2)
        # Collectives must come in one order on all ranks even where some rank's parameters get
        # no gradient, so groups are reduced in this order only.
        self._awaited = self.trained[::-1]
        self._is_in_backward = True
        try:
            loss.backward()
        finally:
            self._is_in_backward = False
        self._finish_backward()

    def step(self) -> None:
        """Step every group's optimizer, share the new parameters, free the gradients."""
        with torch.no_grad():
            for group, optimizer in zip(self.trained, self._optimizers, strict=True):
                whole = group.gradient if self.stage == 0 else None
                optimizer.step(group.own_gradient() if whole is None else whole)
                if self.stage in (1, 2):
                    self.collectives.all_gather(group.flat, group.shard)
        for group in self.trained:
            group.free_full_gradient()
            group.gradient_shard = None

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter (a collective call at stage 3; not counted)."""
        values: dict[str, Tensor] = {}
        with self.collectives.uncounted():
            for group in self.groups:
                was_gathered = group.is_gathered
                group.gather(self.collectives.all_gather)
                values.update((name, view.clone()) for name, view in group.named_views())
                if not was_gathered:
                    group.release()
        return values

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer states held now."""
        return {
            "parameter_bytes": storage_bytes([t for g in self.groups for t in (g.flat, g.shard)]),
            "gradient_bytes": storage_bytes(
                [t for g in self.groups for t in (g.gradient, g.gradient_shard)]
            ),
            "optimizer_bytes": sum(optimizer.state_bytes() for optimizer in self._optimizers),
        }

    def stepped_groups(self) -> list[tuple[FlatGroup, ShardOptimizer | None]]:
        """Return every group with the optimizer that steps it; None where it is frozen."""
        optimizers = iter(self._optimizers)
        return [(group, None if group.is_frozen else next(optimizers)) for group in self.groups]

    def _hook_gradients(self) -> None:
        for group in self.trained:
            for index, parameter in enumerate(group.parameters):
                parameter.register_hook(partial(self._before_gradient, group, index))
                parameter.register_post_accumulate_grad_hook(partial(self._after_gradient, group))

    def _hook_layers(self, layers: nn.ModuleList) -> None:
        for index, layer in enumerate(layers):
            groups = self._named(f"layer.{index}")
            for group in groups:
                layer.register_forward_pre_hook(partial(self._before_forward, group))
            layer.register_forward_hook(partial(self._after_layer, groups))

    def _named(self, name: str) -> list[FlatGroup]:
        return [group for group in self.groups if group.name == name]

    def _hook_outer_modules(self) -> None:
        # Embedding and head have no module of their own: each module that holds one of their
        # parameters gathers the group at its first use, and the backward pass releases it.
        for group in self.groups:
            if not group.name.startswith("layer."):
                for module in {o.module for owners in group.owners for o in owners}:
                    module.register_forward_pre_hook(partial(self._before_forward, group))

    def _before_forward(self, group: FlatGroup, module: nn.Module, args: Any) -> None:
        group.gather(self.collectives.all_gather)

    def _after_layer(
        self, groups: list[FlatGroup], module: nn.Module, args: Any, output: Any
    ) -> None:
        if self._is_in_backward:
            return  # a checkpoint's recompute: its backward is about to use the parameters
        outputs = output if isinstance(output, tuple) else (output,)
        for tensor in outputs:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_layer_backward, groups))
        for group in groups:
            group.release()

    def _before_layer_backward(self, groups: list[FlatGroup], gradient: Tensor) -> None:
        self._release_frozen(groups)
        for group in groups:
            group.gather(self.collectives.all_gather)

    def _release_frozen(self, needed: list[FlatGroup]) -> None:
        """Release frozen groups but the `needed`: no gradient of theirs says when they are done."""
        for group in self.groups:
            if group.is_frozen and group not in needed:
                group.release()

    def _before_gradient(self, group: FlatGroup, index: int, gradient: Tensor) -> None:
        group.accept_gradient(index)

    def _after_gradient(self, group: FlatGroup, parameter: Tensor) -> None:
        group.arrived += 1
        if group.arrived == len(group.parameters):
            group.is_complete = True
            while self._awaited and self._awaited[0].is_complete:
                self._complete(self._awaited.pop(0))

    def _finish_backward(self) -> None:
        for group in self._awaited:
            for index in range(len(group.parameters)):
                group.accept_gradient(index)
            self._complete(group)
        self._awaited = []
        if self.stage == 3:
            self._release_frozen([])

    def _complete(self, group: FlatGroup) -> None:
        group.arrived, group.is_complete = 0, False
        if self._reduces_now:
            self._reduce(group)
        if self.stage == 3:
            group.release()

    @torch.no_grad()
    def _reduce(self, group: FlatGroup) -> None:
        full = group.gradient
        assert full is not None
        if self.stage == 0:
            self.collectives.all_reduce(full)
            self._average(full)
        elif self.stage == 1:
            self.collectives.reduce_scatter(group.own_gradient(), full)
            self._average(group.own_gradient())
        else:
            shard = full.new_empty(group.layout.shard_numel)
            self.collectives.reduce_scatter(shard, full)
            self._average(shard)
            del full
            group.free_full_gradient()
            if group.gradient_shard is None:
                group.gradient_shard = shard
            else:
                group.gradient_shard.add_(shard)

    def _average(self, summed: Tensor) -> None:
        if self.collectives.world_size > 1:
            summed.div_(self.collectives.world_size)
