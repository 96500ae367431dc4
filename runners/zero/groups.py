"""Flat parameter groups: which parameters share a buffer, where each lies in it, who owns a shard."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

INITIAL_STD = 0.02


class GatherInto(Protocol):
    """Fill `output` with every rank's `shard` in rank order."""

    def __call__(self, output: Tensor, shard: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Owner:
    """One place of a model where a parameter hangs: `module.attribute`, and its full name."""

    module: nn.Module
    attribute: str
    name: str


@dataclass(frozen=True, slots=True)
class Members:
    """The parameters of one group; a tied parameter has several owners."""

    name: str
    owners: tuple[tuple[Owner, ...], ...]
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies in its group's flat buffer; `offset` and `numel` in elements."""

    name: str
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.shape.numel()


@dataclass(frozen=True, slots=True)
class Layout:
    """The flat buffer of a group, padded to a multiple of the world size."""

    slots: tuple[Slot, ...]
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return self.slots[-1].offset + self.slots[-1].numel

    @property
    def shard_numel(self) -> int:
        """Elements that one rank owns: ceil(numel / world_size)."""
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer: shard_numel * world_size."""
        return self.shard_numel * self.world_size

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """Return the slice of `flat` [padded_numel] that `rank` owns."""
        return flat[rank * self.shard_numel : (rank + 1) * self.shard_numel]

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Return slot `index` of `flat` in its parameter's shape."""
        slot = self.slots[index]
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return every slot of `flat` in its parameter's shape."""
        return [self.view(flat, index) for index in range(len(self.slots))]


def find_owners(model: nn.Module) -> dict[nn.Parameter, list[Owner]]:
    """Return every parameter of `model` in order, each with all places where it hangs."""
    owners: dict[nn.Parameter, list[Owner]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            owners.setdefault(parameter, []).append(Owner(module, attribute, name))
    return owners


def _base_model(model: nn.Module) -> nn.Module:
    """Return the model under the language-modelling head, as transformers names it."""
    base = model.base_model
    assert isinstance(base, nn.Module)
    return base


def _outer_modules(model: nn.Module) -> list[nn.Module]:
    """Return what surrounds the decoder layers, and their list: OPT has one more module around."""
    base = _base_model(model)
    decoder = getattr(base, "decoder", base)
    assert isinstance(decoder, nn.Module)
    return list(decoder.children())


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a Hugging Face causal language model."""
    for child in _outer_modules(model):
        if isinstance(child, nn.ModuleList):
            return child
    raise ValueError(f"{type(model).__name__} has no list of decoder layers in its base model")


def partition_parameters(model: nn.Module) -> list[Members]:
    """Split a causal language model into the groups embedding, one per decoder layer, head.

    A head that is tied to the embedding belongs to the embedding; the head's group is then the
    final norm alone. What is not trained of a group is a group of its own, of the same name.
    """
    group_of: dict[nn.Module, str] = {}
    for child in _outer_modules(model):
        if isinstance(child, nn.Embedding):
            group_of[child] = "embedding"
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        group_of.update(dict.fromkeys(layer.modules(), f"layer.{index}"))
    names = ["embedding", *(f"layer.{index}" for index in range(len(layers))), "head"]
    members: dict[tuple[str, bool], list[tuple[Owner, ...]]] = {
        (name, is_frozen): [] for name in names for is_frozen in (True, False)
    }
    for parameter, owners in find_owners(model).items():
        name = group_of.get(owners[0].module, "head")
        members[name, not parameter.requires_grad].append(tuple(owners))
    return [
        Members(name, tuple(owners), is_frozen)
        for (name, is_frozen), owners in members.items()
        if owners
    ]


def initialise_parameter(values: Tensor, name: str, seed: int) -> None:
    """Fill `values` from `seed` and the parameter's name: small normal, norms one, biases zero.

    The second matrix of an adapter is zero, so that it starts as nothing.

    Every rank and every engine gets the same values for the same name, shape, dtype and device.
    """
    if values.dim() < 2:
        values.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    if ".lora_B." in name:
        values.zero_()
        return
    generator = torch.Generator(values.device).manual_seed(seed ^ zlib.crc32(name.encode()))
    values.normal_(0.0, INITIAL_STD, generator=generator)


def refill_buffers(model: nn.Module, device: torch.device) -> None:
    """Give meta buffers (rotary frequencies, embedding scales) storage and their values.

    The model's own `_init_weights` computes them; parameters are flagged so that it leaves them.
    Raises RuntimeError naming a buffer that the model did not fill.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    for prefix, module in model.named_modules():
        meta = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        for name, buffer in meta.items():
            module._buffers[name] = torch.full_like(buffer, float("nan"), device=device)
        if meta:
            model._init_weights(module)  # type: ignore[operator]
        for name in meta:
            if module._buffers[name].isnan().any():
                raise RuntimeError(f"buffer {prefix}.{name} was not filled after a meta build")


class FlatGroup:
    """A group's parameters as views of one flat buffer, and its gradients.

    With a `shard_dtype` (from stage 1 on) the rank keeps a shard, in that dtype, and the flat
    buffer's storage is empty except between `gather` and `release`. A shard that `moves` is in the
    flat buffer, in the same dtype, while that is there: it is never held twice.
    """

    def __init__(
        self,
        members: Members,
        *,
        rank: int,
        world_size: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        shard_dtype: torch.dtype | None,
        moves: bool = False,
    ) -> None:
        self.name, self.is_frozen = members.name, members.is_frozen
        self.rank = rank
        self.owners = members.owners
        self.layout = _lay_out(members, world_size)
        self.flat = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self.flat[self.layout.numel :].zero_()
        self.parameters = [self._adopt(index, seed) for index in range(len(self.layout.slots))]
        self.shard = self.layout.shard(self.flat, rank)
        self.is_gathered = True
        self.is_complete = self.is_awaited = False
        self.arrived = 0
        self.gradient: Tensor | None = None
        self.gradient_shard: Tensor | None = None
        # All views of a flat buffer in one call: these say their shapes.
        self._shapes = [torch.empty(slot.shape, device="meta") for slot in self.layout.slots]
        self._storage_bytes = self.flat.untyped_storage().nbytes()
        self.moves = moves
        # One rank's part of the flat buffer is all of it: then there is nothing to free.
        self._is_its_shard = moves and world_size == 1
        if shard_dtype is not None:
            if not self._is_its_shard:
                self.shard = self.shard.to(shard_dtype, copy=True)
            self._shard_bytes = self.shard.untyped_storage().nbytes()
            self.release()

    def _adopt(self, index: int, seed: int) -> nn.Parameter:
        owners = self.owners[index]
        source = owners[0].module._parameters[owners[0].attribute]
        assert source is not None
        view = self.layout.view(self.flat, index)
        with torch.no_grad():
            if source.is_meta:
                initialise_parameter(view, owners[0].name, seed)
            else:
                view.copy_(source)
        # Set through `.data`: the parameter keeps a version counter of its own, so that writing
        # the flat buffer between forward and backward does not invalidate saved weights.
        parameter = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device))
        parameter.data = view
        parameter.requires_grad_(source.requires_grad)
        for owner in owners:
            owner.module._parameters[owner.attribute] = parameter
        return parameter

    def gather(self, all_gather: GatherInto) -> None:
        """Fill the flat buffer from all ranks' shards, unless it is there already."""
        if not self.is_gathered:
            self.make_room()
            self.fill(all_gather)

    def make_room(self) -> None:
        """Give the flat buffer its storage back, for a gather to fill."""
        self.is_gathered = True
        if self._is_its_shard:
            return
        self.flat.untyped_storage().resize_(self._storage_bytes)
        if self.moves:
            self.own_part().copy_(self.shard)
            self.shard.untyped_storage().resize_(0)

    @torch.no_grad()
    def fill(self, all_gather: GatherInto) -> None:
        """Fill the flat buffer from all ranks' shards, each put into its place in its dtype first."""
        own = self.own_part()
        if not self.moves and own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        all_gather(self.flat, own)

    def release(self) -> None:
        """Free the flat buffer's storage; the parameters keep their shapes."""
        if not self.is_gathered:
            return
        self.is_gathered = False
        if self._is_its_shard:
            return
        if self.moves:
            self.shard.untyped_storage().resize_(self._shard_bytes)
            self.shard.copy_(self.own_part())
        self.flat.untyped_storage().resize_(0)

    def own_part(self) -> Tensor:
        """Return the slice of the flat buffer that the rank's shard fills."""
        return self.layout.shard(self.flat, self.rank)

    def begin_gradient(self) -> None:
        """Make the flat gradient, all zeros, with every parameter's `.grad` at its place in it."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat, memory_format=torch.contiguous_format)
            views = _unflatten_dense_tensors(self.gradient, self._shapes)
            for parameter, view in zip(self.parameters, views, strict=True):
                parameter.grad = view

    def free_full_gradient(self) -> None:
        """Drop the flat gradient and every view of it."""
        self.gradient = None
        for parameter in self.parameters:
            parameter.grad = None

    def own_gradient(self) -> Tensor:
        """Return the rank's slice of the reduced gradient, whichever buffer holds it."""
        if self.gradient_shard is not None:
            return self.gradient_shard
        assert self.gradient is not None
        return self.layout.shard(self.gradient, self.rank)

    def named_views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and its view of the flat buffer."""
        for index, slot in enumerate(self.layout.slots):
            yield slot.name, self.layout.view(self.flat, index)


def _lay_out(members: Members, world_size: int) -> Layout:
    slots, offset = [], 0
    for owners in members.owners:
        parameter = owners[0].module._parameters[owners[0].attribute]
        assert parameter is not None
        slots.append(Slot(owners[0].name, parameter.shape, offset))
        offset += parameter.numel()
    return Layout(tuple(slots), world_size)


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Sum the bytes of the storages behind `tensors`, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
