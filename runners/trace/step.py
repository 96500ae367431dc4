"""Run one training step without memory and cut its tape into sections."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from planner.memory.groups import Place
from runners.jobs.losses import LOSS_MODULE
from runners.trace.model import build_model
from runners.trace.patterns import Pattern
from runners.trace.standins import cuda_stand_ins
from runners.trace.symbols import PRIMES
from runners.trace.tape import Event, Tape
from runners.trace.variants import Variant
from runners.zero.groups import Members, decoder_layers, partition_parameters


def trace_step(variant: Variant, pattern: Pattern, gradients_exist: bool) -> list[Event]:
    """Trace forward, loss and backward of a model with these layers; returns the events in order.

    With `gradients_exist`, every parameter already has a gradient that autograd adds into, as in a
    later micro-batch or where an engine provides the buffer; otherwise autograd keeps what the
    backward produced.
    """
    with collected_on_demand():
        return _traced_events(variant, pattern, gradients_exist)


@contextmanager
def collected_on_demand() -> Iterator[None]:
    """Let cycles be collected only where the trace asks, and only those of the trace: a second
    each time else, for everything that is imported."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _traced_events(variant: Variant, pattern: Pattern, gradients_exist: bool) -> list[Event]:
    tokens, autocasts = (variant.batch, PRIMES["seq"]), variant.compute == "autocast"
    model, is_packed = build_model(variant, pattern), variant.is_packed
    tape = Tape()
    return record_step(model, tape, tokens, autocasts, gradients_exist, is_packed)


def record_step(
    model: nn.Module,
    tape: Tape,
    shape: tuple[int, int],
    autocasts: bool,
    gradients_exist: bool,
    is_packed: bool = False,
) -> list[Event]:
    """Run one step of `model` on tokens of `shape` (rows, tokens per row) under `tape`.

    `is_packed`: rows hold several documents, as their position ids say.
    """
    with _fake_cpu(model) if autocasts else torch.device("meta"):
        _prepare_parameters(model, tape, gradients_exist)
        tokens = torch.zeros(*shape, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        if is_packed:
            inputs["position_ids"] = torch.zeros_like(tokens)
        for tensor in inputs.values():
            tape.ignore(tensor)
        _watch_sections(model, tape)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocasts)
        with tape, cuda_stand_ins(is_packed):
            with autocast:
                loss = model(**inputs, use_cache=False).loss
            gc.collect()
            tape.place = Place("loss_backward")
            loss.backward()
            del loss
            gc.collect()
    tape.place = Place("end")
    return tape.events


@contextmanager
def _fake_cpu(model: nn.Module) -> Iterator[None]:
    """Autocast has no meta device: give it fake CPU tensors, which are much slower."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        yield


def _prepare_parameters(model: nn.Module, tape: Tape, gradients_exist: bool) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tape.ignore(tensor)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        if gradients_exist:
            parameter.grad = torch.empty_like(parameter)
            tape.ignore(parameter.grad)
        parameter.register_post_accumulate_grad_hook(lambda p: tape.mark_gradient(p.grad))
    if gradients_exist:
        for members in (m for m in partition_parameters(model) if not m.is_frozen):
            _mark_gradients(members, tape)


def _mark_gradients(members: Members, tape: Tape) -> None:
    """Note a group's first gradient, when an engine allocates flat ones, and its last, when it
    reduces them."""
    group, arrived = members.name.split(".")[0], [0, 0]
    owned = [o[0].module.get_parameter(o[0].attribute) for o in members.owners]
    trained = [parameter for parameter in owned if parameter.requires_grad]

    def comes(gradient: torch.Tensor) -> None:
        arrived[0] += 1
        if arrived[0] == 1:
            tape.mark("flat_" + group)

    def is_added(parameter: torch.Tensor) -> None:
        arrived[1] += 1
        if arrived[1] == len(trained):
            tape.mark("done_" + group)

    for parameter in trained:
        parameter.register_hook(comes)
        parameter.register_post_accumulate_grad_hook(is_added)


def _watch_sections(model: nn.Module, tape: Tape) -> None:
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_enter(tape, Place("layer", index)))
        leave = _leave_layer(tape, index, is_last=index == len(layers) - 1)
        layer.register_forward_hook(leave, with_kwargs=True)
    for name, module in model.named_modules():
        module.register_forward_pre_hook(_name(tape, name))
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    loss_start = getattr(model, LOSS_MODULE, head)
    loss_start.register_forward_pre_hook(_enter(tape, Place("loss")))


def _enter(tape: Tape, place: Place) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not tape.place.in_backward:
            tape.place = place

    return hook


def _name(tape: Tape, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        tape.module = name

    return hook


def _leave_layer(tape: Tape, index: int, is_last: bool) -> Callable[..., None]:
    """After the last layer comes the head; the gradient of a layer's output starts its backward."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if tape.place.in_backward:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        _on_gradient(hidden, tape, Place("layer_backward", index))
        if index == 0:
            entering = args[0] if args else kwargs["hidden_states"]
            _on_gradient(entering, tape, Place("embed_backward"))
        if is_last:
            tape.place = Place("head")

    return hook


def _on_gradient(tensor: torch.Tensor, tape: Tape, place: Place) -> None:
    """Enter `place` when the gradient of `tensor` is there; below frozen layers it never is."""
    if tensor.requires_grad:
        tensor.register_hook(lambda grad: setattr(tape, "place", place))
