"""ZeRO stages 0 to 3 around a Hugging Face causal language model.

Stage 0 keeps everything on every rank, 1 shards the optimizer, 2 also the gradients, 3 also the
parameters that a layer computes with. At stages 1 and 2 these are whole from a step's first forward
to their last backward. Gradients are averaged over the ranks. Collectives run on a stream of their
own, while forward or backward goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runners.engines.precision import COMPUTE_DTYPES
from runners.zero.clipping import Clipper
from runners.zero.collectives import Collectives, LocalCollectives
from runners.zero.errors import (
    ZeroError,
    check_complete,
    check_equal_ranks,
    check_finite,
    check_unchanged,
)
from runners.zero.gathering import Gatherer, LayerGatherer
from runners.zero.groups import (
    FlatGroup,
    Members,
    partition_parameters,
    refill_buffers,
    storage_bytes,
)
from runners.zero.offload import HostOptimizer, HostStepper, check_offload
from runners.zero.optimizer import WHOLE_MATRIX_KINDS, ShardOptimizer, shard_optimizer
from runners.zero.reduction import Reducer
from runners.zero.streams import SideStream


class ZeroEngine:
    """Shards the training state of `model` by `stage`; the model's code stays as it is.

    `model` may be on the meta device: its parameters are then drawn from `seed`, equal on every
    rank. Otherwise its values are kept, and must be equal on every rank. Call `backward` for
    each micro-batch's loss (already divided by their number), then `step`. With
    `sync_each_micro_batch` False stages 2 and 3 keep whole gradients up to the last one, as stages
    0 and 1 always do. `reduce_dtype` is bf16, fp32 or auto, the gradients' own. `max_grad_norm`
    above 0 clips to that norm over all ranks. `checks_gradients` names parameters whose gradients
    are not finite before each step, for which the host waits. Raises ZeroError where ranks differ,
    or the model was changed.
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
        offload_optimizer: bool = False,
        reduce_dtype: str = "auto",
        max_grad_norm: float = 0.0,
        checks_gradients: bool = False,
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
                **_sharding(stage, precision, members, offload_optimizer),
            )
            for members in partition_parameters(model)
        ]
        self.trained = [group for group in self.groups if not group.is_frozen]
        refill_buffers(model, device)
        whole = optimizer in WHOLE_MATRIX_KINDS
        if whole and stage != 0:
            raise ValueError(f"{optimizer} steps whole matrices, which stage {stage} shards")
        self._host: HostStepper | None = None
        self._optimizers: list[ShardOptimizer] = []
        if offload_optimizer:
            check_offload(stage, optimizer, precision)
            hosted = [HostOptimizer(group.shard, lr=lr) for group in self.trained]
            self._optimizers, self._host = [*hosted], HostStepper(hosted)
        else:
            self._optimizers += [
                shard_optimizer(
                    group.flat if stage == 0 else group.shard,
                    kind=optimizer,
                    lr=lr,
                    with_master=precision == "mixed",
                    split=group.layout.views if whole else None,
                    in_layer=group.name.startswith("layer."),
                )
                for group in self.trained
            ]
        side = SideStream(device, self.collectives.world_size)
        dtypes = _reduction_dtypes(precision, reduce_dtype)
        self._side, self._reducer = side, Reducer(stage, self.collectives, side, *dtypes)
        is_sharded = stage > 0
        self._clipper = Clipper(max_grad_norm, self.collectives, side, is_sharded=is_sharded)
        self._checks_gradients, self._has_begun = checks_gradients, False
        self._awaited: list[FlatGroup] = []
        self._reduces_now = False
        self._hook_gradients()
        self._gatherer = self._build_gatherer(side)
        options = {"stage": stage, "optimizer": optimizer, "precision": precision}
        options |= {"reduce_dtype": reduce_dtype, "max_grad_norm": max_grad_norm}
        check_equal_ranks(self.groups, self.collectives, options)

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Run the backward pass of `loss`; reduce what the stage reduces in this micro-batch."""
        check_unchanged(self.groups)
        if not self._has_begun:
            check_complete(self.module, self.groups)
            self._has_begun = True
        self._reduces_now = last_micro_batch or (self._syncs_each and self.stage >= 2)
        # Collectives must come in one order on all ranks even where some rank's parameters get
        # no gradient, so groups are reduced in this order only.
        self._awaited = self.trained[::-1]
        for group in self._awaited:
            group.is_awaited = True
        with self._gatherer.backward(last_micro_batch) if self._gatherer else nullcontext():
            loss.backward()
            self._finish_backward()

    def step(self) -> None:
        """Step every group's optimizer and free the gradients; the next forward gathers."""
        gradients = [self._reduced(group) for group in self.trained]
        if self._checks_gradients:
            check_finite(self.trained, gradients, self.collectives)
        self._clipper.clip(gradients)
        self.release_parameters()
        with torch.no_grad():
            if self._host is not None:
                self._host.step(gradients)
            else:
                for optimizer, gradient in zip(self._optimizers, gradients, strict=True):
                    optimizer.step(gradient)
        del gradients
        for group in self.trained:
            group.free_full_gradient()
            group.gradient_shard = None

    def _reduced(self, group: FlatGroup) -> Tensor:
        """Return the gradient that a group's optimizer steps with: whole at stage 0, else a shard."""
        whole = group.gradient if self.stage == 0 else None
        return group.own_gradient() if whole is None else whole

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter (a collective call from stage 1 on; not counted)."""
        values: dict[str, Tensor] = {}
        if self._gatherer is not None:
            self._gatherer.settle()
        with self.collectives.uncounted():
            for group in self.groups:
                was_gathered = group.is_gathered
                group.gather(self.collectives.all_gather)
                values.update((name, view.clone()) for name, view in group.named_views())
                if not was_gathered:
                    group.release()
        return values

    @contextmanager
    def whole_parameters(self) -> Iterator[nn.Module]:
        """Have all of the model's parameters whole, to read, save or change them in place.

        All ranks enter it, between two steps, and change alike. What is changed is kept, in fp32
        master copies too; the rest of these stays as precise as it was. Not counted.
        """
        with self.collectives.uncounted():
            if self._gatherer is not None:
                self._gatherer.need_all()
        try:
            yield self.module
        finally:
            self._keep_changes()
            self.release_parameters()

    def release_parameters(self) -> None:
        """Free whole parameters that a forward without a backward has left; shards stay."""
        if self._gatherer is not None:
            self._gatherer.release_all()

    @torch.no_grad()
    def _keep_changes(self) -> None:
        for group, optimizer in self.stepped_groups():
            if not group.is_gathered:
                continue  # a backward in the block has freed it
            own = group.flat if self.stage == 0 else group.own_part()
            if optimizer is not None and not (group.moves and optimizer.values is group.shard):
                optimizer.adopt(own)
            if not group.moves and group.shard.dtype == own.dtype:
                group.shard.copy_(group.own_part())

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer states held now."""
        return {
            "parameter_bytes": storage_bytes([t for g in self.groups for t in (g.flat, g.shard)]),
            "gradient_bytes": storage_bytes(
                [t for g in self.groups for t in (g.gradient, g.gradient_shard)]
            ),
            "optimizer_bytes": sum(optimizer.state_bytes() for optimizer in self._optimizers),
            **({} if self._host is None else {"host_bytes": self._host.host_bytes()}),
        }

    def stepped_groups(self) -> list[tuple[FlatGroup, ShardOptimizer | None]]:
        """Return every group with the optimizer that steps it; None where it is frozen."""
        optimizers = iter(self._optimizers)
        return [(group, None if group.is_frozen else next(optimizers)) for group in self.groups]

    def _build_gatherer(self, side: SideStream) -> Gatherer | None:
        if self.stage == 0:
            return None
        if self.stage == 3:
            plan = self.module, self.groups, self.collectives, side
            return LayerGatherer(*plan, self._complete_above)
        return Gatherer(self.module, self.trained, self.collectives, side)

    def _hook_gradients(self) -> None:
        for group in self.trained:
            for index, parameter in enumerate(group.parameters):
                parameter.register_hook(partial(self._before_gradient, group, index))
                parameter.register_post_accumulate_grad_hook(partial(self._after_gradient, group))

    def _before_gradient(self, group: FlatGroup, index: int, gradient: Tensor) -> None:
        if not group.is_awaited:
            raise ZeroError(
                f"the gradient of {group.layout.slots[index].name} came after its group was reduced, "
                "or outside the engine: call engine.backward(loss) instead of loss.backward(), and "
                "use a parameter inside one layer only"
            )
        group.begin_gradient()

    def _after_gradient(self, group: FlatGroup, parameter: Tensor) -> None:
        group.arrived += 1
        if group.arrived == len(group.parameters):
            group.is_complete = True
            while self._awaited and self._awaited[0].is_complete:
                self._complete(self._awaited.pop(0))

    def _complete_above(self, unit: int) -> None:
        """Complete the groups above the unit whose backward begins: nothing comes any more.

        So gathers and reductions have one order on all ranks.
        """
        assert self._gatherer is not None
        while self._awaited and self._gatherer.unit_of[self._awaited[0]] > unit:
            self._complete_without_gradient(self._awaited.pop(0))

    def _finish_backward(self) -> None:
        for group in self._awaited:
            self._complete_without_gradient(group)
        self._awaited = []
        self._reducer.settle()

    def _complete_without_gradient(self, group: FlatGroup) -> None:
        """Complete a group of which some parameters had no gradient: theirs is zero."""
        group.begin_gradient()
        self._complete(group)

    def _complete(self, group: FlatGroup) -> None:
        group.arrived, group.is_complete, group.is_awaited = 0, False, False
        if self._gatherer is not None:
            self._gatherer.finish(group)
        if self._reduces_now:
            self._reducer.start(group)


def _sharding(
    stage: int, precision: str, members: Members, offload_optimizer: bool
) -> dict[str, Any]:
    """How a group is kept in shards, if it is: what is frozen at stage 3 alone.

    In `mixed` the fp32 master is the shard, and is cast as it is gathered; where the optimizer is
    on the host, the master is there.
    """
    if stage == 0 or (members.is_frozen and stage < 3):
        return {"shard_dtype": None}
    is_master = precision == "mixed" and not members.is_frozen and not offload_optimizer
    dtype = torch.float32 if is_master else COMPUTE_DTYPES[precision]
    return {"shard_dtype": dtype, "moves": stage < 3 and dtype == COMPUTE_DTYPES[precision]}


def _reduction_dtypes(precision: str, reduce_dtype: str) -> tuple[torch.dtype, torch.dtype]:
    """In what dtype gradients are reduced, and kept once they are.

    With an fp32 master they stay in the reduction's; bf16 parameters are stepped with bf16.
    """
    made = COMPUTE_DTYPES[precision]
    named = {"auto": made, "bf16": torch.bfloat16, "fp32": torch.float32}
    if reduce_dtype not in named or (made == torch.float32 and reduce_dtype == "bf16"):
        raise ValueError(f"reduce_dtype {reduce_dtype!r} is none for gradients in {made}")
    sent = named[reduce_dtype]
    return sent, (sent if precision == "mixed" else made)
