"""Run a model with attention changed, and say how far its logits move from those of exact attention.

Changes of the algorithm are plain torch under the model's own weights; those of the system go through
the real caches and kernels, in pieces, so that keys and values are read from where they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, scaled_dot_product_attention
from transformers import AttentionInterface

from kernels.linear_attention.reference import reference_linear_attention
from planner.decode_run import AttentionBackend, CacheDtype
from planner.errors import PlanError
from planner.quality_run import CHUNK_TOKENS, Change
from runners.serving import attention as serving_attention
from runners.serving.attention import Step
from runners.serving.caches import Cache, ContiguousCache, PagedCache
from runners.serving.shapes import ONE_BYTE, cache_shape

NAME = "peakmark_quality"
PAGE_SIZE = 16
# Positions whose distributions are compared at once, in float64.
_POSITIONS = 64
_STORED = {
    Change.FP8_CACHE: ONE_BYTE[CacheDtype.FP8],
    Change.INT8_CACHE: ONE_BYTE[CacheDtype.INT8],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A change of attention with its settings; `change` None is exact attention."""

    change: Change | None
    window: int
    block: int
    block_stride: int
    kv_heads: int


def register() -> None:
    """Make `attn_implementation="peakmark_quality"` known to transformers; no mask is made for it."""
    AttentionInterface.register(NAME, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    serving: Step | None = None,
    quality: Probe | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return (out (B, S, Hq, V), None): over a cache with `serving`, else as `quality` says."""
    if serving is not None:
        return serving_attention.attention_forward(
            module, query, key, value, attention_mask, 0.0, scaling, sliding_window, serving
        )
    if quality is None or sliding_window is not None:
        raise PlanError("quality.model", None, "a family whose layers attend to everything")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return attend(query, key, value, quality, scale).transpose(1, 2), None


def attend(query: Tensor, key: Tensor, value: Tensor, probe: Probe, scale: float) -> Tensor:
    """Return causal attention (B, Hq, S, V) of query (B, Hq, S, D), changed as `probe` says."""
    if probe.change is Change.LINEAR:
        return reference_linear_attention(query, key, value, dtype=torch.float32).to(query.dtype)
    if probe.change is Change.FEWER_KV_HEADS:
        key, value = (_pooled(tensor, probe.kv_heads) for tensor in (key, value))
    seen = visible(query.shape[2], probe, query.device)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
    )


def visible(length: int, probe: Probe, device: torch.device) -> Tensor | None:
    """Return which keys each query sees (S, S); None for all up to its own."""
    if probe.change not in (Change.WINDOW, Change.BLOCK_SPARSE):
        return None
    index = torch.arange(length, device=device)
    own, other = index[:, None], index[None, :]
    if probe.change is Change.WINDOW:
        return (other <= own) & (own - other < probe.window)
    apart = own // probe.block - other // probe.block
    return (other <= own) & (apart % probe.block_stride == 0)


def _pooled(heads: Tensor, left: int) -> Tensor:
    """Return the means of neighbouring heads (B, Hkv, S, D), `left` of them; GQA, arXiv 2305.13245."""
    number = heads.shape[1]
    if number % left or left >= number:
        allowed = f"a part of the model's {number} key/value heads"
        raise PlanError("quality.kv_heads", left, allowed)
    pooled: Tensor = heads.unflatten(1, (left, number // left)).mean(2)
    return pooled


class Prober:
    """Gives the logits of one model with each change."""

    def __init__(self, model: nn.Module, probe: Probe) -> None:
        self._model, self._probe = model, probe
        config: Any = model.config
        config._attn_implementation = NAME
        self._shape = cache_shape(config)
        self._dtype = next(model.parameters()).dtype

    @torch.inference_mode()
    def logits(self, tokens: Tensor, change: Change | None) -> Tensor:
        """Return logits (B, S, vocabulary) of tokens (B, S) with a change of the algorithm, or exact."""
        probe = with_change(self._probe, change)
        output = self._model(input_ids=tokens, use_cache=False, quality=probe)
        logits: Tensor = output.logits
        return logits

    @torch.inference_mode()
    def cached_logits(self, tokens: Tensor, change: Change | None) -> Tensor:
        """Return logits (B, S, vocabulary), piece by piece over the cache of a change of the system."""
        rows, length = tokens.shape
        cache = self._cache(rows, length, change, tokens.device)
        kernels = change is Change.KERNEL
        backend = AttentionBackend.PEAKMARK if kernels else AttentionBackend.TORCH
        found = []
        for past in range(0, length, CHUNK_TOKENS):
            piece = tokens[:, past : past + CHUNK_TOKENS]
            size = piece.shape[1]
            for row in range(rows):
                cache.grow(row, size)
            cache.publish()
            cache.lengths += size
            positions = torch.arange(past, past + size, device=tokens.device).expand(rows, size)
            step = Step(cache, backend, slice(0, rows), cache.lengths, past)
            output = self._model(
                input_ids=piece, position_ids=positions, use_cache=False, serving=step
            )
            found.append(output.logits)
        return torch.cat(found, dim=1)

    def _cache(self, rows: int, length: int, change: Change | None, device: torch.device) -> Cache:
        dtype = self._dtype if change is None else _STORED.get(change, self._dtype)
        if change is Change.PAGED:
            pages = rows * -(-length // PAGE_SIZE)
            sizes = {"page_size": PAGE_SIZE, "num_pages": pages}
            return PagedCache(self._shape, rows, length, dtype, device, **sizes)
        return ContiguousCache(self._shape, rows, length, dtype, device)


def with_change(probe: Probe, change: Change | None) -> Probe:
    """Return the settings of `probe` with another change."""
    return replace(probe, change=change)


def divergence(exact: Tensor, other: Tensor, targets: Tensor) -> dict[str, float]:
    """Compare logits (N, vocabulary) with exact ones, and with the tokens (N,) that followed.

    KL is of the exact distribution from the other, in nats; perplexity is the other's.
    """
    divergences, largest, same, losses = [], 0.0, 0, []
    for start in range(0, len(exact), _POSITIONS):
        part = slice(start, start + _POSITIONS)
        ours, theirs = exact[part].double(), other[part].double()
        sure, found = log_softmax(ours, -1), log_softmax(theirs, -1)
        divergences.append((sure.exp() * (sure - found)).sum(-1))
        largest = max(largest, float((ours - theirs).abs().max()))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        losses.append(cross_entropy(theirs, targets[part], reduction="none"))
    every = torch.cat(divergences)
    return {
        "kl_mean": max(0.0, float(every.mean())),
        "kl_max": max(0.0, float(every.max())),
        "max_abs": largest,
        "same_choice": same / len(exact),
        "perplexity": math.exp(min(float(torch.cat(losses).mean()), 700.0)),
    }


def rounding_floor(exact: Tensor, again: Tensor) -> float:
    """Return what two exact ways of one model differ by at most, and at least a last digit."""
    digit = torch.finfo(exact.dtype).eps * float(exact.abs().max())
    return max(float((exact - again).abs().max()), digit)


def settings_of(probe: Probe) -> Mapping[str, int]:
    """Return a probe's settings as the result names them."""
    return {
        "window": probe.window,
        "block": probe.block,
        "block_stride": probe.block_stride,
        "kv_heads": probe.kv_heads,
    }
