"""Build a small real model whose every dimension is a recognisable prime, as fake tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from planner.memory.templates import ONE_GROUPING
from runners.trace.standins import TRITON_NAME
from runners.trace.symbols import HEAD_DIM, HEADS, HIDDEN, PRIMES, ROTARY_DIM

LAYERS = 4
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "opt",
    "falcon",
    "mixtral",
    "qwen3_moe",
)
# These derive the head size from the hidden size, so their hidden size is heads * head_dim.
DERIVED_HEAD_DIM = ("phi3", "olmo2", "gpt_neox", "opt")
WINDOWED = ("mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Variant:
    """What changes the tensors that a step of one family keeps."""

    family: str
    attention: str  # eager, sdpa or triton; "_masked": a sliding window; "_mha": no grouped heads
    compute: str  # bf16, fp32 or autocast
    checkpointing: str  # none or full

    @property
    def key(self) -> str:
        """The name under which the template is stored."""
        return "/".join((self.attention, self.compute, self.checkpointing))

    @property
    def masked(self) -> bool:
        """Whether a sliding window shorter than the sequence is in force."""
        return "_masked" in self.attention

    @property
    def implementation(self) -> str:
        """The name transformers knows the attention by."""
        kernel = self.attention.split("_")[0]
        return TRITON_NAME if kernel == "triton" else kernel


def variants(family: str) -> list[Variant]:
    """Every variant of a family whose tensors differ from the others'."""
    attentions = ["eager", "sdpa", "triton"]
    if family == "gemma2":  # transformers offers it eager attention only (logit softcap)
        attentions = ["eager", "eager_mha"]
    elif family == "falcon":  # it takes no attention function from outside
        attentions = ["eager", "sdpa"]
    elif family not in ONE_GROUPING:
        attentions.append("eager_mha")
    if family in WINDOWED:
        attentions += ["sdpa_masked", "sdpa_masked_mha"]
    kinds = [(a, compute) for a in attentions for compute in ("bf16", "fp32", "autocast")]
    if "sdpa" in attentions and family not in ONE_GROUPING:
        kinds.append(("sdpa_mha", "fp32"))  # grouped heads have no fused fp32 kernel
    return [
        Variant(family, attention, compute, checkpointing)
        for attention, compute in kinds
        for checkpointing in ("none", "full")
    ]


def _dense_fields(variant: Variant) -> dict[str, Any]:
    family = variant.family
    fields: dict[str, Any] = {
        "vocab_size": PRIMES["vocab"],
        "hidden_size": HEADS * HEAD_DIM if family in DERIVED_HEAD_DIM else HIDDEN,
        "intermediate_size": PRIMES["ffn"],
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS if "_mha" in variant.attention else PRIMES["kv_heads"],
        "max_position_embeddings": 2 * PRIMES["seq"],
        "pad_token_id": 0,
    }
    if family not in DERIVED_HEAD_DIM:
        fields["head_dim"] = HEAD_DIM
    if family in ("gpt_neox", "opt", "falcon"):
        for key in ("num_key_value_heads", "head_dim"):
            fields.pop(key, None)
    return fields


def _own_fields(variant: Variant) -> dict[str, Any]:
    """The fields that only this family has, or has by other names than Llama's."""
    experts = {
        "num_local_experts": PRIMES["experts"],
        "num_experts_per_tok": PRIMES["top_k"],
    }
    own: dict[str, dict[str, Any]] = {
        "gpt2": {
            "n_embd": HEADS * HEAD_DIM,
            "n_head": HEADS,
            "n_inner": PRIMES["ffn"],
            "n_layer": LAYERS,
            "n_positions": PRIMES["positions"],
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
        # Rounded down to the elements of a head that are rotated.
        "gpt_neox": {"rotary_pct": (ROTARY_DIM + 0.5) / HEAD_DIM},
        "opt": {
            "ffn_dim": PRIMES["ffn"],
            "max_position_embeddings": PRIMES["positions"] - 2,
            "dropout": 0.0,
        },
        # One key-value head for all query heads: the group is all of them.
        "falcon": {
            "hidden_size": PRIMES["group"] * HEAD_DIM,
            "num_attention_heads": PRIMES["group"],
            "ffn_hidden_size": PRIMES["ffn"],
        },
        "mixtral": experts,
        "qwen3_moe": {
            "num_experts": PRIMES["experts"],
            "num_experts_per_tok": PRIMES["top_k"],
            "moe_intermediate_size": PRIMES["moe_ffn"],
            "norm_topk_prob": True,
        },
    }
    return own.get(variant.family, {})


def config_fields(variant: Variant) -> dict[str, Any]:
    """The Hugging Face config fields of the traced model."""
    fields = {} if variant.family == "gpt2" else _dense_fields(variant)
    fields |= _own_fields(variant)
    fields |= {"vocab_size": PRIMES["vocab"], "tie_word_embeddings": False}
    if variant.family == "mistral":
        fields["sliding_window"] = None
    if variant.family == "gemma2":
        fields["layer_types"] = ["full_attention"] * LAYERS
    if variant.masked:
        fields |= {"sliding_window": 7, "use_sliding_window": True}
        fields["layer_types"] = ["sliding_attention"] * LAYERS
    return fields


def build_model(variant: Variant, fake: FakeTensorMode) -> torch.nn.Module:
    """The real Hugging Face model of this variant with fake parameters, in training mode."""
    config = AutoConfig.for_model(variant.family, **config_fields(variant))
    dtype = torch.bfloat16 if variant.compute == "bf16" else torch.float32
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=variant.implementation, dtype=dtype
        )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # engines store all in one dtype, routers too
    with fake:
        model.to_empty(device="cpu")
    if variant.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()
