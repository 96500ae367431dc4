"""Rows of two documents: what the job feeds makes transformers hide one document from the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.jobs.train_step import packed_positions

LENGTH = 9


def test_positions_of_two_documents() -> None:
    starts = torch.tensor([[3], [1], [4]])
    expected = [[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 0, 1, 2]]
    assert packed_positions(starts, 7).tolist() == expected


def _model(family: str, attention: str) -> nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        family,
        vocab_size=31,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        pad_token_id=0,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.double().eval()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_document_is_blind_to_the_other(family: str, attention: str) -> None:
    model = _model(family, attention)
    tokens = torch.randint(1, 31, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    starts = torch.tensor([[4], [7]])

    def logits(ids: Tensor, positions: Tensor | None = None) -> Tensor:
        found: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return found

    with torch.no_grad():
        packed = logits(tokens, packed_positions(starts, LENGTH))
        for row, start in enumerate(starts.flatten().tolist()):
            first, second = tokens[row : row + 1, :start], tokens[row : row + 1, start:]
            alone = torch.cat([logits(first), logits(second)], dim=1)
            assert torch.allclose(packed[row : row + 1], alone, atol=1e-12)
