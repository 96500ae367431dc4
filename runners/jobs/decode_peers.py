"""transformers' own greedy generation of the same model on the same prompts: sdpa, static cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.decode_run import Peer
from runners.jobs.attention_calls import recorded_sdpa_call
from runners.measure import Clock

_REPETITIONS = 2


def measure_peer(peer: Peer, model: nn.Module, prompts: Tensor, tokens: Tensor) -> dict[str, Any]:
    """Return times and memory of `generate`, and how far its tokens agree with ours (B, new).

    The time per token is that of a whole generation less one of a single token, over the rest: what
    `generate` does between two forwards is part of it, as it is for who calls it.
    """
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    try:
        return _measure(peer, model, prompts, tokens)
    finally:
        model.set_attn_implementation(attention)  # type: ignore[operator]


def _measure(peer: Peer, model: nn.Module, prompts: Tensor, tokens: Tensor) -> dict[str, Any]:
    device, new_tokens = prompts.device, tokens.shape[1]
    is_cuda = device.type == "cuda"
    with recorded_sdpa_call() as call:
        # As long as the measured ones: a static cache of another size would be compiled for anew.
        _generate(peer, model, prompts, new_tokens)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    whole, one = [], []
    for _ in range(_REPETITIONS):
        time_s, found = _timed(peer, model, prompts, new_tokens)
        whole.append(time_s)
        one.append(_timed(peer, model, prompts, 1)[0])
    equal = (found == tokens).float()
    return {
        "prefill_time_s": min(one),
        "decode_time_s": (min(whole) - min(one)) / (new_tokens - 1),
        "tokens_per_s": len(prompts) * (new_tokens - 1) / (min(whole) - min(one)),
        "sdpa_call": call or None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
        "first_tokens_equal": float(equal[:, 0].mean()),
        "tokens_equal": float(equal.mean()),
    }


def _timed(peer: Peer, model: nn.Module, prompts: Tensor, new_tokens: int) -> tuple[float, Tensor]:
    clock = Clock(prompts.device)
    start = clock.now()
    found = _generate(peer, model, prompts, new_tokens)
    return clock.seconds(start, clock.now()), found


@torch.inference_mode()
def _generate(peer: Peer, model: Any, prompts: Tensor, new_tokens: int) -> Tensor:
    tokens: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        disable_compile=peer is Peer.STATIC,
    )
    return tokens[:, prompts.shape[1] :]
