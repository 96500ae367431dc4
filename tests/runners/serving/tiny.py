"""Tiny models of real families, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.decode_run import CacheKind
from runners.serving.attention import NAME, register
from runners.serving.caches import Cache, ContiguousCache, PagedCache
from runners.serving.decoder import Decoder
from runners.serving.shapes import cache_shape

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "use_sliding_window": True, "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3 hybrid": ("qwen3", {"head_dim": 8, **HYBRID}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "deepseek_v3": ("deepseek_v3", LATENT),
}


def tiny_model(name: str, attention: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of one of FAMILIES; the same weights whatever its attention is."""
    register()
    family, fields = FAMILIES[name]
    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **(SIZES | fields))
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=dtype
    )
    # Far larger than as trained: logits then differ enough for a choice that rounding cannot change.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model.eval()


def ours(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model on our attention."""
    return tiny_model(name, NAME, dtype)


def generated(model: nn.Module, prompt: Tensor, new_tokens: int) -> Tensor:
    """What transformers decodes greedily after prompt (B, S): (B, new_tokens)."""
    tokens = model.generate(  # type: ignore[operator]
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokens[:, prompt.shape[1] :]


def random_prompts(batch: int, length: int, seed: int = 3) -> Tensor:
    """Tokens (batch, length)."""
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def make_cache(
    model: nn.Module,
    kind: CacheKind,
    rows: int,
    capacity: int,
    dtype: torch.dtype = torch.float32,
    num_pages: int | None = None,
    device: str = "cpu",
) -> Cache:
    """A cache for the model, in pages of 4 tokens where paged."""
    shape, where = cache_shape(model.config), torch.device(device)
    if kind is CacheKind.CONTIGUOUS:
        return ContiguousCache(shape, rows, capacity, dtype, where)
    pages = num_pages or rows * -(-capacity // 4)
    return PagedCache(shape, rows, capacity, dtype, where, page_size=4, num_pages=pages)


def decoded(decoder: Decoder, prompts: Tensor, new_tokens: int, chunk: int | None = None) -> Tensor:
    """Prefill, in chunks if asked, and decode."""
    seq = prompts.shape[1]
    for start in range(0, seq, chunk or seq):
        part = prompts[:, start : start + (chunk or seq)]
        first = decoder.prefill(part, slice(0, len(prompts)), past=start)
    rest = [decoder.decode().clone() for _ in range(new_tokens - 1)]
    return torch.stack([first, *rest], dim=1)
