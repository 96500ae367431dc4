"""Run one fake training step and cut its tape into sections."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from runners.jobs.losses import LOSS_MODULE
from runners.trace.model import LAYERS, build_model
from runners.trace.standins import cuda_stand_ins
from runners.trace.symbols import PRIMES
from runners.trace.tape import Event, Tape
from runners.trace.variants import Variant
from runners.zero.groups import decoder_layers, partition_parameters

# Of four layers the second stands for all inner ones; the first and the last see the model's ends.
LAYER_NAMES = ("first_layer", "layer", "other_layer", "last_layer")


def trace_step(variant: Variant, gradients_exist: bool) -> list[Event]:
    """Trace forward, loss and backward; returns the events in order.

    With `gradients_exist`, every parameter already has a gradient that autograd adds into, as in a
    later micro-batch or where an engine provides the buffer; otherwise autograd keeps what the
    backward produced.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    model = build_model(variant, fake)
    tape = Tape()
    with fake:
        _prepare_parameters(model, tape, gradients_exist)
        tokens = torch.zeros(variant.batch, PRIMES["seq"], dtype=torch.long)
        tape.ignore(tokens)
        _watch_sections(model, tape)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=variant.compute == "autocast")
        with tape, cuda_stand_ins():
            with autocast:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            gc.collect()
            tape.section = "loss_backward"
            loss.backward()
            del loss
            gc.collect()
    tape.section = "end"
    return tape.events


def _prepare_parameters(model: nn.Module, tape: Tape, gradients_exist: bool) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        tape.ignore(tensor)
    for parameter in model.parameters():
        if gradients_exist:
            parameter.grad = torch.empty_like(parameter)
            tape.ignore(parameter.grad)
        parameter.register_post_accumulate_grad_hook(lambda p: tape.mark_gradient(p.grad))
    if gradients_exist:
        _mark_first_gradients(model, tape)


def _mark_first_gradients(model: nn.Module, tape: Tape) -> None:
    """Note when a group's first gradient arrives: an engine with flat gradients allocates then."""
    seen: set[str] = set()
    for members in partition_parameters(model):
        for owners in members.owners:
            parameter = owners[0].module.get_parameter(owners[0].attribute)
            parameter.register_hook(partial(_first_gradient, tape, seen, members.name))


def _first_gradient(tape: Tape, seen: set[str], group: str, gradient: torch.Tensor) -> None:
    if group not in seen:
        seen.add(group)
        tape.mark("flat_" + group.split(".")[0])


def _watch_sections(model: nn.Module, tape: Tape) -> None:
    layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_enter(tape, LAYER_NAMES[index]))
        layer.register_forward_hook(_leave_layer(tape, index))
    for name, module in model.named_modules():
        module.register_forward_pre_hook(_name(tape, name))
    head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
    loss_start = getattr(model, LOSS_MODULE, head)
    loss_start.register_forward_pre_hook(_enter(tape, "loss"))


def _enter(tape: Tape, section: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not tape.section.endswith("_backward"):
            tape.section = section

    return hook


def _name(tape: Tape, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        tape.module = name

    return hook


def _leave_layer(tape: Tape, index: int) -> Callable[..., None]:
    """After the last layer comes the head; the gradient of a layer's output starts its backward."""
    backward = LAYER_NAMES[index] + "_backward"

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if tape.section.endswith("_backward"):
            return
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(lambda grad: setattr(tape, "section", backward))
        if index == 0:
            args[0].register_hook(lambda grad: setattr(tape, "section", "embed_backward"))
        if index == LAYERS - 1:
            tape.section = "head"

    return hook
