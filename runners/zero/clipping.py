"""Gradients are scaled down to a largest norm over all parameters and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from runners.zero.collectives import Collectives
from runners.zero.streams import SideStream

# As torch.nn.utils.clip_grad_norm_, so that a norm of zero divides nothing by zero.
_EPSILON = 1e-6


class Clipper:
    """Scales gradients so that their L2 norm is at most `max_norm`.

    Each rank has its shards (`is_sharded`), whose squares one all-reduce of a scalar sums, or whole
    gradients. Every trained parameter is in one group, a tied one too, so it counts once; padding is
    zero. The host waits for nothing: the scale stays on the device.
    """

    def __init__(
        self, max_norm: float, collectives: Collectives, side: SideStream, *, is_sharded: bool
    ) -> None:
        if not max_norm >= 0.0:
            raise ValueError(f"max_grad_norm is {max_norm!r}: it must be 0 (off) or above")
        self._max_norm, self._collectives, self._side = max_norm, collectives, side
        self._is_sharded = is_sharded

    @torch.no_grad()
    def clip(self, gradients: Sequence[Tensor]) -> None:
        """Scale the gradients of all groups, in place."""
        if not self._max_norm:
            return
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in gradients]
        squares = torch.stack(norms).square_()
        scale = squares.sum()
        if self._is_sharded:
            with self._collectives.uncounted():
                end = self._side.run(partial(self._collectives.all_reduce, scale))
            self._side.wait(end)
        scale.sqrt_().add_(_EPSILON).reciprocal_().mul_(self._max_norm).clamp_(max=1.0)
        for part in gradients:
            part.mul_(scale)
