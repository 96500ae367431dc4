"""Which layers the job recomputes in the backward."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runners.jobs.train_step import checkpoint_layers


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3])])
def test_every_k_th_layer_runs_its_forward_twice(every: int, recomputed: list[int]) -> None:
    config = AutoConfig.for_model(
        "llama",
        vocab_size=31,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=4,
        num_attention_heads=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    checkpoint_layers(model, every)
    calls: Counter[int] = Counter()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    tokens = torch.randint(1, 31, (1, 5))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    assert sorted(layer for layer, count in calls.items() if count == 2) == recomputed
