"""DeepSpeed's ZeRO stages behind the engine interface; needs the extra `deepspeed`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from runners.engines.parameters import cast_parameters, fill_parameter, materialise
from runners.zero.collectives import Collectives
from runners.zero.groups import storage_bytes
from runners.zero.optimizer import build_optimizer, state_tensors


class DeepSpeedEngine:
    """Runs `model` under `deepspeed.initialize` with its default buckets, on the default group.

    bf16 parameters with fp32 master weights (`mixed`), the optimizer is torch's own. Its stage 3
    learns the order of modules in the first two micro-batches: only from the third on does it
    prefetch. A model on the meta device is drawn from `seed`; otherwise its values are kept.
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
        max_grad_norm: float = 0.0,
    ) -> None:
        if stage not in (1, 2, 3):
            raise ValueError(f"DeepSpeed runs as ZeRO stage 1, 2 or 3 here, not {stage!r}")
        if precision != "mixed":
            raise ValueError(f"DeepSpeed's bf16 is precision mixed, not {precision}")
        if not sync_each_micro_batch:
            raise ValueError("DeepSpeed's stages decide by themselves when gradients are reduced")
        self.stage, self.collectives, self._model = stage, collectives, model
        cast_parameters(model, torch.bfloat16)
        materialise(model, device, partial(fill_parameter, seed=seed))
        stepper = build_optimizer(optimizer, model.parameters(), lr)
        self.module = _initialize(model, stepper, stage, max_grad_norm)
        _count_collectives(collectives)

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Run the backward pass of `loss`; DeepSpeed reduces bucket by bucket."""
        self.module.set_gradient_accumulation_boundary(last_micro_batch)
        self.module.backward(loss)
        if not last_micro_batch:
            self.module.step()

    def step(self) -> None:
        """Step this rank's shard and share the parameters; gradients are freed."""
        self.module.step()

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, gathered from all ranks at stage 3."""
        import deepspeed

        named = dict(self._model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(named.values()), enabled=self.stage == 3):
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of parameters, averaged gradients and optimizer states held now."""
        zero = self.module.optimizer
        if self.stage == 3:
            parameters = [zero.lp_param_buffer]
            gradients, master = (
                [zero.grad_partitions_flat_buffer],
                zero.fp32_partitioned_groups_flat,
            )
        else:
            parameters, master = zero.bit16_groups_flat, zero.single_partition_of_fp32_groups
            averaged = [g for group in zero.averaged_gradients.values() for g in group or []]
            gradients = averaged
        states = state_tensors(zero.optimizer)
        return {
            "parameter_bytes": storage_bytes(parameters),
            "gradient_bytes": storage_bytes(gradients),
            "optimizer_bytes": storage_bytes([*master, *states]),
        }


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer, stage: int, max_grad_norm: float
) -> Any:
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError("engine deepspeed needs DeepSpeed: pip install 'peakmark[deepspeed]'")
    # DeepSpeed reads its place in the world from the environment, whatever group there is.
    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
    place = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    for name, value in {**place, "LOCAL_RANK": local_rank}.items():
        os.environ.setdefault(name, str(value))
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine


# What DeepSpeed calls on its backend, and our name of it.
_COUNTED = {
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
}


def _count_collectives(collectives: Collectives) -> None:
    """Count what DeepSpeed sends by itself from now on, but for scalars (overflow, norm)."""
    from deepspeed.comm import comm

    for method, name in _COUNTED.items():
        # From the class: an engine built later counts for itself alone.
        call = partial(getattr(type(comm.cdb), method), comm.cdb)
        setattr(comm.cdb, method, _counted(call, name, collectives))


def _counted(call: Callable[..., Any], name: str, collectives: Collectives) -> Callable[..., Any]:
    def counted(*args: Any, **options: Any) -> Any:
        # The whole buffer is the largest of the tensors, whatever its argument is called.
        tensors = (value for value in (*args, *options.values()) if isinstance(value, Tensor))
        whole = max(tensors, key=Tensor.numel)
        if whole.numel() > 1:
            collectives.count(name, whole.numel() * whole.element_size())
        return call(*args, **options)

    return counted
