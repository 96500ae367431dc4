"""Read the traced templates and turn them into moments of a training step.

A template says what each section of a step (embedding, a layer, the loss, their backwards) leaves
alive and how high it rises, as bytes per monomial of model dimensions. `runners.trace.build`
writes them from the real modules; nothing here is a formula of an architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.memory.losses import chunk_tokens
from planner.memory.sections import (
    BACKWARD,
    COMPONENTS,
    FLAT_GROUPS,
    FORWARD,
    Extent,
    LiveSet,
    Steps,
    extent,
)
from planner.model import ModelSpec
from planner.rank import RankSpec

Floats = npt.NDArray[np.float64]

# Families of which every model has its key-value heads in the same proportion to its query heads.
ONE_GROUPING = ("gpt2", "gpt_neox", "opt", "falcon", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that the forward keeps for the backward, once per layer if in a layer section."""

    section: str
    module: str
    op: str
    shape: tuple[str, ...]
    dtype: str
    monomial: str
    coefficient_bytes: int


@dataclass(frozen=True, slots=True)
class Moments:
    """Live sets at the moments that can be a step's peak, as linear forms.

    Bytes of component c at moment k = (constant[k, c] + inner * per_inner[k, c]) . monomials, where
    `inner` is the number of layers that are neither first nor last. `position[k]` names where in
    the step the moment lies; bit i of `flat_key[k]` says that flat gradient buffer i began before
    it in its own section; `at_end[k]` marks the end of a section.
    """

    monomials: tuple[str, ...]
    position: tuple[str, ...]
    constant: Floats
    per_inner: Floats
    flat_key: tuple[int, ...]
    at_end: tuple[bool, ...]

    def has_begun(self, row: int, flat_group: str) -> bool:
        """Whether a flat gradient buffer exists at moment `row`."""
        return bool(self.flat_key[row] >> FLAT_GROUPS.index(flat_group) & 1)


@lru_cache(maxsize=16)
def _family_file(family: str) -> Mapping[str, Any]:
    text = resources.files("planner.memory").joinpath(f"templates/{family}.json").read_text()
    data: Mapping[str, Any] = json.loads(text)
    return data


def has_template(family: str, key: str) -> bool:
    """Whether this variant of a family's training step has been traced."""
    return has_templates(family) and key in _family_file(family)["templates"]


@cache
def has_templates(family: str) -> bool:
    """Whether a training step of this family has been traced."""
    return resources.files("planner.memory").joinpath(f"templates/{family}.json").is_file()


def template_versions(family: str) -> dict[str, str]:
    """The transformers and torch versions a family's templates were traced with."""
    data = _family_file(family)
    return {"transformers": data["transformers"], "torch": data["torch"]}


def attention_variant(spec: ModelSpec, attention: str, compute: str, sequence_length: int) -> str:
    """The traced attention variant that a model runs at a sequence length.

    transformers gives SDPA a mask, and expands K and V for it, once a sliding window is not longer
    than the sequence (`masking_utils._ignore_causal_mask_sdpa`); eager attention and masked SDPA
    copy K and V unless every query head has its own. In fp32, SDPA has no fused kernel for grouped
    heads and keeps the scores.
    """
    variant = attention
    window = spec.sliding_window
    if attention == "sdpa" and window and any(spec.sliding_layers) and sequence_length >= window:
        variant = "sdpa_masked"
    told_apart = variant in ("eager", "sdpa_masked") or (variant, compute) == ("sdpa", "fp32")
    if told_apart and spec.family not in ONE_GROUPING and spec.num_heads == spec.num_kv_heads:
        variant += "_mha"
    return variant


def layout_suffix(spec: ModelSpec, micro_batch: int) -> str:
    """What a traced attention variant's name ends in for the layouts of single families.

    Falcon's one key-value head serves all heads: expanding it copies, except for a batch of one
    row. DeepSeek's small models project queries in one step.
    """
    if spec.family == "falcon" and micro_batch == 1:
        return "_single"
    return "_direct" if spec.latent is not None and spec.latent.q_rank is None else ""


@lru_cache(maxsize=512)
def load_steps(family: str, key: str, gradients: str) -> Steps:
    """The traced rows of one template; `gradients` is "kept" or "added" (see `runners.trace`)."""
    data = _family_file(family)
    index = data["templates"][key]
    numbers = {**index["forward"], **index[gradients]}
    rows = {name: data["sections"][i] for name, i in numbers.items()}
    return Steps(tuple(data["monomials"]), rows)


@lru_cache(maxsize=512)
def load_moments(family: str, key: str, gradients: str) -> Moments:
    """The moments of one template that can be a peak; arguments as for `load_steps`."""
    steps = load_steps(family, key, gradients)
    return _compile({name: extent(steps, name) for name in (*FORWARD, *BACKWARD)})


@lru_cache(maxsize=512)
def load_saved(family: str, key: str) -> tuple[SavedTensor, ...]:
    """The tensors one template keeps between forward and backward."""
    data = _family_file(family)
    return tuple(
        SavedTensor(
            section=section,
            module=row[0],
            op=row[1],
            shape=tuple(row[2]),
            dtype=row[3],
            monomial=data["monomials"][row[4]],
            coefficient_bytes=row[5],
        )
        for section, i in data["templates"][key]["saved"].items()
        for row in data["sections"][i]
    )


def _expert_sizes(spec: ModelSpec) -> dict[str, float]:
    if not spec.num_experts:
        return {}
    return {
        "top_k": spec.experts_per_token,
        "experts": spec.num_experts,
        "moe_ffn": spec.expert_size,
        "shared_experts": spec.shared_expert_size / spec.expert_size,
        "expert_groups": spec.expert_groups,
        "group_experts": spec.num_experts / spec.expert_groups,
        "chosen_groups": spec.groups_per_token,
    }


def _latent_sizes(spec: ModelSpec) -> dict[str, float]:
    latent = spec.latent
    if latent is None:
        return {}
    return {
        "nope_dim": latent.nope_dim,
        "qk_dim": spec.head_dim,
        "value_dim": latent.value_dim,
        "half_nope_and_value": (latent.nope_dim + latent.value_dim) / 2,
        "kv_rank": latent.kv_rank,
        "kv_rank_and_rotary": latent.kv_rank + latent.rope_dim,
        "q_rank": latent.q_rank or 0,
    }


def monomial_values(
    spec: ModelSpec, monomials: tuple[str, ...], micro_batch: Any, sequence_length: Any
) -> Floats:
    """Evaluate monomials: shape [len(monomials), *broadcast of batch and sequence]."""
    sizes: dict[str, Any] = {
        **_expert_sizes(spec),
        **_latent_sizes(spec),
        "batch": micro_batch,
        "seq": sequence_length,
        "half_seq_and_one": (sequence_length + 1) / 2,
        "kv_heads": spec.num_kv_heads,
        "group": spec.num_heads / spec.num_kv_heads,
        "group_plus_2": spec.num_heads / spec.num_kv_heads + 2,
        "half_head_dim": spec.head_dim / 2,
        "half_rotary": spec.rotary_dim / 2,
        "hidden": spec.hidden_size,
        "ffn": spec.intermediate_size,
        "vocab": spec.vocab_size,
        "positions": spec.position_rows,
        "layers": spec.num_layers,
        "chunk": chunk_tokens(micro_batch * sequence_length, spec.vocab_size),
    }
    one = np.ones(np.broadcast_shapes(np.shape(micro_batch), np.shape(sequence_length)))
    rows = []
    for monomial in monomials:
        value: Any = spec.share_of(monomial) if isinstance(spec, RankSpec) else 1.0
        for name in filter(None, monomial.split("*")):
            value = value * sizes[name]
        rows.append(value * one)
    return np.array(rows, dtype=np.float64)


class _Compiler:
    """Walks the sections in the order of a step and collects absolute live sets."""

    def __init__(self, extents: Mapping[str, Extent]) -> None:
        self._extents = extents
        live_sets = [live for e in extents.values() for live in (e.net, *e.peaks)]
        names = {monomial for live in live_sets for _, monomial in live}
        self.monomials = tuple(sorted(names - set(FLAT_GROUPS)))
        self._column = {name: i for i, name in enumerate(self.monomials)}
        shape = (len(COMPONENTS), len(self.monomials))
        self._live, self._live_inner = np.zeros(shape), np.zeros(shape)
        self.rows: list[tuple[str, Floats, Floats, int, bool]] = []

    def visit(self, name: str) -> None:
        """Add a section's moments at the present state, and advance the state past it."""
        if name in ("layer", "layer_backward"):
            self._visit_inner(name)
        else:
            self._moments(name, name)
            self._live = self._live + self._net(name)

    def _visit_inner(self, name: str) -> None:
        """Inner layers rise or fall by the same step, so only the first and last of them count."""
        net = self._net(name)
        self._moments(name, f"{name}:first")
        self._live, self._live_inner = self._live - net, self._live_inner + net
        self._moments(name, f"{name}:last")
        self._live = self._live + net

    def _moments(self, name: str, position: str) -> None:
        section = self._extents[name]
        for live in section.peaks:
            self._add(position, live, at_end=False)
        self._add(position, section.net, at_end=True)

    def _add(self, position: str, live: LiveSet, at_end: bool) -> None:
        dense, flat_key = self._dense(live)
        self.rows.append((position, self._live + dense, self._live_inner, flat_key, at_end))

    def _net(self, name: str) -> Floats:
        net = self._dense(self._extents[name].net)[0]
        # What becomes of a finished gradient is the engine's affair (see `states`).
        net[COMPONENTS.index("gradients")] = 0.0
        return net

    def _dense(self, live: LiveSet) -> tuple[Floats, int]:
        dense = np.zeros((len(COMPONENTS), len(self.monomials)))
        flat_key = 0
        for (component, monomial), size_bytes in live.items():
            if monomial in FLAT_GROUPS:
                flat_key |= 1 << FLAT_GROUPS.index(monomial)
            else:
                dense[COMPONENTS.index(component), self._column[monomial]] += size_bytes
        return dense, flat_key


def _compile(extents: Mapping[str, Extent]) -> Moments:
    compiler = _Compiler(extents)
    for name in (*FORWARD, *BACKWARD):
        compiler.visit(name)
    position, constant, per_inner, flat_key, at_end = zip(*compiler.rows, strict=True)
    return Moments(
        monomials=compiler.monomials,
        position=position,
        constant=np.array(constant),
        per_inner=np.array(per_inner),
        flat_key=flat_key,
        at_end=at_end,
    )
