"""What a job asks of a training engine, whichever it is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

StateBytes = dict[str, int]


class TrainingEngine(Protocol):
    """A model made ready to train on one rank."""

    @property
    def module(self) -> nn.Module:
        """What to call as the model in the forward pass."""

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Add the gradients of `loss`, reduced over the ranks when the engine's stage says so."""

    def step(self) -> None:
        """Apply the gradients of this step, then free them."""

    def full_parameters(self) -> dict[str, Tensor]:
        """Return a copy of every parameter, gathered from all ranks (a collective call)."""

    def state_bytes(self) -> StateBytes:
        """Return parameter_bytes, gradient_bytes and optimizer_bytes as they stand now."""
