"""What the planner knows of a transformer: its dimensions and its parameter tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterShape:
    """One kind of parameter tensor, as transformers names and shapes it.

    Tensors of a decoder layer are listed once, under the name of layer 0, with `count` layers.
    """

    name: str
    shape: tuple[int, ...]
    group: str
    count: int = 1

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
        return [self.name.replace(".0.", f".{i}.", 1) for i in range(self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of a supported family.

    `hf_config` is what `AutoConfig.for_model(**hf_config)` takes: the job builds the real model
    from it. `sliding_layers` says of every layer whether its attention is limited to
    `sliding_window` tokens. `num_experts` is 0 for a dense model. `flags` are sentences about
    what was noticed in the configuration.
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
    max_positions: int
    tie_word_embeddings: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    attention_logit_softcap: float | None
    final_logit_softcap: float | None
    parameters: int
    hf_config: Mapping[str, Any] = field(hash=False)
    flags: tuple[str, ...] = ()

    @property
    def query_size(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of all key-value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_sliding_layers(self) -> int:
        """Layers whose attention is limited to the window."""
        return sum(self.sliding_layers)
