"""What each section of one step allocates: marks at the model's module boundaries.

The sections are those of the planner's timeline: the embedding, every decoder layer, final norm,
logits and loss, their backwards, the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from planner.memory.step_sections import section_label
from runners.zero.groups import decoder_layers

# A step has two sections per layer and six more; no model that runs here has as many layers.
MAX_SECTIONS = 600
# What begins with each phase that `StepMeter` measures.
_FIRST_SECTIONS = {"forward": "embed", "backward": "loss_backward", "optimizer": "optimizer"}


class MemoryCounter(Protocol):
    """An allocator's count of what it has given out, with a peak that can start anew."""

    def allocated_bytes(self) -> int:
        """Return what is allocated now."""

    def peak_bytes(self) -> int:
        """Return the most that was allocated since the last reset."""

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""


class CudaCounter:
    """The caching allocator of one CUDA device; reading it does not wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated_bytes(self) -> int:
        """Return what is allocated now."""
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        """Return the most that was allocated since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Start a new peak at what is allocated now."""
        torch.cuda.reset_peak_memory_stats(self._device)


class SectionMeter:
    """Collects (label, allocated at its end, peak in it) of every section, in order.

    Of several micro-batches the last one is kept, with the optimizer step behind it.
    """

    def __init__(self, counter: MemoryCounter) -> None:
        self._counter = counter
        self._rows: list[tuple[str, int, int]] = []
        self._section: str | None = None
        self.is_backward = False

    def enter_phase(self, phase: str) -> None:
        """Begin the first section of a measured phase: forward, backward or optimizer."""
        if phase == "forward":
            self._close()
            self._rows.clear()
        self.is_backward = phase == "backward"
        self.enter(section_label(_FIRST_SECTIONS[phase]))

    def enter(self, section: str) -> None:
        """End the running section and begin the next."""
        if section != self._section:
            self._close()
            self._section = section
            self._counter.reset_peak()

    def rows(self) -> list[list[str | int]]:
        """End the running section and return [label, allocated at end, peak in it], JSON-ready."""
        self._close()
        return [list(row) for row in self._rows]

    def _close(self) -> None:
        if self._section is not None and len(self._rows) < MAX_SECTIONS:
            row = (self._section, self._counter.allocated_bytes(), self._counter.peak_bytes())
            self._rows.append(row)
        self._section = None


@contextmanager
def watched_sections(model: nn.Module, meter: SectionMeter) -> Iterator[None]:
    """Tell `meter` of every section of the steps inside; the model is left as it was.

    A section begins before, and ends after, what an engine's own hooks gather and release for it.
    What a checkpoint computes again in the backward begins no section.
    """
    inner: nn.Module = getattr(model, "module", model)  # DistributedDataParallel wraps
    handles: list[RemovableHandle] = []
    layers = decoder_layers(inner)
    for index, layer in enumerate(layers):
        handles += _watch_layer(layer, index, index == len(layers) - 1, meter)
    handles.append(_holder(inner, layers).register_forward_hook(_begin_loss(meter)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch_layer(
    layer: nn.Module, index: int, is_last: bool, meter: SectionMeter
) -> list[RemovableHandle]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if meter.is_backward:
            return
        meter.enter(section_label("layer", index))
        if index == 0:
            _enter_at_gradient(meter, args[0] if args else kwargs.get("hidden_states"), "embed", 0)

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        if not meter.is_backward:
            hidden = output[0] if isinstance(output, tuple) else output
            _enter_at_gradient(meter, hidden, "layer", index)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if is_last and not meter.is_backward:
            meter.enter(section_label("head"))

    return [
        layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        # First of all, so that its mark on the output comes before an engine's gather there.
        layer.register_forward_hook(leaving, prepend=True),
        layer.register_forward_hook(after),
    ]


def _enter_at_gradient(meter: SectionMeter, hidden: Any, section: str, layer: int) -> None:
    """The gradient of a section's output begins its backward."""
    if isinstance(hidden, Tensor) and hidden.requires_grad:
        label = section_label(f"{section}_backward", layer)
        hidden.register_hook(lambda gradient: meter.enter(label))


def _holder(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The module that runs the layers and the final norm; logits and loss come after it."""
    return next(m for m in model.modules() if any(child is layers for child in m.children()))


def _begin_loss(meter: SectionMeter) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not meter.is_backward:
            meter.enter(section_label("loss"))

    return hook
