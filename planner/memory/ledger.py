"""The ledger: every byte of a predicted peak under the name of the tensor that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from planner.memory.adapters import trained_groups
from planner.memory.groups import (
    BACKWARD_SECTIONS,
    FORWARD_SECTIONS,
    Place,
    group_numels,
    layer_ranges,
)
from planner.memory.optimizers import state_words
from planner.memory.states import Parts, Precisions, compute_bytes, parameter_stage
from planner.memory.templates import (
    SavedTensor,
    Traced,
    load_saved,
    monomial_values,
    template_family,
    template_versions,
)
from planner.memory.timeline import EngineStates, Moment
from planner.model import ModelSpec
from planner.rank import with_all_experts
from planner.units import format_bytes
from planner.workload import Engine, Parallelism, TrainingWorkload

_DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}
_ALL_PHASES = (
    "forward",
    "loss_forward",
    "loss_backward",
    "backward_first",
    "backward_last",
    "optimizer",
)
_UNTIL_BACKWARD = _ALL_PHASES[:-1]
# The last phase in which what a forward section saved is still alive.
_SAVED_UNTIL = {"loss": 3, "head": 3}
_SAVED_FROM = {"loss": 1}
# Sides of traced shapes that the trace wrote as the product of its small model's own sizes (batch
# 13, 11 key-value heads of 17 query heads each, 8,221 tokens, heads of 122, an MLP of 31; see `runners.trace`).
_STAND_INS = {
    "62": "2*ffn",
    "221": "batch*heads",
    "2431": "batch*heads",
    "2318": "group_plus_2*head_dim",
    "25498": "kv_heads*group_plus_2*head_dim",
    "74987": "heads*nope_dim+value_dim",
    "8222": "seq_and_one",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One kind of tensor: `count` tensors of `shape` that hold `size_bytes` together at the peak."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    count: int
    size_bytes: int
    component: str
    owner: str
    phases: tuple[str, ...]
    formula: str

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger row of a prediction."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "count": self.count,
            "bytes": self.size_bytes,
            "component": self.component,
            "owner": self.owner,
            "phases": list(self.phases),
            "formula": self.formula,
        }


def entries(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    states: EngineStates,
    peak: Moment,
    template: Traced,
    others: Sequence[Entry] = (),
) -> tuple[Entry, ...]:
    """The ledger at the peak; its bytes sum to the peak's, part by part.

    What a part holds beyond its named tensors (values in the middle of an operation, gradients of
    the running layer) is one row that says so.
    """
    rows = [
        *_state_entries(spec, workload.of_any_size(), parallelism, states),
        *_saved_entries(spec, workload, peak.place, template),
        *others,
    ]
    return (*rows, *_rest(rows, peak))


@lru_cache(maxsize=256)
def _state_entries(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, states: EngineStates
) -> tuple[Entry, ...]:
    """What an engine keeps; engines' states are known by themselves, for they do not change."""
    return tuple(_state_rows(spec, workload, parallelism, states))


def _state_rows(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, states: EngineStates
) -> Iterator[Entry]:
    sizes = Precisions.of(
        *(workload.precision, parallelism.engine, _parameter_stage(spec, parallelism)),
        offloads=workload.offload_optimizer,
    )
    for group, count, kept, stepped, optimizer_states, itemsize in states.held_numels():
        stored = itemsize or sizes.parameter
        yield _state_entry(f"{group} parameters", kept, stored, count, "parameters")
        if sizes.master and stepped:
            yield _state_entry(f"{group} master weights", stepped, sizes.master, count, "optimizer")
        for state in optimizer_states:
            if state.numel:
                name = f"{group} {state.name}"
                yield _state_entry(name, state.numel, state.itemsize, count, "optimizer")


def _state_entry(name: str, numel: int, itemsize: int, count: int, component: str) -> Entry:
    return Entry(
        name=name,
        shape=(int(numel),),
        dtype=_DTYPES[itemsize],
        count=count,
        size_bytes=int(numel) * itemsize * count,
        component=component,
        owner="engine",
        phases=_ALL_PHASES,
        formula=f"{count} x {int(numel):,} elements x {itemsize} B",
    )


def _saved_entries(
    spec: ModelSpec, workload: TrainingWorkload, place: Place, template: Traced
) -> Iterator[Entry]:
    rows, monomials = _alive_rows(template, spec.num_layers, spec.trace is None, place)
    numels = monomial_values(
        spec, monomials, workload.micro_batch, workload.sequence_length, workload.lora_rank
    )
    value = dict(zip(monomials, numels.tolist(), strict=True))
    for row, count, formula in rows:
        tensor = row.tensor
        one_bytes = value[tensor.monomial] * tensor.coefficient_bytes
        yield Entry(
            row.name,
            row.sides,
            tensor.dtype,
            count,
            round(one_bytes * count),
            row.component,
            "saved for backward",
            row.phases,
            formula,
        )


class _SavedRow(NamedTuple):
    """What the ledger says of a saved tensor whatever its size; `one` is its shape in words."""

    tensor: SavedTensor
    name: str
    sides: tuple[str, ...]
    component: str
    phases: tuple[str, ...]
    one: str


@lru_cache(maxsize=512)
def _saved_rows(template: Traced, num_layers: int, is_of_family: bool) -> tuple[_SavedRow, ...]:
    """The rows of all saved tensors of a template."""
    return tuple(_saved_row(tensor, num_layers, is_of_family) for tensor in load_saved(template))


@lru_cache(maxsize=512)
def _alive_rows(
    template: Traced, num_layers: int, is_of_family: bool, place: Place
) -> tuple[tuple[tuple[_SavedRow, int, str], ...], tuple[str, ...]]:
    """The rows that are alive at a place, of how many tensors and how they are written; monomials."""
    counted = [
        (row, _num_alive(row.tensor.places, place))
        for row in _saved_rows(template, num_layers, is_of_family)
    ]
    alive = tuple((row, count, f"{count} x {row.one}") for row, count in counted if count)
    return alive, tuple(dict.fromkeys(row.tensor.monomial for row, *_ in alive))


def kept_parts(spec: ModelSpec, template: Traced, micro_batch: Any, sequence_length: Any) -> Parts:
    """Bytes that a forward up to the head leaves for its backward; values may be arrays."""
    saved = load_saved(template)
    monomials = tuple({tensor.monomial for tensor in saved})
    numels = monomial_values(spec, monomials, micro_batch, sequence_length)
    value = dict(zip(monomials, numels, strict=True))
    parts: Parts = {}
    for tensor in saved:
        count = _num_alive(tensor.places, Place("head"))
        size_bytes = value[tensor.monomial] * (tensor.coefficient_bytes * count)
        component = _saved_component(tensor)
        parts[component] = parts.get(component, 0) + size_bytes
    return parts


def _saved_row(tensor: SavedTensor, num_layers: int, is_of_family: bool) -> _SavedRow:
    section, sides = tensor.places[0].section, tensor.shape
    if is_of_family:
        sides = tuple(_STAND_INS.get(side, side) for side in sides)
    return _SavedRow(
        tensor=tensor,
        name=f"{_where(tensor, num_layers)}: {tensor.module} ({tensor.op})",
        sides=sides,
        component=_saved_component(tensor),
        phases=_UNTIL_BACKWARD[_SAVED_FROM.get(section, 0) : _SAVED_UNTIL.get(section, 5)],
        one=f"[{' x '.join(sides)}] {tensor.dtype}",
    )


def _saved_component(tensor: SavedTensor) -> str:
    names = tensor.monomial.split("*")
    if "vocab" in names and "seq" in names:
        return "logits"
    return "attention" if names.count("seq") == 2 else "activations"


def _where(tensor: SavedTensor, num_layers: int) -> str:
    section, layers = tensor.places[0].section, [place.layer for place in tensor.places]
    if section != "layer" or len(layers) == num_layers:
        return section
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layer_ranges(layers)}"


@lru_cache(maxsize=4096)
def _num_alive(kept: tuple[Place, ...], place: Place) -> int:
    return sum(_is_alive(one, place) for one in kept)


def _is_alive(kept: Place, place: Place) -> bool:
    """Whether what the forward keeps at `kept` is there as `place` begins."""
    if place.section not in (*FORWARD_SECTIONS, *BACKWARD_SECTIONS):
        return False
    if not place.in_backward:
        return _forward_order(kept) < _forward_order(place)
    if place.section == "layer_backward":
        return kept.section == "embed" or (kept.in_layer and kept.layer <= place.layer)
    return place.section == "loss_backward" or kept.section == "embed"


def _forward_order(place: Place) -> tuple[int, int]:
    return FORWARD_SECTIONS.index(place.section), place.layer


def _rest(rows: list[Entry], peak: Moment) -> Iterator[Entry]:
    named = dict.fromkeys(peak.parts, 0)
    for row in rows:
        if row.component in named:
            named[row.component] += row.size_bytes
    for component, part_bytes in peak.parts.items():
        left = round(float(part_bytes)) - named[component]
        if left:
            yield Entry(
                name=_REST_NAMES.get(component, f"{component} of the running operation"),
                shape=(),
                dtype="",
                count=1,
                size_bytes=left,
                component=component,
                owner=_REST_OWNERS.get(component, "running operation"),
                phases=(),
                formula=f"{format_bytes(left)} at the peak beyond the tensors named above",
            )


_REST_NAMES = {
    "gathered": "gathered parameters",
    "gradients": "gradients",
    "workspace": "cuBLAS workspaces",
    "temporary": "temporaries",
    "rounding": "unsplit ends of blocks",
}
_REST_OWNERS = {
    "gathered": "engine",
    "gradients": "engine",
    "workspace": "library",
    "rounding": "allocator",
}


def formulas(
    spec: ModelSpec, workload: TrainingWorkload, parallelism: Parallelism, peak: Moment
) -> dict[str, str]:
    """One line per part: how its bytes come about, with the numbers in it."""
    stage, ranks = parallelism.zero_stage, parallelism.world_size
    offloads = workload.offload_optimizer
    kept_stage = _parameter_stage(spec, parallelism)
    sizes = Precisions.of(workload.precision, parallelism.engine, kept_stage, offloads)
    total = f"{sum_parameters(spec):,} parameters"
    # Experts that several ranks split are sharded over fewer of them: as all experts over all ranks.
    spread = f"{sum_parameters(with_all_experts(spec)):,} parameters"
    trained = trained_groups(spec, workload)
    stepped, reduced = (spread if stage >= 1 else total), (spread if stage >= 2 else total)
    if trained is not None:
        stepped = reduced = f"{int(trained.trained.total()):,} trained parameters"
    states = state_words(workload.optimizer, sizes.state, sizes.master)
    is_ours = parallelism.engine is Engine.PEAKMARK
    shards_parameters = stage == 3 or parallelism.engine is Engine.FSDP2
    shards_parameters = shards_parameters or (is_ours and kept_stage > 0)
    deals_out = parallelism.engine is Engine.ZERO_REDUNDANCY
    whole = ", dealt out by whole parameters" if deals_out else ""
    tokens = f"{workload.micro_batch} x {workload.sequence_length:,} tokens"
    layers = f"{spec.num_layers} layers"
    kept = spread if shards_parameters else total
    if workload.lora_rank:
        kept = f"({kept} + {stepped})"
    parameters = f"{kept} x {sizes.parameter} B"
    if trained is not None and is_ours and kept_stage in (1, 2):
        # What is not trained stays whole.
        frozen_bytes = compute_bytes(workload.precision)
        parameters = f"{int(trained.frozen.total()):,} frozen parameters x {frozen_bytes} B + "
        parameters += f"{stepped} x {sizes.parameter} B"
    return {
        "parameters": parameters + _over(ranks, shards_parameters),
        "optimizer": f"{stepped} x {states}" + _over(ranks, stage >= 1, whole),
        "gradients": f"{reduced} x {sizes.gradient} B, what is alive in "
        f"{_words(peak.place)}" + _over(ranks, stage >= 2, " once reduced"),
        "gathered": f"whole parameters of the units in use in {_words(peak.place)}",
        "activations": f"tensors saved for backward: {tokens}, {layers}, traced from the real "
        f"module of transformers {template_versions(template_family(spec))['transformers']}",
        "attention": f"scores: {workload.micro_batch} x {spec.num_heads} heads x "
        f"{workload.sequence_length:,} squared, per layer",
        "logits": f"{tokens} x {spec.vocab_size:,} vocabulary, the copies alive at once",
        "temporary": f"values in the middle of {_words(peak.place)}",
        "workspace": "two cuBLAS workspaces: main and autograd thread",
        "rounding": "blocks larger than their tensor: 512 B steps, remainders up to 1 MiB unsplit",
    }


def _parameter_stage(spec: ModelSpec, parallelism: Parallelism) -> int:
    stage = parallelism.zero_stage
    return parameter_stage(spec, stage) if parallelism.engine is Engine.PEAKMARK else stage


def sum_parameters(spec: ModelSpec) -> int:
    """All parameters, from the groups."""
    return int(group_numels(spec).total())


def _over(ranks: int, sharded: bool, suffix: str = "") -> str:
    return f" / {ranks} ranks{suffix}" if sharded and ranks > 1 else ""


def _words(place: Place) -> str:
    words = place.section.replace("_", " ")
    return f"{words} {place.layer}" if place.in_layer else words
