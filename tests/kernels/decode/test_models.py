"""Models of transformers decode on the kernels, token for token as transformers does."""

from __future__ import annotations

import pytest
import torch

from planner.decode_run import AttentionBackend, CacheKind
from runners.serving.decoder import Decoder
from runners.serving.fused import fused_operations
from tests.runners.serving.tiny import (
    decoded,
    generated,
    make_cache,
    ours,
    random_prompts,
    tiny_model,
)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", CacheKind.PAGED), ("mistral", CacheKind.CONTIGUOUS)]
)
def test_our_kernels_decode_the_same(name: str, kind: CacheKind, device: str) -> None:
    """On a GPU the steps after the first are replays of one graph."""
    prompts = random_prompts(1, 11)
    expected = generated(tiny_model(name, "eager"), prompts, 4)
    model = ours(name).to(device)
    decoder = Decoder(
        model, make_cache(model, kind, 1, 16, device=device), AttentionBackend.PEAKMARK
    )
    with fused_operations(model) as fused:
        found = decoded(decoder, prompts.to(device), 4)
    assert torch.equal(found.cpu(), expected)
    # Of 3 layers two norms each and the last one's.
    assert fused == {"rms_norm": 7, "gated_mlp": 3, "joined_qkv": 3, "rope": 1}
