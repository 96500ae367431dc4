"""Real transformers models on the Triton attention, against their own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kernels.attention import hf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    hf.register()


def build(model_type: str, attention: str = hf.NAME, **fields: Any) -> PreTrainedModel:
    """Return a small model with seeded random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(DEVICE).eval()


def tokens(seq: int = 70) -> Tensor:
    return torch.randint(0, 64, (1, seq), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def logits_and_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    ids = tokens()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    gradients = {name: p.grad.double() for name, p in model.named_parameters()}
    return {"logits": result.logits.detach().double(), **gradients}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", SMALL),
        ("gpt2", GPT2),
        ("qwen3", SMALL | {"head_dim": 80}),
        ("mistral", SMALL | {"sliding_window": 70}),
    ],
)
def test_logits_and_gradients_equal_the_eager_models(
    model_type: str, fields: dict[str, Any]
) -> None:
    ours = logits_and_gradients(build(model_type, **fields))
    plain = logits_and_gradients(build(model_type, "eager", **fields))
    exact = logits_and_gradients(build(model_type, "eager", **fields).double())
    for name, expected in exact.items():
        limit = 2 * (plain[name] - expected).abs().max() + 1e-6 * expected.abs().max()
        assert (ours[name] - expected).abs().max() <= limit, name


def test_greedy_decoding_with_a_cache_equals_eager() -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": tokens(5), "attention_mask": torch.ones(1, 5, device=DEVICE)}
    ours = build("llama", **SMALL).generate(**prompt, **options)
    assert torch.equal(ours, build("llama", "eager", **SMALL).generate(**prompt, **options))


def test_a_mask_that_hides_nothing_is_accepted() -> None:
    model, ids = build("llama", **SMALL), tokens()
    with torch.no_grad():
        masked = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(masked, model(input_ids=ids).logits)


def test_a_left_padded_batch_is_refused() -> None:
    mask = torch.ones(1, 70, dtype=torch.long, device=DEVICE)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="cannot do padding in attention_mask"):
        build("llama", **SMALL)(input_ids=tokens(), attention_mask=mask)


def test_a_ready_made_mask_is_refused() -> None:
    mask = torch.zeros(1, 1, 70, 70, device=DEVICE)
    with pytest.raises(ValueError, match="a materialised attention mask"):
        build("llama", **SMALL)(input_ids=tokens(), attention_mask=mask)


def test_packed_sequences_are_refused() -> None:
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None].to(DEVICE)
    with pytest.raises(ValueError, match="a packed, windowed or custom mask"):
        build("llama", **SMALL)(input_ids=tokens(), position_ids=positions, use_cache=False)


def test_a_window_shorter_than_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="a packed, windowed or custom mask"):
        build("mistral", **SMALL, sliding_window=69)(input_ids=tokens())


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="a cache with unfilled positions"):
        build("llama", **SMALL).generate(
            tokens(), max_new_tokens=2, cache_implementation="static", disable_compile=True
        )


def test_gemma2_with_its_softcap_is_refused() -> None:
    model = build("gemma2", **SMALL, head_dim=16, sliding_window=128)
    with pytest.raises(ValueError, match="the argument softcap"):
        model(input_ids=tokens())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"attention dropout 0\.1"),
        ({"sliding_window": 7}, "a sliding window of 7"),
        ({"softcap": 50.0}, "the argument softcap"),
        ({"s_aux": torch.zeros(2)}, "the argument s_aux"),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, "the argument cu_seq_lens_q"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    q, k = torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)
    with pytest.raises(ValueError, match=message):
        hf.attention_forward(nn.Module(), q, k, k, None, **options)


def test_a_full_attention_module_is_not_masked() -> None:
    module = nn.Module()
    module.is_causal = False
    q, k, v = (torch.randn(1, 1, 2, 16, device=DEVICE) for _ in "qkv")
    full, _ = hf.attention_forward(module, q, k, v, None)
    assert torch.equal(full, hf.attention_forward(nn.Module(), q, k, v, None, is_causal=False)[0])
    causal, _ = hf.attention_forward(nn.Module(), q, k, v, None)
    torch.testing.assert_close(causal[0, 0, 0], v[0, 0, 0])
    assert not torch.equal(full[0, 0], causal[0, 0])


def test_a_model_can_be_traced_with_fake_tensors() -> None:
    model = build("llama", **SMALL).to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        ids = mode.from_tensor(tokens())
        result = model(input_ids=ids, labels=ids, use_cache=False)
        result.loss.backward()
    assert result.logits.shape == (1, 70, 64)
