"""What a person can do wrong with the ZeRO engine, and what to do about it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runners.zero.collectives import Collectives
from runners.zero.groups import FlatGroup, Owner

_MOST_NAMES = 3
_INSTEAD = (
    "change values in place inside `with engine.whole_parameters():` (load_state_dict, copy_), or build "
    "the engine again"
)


class ZeroError(RuntimeError):
    """An error of the engine's use; its sentence says what to do."""


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are on other ranks: only what it is may be read, not its values.

    Parameters are of this class, from stage 1 on, while they are not gathered. As torch's
    UninitializedParameter, it refuses every operation but attributes.
    """

    zero_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.__class__.__name__ == "method-wrapper" or func in _OF_THE_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = next((p.zero_name for p in _released(args)), "a parameter")
        raise ZeroError(
            f"{name} is used outside its module: it is in shards, and whole only while the layer that "
            "holds it runs (at ZeRO stages 1 and 2 from there to the end of its backward). Use it "
            "inside that layer's forward or inside `with engine.whole_parameters():`, or read copies "
            "with full_parameters()."
        )


_OF_THE_SHAPE = frozenset(
    (
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__),
        *(Tensor.element_size, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
        *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.get_device, Tensor.__hash__),
        *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_),
    )
)


def mark_released(group: FlatGroup) -> None:
    """Make a group's parameters refuse to be used."""
    for slot, parameter in zip(group.layout.slots, group.parameters, strict=True):
        parameter.__class__ = ReleasedParameter
        parameter.zero_name = slot.name  # type: ignore[attr-defined]


def mark_whole(group: FlatGroup) -> None:
    """Make a group's parameters ordinary ones again."""
    for parameter in group.parameters:
        parameter.__class__ = nn.Parameter


def _released(args: Iterable[Any]) -> Iterable[ReleasedParameter]:
    for arg in args:
        if isinstance(arg, ReleasedParameter):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _released(arg)


def check_unchanged(groups: Sequence[FlatGroup]) -> None:
    """Raise ZeroError where a module has another parameter than the engine gave it, or other values."""
    # Parameters that are released would look up each attribute in Python.
    with torch._C.DisableTorchFunctionSubclass():
        for group in groups:
            storage, is_trained = group.flat.untyped_storage()._cdata, not group.is_frozen
            for owners, parameter in zip(group.owners, group.parameters, strict=True):
                for owner in owners:
                    _check_owner(owner, parameter)
                if parameter.untyped_storage()._cdata != storage:
                    raise ZeroError(
                        f"{owners[0].name} was given other values or another dtype after the engine "
                        f"was built (.data, half(), to()), which keeps its own: {_INSTEAD}"
                    )
                if parameter.requires_grad != is_trained:
                    raise ZeroError(
                        f"{owners[0].name} was {'frozen' if is_trained else 'made trainable'} after the "
                        "engine was built: set requires_grad before, or build the engine again"
                    )


def check_complete(model: nn.Module, groups: Sequence[FlatGroup]) -> None:
    """Raise ZeroError where the model has parameters that the engine does not know, or lost some."""
    known = {
        id(parameter): owners[0].name
        for group in groups
        for owners, parameter in zip(group.owners, group.parameters, strict=True)
    }
    for name, parameter in model.named_parameters():
        if known.pop(id(parameter), None) is None:
            raise ZeroError(
                f"{name} was added after the engine was built and would not be trained: build the "
                "engine again, after all parameters are there"
            )
    if known:
        raise ZeroError(
            f"{min(known.values())} is no longer part of the model, and the engine would go on "
            "stepping it: build the engine again"
        )


def _check_owner(owner: Owner, parameter: nn.Parameter) -> None:
    found = owner.module._parameters.get(owner.attribute)
    if found is parameter:
        return
    shape = None if found is None else list(found.shape)
    change = "was removed" if found is None else f"was replaced by a tensor of shape {shape}"
    raise ZeroError(
        f"{owner.name} {change} after the engine was built, which trains another: {_INSTEAD}"
    )


def check_equal_ranks(
    groups: Sequence[FlatGroup], collectives: Collectives, options: dict[str, object]
) -> None:
    """Raise ZeroError, on every rank, where ranks have other parameters or options.

    One small gather of hashes; only where they differ are the names compared.
    """
    mine = _description(groups, options)
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    digests = collectives.gather_objects(digest)
    if len(set(digests)) == 1:
        return
    described = collectives.gather_objects(mine)
    first = described[0]
    rank = next(rank for rank, other in enumerate(described) if other != first)
    lines = set(map(tuple, first)) ^ set(map(tuple, described[rank]))
    words = "; ".join(sorted(" ".join(line) for line in lines)[:_MOST_NAMES])
    raise ZeroError(
        f"rank {rank} was built unlike rank 0, and they would wait for each other for ever: {words}. "
        "Build the same model with the same options on every rank."
    )


def _description(groups: Sequence[FlatGroup], options: dict[str, object]) -> list[list[str]]:
    parameters = [
        [slot.name, str(list(slot.shape)), "frozen" if group.is_frozen else "trained"]
        for group in groups
        for slot in group.layout.slots
    ]
    return [*parameters, *([name, str(value), "option"] for name, value in options.items())]


def check_finite(
    groups: Sequence[FlatGroup], gradients: Sequence[Tensor], collectives: Collectives
) -> None:
    """Raise ZeroError naming parameters whose gradients have a NaN or an infinity.

    The host waits for the device, so this is asked for where something is wrong already. Ranks that
    have only finite values raise too, so that none waits for the others.
    """
    bad = [
        name
        for group, gradient in zip(groups, gradients, strict=True)
        if not gradient.isfinite().all()
        for name in _bad_names(group, gradient)
    ]
    named = sorted({name for names in collectives.gather_objects(bad) for name in names})
    if named:
        more = f" and {len(named) - _MOST_NAMES} more" if len(named) > _MOST_NAMES else ""
        raise ZeroError(
            f"the gradient of {', '.join(named[:_MOST_NAMES])}{more} is not finite: nothing was "
            "stepped. Look for a division by zero or a too large learning rate before it; "
            "max_grad_norm bounds large gradients, but not these."
        )


def _bad_names(group: FlatGroup, gradient: Tensor) -> list[str]:
    """The parameters that have an element of `gradient`, whole or the rank's shard, not finite."""
    is_whole = gradient.numel() == group.layout.padded_numel
    base = 0 if is_whole else group.rank * group.layout.shard_numel
    names = []
    for slot in group.layout.slots:
        start = max(slot.offset - base, 0)
        stop = max(start, min(slot.offset + slot.numel - base, gradient.numel()))
        if not gradient[start:stop].isfinite().all():
            names.append(slot.name)
    return names
