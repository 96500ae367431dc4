"""Which attention implementation really ran: the first call of a step, recorded as it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend


def sdpa_backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """Return the kernel family torch chooses for this call: flash, efficient, cudnn or math."""
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return str(SDPBackend(choice).name).removesuffix("_ATTENTION").lower()


@contextmanager
def recorded_sdpa_call() -> Iterator[dict[str, Any]]:
    """Yield a dictionary that the first `scaled_dot_product_attention` call in the block fills.

    backend, query and key shapes, whether a mask tensor was passed, is_causal, enable_gqa.
    """
    call: dict[str, Any] = {}
    original = functional.scaled_dot_product_attention

    def record(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not call:
            arguments = dict(zip(("attn_mask", "dropout_p", "is_causal"), args, strict=False))
            arguments.update(kwargs)
            call.update(
                backend=sdpa_backend(query, key, value, **arguments),
                query_shape=list(query.shape),
                key_shape=list(key.shape),
                has_mask=arguments.get("attn_mask") is not None,
                is_causal=bool(arguments.get("is_causal", False)),
                enable_gqa=bool(arguments.get("enable_gqa", False)),
            )
        return original(query, key, value, *args, **kwargs)

    with patch.object(functional, "scaled_dot_product_attention", record):
        yield call
