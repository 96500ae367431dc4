"""Give a model from the meta device its parameters on a real one, for engines that keep its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from runners.engines.four_bit import quantised
from runners.zero.groups import find_owners, initialise_parameter, refill_buffers

Fill = Callable[[nn.Parameter, str], None]


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Store every parameter in `dtype`."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def materialise(model: nn.Module, device: torch.device, fill: Fill) -> None:
    """Allocate the parameters of a model on the meta device and `fill(parameter, name)` each.

    A model that has its values already keeps them.
    """
    with quantised(model, device, fill):
        _materialise_whole(model, device, fill)


def _materialise_whole(model: nn.Module, device: torch.device, fill: Fill) -> None:
    owners_of = find_owners(model)
    if not any(parameter.is_meta for parameter in owners_of):
        return
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    for owners in owners_of.values():
        parameter = owners[0].module._parameters[owners[0].attribute]
        assert parameter is not None
        # `to_empty` gives each place of a tied weight a tensor of its own: tie them again.
        for owner in owners[1:]:
            owner.module._parameters[owner.attribute] = parameter
        fill(parameter, owners[0].name)
    _restore_meta_buffers(model, buffers)
    refill_buffers(model, device)


@torch.no_grad()
def fill_parameter(parameter: nn.Parameter, name: str, *, seed: int) -> None:
    """Draw a whole parameter's values, the same on every rank."""
    initialise_parameter(parameter, name, seed)


def _restore_meta_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        if buffer.is_meta:
            path, _, attribute = name.rpartition(".")
            model.get_submodule(path)._buffers[attribute] = buffer
