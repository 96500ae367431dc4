"""What the planner knows of a transformer: its dimensions and its parameter tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One kind of parameter tensor, as transformers names and shapes it.

    `layers` are the decoder layers that have it, empty for one outside of them. A layer's tensor
    is listed once, under the name it has in the first of its layers.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    layers: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many such tensors the model has."""
        return len(self.layers) or 1

    @property
    def numel(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    @property
    def total_numel(self) -> int:
        """Elements of all `count` tensors."""
        return self.numel * self.count

    def names(self) -> list[str]:
        """Return the name of every tensor this stands for."""
        if not self.layers:
            return [self.name]
        own = f".{self.layers[0]}."
        return [self.name.replace(own, f".{layer}.", 1) for layer in self.layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The widths of multi-head latent attention (DeepSeek-V2, section 2.1).

    Keys and values of all heads are computed from `kv_rank` cached elements; a key has `nope_dim`
    elements of its own and `rope_dim` rotated ones that all heads share. `q_rank` is None where
    queries are projected directly.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of a supported family.

    `hf_config` is what `AutoConfig.for_model(**hf_config)` takes: the job builds the real model
    from it. `sliding_layers` says of every layer whether its attention is limited to
    `sliding_window` tokens, `expert_layers` whether its MLP is a mixture of experts. `num_experts`
    is 0 for a dense model; `expert_size` is the width of one expert, `shared_expert_size` that of
    the experts which every token visits. Where experts are in several `expert_groups`, a token
    chooses `groups_per_token` of them first. `rotary_dim` elements of a head are rotated, none with
    learned positions. `flags` are sentences about what was noticed in the configuration. `trace`
    names what a model of no family was traced as (`planner.traced`); what only families know of
    their models is then 0. `multiplies_for_angles`, `masks_experts` and
    `portable_attention`: see `planner.as_run`.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    max_positions: int
    tie_word_embeddings: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    expert_groups: int
    groups_per_token: int
    expert_size: int
    shared_expert_size: int
    expert_layers: tuple[bool, ...]
    latent: LatentAttention | None
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    attention_logit_softcap: float | None
    final_logit_softcap: float | None
    parameters: int
    hf_config: Mapping[str, Any] = field(hash=False)
    flags: tuple[str, ...] = ()
    trace: str | None = None
    multiplies_for_angles: bool = False
    masks_experts: bool = False
    portable_attention: tuple[str, ...] = ()

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys of all key-value heads, and of their values but in latent attention."""
        return self.num_kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's value."""
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def attended_size(self) -> int:
        """Width of what all heads attend to: the input of the output projection."""
        return self.num_heads * self.value_dim

    @property
    def mlp_products(self) -> int:
        """Matrix products of an MLP: up and down, and the gate where the family has one."""
        return 2 if self.family in ("gpt2", "gpt_neox", "opt", "falcon") else 3

    @property
    def num_sliding_layers(self) -> int:
        """Layers whose attention is limited to the window."""
        return sum(self.sliding_layers)

    @property
    def num_expert_layers(self) -> int:
        """Layers whose MLP is a mixture of experts."""
        return sum(self.expert_layers)

    @property
    def has_learned_positions(self) -> bool:
        """Whether every position has a learned row, which bounds the sequence length."""
        return self.rotary_dim == 0

    @property
    def has_attention_sinks(self) -> bool:
        """Whether every head has a learned logit beside those of the keys."""
        return self.family == "gpt_oss"

    @property
    def position_rows(self) -> int:
        """Rows of the table of learned positions; OPT's starts with two that no token uses."""
        return self.max_positions + (2 if self.family == "opt" else 0)
