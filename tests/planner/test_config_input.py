"""A Hugging Face config.json, as people paste, upload or point to it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.config_input import parse_config_text, read_config_file, spec_from_config
from planner.config_keys import default_values, own_names
from planner.errors import PlanError
from planner.families import SUPPORTED_FAMILIES
from planner.model import ModelSpec

# The head of the file that the hub shows for Llama-3.1-8B.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 32,
}


def spec_of(**edits: Any) -> ModelSpec:
    """Return the spec of the Llama configuration with edited keys."""
    return spec_from_config({**LLAMA, **edits}, name="mine")


def refusal(config: Any, overrides: Any = None) -> PlanError:
    """Return the error that a configuration gives."""
    with pytest.raises(PlanError) as caught:
        spec_from_config(config, name="mine", overrides=overrides)
    assert str(caught.value).count("\n") == 0
    return caught.value


def test_a_published_file_gives_the_published_model_silently() -> None:
    spec = spec_of()
    assert spec.parameters == 8_030_261_248
    assert spec.flags == ()
    assert (spec.head_dim, spec.num_kv_heads, spec.max_positions) == (128, 8, 131072)


def test_absent_keys_take_the_class_default() -> None:
    spec = spec_from_config(
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        name="mine",
    )
    # MistralConfig: 8 key-value heads and a window of 4096.
    assert (spec.num_kv_heads, spec.sliding_window) == (8, 4096)
    assert spec.sliding_layers == (True,) * 32
    assert spec.parameters == 7_241_732_096


# Keys that the modules or the class take from a configuration without declaring a field.
READ_BEYOND_THE_CLASS = (("head_dim", None), ("sliding_window_pattern", 6), ("rotary_pct", 0.25))


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_our_table_of_defaults_is_that_of_transformers(family: str) -> None:
    from transformers import AutoConfig

    names = {common: own for own, common in own_names(family).items()}
    real = type(AutoConfig.for_model(family)).__dataclass_fields__
    for key, value in default_values(family).items():
        own = names.get(key, key)
        if own in real:
            assert real[own].default == value, own
        else:
            assert (own, value) in READ_BEYOND_THE_CLASS


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_the_spec_s_configuration_is_what_transformers_reads_back(family: str) -> None:
    from transformers import AutoConfig

    spec = spec_from_config(small_config(family), name="mine")
    built = AutoConfig.for_model(**spec.hf_config)
    assert built.num_hidden_layers == spec.num_layers
    assert built.hidden_size == spec.hidden_size
    assert built.vocab_size == spec.vocab_size
    again = spec_from_config(json.loads(built.to_json_string()), name="mine")
    assert (again.parameters, again.sliding_layers) == (spec.parameters, spec.sliding_layers)


def small_config(family: str) -> dict[str, Any]:
    """Return a small configuration of a family."""
    if family == "gpt2":
        return GPT2
    own = {"num_key_value_heads": 4, "num_experts_per_tok": 2} if "deepseek" in family else {}
    return {**SMALL, "model_type": family, **own}


SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("hidden_size", "4096", "model.config.hidden_size"),
        ("hidden_size", -1, "model.config.hidden_size"),
        ("hidden_size", 0, "model.config.hidden_size"),
        ("hidden_size", 10**30, "model.config.hidden_size"),
        ("hidden_size", 4096.0, "model.config.hidden_size"),
        ("hidden_size", None, "model.config.hidden_size"),
        ("hidden_size", math.nan, "model.config.hidden_size"),
        ("num_hidden_layers", True, "model.config.num_hidden_layers"),
        ("vocab_size", [], "model.config.vocab_size"),
        ("num_attention_heads", 24, "model.config.num_attention_heads"),
        ("num_key_value_heads", 5, "model.config.num_key_value_heads"),
        ("head_dim", 127, "model.config.head_dim"),
        ("tie_word_embeddings", "yes", "model.config.tie_word_embeddings"),
        ("rms_norm_eps", 0, "model.config.rms_norm_eps"),
        ("rope_theta", "1e6", "model.config.rope_theta"),
        ("attention_dropout", 2, "model.config.attention_dropout"),
        ("hidden_act", "relu", "model.config.hidden_act"),
        ("max_position_embeddings", -5, "model.config.max_position_embeddings"),
        ("model_type", "llama4", "model.config.model_type"),
        ("model_type", None, "model.config.model_type"),
        ("model_type", ["llama"], "model.config.model_type"),
        ("quantization_config", {"bits": 4}, "model.config.quantization_config"),
        ("num_local_experts", 8, "model.config.num_local_experts"),
        ("kv_lora_rank", 512, "model.config.kv_lora_rank"),
        ("vision_config", {"a": 1}, "model.config.vision_config"),
        ("is_encoder_decoder", True, "model.config.is_encoder_decoder"),
        ("num_nextn_predict_layers", 1, "model.config.num_nextn_predict_layers"),
    ],
)
def test_one_wrong_key_gives_one_sentence_that_names_it(key: str, value: Any, field: str) -> None:
    error = refusal({**LLAMA, key: value})
    assert error.field == field
    assert field in str(error)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "model_type"])
def test_a_missing_key_is_named(key: str) -> None:
    error = refusal({name: value for name, value in LLAMA.items() if name != key})
    assert f"model.config.{key} is missing" in str(error)


def test_gpt2_s_own_names_are_used_in_errors() -> None:
    assert refusal({**GPT2, "n_embd": "64"}).field == "model.config.n_embd"
    assert "n_head is missing" in str(refusal({k: v for k, v in GPT2.items() if k != "n_head"}))
    assert spec_from_config(GPT2, name="mine").intermediate_size == 256


def test_a_configuration_without_family_lists_the_families() -> None:
    message = str(refusal({"hidden_size": 64}))
    assert all(family in message for family in SUPPORTED_FAMILIES)


def test_an_architecture_without_template_says_how_to_trace_it() -> None:
    message = str(refusal({"model_type": "mamba2"}))
    assert "model_type is 'mamba2'" in message
    assert "run `peakmark trace CONFIG.json`" in message


def test_keys_that_would_only_matter_when_set_may_be_null() -> None:
    spec = spec_of(quantization_config=None, num_local_experts=None, vision_config={})
    assert spec.flags == ()


def test_unknown_keys_dropout_and_remote_code_are_flagged_by_name() -> None:
    flags = spec_of(
        frobnicate=3, attention_dropout=0.1, auto_map={"AutoModel": "x"}, partial_rotary_factor=0.5
    ).flags
    assert len(flags) == 4
    joined = " ".join(flags)
    for name in ("frobnicate", "attention_dropout", "auto_map", "partial_rotary_factor"):
        assert name in joined


def test_the_job_never_gets_dropout_or_special_tokens() -> None:
    config = spec_of(attention_dropout=0.1).hf_config
    assert config["attention_dropout"] == 0.0
    assert config["pad_token_id"] is None
    assert "auto_map" not in config


def test_windows_follow_the_family_s_rule() -> None:
    qwen = {**SMALL, "model_type": "qwen2", "sliding_window": 16, "max_window_layers": 3}
    assert not any(spec_from_config(qwen, name="m").sliding_layers)
    used = spec_from_config({**qwen, "use_sliding_window": True}, name="m")
    assert used.sliding_layers == (False, False, False, True)
    gemma = spec_from_config({**SMALL, "model_type": "gemma2"}, name="m")
    assert gemma.sliding_layers == (True, False, True, False)
    assert refusal({**SMALL, "model_type": "gemma2", "layer_types": ["full_attention"]}).field == (
        "model.config.layer_types"
    )
    mixed = ["full_attention", "chunked_attention"] * 2
    assert refusal({**SMALL, "model_type": "gemma2", "layer_types": mixed}).value == mixed[1]


@pytest.mark.parametrize("family", ["llama", "olmo2", "mistral", "phi3", "mixtral", "gpt2"])
def test_kinds_of_layers_that_a_family_ignores_are_flagged_and_ignored(family: str) -> None:
    small = GPT2 if family == "gpt2" else SMALL
    count = 2 if family == "gpt2" else 4
    kinds = ["sliding_attention", "full_attention"] * (count // 2)
    config = {**small, "model_type": family, "layer_types": kinds, "sliding_window": 16}
    spec = spec_from_config(config, name="m")
    # transformers' Llama, OLMo 2 and GPT-2 have no window; the others have it in every layer.
    windowed = family in ("mistral", "phi3", "mixtral")
    assert spec.sliding_layers == (windowed,) * count
    assert any("layer_types" in flag for flag in spec.flags)


def test_another_head_than_a_language_model_s_is_flagged() -> None:
    assert spec_of().flags == ()
    (flag,) = spec_of(architectures=["LlamaForSequenceClassification"]).flags
    assert "LlamaForSequenceClassification" in flag


def test_every_derived_number_can_be_edited_and_is_checked_again() -> None:
    base = spec_of()
    edited = spec_from_config(LLAMA, name="mine", overrides={"num_key_value_heads": 32})
    assert edited.parameters == base.parameters + 32 * 2 * 4096 * 24 * 128
    error = refusal(LLAMA, {"num_key_value_heads": 7})
    assert error.field == "model.overrides.num_key_value_heads"
    error = refusal(LLAMA, {"model_type": "gpt2"})
    assert error.field == "model.overrides.model_type"
    assert "cannot be edited" in str(error)


def test_a_new_depth_takes_the_family_s_own_pattern() -> None:
    kinds = ["full_attention"] * 4
    config = {**SMALL, "model_type": "gemma2", "layer_types": kinds}
    edited = spec_from_config(config, name="m", overrides={"num_hidden_layers": 3})
    assert edited.sliding_layers == (True, False, True)


def test_a_model_beyond_all_hardware_is_refused() -> None:
    error = refusal(
        {**LLAMA, "hidden_size": 524288, "intermediate_size": 2**22, "num_hidden_layers": 4096}
    )
    assert "parameters: at most" in str(error)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[1, 2]", "3", '"text"', "null", b"\xff\xfe\x00", "{'a': 1}", "1" * 5000],
)
def test_text_that_is_no_json_object_is_one_sentence(text: str | bytes) -> None:
    with pytest.raises(PlanError) as caught:
        parse_config_text(text)
    assert caught.value.field == "model.config"
    assert len(str(caught.value)) < 300


def test_json_nested_too_deeply_is_one_sentence() -> None:
    with pytest.raises(PlanError, match="not JSON that can be read"):
        parse_config_text("[" * 200_000)


def test_ten_megabytes_are_refused_before_they_are_parsed() -> None:
    with pytest.raises(PlanError, match=r"at most 1,000,000 bytes"):
        parse_config_text(" " * 10_000_000)


def test_files_and_folders_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config_file(tmp_path) == read_config_file(tmp_path / "config.json") == LLAMA
    with pytest.raises(PlanError, match=r"cannot be read from .*/none\.json: No such file"):
        read_config_file(tmp_path / "none.json")
    big = tmp_path / "big.json"
    big.write_text(" " * 2_000_000)
    with pytest.raises(PlanError, match="at most"):
        read_config_file(big)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(LLAMA)), JSON, max_size=4), JSON)
def test_any_value_of_any_key_gives_a_model_or_a_plan_error(
    edits: dict[str, Any], overrides: Any
) -> None:
    try:
        spec = spec_from_config({**LLAMA, **edits}, name="mine", overrides=overrides)
    except PlanError as error:
        assert "\n" not in str(error)
    else:
        assert spec.parameters > 0


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_text_gives_an_object_or_a_plan_error(text: str | bytes) -> None:
    try:
        assert isinstance(parse_config_text(text), dict)
    except PlanError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("opt", "word_embed_proj_dim", 32),
        ("opt", "do_layer_norm_before", False),
        ("opt", "enable_bias", False),
        ("falcon", "alibi", True),
        ("falcon", "new_decoder_architecture", True),
        ("falcon", "multi_query", False),
        ("falcon", "num_ln_in_parallel_attn", 2),
        ("gpt_neox", "use_parallel_residual", False),
        ("gpt_neox", "rotary_pct", 0.01),
        ("gpt_neox", "hidden_act", "gelu_fast"),
        ("qwen3_moe", "num_experts_per_tok", 129),
        ("qwen3_moe", "moe_intermediate_size", 0),
        ("qwen3_moe", "mlp_only_layers", "0"),
        ("qwen3_moe", "output_router_logits", True),
        ("gpt_oss", "quantization_config", {"quant_method": "mxfp4"}),
        ("deepseek_v2", "topk_method", "group_limited_greedy"),
        ("deepseek_v2", "num_experts_per_tok", None),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "qk_rope_head_dim", 63),
        ("deepseek_v3", "n_group", 7),
        ("deepseek_v3", "topk_group", 9),
        ("deepseek_v3", "n_shared_experts", 0),
        ("deepseek_v3", "first_k_dense_replace", -1),
        ("deepseek_v3", "rope_interleave", False),
    ],
)
def test_what_a_family_does_not_model_is_one_sentence(family: str, key: str, value: Any) -> None:
    error = refusal({**small_config(family), key: value})
    assert error.field == f"model.config.{key}"
    assert key in str(error)


def test_layers_with_experts_follow_the_family_s_rule() -> None:
    def layers(family: str, **edits: Any) -> tuple[bool, ...]:
        return spec_from_config({**small_config(family), **edits}, name="m").expert_layers

    assert layers("llama") == (False,) * 4
    assert layers("mixtral") == layers("qwen3_moe") == layers("gpt_oss") == (True,) * 4
    assert layers("qwen3_moe", decoder_sparse_step=2) == (False, True, False, True)
    assert layers("qwen3_moe", mlp_only_layers=[0, 3]) == (False, True, True, False)
    assert layers("deepseek_v3") == (False, False, False, True)
    assert layers("deepseek_v2", first_k_dense_replace=1) == (False, True, True, True)


def test_gemma_3_slides_in_five_layers_of_six() -> None:
    config = {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 13}
    spec = spec_from_config(config, name="m")
    assert [i for i, slides in enumerate(spec.sliding_layers) if not slides] == [5, 11]
    third = spec_from_config({**config, "sliding_window_pattern": 3}, name="m")
    assert [i for i, slides in enumerate(third.sliding_layers) if not slides] == [2, 5, 8, 11]


def test_the_language_model_inside_gemma_3_is_planned_and_flagged() -> None:
    # The hub's file of gemma-3-4b-it holds only what differs from the class defaults.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    spec = spec_from_config(config, name="m")
    assert (spec.family, spec.parameters) == ("gemma3_text", 3_880_263_168)
    assert any("vision tower" in flag for flag in spec.flags)
    assert refusal({"model_type": "gemma3"}).field == "model.config.text_config"


def test_the_share_of_a_head_that_gpt_neox_rotates_is_read_in_both_forms() -> None:
    config = {**SMALL, "model_type": "gpt_neox"}
    assert spec_from_config(config, name="m").rotary_dim == 4
    assert spec_from_config({**config, "rotary_pct": 0.5}, name="m").rotary_dim == 8
    nested = {**config, "rope_parameters": {"partial_rotary_factor": 1.0}}
    assert spec_from_config(nested, name="m").rotary_dim == 16


def test_prediction_layers_that_transformers_does_not_build_are_flagged() -> None:
    config = {**small_config("deepseek_v3"), "num_nextn_predict_layers": 1}
    (flag,) = spec_from_config(config, name="m").flags
    assert "num_nextn_predict_layers" in flag


def test_a_new_width_of_opt_keeps_its_embedding_as_wide() -> None:
    config = {**SMALL, "model_type": "opt", "word_embed_proj_dim": 64}
    spec = spec_from_config(config, name="m", overrides={"hidden_size": 128})
    assert spec.hf_config["word_embed_proj_dim"] is None
