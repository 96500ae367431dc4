"""Which keys of a Hugging Face configuration are read, ignored, flagged or refused, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from planner.errors import PlanError, describe_key, describe_value

REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
SIZE_LIMITS = {
    "vocab_size": 2**24,
    "hidden_size": 1_000_000,
    "intermediate_size": 2**22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1_000_000_000,
    "sliding_window": 1_000_000_000,
    "sliding_window_pattern": 4096,
    "num_local_experts": 1024,
    "num_experts_per_tok": 1024,
    "moe_intermediate_size": 2**22,
    "decoder_sparse_step": 4096,
    "n_shared_experts": 1024,
    "n_group": 1024,
    "topk_group": 1024,
    "q_lora_rank": 1_000_000,
    "kv_lora_rank": 1_000_000,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "word_embed_proj_dim": 1_000_000,
    "num_ln_in_parallel_attn": 2,
}
BOOLEAN_KEYS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "norm_topk_prob",
)
POSITIVE_NUMBER_KEYS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "query_pre_attn_scalar",
)
DROPOUT_KEYS = (
    "attention_dropout",
    "hidden_dropout",
    "dropout",
    "layerdrop",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
)


@cache
def _table(name: str) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(
        files("planner").joinpath(f"data/{name}.json").read_text()
    )
    return table


def default_values(family: str) -> dict[str, Any]:
    """Return the class defaults of transformers for the keys modelled in `family`."""
    return dict(_table("config_defaults")[family]["defaults"])


def own_defaults(family: str) -> dict[str, Any]:
    """Return the class defaults of the required keys, for configurations stored without them."""
    return dict(_table("config_defaults")[family].get("required_defaults", {}))


def own_names(family: str) -> dict[str, str]:
    """Return the names that only this family uses (n_embd) with the common ones (hidden_size)."""
    return dict(_table("config_defaults")[family].get("own_names", {}))


def with_common_names(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the family's own names replaced by the common ones."""
    names = own_names(family)
    return {names.get(key, key): value for key, value in values.items()}


def with_own_names(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with the common names replaced by the family's own ones."""
    names = {common: own for own, common in own_names(family).items()}
    return {names.get(key, key): value for key, value in values.items()}


def modelled_keys(family: str) -> frozenset[str]:
    """Return the keys (common names) whose value is read for `family`."""
    return frozenset({*default_values(family), *REQUIRED_KEYS})


def refuse_unmodelled_keys(family: str, values: Mapping[str, Any]) -> None:
    """Raise PlanError for the first key that says the model has something we do not model."""
    sizes = modelled_keys(family) & set(SIZE_LIMITS)
    for key, what in _table("config_keys")["refused"]["keys"].items():
        if key not in sizes | _UNBUILT_LAYERS.get(family, set()) and values.get(key):
            field = f"model.config.{key}"
            sentence = (
                f"{field} is {describe_value(values[key])}: Peakmark does not model {what} "
                f"in a {family} model."
            )
            raise PlanError(field, values[key], "absent, null or false", sentence=sentence)
    for key, (modelled, what) in _fixed_keys(family).items():
        if values.get(key, modelled) != modelled:
            field = f"model.config.{key}"
            sentence = (
                f"{field} is {describe_value(values[key])}: Peakmark models a {family} model with "
                f"{describe_value(modelled)} only, not {what}."
            )
            raise PlanError(field, values[key], describe_value(modelled), sentence=sentence)


# Layers that the published weights have and transformers does not build.
_UNBUILT_LAYERS = {"deepseek_v3": {"num_nextn_predict_layers"}}


def _fixed_keys(family: str) -> dict[str, tuple[Any, str]]:
    """Return the keys of `family` of which one value is modelled: that value, what others mean."""
    families: dict[str, dict[str, tuple[Any, str]]] = _table("config_keys")["fixed"]["families"]
    return families.get(family, {})


def flag_unknown_keys(family: str, values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for every key that is neither modelled nor known to be harmless."""
    table = _table("config_keys")
    named = {
        *modelled_keys(family),
        *table["ignored"]["keys"],
        *table["refused"]["keys"],
        *_fixed_keys(family),
    }
    unknown = sorted(set(values) - named)
    flags = [f"{describe_key(key)} is not read for a {family} model." for key in unknown]
    partial = values.get("partial_rotary_factor", nested_rotary_factor(values))
    if partial not in (None, 1, 1.0) and "rotary_pct" not in modelled_keys(family):
        flags.append("partial_rotary_factor is planned and run as 1: all of a head is rotated.")
    for key in _UNBUILT_LAYERS.get(family, ()):
        if values.get(key):
            flags.append(f"{key}: planned and run without, as transformers builds none.")
    classes = values.get("architectures")
    if isinstance(classes, list) and classes and not any(map(_is_language_model, classes)):
        name = describe_key(str(classes[0]))
        flags.append(f"architectures names {name}: planned and run as a causal language model.")
    if values.get("auto_map"):
        flags.append("auto_map names code in the repository: it is never downloaded or run.")
    return flags


def nested_rotary_factor(values: Mapping[str, Any]) -> Any:
    """Return the share of a head that rope_parameters (or rope_scaling) says is rotated, or None."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    return rope.get("partial_rotary_factor") if isinstance(rope, dict) else None


def _is_language_model(class_name: object) -> bool:
    return str(class_name).endswith(("ForCausalLM", "LMHeadModel"))
