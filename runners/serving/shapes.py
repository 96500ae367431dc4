"""What a model keeps of each token: layers, heads and windows, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from planner.decode_run import CacheDtype
from planner.errors import PlanError

ONE_BYTE = {CacheDtype.FP8: torch.float8_e4m3fn, CacheDtype.INT8: torch.int8}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Per layer its window (None sees all); heads and head size are those of all layers."""

    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


def cache_shape(config: Any) -> CacheShape:
    """Return the cache of a Hugging Face configuration.

    Latent attention (`kv_lora_rank`) is kept as the keys and values that the model expands, one of
    each per query head. Raises PlanError for logits or layers that the decode kernel has no form for.
    """
    for name, what in _REFUSED.items():
        if getattr(config, name, None):
            sentence = (
                f"model is of the family {config.model_type}, which has {what}: the decode kernel "
                "has no form for it; choose a family without."
            )
            raise PlanError(
                "model", config.model_type, "a family without " + what, sentence=sentence
            )
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return CacheShape(kv_heads=heads, head_dim=head_dim, windows=_windows(config))


_REFUSED = {
    "attn_logit_softcapping": "a softcap on its attention logits",
    "attention_chunk_size": "chunked attention",
    "is_encoder_decoder": "an encoder",
}


def _windows(config: Any) -> tuple[int | None, ...]:
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ()
    if not kinds or window is None:
        return (window,) * int(config.num_hidden_layers)
    known: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if not set(kinds) <= set(known):
        odd = ", ".join(sorted(set(kinds) - set(known)))
        sentence = f"model has layers of the kind {odd}: allowed are {', '.join(known)}."
        raise PlanError("model", odd, ", ".join(known), sentence=sentence)
    return tuple(known[kind] for kind in kinds)
