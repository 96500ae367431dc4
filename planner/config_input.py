"""Reading a Hugging Face config.json: from text to a checked ModelSpec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.checks import (
    canonical_json,
    check_boolean,
    check_integer,
    check_mapping,
    check_number,
    check_text,
)
from planner.config_keys import (
    BOOLEAN_KEYS,
    DROPOUT_KEYS,
    POSITIVE_NUMBER_KEYS,
    SIZE_LIMITS,
    default_values,
    flag_unknown_keys,
    modelled_keys,
    nested_rotary_factor,
    own_defaults,
    own_names,
    refuse_unmodelled_keys,
    with_common_names,
    with_own_names,
)
from planner.errors import PlanError, describe_key
from planner.families import SUPPORTED_FAMILIES, count_parameters
from planner.model import LatentAttention, ModelSpec
from planner.traced import spec_from_config_of_other, spec_of_refused

MAX_CONFIG_BYTES = 1_000_000
MAX_PARAMETERS = 2**46

_ACTIVATIONS = {
    "gemma2": ("hidden_activation", "gelu_pytorch_tanh"),
    "gemma3_text": ("hidden_activation", "gelu_pytorch_tanh"),
    "gpt2": ("activation_function", "gelu_new"),
    "gpt_neox": ("hidden_act", "gelu"),
    "opt": ("activation_function", "relu"),
    "falcon": ("activation", "gelu"),
}
_LAYER_KINDS = ("full_attention", "sliding_attention")
# A quantity that transformers divides by the number of heads whatever head_dim says.
_HIDDEN_DIVIDES_BY_HEADS = ("llama", "gemma2", "gemma3_text")
_LEARNED_POSITIONS = ("gpt2", "opt")
_LATENT = ("deepseek_v2", "deepseek_v3")
# Families whose products have biases that no key of the configuration takes away.
_BIASED = ("gpt2", "opt", "gpt_neox")


def parse_config_text(text: str | bytes) -> dict[str, Any]:
    """Parse the text of a config.json; raises PlanError when it is too large or not an object."""
    size_bytes = len(text) if isinstance(text, bytes) else len(text.encode(errors="replace"))
    if size_bytes > MAX_CONFIG_BYTES:
        sentence = (
            f"model.config is longer than a config.json may be: at most {MAX_CONFIG_BYTES:,} bytes."
        )
        raise PlanError("model.config", size_bytes, "at most 1 MB", sentence=sentence)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if isinstance(error, ValueError) else "too deep"
        sentence = f"model.config is not JSON that can be read ({reason[:120]})."
        raise PlanError("model.config", None, "a JSON object", sentence=sentence) from None
    if not isinstance(value, dict):
        raise PlanError("model.config", value, "a JSON object")
    return value


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config.json (or the one in a model folder); raises PlanError with the reason."""
    target = path / "config.json" if path.is_dir() else path
    try:
        with target.open("rb") as file:
            return parse_config_text(file.read(MAX_CONFIG_BYTES + 1))
    except OSError as error:
        sentence = f"model.config cannot be read from {target}: {error.strerror or error}."
        raise PlanError("model.config", str(target), "a file", sentence=sentence) from None


class _Fields:
    """The keys of one configuration, checked as they are read; errors name the dotted field."""

    def __init__(
        self, family: str, config: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> None:
        self.family = family
        self.values = {**default_values(family), **config, **overrides}
        self.edited = frozenset(overrides)
        self._own_names = {common: own for own, common in own_names(family).items()}

    def field(self, key: str) -> str:
        """Return the dotted name that a person would look for."""
        root = "overrides" if key in self.edited else "config"
        return f"model.{root}.{self._own_names.get(key, key)}"

    def size(self, key: str) -> int:
        """Return a positive integer within the limit for `key`."""
        if key not in self.values:
            sentence = f"{self.field(key)} is missing: a {self.family} configuration needs it."
            raise PlanError(self.field(key), None, "present", sentence=sentence)
        return check_integer(self.field(key), self.values[key], 1, SIZE_LIMITS[key])

    def optional_size(self, key: str) -> int | None:
        """Return a positive integer, or None where the key is null or absent."""
        return None if self.values.get(key) is None else self.size(key)

    def flag(self, key: str) -> bool:
        """Return a boolean, false where absent."""
        return check_boolean(self.field(key), self.values.get(key, False))

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None where the key is null or absent."""
        value = self.values.get(key)
        return None if value is None else check_number(self.field(key), value, 1e-30, 1e30)


def _sliding_layers(fields: _Fields, num_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers use it, by the rule of the family's configuration."""
    if "sliding_window" not in modelled_keys(fields.family):
        return None, (False,) * num_layers
    window = fields.optional_size("sliding_window")
    if fields.family in ("qwen2", "qwen3", "qwen3_moe") and not fields.flag("use_sliding_window"):
        window = None
    kinds = fields.values.get("layer_types")
    if kinds is not None and "layer_types" in modelled_keys(fields.family):
        layers = _read_layer_types(fields, kinds, num_layers)
    elif fields.family in ("gemma2", "gpt_oss"):
        layers = tuple(i % 2 == 0 for i in range(num_layers))
    elif fields.family == "gemma3_text":
        pattern = fields.size("sliding_window_pattern")
        layers = tuple((i + 1) % pattern != 0 for i in range(num_layers))
    elif fields.family in ("qwen2", "qwen3"):
        name = fields.field("max_window_layers")
        first = check_integer(name, fields.values["max_window_layers"], 0, 4096)
        layers = tuple(window is not None and i >= first for i in range(num_layers))
    else:
        layers = (window is not None,) * num_layers
    if any(layers) and window is None:
        name = fields.field("sliding_window")
        raise PlanError(name, None, "a positive integer, as some layers are sliding_attention")
    return (window, layers) if any(layers) else (None, layers)


def _read_layer_types(fields: _Fields, kinds: object, num_layers: int) -> tuple[bool, ...]:
    name = fields.field("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise PlanError(name, kinds, f"a list of {num_layers} names, one per layer")
    for kind in kinds:
        if kind not in _LAYER_KINDS:
            raise PlanError(name, kind, "made of " + " and ".join(_LAYER_KINDS))
    return tuple(kind == "sliding_attention" for kind in kinds)


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int) -> int:
    """Return head_dim as given, else hidden_size / num_attention_heads."""
    given = fields.optional_size("head_dim") if _has(fields, "head_dim") else None
    must_divide = given is None or fields.family in _HIDDEN_DIVIDES_BY_HEADS
    if must_divide and hidden_size % num_heads:
        allowed = f"a divisor of hidden_size ({hidden_size})"
        raise PlanError(fields.field("num_attention_heads"), num_heads, allowed)
    head_dim = given or hidden_size // num_heads
    if fields.family not in _LEARNED_POSITIONS and head_dim % 2:
        raise PlanError(fields.field("head_dim"), head_dim, "even, as rotary positions need pairs")
    return head_dim


def _has(fields: _Fields, key: str) -> bool:
    return key in modelled_keys(fields.family)


def _rotary_dim(fields: _Fields, head_dim: int) -> int:
    """Return how many elements of a head are rotated; none with learned positions."""
    if fields.family in _LEARNED_POSITIONS:
        return 0
    if not _has(fields, "rotary_pct"):
        return head_dim
    nested = nested_rotary_factor(fields.values)
    if (
        nested is not None
        and fields.values["rotary_pct"] == default_values(fields.family)["rotary_pct"]
    ):
        fields.values["rotary_pct"] = nested
    name = fields.field("rotary_pct")
    share = check_number(name, fields.values["rotary_pct"], 0.0, 1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        allowed = f"a share that rotates an even number of a head's {head_dim} elements"
        raise PlanError(name, share, allowed)
    return rotary_dim


def _latent_attention(fields: _Fields, hidden_size: int, num_heads: int) -> LatentAttention | None:
    if fields.family not in _LATENT:
        return None
    if fields.family == "deepseek_v2" and hidden_size % num_heads:
        allowed = f"a divisor of hidden_size ({hidden_size})"
        raise PlanError(fields.field("num_attention_heads"), num_heads, allowed)
    kv_heads = fields.optional_size("num_key_value_heads") or num_heads
    if kv_heads != num_heads:
        allowed = f"num_attention_heads ({num_heads}), as latent attention has no grouped heads"
        raise PlanError(fields.field("num_key_value_heads"), kv_heads, allowed)
    rope_dim = fields.size("qk_rope_head_dim")
    if rope_dim % 2:
        name = fields.field("qk_rope_head_dim")
        raise PlanError(name, rope_dim, "even, as rotary positions need pairs")
    return LatentAttention(
        q_rank=fields.optional_size("q_lora_rank"),
        kv_rank=fields.size("kv_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=fields.size("v_head_dim"),
    )


def _num_kv_heads(fields: _Fields, num_heads: int) -> int:
    """Return the key-value heads; they must divide the query heads."""
    if fields.family == "falcon":
        return 1
    given = (
        fields.optional_size("num_key_value_heads") if _has(fields, "num_key_value_heads") else None
    )
    num_kv_heads = given or num_heads
    if num_heads % num_kv_heads:
        allowed = f"a divisor of num_attention_heads ({num_heads})"
        raise PlanError(fields.field("num_key_value_heads"), num_kv_heads, allowed)
    return num_kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """The mixture-of-experts fields of a ModelSpec; those of a dense model by default."""

    num_experts: int = 0
    experts_per_token: int = 0
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_size: int = 0
    shared_expert_size: int = 0
    expert_layers: tuple[bool, ...]


def _experts(fields: _Fields, num_layers: int) -> _Experts:
    if not _has(fields, "num_local_experts"):
        return _Experts(expert_layers=(False,) * num_layers)
    layers = _expert_layers(fields, num_layers)
    experts = _bounded(fields, "num_experts_per_tok", "num_local_experts")
    own_size = "moe_intermediate_size" if _has(fields, "moe_intermediate_size") else None
    size = fields.size(own_size or "intermediate_size")
    shared = fields.size("n_shared_experts") if _has(fields, "n_shared_experts") else 0
    return _Experts(
        num_experts=experts[1],
        experts_per_token=experts[0],
        **_expert_groups(fields, experts[1]),
        expert_size=size,
        shared_expert_size=shared * size,
        expert_layers=layers,
    )


def _bounded(fields: _Fields, key: str, bound: str) -> tuple[int, int]:
    """Return the sizes `key` and `bound`, of which the first may not be the larger."""
    value, limit = fields.size(key), fields.size(bound)
    if value > limit:
        name = fields.field(bound).rpartition(".")[2]
        raise PlanError(fields.field(key), value, f"at most {name} ({limit})")
    return value, limit


def _expert_groups(fields: _Fields, num_experts: int) -> dict[str, int]:
    """Return the groups among which DeepSeek-V3 first chooses; its two best decide for a group."""
    if fields.family != "deepseek_v3":
        return {}
    chosen, groups = _bounded(fields, "topk_group", "n_group")
    if num_experts % groups or num_experts // groups < 2:
        allowed = f"a divisor of n_routed_experts ({num_experts}) that leaves two in a group"
        raise PlanError(fields.field("n_group"), groups, allowed)
    return {"expert_groups": groups, "groups_per_token": chosen}


def _expert_layers(fields: _Fields, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts, by the rule of the family's configuration."""
    if _has(fields, "first_k_dense_replace"):
        name = fields.field("first_k_dense_replace")
        first = check_integer(name, fields.values["first_k_dense_replace"], 0, 4096)
        return tuple(i >= first for i in range(num_layers))
    if not _has(fields, "decoder_sparse_step"):
        return (True,) * num_layers
    step, dense = fields.size("decoder_sparse_step"), fields.values["mlp_only_layers"] or []
    name = fields.field("mlp_only_layers")
    if not isinstance(dense, list):
        raise PlanError(name, dense, "a list of layer numbers")
    numbers = {check_integer(name, layer, 0, 4096) for layer in dense}
    return tuple(i not in numbers and (i + 1) % step == 0 for i in range(num_layers))


def _check_widths(fields: _Fields, hidden_size: int) -> None:
    """Refuse projections around OPT's embedding and a second norm in Falcon's parallel block."""
    if _has(fields, "word_embed_proj_dim"):
        if "hidden_size" in fields.edited and "word_embed_proj_dim" not in fields.edited:
            fields.values["word_embed_proj_dim"] = None
        width = fields.optional_size("word_embed_proj_dim") or hidden_size
        if width != hidden_size:
            name = fields.field("word_embed_proj_dim")
            raise PlanError(name, width, f"hidden_size ({hidden_size}), without projections")
    if _has(fields, "num_ln_in_parallel_attn"):
        norms = fields.optional_size("num_ln_in_parallel_attn") or 1
        if norms != 1:
            name = fields.field("num_ln_in_parallel_attn")
            raise PlanError(name, norms, "1 or null without the new decoder architecture")


def _check_activation(fields: _Fields) -> None:
    key, modelled = _ACTIVATIONS.get(fields.family, ("hidden_act", "silu"))
    if fields.values[key] != modelled:
        raise PlanError(
            fields.field(key), fields.values[key], f"{modelled}, the one modelled for this family"
        )


def _hf_config(spec: ModelSpec, fields: _Fields) -> dict[str, Any]:
    """Return the fields from which transformers builds exactly the modelled tensors.

    Dropout is off and the special tokens are unset, so that any vocabulary size can be built.
    """
    kept = {key: fields.values[key] for key in sorted(modelled_keys(spec.family))}
    kept |= {key: 0.0 for key in DROPOUT_KEYS if key in kept}
    if fields.values.get("rope_theta") is not None:
        kept["rope_theta"] = fields.values["rope_theta"]
    exact = {"num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    kept |= {key: value for key, value in exact.items() if key in kept}
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return {"model_type": spec.family, **with_own_names(spec.family, kept), **special}


def _build(name: str, fields: _Fields, flags: tuple[str, ...]) -> ModelSpec:
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    layers = fields.size("num_hidden_layers")
    if fields.family in ("gpt2", "falcon") and fields.values["intermediate_size"] is None:
        fields.values["intermediate_size"] = 4 * hidden
    _check_widths(fields, hidden)
    window, sliding_layers = _sliding_layers(fields, layers)
    latent = _latent_attention(fields, hidden, heads)
    head_dim = latent.nope_dim + latent.rope_dim if latent else _head_dim(fields, hidden, heads)
    bias = fields.flag("attention_bias") or fields.family in ("gpt2", "opt")
    spec = ModelSpec(
        name=name,
        family=fields.family,
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_num_kv_heads(fields, heads),
        head_dim=head_dim,
        rotary_dim=latent.rope_dim if latent else _rotary_dim(fields, head_dim),
        max_positions=fields.size("max_position_embeddings"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=window,
        sliding_layers=sliding_layers,
        **asdict(_experts(fields, layers)),
        latent=latent,
        qkv_bias=bias or fields.family == "qwen2",
        attention_out_bias=bias,
        mlp_bias=fields.family in _BIASED or fields.flag("mlp_bias"),
        attention_logit_softcap=fields.optional_number("attn_logit_softcapping"),
        final_logit_softcap=fields.optional_number("final_logit_softcapping"),
        parameters=0,
        hf_config={},
        flags=flags,
    )
    parameters = count_parameters(spec)
    if parameters > MAX_PARAMETERS:
        sentence = f"model.config has {parameters:,} parameters: at most {MAX_PARAMETERS:,}."
        raise PlanError("model.config", parameters, "fewer parameters", sentence=sentence)
    return replace(spec, parameters=parameters, hf_config=_hf_config(spec, fields))


def _family_of(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    supported = ", ".join(SUPPORTED_FAMILIES)
    if family is None:
        sentence = f"model.config.model_type is missing: it must be one of {supported}."
        raise PlanError("model.config.model_type", None, supported, sentence=sentence)
    if not isinstance(family, str) or family not in SUPPORTED_FAMILIES:
        raise PlanError("model.config.model_type", family, f"one of {supported}")
    return family


def _check_plain_values(fields: _Fields) -> list[str]:
    """Check values that only have to be well-formed; return sentences about dropout."""
    for key in BOOLEAN_KEYS:
        fields.flag(key)
    for key in POSITIVE_NUMBER_KEYS:
        fields.optional_number(key)
    sentences = []
    for key in DROPOUT_KEYS:
        value = fields.values.get(key)
        if value is not None and check_number(fields.field(key), value, 0.0, 1.0) > 0:
            sentences.append(f"{key} is {value:g}: planned and run without dropout.")
    # DeepSeek-V2's module does not read the key.
    normalises = _has(fields, "norm_topk_prob") and fields.family != "deepseek_v2"
    if normalises and not fields.flag("norm_topk_prob"):
        sentences.append("norm_topk_prob is false: memory is planned as with true.")
    return sentences


def _check_editable(family: str, overrides: Mapping[str, Any]) -> None:
    editable = modelled_keys(family) | {"rope_theta"}
    for key, value in overrides.items():
        if key not in editable:
            allowed = ", ".join(sorted(with_own_names(family, dict.fromkeys(editable))))
            field = f"model.overrides.{describe_key(key)}"
            sentence = f"{field} cannot be edited: {family} has {allowed}."
            raise PlanError(field, value, allowed, sentence=sentence)


def spec_from_config(
    config: Mapping[str, Any], *, name: str, overrides: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Check a Hugging Face configuration and return its ModelSpec.

    Keys that are absent take the class default of transformers (data/config_defaults.json).
    Raises PlanError naming the field for anything missing, malformed or not modelled.
    """
    if has_no_family(check_mapping("model.config", config)):
        return _other_spec(config, name, overrides or {})
    text = canonical_json("model.config", check_mapping("model.config", config))
    edits = check_mapping("model.overrides", overrides or {})
    try:
        return _cached_spec(check_text("model.name", name), text, canonical_json("model", edits))
    except PlanError:
        # A model of a known family with something that the family's template has not.
        other = None if edits else spec_of_refused(config, name=name)
        if other is None:
            raise
        return other


def has_no_family(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names an architecture that no template of ours is for."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind not in (*SUPPORTED_FAMILIES, "gemma3")


def _other_spec(config: Mapping[str, Any], name: str, overrides: Mapping[str, Any]) -> ModelSpec:
    spec = spec_from_config_of_other(config, name=check_text("model.name", name))
    if overrides:
        key = describe_key(next(iter(overrides)))
        sentence = (
            f"model.overrides.{key} cannot be edited: {spec.family} is planned as it was traced; "
            "change its config.json and trace that."
        )
        raise PlanError("model.overrides", key, "none", sentence=sentence)
    return spec


def _text_part(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the language model inside a Gemma 3 configuration with images, and a flag for it."""
    if config.get("model_type") != "gemma3":
        return config, []
    text = check_mapping("model.config.text_config", config.get("text_config"))
    own = {"model_type": "gemma3_text"}
    return {**own_defaults("gemma3_text"), **text, **own}, [
        "gemma3: planned and run as its language model, without the vision tower."
    ]


@lru_cache(maxsize=256)
def _cached_spec(name: str, config_text: str, overrides_text: str) -> ModelSpec:
    raw, flags = _text_part(json.loads(config_text))
    family = _family_of(raw)
    config = with_common_names(family, raw)
    overrides = with_common_names(family, json.loads(overrides_text))
    _check_editable(family, overrides)
    if "num_hidden_layers" in overrides and "layer_types" not in overrides:
        # The list of kinds has one entry per layer: the family's own pattern fills a new depth.
        config.pop("layer_types", None)
    fields = _Fields(family, config, overrides)
    refuse_unmodelled_keys(family, fields.values)
    _check_activation(fields)
    flags += _check_plain_values(fields) + flag_unknown_keys(family, fields.values)
    return _build(name, fields, tuple(flags))
