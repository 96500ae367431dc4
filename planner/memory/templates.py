"""Read the traced templates and turn them into moments of a training step.

A template says what each section of a step (embedding, a layer, the loss, their backwards) leaves
alive and how high it rises, as bytes per monomial of model dimensions. `runners.trace.build`
writes them from the real modules; nothing here is a formula of an architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.errors import PlanError
from planner.memory.groups import Place
from planner.memory.kinds import SLIDING, kind_set, layer_kinds
from planner.memory.losses import chunk_tokens
from planner.memory.partial_sums import is_partial_sums, partial_sums_value
from planner.memory.sections import (
    COMPONENTS,
    FLAT_GROUPS,
    Extent,
    LiveSet,
    Steps,
    StepSequence,
)
from planner.model import ModelSpec
from planner.rank import RankSpec
from planner.traced import find_variant, trace_data
from planner.workload import BaseDtype, Loss, Precision, TrainingWorkload

Floats = npt.NDArray[np.float64]

# Of a model that is traced at its own dimensions, all that is no row, token or vocabulary is in the
# coefficient: a factor of one that tells such tensors from those of a few elements per token.
WIDTH = "width"
# Families of which every model has its key-value heads in the same proportion to its query heads.
ONE_GROUPING = ("gpt2", "gpt_neox", "opt", "falcon", "deepseek_v2", "deepseek_v3")
# What the name of an attention ends in that was traced with a batch of one row.
ONE_ROW = "_single"
# Families whose small models have one key-value head: expanding it to all heads copies nothing.
ONE_KEY_VALUE_HEAD = ("gemma3_text",)


@dataclass(frozen=True, slots=True)
class Traced:
    """Which template a model runs: its family, the variant's key, the kind of every layer."""

    family: str
    key: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that the forward keeps for the backward, at each of `places`."""

    places: tuple[Place, ...]
    module: str
    op: str
    shape: tuple[str, ...]
    dtype: str
    monomial: str
    coefficient_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Live sets at the moments that can be a step's peak, as linear forms.

    Bytes of component c at moment k = constant[k, c] . monomials. `place[k]` says where in the step
    the moment lies; bit i of `flat_key[k]` says that flat gradient buffer i began before it in its
    own section; `at_end[k]` marks the end of a section.
    """

    monomials: tuple[str, ...]
    place: tuple[Place, ...]
    constant: Floats
    flat_key: tuple[int, ...]
    at_end: tuple[bool, ...]


# What stands for a family's name where a model was traced by itself, before the trace's own.
_TRACE = "trace:"
# Before a family's name: variants traced with transformers 5.17, that of the recorded rows, of
# families whose experts were others then. Not all are there.
OLDER = "older/"


def template_family(spec: ModelSpec) -> str:
    """The name under which a model's templates are: its family's, or that of its own trace."""
    return spec.family if spec.trace is None else _TRACE + spec.trace


@lru_cache(maxsize=16)
def _family_file(family: str) -> Mapping[str, Any]:
    if family.startswith(_TRACE):
        return trace_data(family.removeprefix(_TRACE))
    text = resources.files("planner.memory").joinpath(f"templates/{family}.json").read_text()
    return with_parts(json.loads(text))


def with_parts(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put parts of templates and rows of sections in their place: a file holds equal ones once."""
    if "parts" not in data:
        return data
    parts, rows = data["parts"], data["rows"]
    sections = [
        section if isinstance(section, dict) else [rows[number] for number in section]
        for section in data["sections"]
    ]
    templates = {
        key: {
            kinds: {name: parts[number] for name, number in index.items()}
            for kinds, index in by_kinds.items()
        }
        for key, by_kinds in data["templates"].items()
    }
    return {**data, "sections": sections, "templates": templates}


def has_template(template: Traced) -> bool:
    """Whether this variant of a family's training step has been traced, for any layers."""
    family = template.family
    return has_templates(family) and template.key in _family_file(family)["templates"]


def _has_kinds(template: Traced) -> bool:
    """Whether this variant has been traced for these kinds of layers."""
    if not has_template(template):
        return False
    return kind_set(template.kinds) in _family_file(template.family)["templates"][template.key]


@cache
def has_templates(family: str) -> bool:
    """Whether a training step of this family has been traced."""
    if family.startswith(_TRACE):
        return True
    return resources.files("planner.memory").joinpath(f"templates/{family}.json").is_file()


def template_versions(family: str) -> dict[str, str]:
    """The transformers and torch versions a family's templates were traced with."""
    data = _family_file(family)
    return {"transformers": data["transformers"], "torch": data["torch"]}


def traced(spec: ModelSpec, workload: TrainingWorkload, sequence_length: int) -> Traced:
    """The template that a workload runs at a sequence length; `mixed` computes in bf16.

    A batch of one row has its own where that was traced. Products of eager attention take its heads
    as they lie and copy those of several rows: copies that no peak has, but other blocks for what
    comes after them. Where one head serves all, expanding it to them copies nothing either.
    """
    if spec.trace is not None:
        return _traced_by_itself(spec, workload, _compute(workload), sequence_length)
    kinds = layer_kinds(spec, workload, sequence_length)
    return _traced_of_family(spec, workload.of_any_size(), kinds, workload.micro_batch == 1)


def _compute(workload: TrainingWorkload) -> str:
    return "bf16" if workload.precision is Precision.MIXED else str(workload.precision)


@lru_cache(maxsize=512)
def _traced_of_family(
    spec: ModelSpec, workload: TrainingWorkload, kinds: tuple[str, ...], is_one_row: bool
) -> Traced:
    """The template of layers of these kinds; `workload` is any with the rows and the length left out."""
    compute = _compute(workload)
    attention = attention_variant(spec, workload, compute, kinds)
    parts = [compute, str(workload.checkpointing)]
    if workload.loss is not Loss.HF:
        parts.append(str(workload.loss))
    if workload.lora_rank:
        base = f"_{workload.base_dtype}" if workload.base_dtype is BaseDtype.NF4 else ""
        parts.append(f"lora_{workload.lora_targets}{base}")
    families = (OLDER + spec.family, spec.family) if spec.masks_experts else (spec.family,)
    names = (attention + ONE_ROW, attention) if is_one_row else (attention,)
    found = [Traced(f, "/".join((name, *parts)), kinds) for f in families for name in names]
    return next(filter(_has_kinds, found), found[-1])


def _traced_by_itself(
    spec: ModelSpec, workload: TrainingWorkload, compute: str, sequence_length: int
) -> Traced:
    """The template of a model with its own trace; one that is not there, where it was not traced."""
    key = "/".join((str(workload.attention), compute, str(workload.checkpointing)))
    changed = {
        "loss": workload.loss is not Loss.HF,
        "lora": workload.lora_rank > 0,
        "packed": workload.packed,
        "frozen": workload.frozen_layers > 0,
        "every": workload.checkpoint_every > 1,
    }
    key = "/".join((key, *(name for name, is_so in changed.items() if is_so)))
    variant = find_variant(spec, key, workload.micro_batch, sequence_length)
    if variant is None:
        return Traced(template_family(spec), key, layer_kinds(spec, workload, sequence_length))
    return Traced(template_family(spec), variant.name, variant.kinds)


def attention_variant(
    spec: ModelSpec, workload: TrainingWorkload, compute: str, kinds: Sequence[str]
) -> str:
    """The traced attention variant of a model with these kinds of layers.

    Eager attention, and SDPA with the mask of a sliding window or of packed rows, copy K and V
    unless every query head has its own. In fp32, SDPA has no fused kernel for grouped heads and
    keeps the scores. DeepSeek's small models project queries in one step.
    """
    attention = str(workload.attention)
    is_direct = spec.latent is not None and spec.latent.q_rank is None
    masked = attention == "sdpa" and any(SLIDING in kind for kind in kinds)
    told_apart = attention == "eager" or masked or (attention, compute) == ("sdpa", "fp32")
    if workload.packed:
        attention, told_apart = f"{attention}_packed", True
    if not told_apart or spec.family in ONE_GROUPING:
        return attention + "_direct" if is_direct else attention
    if spec.num_heads == spec.num_kv_heads:
        return attention + "_mha"
    one_head = spec.num_kv_heads == 1 and spec.family in ONE_KEY_VALUE_HEAD
    return attention + "_mqa" if one_head else attention


@lru_cache(maxsize=512)
def _steps(family: str, key: str, kinds: str, gradients: str) -> Steps:
    data = _family_file(family)
    index = data["templates"].get(key, {}).get(kinds)
    if index is None:
        sentence = (
            f"workload: a model with the kinds of layers {kinds} has not been traced for "
            f"{family} with {key.replace('/', ', ')}."
        )
        raise PlanError("workload", kinds, "kinds that have been traced", sentence=sentence)
    numbers = {**index["forward"], **index[gradients]}
    return Steps(
        monomials=tuple(data["monomials"]),
        rows={name: data["sections"][i] for name, i in numbers.items()},
        exports={name: data["sections"][i] for name, i in index[f"{gradients}_exports"].items()},
        late={name: data["sections"][i] for name, i in index["late"].items()},
        holders={int(number): kinds for number, kinds in index["holders"].items()},
    )


@lru_cache(maxsize=512)
def load_steps(template: Traced, gradients: str) -> StepSequence:
    """The traced rows of a model's step; `gradients` is "kept" or "added" (see `runners.trace`).

    Raises PlanError where its pattern of layers has not been traced.
    """
    steps = _steps(template.family, template.key, kind_set(template.kinds), gradients)
    return StepSequence(steps, template.kinds)


@lru_cache(maxsize=512)
def load_moments(template: Traced, gradients: str) -> Moments:
    """The moments of a model's step that can be a peak; arguments as for `load_steps`."""
    return _Compiler(load_steps(template, gradients)).moments()


@lru_cache(maxsize=512)
def load_saved(template: Traced) -> tuple[SavedTensor, ...]:
    """The tensors that a model keeps between forward and backward; layers of one kind together."""
    data = _family_file(template.family)
    index = data["templates"][template.key][kind_set(template.kinds)]["saved"]
    sequence = load_steps(template, "kept")
    places: dict[tuple[str, int], list[Place]] = {}
    for place in sequence.forward():
        number = sequence.look_up(index, place)
        places.setdefault((place.section, number), []).append(place)
    return tuple(
        SavedTensor(
            places=tuple(members),
            module=row[0],
            op=row[1],
            shape=tuple(row[2]),
            dtype=row[3],
            monomial=data["monomials"][row[4]],
            coefficient_bytes=row[5],
        )
        for (_, number), members in places.items()
        for row in data["sections"][number]
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
        "half_nope_dim": latent.nope_dim / 2,
        "quarter_qk_dim": spec.head_dim / 4,
        "value_dim": latent.value_dim,
        "nope_and_value": latent.nope_dim + latent.value_dim,
        "half_kv_rank": latent.kv_rank / 2,
        "quarter_kv_rank_and_rotary": (latent.kv_rank + latent.rope_dim) / 4,
        "q_rank": latent.q_rank or 0,
    }


@cache
def _factors(monomial: str) -> tuple[str, ...]:
    return tuple(filter(None, monomial.split("*")))


def monomial_values(
    spec: ModelSpec,
    monomials: tuple[str, ...],
    micro_batch: Any,
    sequence_length: Any,
    lora_rank: int = 0,
) -> Floats:
    """Evaluate monomials: shape [len(monomials), *broadcast of batch and sequence]."""
    sizes = _factor_sizes(spec, micro_batch, sequence_length, lora_rank)
    shape = np.broadcast_shapes(np.shape(micro_batch), np.shape(sequence_length))
    if not shape and not isinstance(spec, RankSpec):
        return _values_of_one(monomials, sizes)
    one = np.ones(shape)
    rows = []
    for monomial in monomials:
        if is_partial_sums(monomial):
            rows.append(partial_sums_value(monomial, sizes) * one)
            continue
        value: Any = spec.share_of(monomial) if isinstance(spec, RankSpec) else 1.0
        for name in _factors(monomial):
            value = value * sizes[name]
        rows.append(value * one)
    return np.array(rows, dtype=np.float64)


def _values_of_one(monomials: tuple[str, ...], sizes: Mapping[str, Any]) -> Floats:
    """Evaluate monomials of one plan: all products at once, factor by factor."""
    factors, sums = _factor_table(monomials, tuple(sizes))
    values: Floats = np.array([*sizes.values(), 1.0])[factors].prod(axis=0)
    for row in sums:
        values[row] = partial_sums_value(monomials[row], sizes)
    return values


@lru_cache(maxsize=512)
def _factor_table(
    monomials: tuple[str, ...], names: tuple[str, ...]
) -> tuple[npt.NDArray[np.intp], tuple[int, ...]]:
    """The number of each factor of each monomial, and which monomials are no products.

    Shape [most factors, len(monomials)]; shorter ones are filled up with the number behind all.
    """
    number = {name: index for index, name in enumerate(names)}
    sums = tuple(row for row, monomial in enumerate(monomials) if is_partial_sums(monomial))
    products = [() if row in sums else _factors(m) for row, m in enumerate(monomials)]
    table = np.full((max(map(len, products), default=0) or 1, len(monomials)), len(names))
    for row, factors in enumerate(products):
        table[: len(factors), row] = [number[name] for name in factors]
    return table, sums


def _factor_sizes(
    spec: ModelSpec, micro_batch: Any, sequence_length: Any, lora_rank: int
) -> dict[str, Any]:
    return {
        **_model_sizes(spec),
        "batch": micro_batch,
        "seq": sequence_length,
        "half_seq_and_one": (sequence_length + 1) / 2,
        "lora_rank": lora_rank,
        "chunk": chunk_tokens(micro_batch * sequence_length, spec.vocab_size),
    }


@lru_cache(maxsize=256)
def _model_sizes(spec: ModelSpec) -> dict[str, float]:
    """The factors that a model has, whatever it runs on; to be read only."""
    return {
        **_expert_sizes(spec),
        **_latent_sizes(spec),
        "kv_heads": spec.num_kv_heads,
        "group": spec.num_heads / spec.num_kv_heads,
        "group_plus_2": spec.num_heads / spec.num_kv_heads + 2,
        "half_head_dim": spec.head_dim / 2,
        "half_rotary": spec.rotary_dim / 2,
        "hidden": spec.hidden_size,
        "ffn": spec.intermediate_size,
        "vocab": spec.vocab_size,
        WIDTH: 1.0,
        "positions": spec.position_rows,
    }


class _Compiler:
    """Walks the places of a step in order and collects absolute live sets."""

    def __init__(self, sequence: StepSequence) -> None:
        self._sequence = sequence
        self._places = (*sequence.forward(), *sequence.backward())
        self._extents = [sequence.extent(place) for place in self._places]
        self._distinct = {id(extent): extent for extent in self._extents}
        live_sets = [live for e in self._distinct.values() for live in (e.net, *e.peaks)]
        names = {monomial for live in live_sets for _, monomial in live}
        self._monomials = tuple(sorted(names - set(FLAT_GROUPS)))
        self._column = {name: i for i, name in enumerate(self._monomials)}
        self._rows: list[tuple[Place, Floats, int, bool]] = []

    def moments(self) -> Moments:
        """The moments of the places that can decide a peak, over the state they begin from."""
        nets = {key: self._net(extent) for key, extent in self._distinct.items()}
        peaks = {key: self._peaks(extent) for key, extent in self._distinct.items()}
        decisive = self._decisive_layers()
        live = np.zeros((len(COMPONENTS), len(self._monomials)))
        for place, extent in zip(self._places, self._extents, strict=True):
            if not place.in_layer or place.layer in decisive:
                for dense, flat_key, at_end in peaks[id(extent)]:
                    self._rows.append((place, live + dense, flat_key, at_end))
            live = live + nets[id(extent)]
        place_of, constant, flat_key_of, at_end_of = zip(*self._rows, strict=True)
        return Moments(self._monomials, place_of, np.array(constant), flat_key_of, at_end_of)

    def _decisive_layers(self) -> set[int]:
        """Layers that can decide a peak.

        Where the same run of layers repeats, memory rises or falls by the same step each time, so
        of each layer in the run only the first and the last repetition can be the highest. At the end
        of the last layer but one an engine gathers for the last; after the last, for none.
        """
        last = self._sequence.last
        forward = [id(extent) for extent in self._extents[1 : last + 2]]
        backward = [id(extent) for extent in reversed(self._extents[-last - 2 : -1])]
        run = list(zip(forward, backward, strict=True))
        layers_of: dict[Any, list[int]] = {}
        for layer, identity in enumerate(run):
            layers_of.setdefault(identity, []).append(layer)
        decisive = {max(last - 1, 0)}
        for layers in layers_of.values():
            decisive |= {layers[0], layers[-1]}
            for before, layer, after in zip(layers, layers[1:], layers[2:], strict=False):
                if run[before:layer] != run[layer:after]:
                    decisive.add(layer)
        return decisive

    def _peaks(self, extent: Extent) -> list[tuple[Floats, int, bool]]:
        moments = [(*self._dense(live), False) for live in extent.peaks]
        return [*moments, (*self._dense(extent.net), True)]

    def _net(self, extent: Extent) -> Floats:
        net = self._dense(extent.net)[0]
        # What becomes of a finished gradient is the engine's affair (see `states`).
        net[COMPONENTS.index("gradients")] = 0.0
        return net

    def _dense(self, live: LiveSet) -> tuple[Floats, int]:
        dense = np.zeros((len(COMPONENTS), len(self._monomials)))
        flat_key = 0
        for (component, monomial), size_bytes in live.items():
            if monomial in FLAT_GROUPS:
                flat_key |= 1 << FLAT_GROUPS.index(monomial)
            else:
                dense[COMPONENTS.index(component), self._column[monomial]] += size_bytes
        return dense, flat_key
