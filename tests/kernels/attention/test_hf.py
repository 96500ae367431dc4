"""Real transformers models on the Triton attention, against their own eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_bidirectional_mask_function,
)

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
TINY = SMALL | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 2}
LATENT |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
LATENT |= {"first_k_dense_replace": 1, "num_hidden_layers": 1}
GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0}


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    hf.register()


def build(model_type: str, attention: str = hf.NAME, **fields: Any) -> PreTrainedModel:
    """Return a small model with seeded random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **fields)
    # transformers' grouped products of experts know no float64.
    plain = {"attn_implementation": attention, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **plain)
    return model.to(DEVICE).eval()


def tokens(seq: int = 70) -> Tensor:
    return torch.randint(0, 64, (1, seq), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def logits_and_gradients(
    model: PreTrainedModel, run: Any = None, **options: Any
) -> dict[str, Tensor]:
    ids = tokens()
    result = (model if run is None else run)(input_ids=ids, labels=ids, **options)
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
        ("mistral", TINY | {"sliding_window": 20}),
        # A softcap of 0.5 bends the small logits of random weights; layers take turns in the window.
        ("gemma2", TINY | {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 0.5}),
        ("gpt_oss", TINY | MOE | {"sliding_window": 9}),
        ("deepseek_v3", TINY | LATENT),
    ],
    ids=["llama", "gpt2", "qwen3", "whole window", "mistral", "gemma2", "gpt_oss", "deepseek_v3"],
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


PACKED = {"position_ids": torch.cat([torch.arange(30), torch.arange(40)])[None]}
WINDOWED = TINY | {"sliding_window": 20}


@pytest.mark.parametrize(
    ("model_type", "fields", "options", "in_one_graph"),
    [
        ("llama", TINY, {}, True),
        ("llama", TINY, {"use_cache": False}, False),
        ("mistral", WINDOWED, {"use_cache": False} | PACKED, False),
        ("mistral", WINDOWED, {"attention_mask": torch.ones(1, 70)}, False),
    ],
    ids=["one graph", "training", "packed rows in a window", "a mask that hides nothing"],
)
def test_compiled_models_equal_those_that_are_not(
    model_type: str, fields: dict[str, Any], options: dict[str, Any], in_one_graph: bool
) -> None:
    options = {n: v.to(DEVICE) if isinstance(v, Tensor) else v for n, v in options.items()}
    expected = logits_and_gradients(build(model_type, **fields), **options)
    model = build(model_type, **fields)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=in_one_graph)
    found = logits_and_gradients(model, compiled, **options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_padding_is_refused_when_compiled_too() -> None:
    torch.compiler.reset()
    compiled = torch.compile(build("llama", **TINY), backend="aot_eager")
    padded = torch.ones(1, 70, device=DEVICE)
    padded[0, 0] = 0
    with pytest.raises(ValueError, match="cannot do padding in attention_mask"):
        compiled(input_ids=tokens(), attention_mask=padded, use_cache=False)


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


@pytest.mark.parametrize(
    ("model_type", "fields"), [("llama", TINY), ("mistral", TINY | {"sliding_window": 9})]
)
def test_packed_rows_equal_eager_by_positions_and_by_lengths(
    model_type: str, fields: dict[str, Any]
) -> None:
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None].to(DEVICE)
    ends = torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE)
    packed = {"position_ids": positions, "use_cache": False}
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    with torch.no_grad():
        expected = build(model_type, "eager", **fields)(tokens(), **packed).logits
        ours = build(model_type, **fields)
        torch.testing.assert_close(ours(tokens(), **packed).logits, expected)
        by_lengths = ours(tokens(), **packed, **lengths).logits
        torch.testing.assert_close(by_lengths, expected)


def test_a_windowed_model_decodes_as_eager_past_its_window() -> None:
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    fields = TINY | {"sliding_window": 6}
    ours = build("mistral", **fields).generate(tokens(9), **options)
    assert torch.equal(ours, build("mistral", "eager", **fields).generate(tokens(9), **options))


def test_a_window_and_a_softcap_keep_no_tensor_more_than_causal_attention() -> None:
    def kept(model_type: str, **fields: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
        model = build(model_type, **TINY, **fields)
        found: list[tuple[tuple[int, ...], torch.dtype]] = []
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            ids = mode.from_tensor(tokens())
            hooks = saved_tensors_hooks(
                lambda t: found.append((tuple(t.shape), t.dtype)) or t, lambda t: t
            )
            with hooks:
                model(input_ids=ids, use_cache=False)
        return found

    assert kept("mistral", sliding_window=9) == kept("mistral", sliding_window=None)
    capped = {"head_dim": 16, "final_logit_softcapping": None}
    plain = {**capped, "sliding_window": 70, "attn_logit_softcapping": None}
    assert kept("gemma2", **capped, sliding_window=9) == kept("gemma2", **plain)


def test_chunked_attention_is_refused() -> None:
    chunked = chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="a chunked, blockwise or custom mask"):
        hf.attention_mask(1, 20, 20, mask_function=chunked, local_size=8)


def test_a_symmetric_window_of_transformers_is_refused() -> None:
    both_ways = sliding_window_bidirectional_mask_function(8)
    with pytest.raises(ValueError, match="a chunked, blockwise or custom mask"):
        hf.attention_mask(1, 20, 20, mask_function=both_ways, local_size=8)


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="a cache with unfilled positions"):
        build("llama", **SMALL).generate(
            tokens(), max_new_tokens=2, cache_implementation="static", disable_compile=True
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"attention dropout 0\.1"),
        ({"sliding_window": 7, "is_causal": False}, "a sliding window of 7 without a causal mask"),
        ({"position_bias": torch.zeros(2)}, "the argument position_bias"),
        ({"s_aux": torch.zeros(2)}, "sinks has shape"),
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
