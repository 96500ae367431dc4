"""Serving memory on one GPU: weights, key-value cache, prefill and sampling, what fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from planner.families import parameter_shapes
from planner.memory.overheads import CONTEXT_BYTES
from planner.model import ModelSpec, ParameterShape
from planner.rank import is_expert
from planner.units import MIB_BYTES
from planner.workload import KvDtype, ServingWorkload, WeightsDtype, flat_dict

KV_ELEMENT_BYTES = {
    KvDtype.BF16: 2,
    KvDtype.FP16: 2,
    KvDtype.FP32: 4,
    KvDtype.FP8: 1,
    KvDtype.INT8: 1,
}
# int8 entries need a scale for each token and head, fp32, for keys and for values; fp8 entries
# share one per tensor, which is negligible.
_INT8_KV_SCALE_BYTES = 4

# A long prompt is computed in pieces, as serving engines do, so its activations do not grow.
PREFILL_CHUNK_TOKENS = 2048
_ACTIVATION_ELEMENT_BYTES = 2
_INT4_GROUP = 128
_MXFP4_GROUP = 32

_SEGMENT_BYTES = 2 * MIB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Tensors of one kind: `count` of them, `bytes` in all, alive in `phases`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int
    component: str
    owner: str
    phases: tuple[str, ...]
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """What a serving plan holds: the ledger, the budget and how many requests fit."""

    ledger: tuple[LedgerEntry, ...]
    weights_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    activation_bytes: int
    budget_bytes: int
    kv_pool_bytes: int
    max_tokens: int
    max_sequences: int
    fits_sequences: bool

    @property
    def allocated_bytes(self) -> int:
        """Bytes of weights, cache of the requested sequences and the larger phase."""
        return max(_phase_bytes(self.ledger, phase) for phase in ("prefill", "decode"))

    @property
    def reserved_bytes(self) -> int:
        """Allocated bytes in whole 2 MiB segments."""
        return ceil(self.allocated_bytes / _SEGMENT_BYTES) * _SEGMENT_BYTES

    @property
    def device_bytes(self) -> int:
        """All bytes the driver counts: reserved and the CUDA context."""
        return self.reserved_bytes + CONTEXT_BYTES

    def serving_dict(self, replicas: int) -> dict[str, Any]:
        """Return the "serving" object of a prediction; each replica is one GPU."""
        return {
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_per_sequence": self.kv_bytes_per_sequence,
            "weights_bytes": self.weights_bytes,
            "activation_bytes": self.activation_bytes,
            "budget_bytes": self.budget_bytes,
            "kv_pool_bytes": self.kv_pool_bytes,
            "max_tokens": self.max_tokens,
            "max_sequences": self.max_sequences,
            "fits_sequences": self.fits_sequences,
            "replicas": replicas,
            "max_sequences_all_replicas": self.max_sequences * replicas,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the "memory" object of a prediction."""
        phases = {name: _phase_bytes(self.ledger, name) for name in ("prefill", "decode")}
        peak = max(phases, key=lambda name: phases[name])
        return {
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "device_bytes": self.device_bytes,
            "peak_phase": peak,
            "rank": 0,
            "phases": [_phase_dict(self.ledger, name, phases[name]) for name in phases],
            "components": _components(self.ledger, peak),
            "overheads": [
                {
                    "name": "segments",
                    "bytes": self.reserved_bytes - self.allocated_bytes,
                    "formula": "allocated bytes rounded up to 2 MiB",
                },
                {
                    "name": "context",
                    "bytes": CONTEXT_BYTES,
                    "formula": "CUDA context and kernels, measured on an H200",
                },
            ],
            "ledger": [flat_dict(entry) for entry in self.ledger],
        }


_PHASE_LABELS = {
    "prefill": "Prefill of one prompt chunk",
    "decode": "Decode of all sequences at full context",
}


def _phase_bytes(ledger: Iterable[LedgerEntry], phase: str) -> int:
    return sum(entry.bytes for entry in ledger if phase in entry.phases)


def _phase_dict(ledger: Iterable[LedgerEntry], phase: str, total_bytes: int) -> dict[str, Any]:
    parts: dict[str, int] = {}
    for entry in ledger:
        if phase in entry.phases:
            parts[entry.component] = parts.get(entry.component, 0) + entry.bytes
    label = _PHASE_LABELS[phase]
    return {"name": phase, "label": label, "allocated_bytes": total_bytes, "parts": parts}


def _components(ledger: Iterable[LedgerEntry], peak: str) -> list[dict[str, Any]]:
    found: dict[str, list[LedgerEntry]] = {}
    for entry in ledger:
        if peak in entry.phases:
            found.setdefault(entry.component, []).append(entry)
    return [
        {"name": name, "bytes": sum(e.bytes for e in entries), "formula": _formula(entries)}
        for name, entries in found.items()
    ]


def _formula(entries: list[LedgerEntry]) -> str:
    """Return one formula for the entries of a component: weights by element type, others added."""
    if entries[0].component != "parameters":
        return " + ".join(entry.formula for entry in entries)
    elements: dict[str, int] = {}
    for entry in entries:
        elements[entry.dtype] = elements.get(entry.dtype, 0) + prod(entry.shape) * entry.count
    stored = " + ".join(f"{count:,} parameters in {dtype}" for dtype, count in elements.items())
    return f"{stored}, scales included" if len(elements) > 1 else stored


def _is_quantised(spec: ModelSpec, parameter: ParameterShape, dtype: WeightsDtype) -> bool:
    # GPT-OSS publishes its experts in MXFP4 and all else in bf16.
    if dtype is WeightsDtype.MXFP4 and spec.num_experts and not is_expert(parameter):
        return False
    # The router decides between experts on small differences: quantisers leave it alone.
    return (
        parameter.group == "layer"
        and len(parameter.shape) > 1
        and not parameter.name.endswith(("mlp.gate.weight", "mlp.router.weight", "bias"))
    )


def _inputs_and_outputs(family: str, parameter: ParameterShape) -> tuple[int, int]:
    """Return the input width and the number of output rows of a weight (experts as rows)."""
    # GPT-2 and GPT-OSS's experts store inputs as rows.
    inputs = parameter.shape[-1]
    if family == "gpt2" or (family == "gpt_oss" and is_expert(parameter)):
        inputs = parameter.shape[-2]
    return inputs, parameter.numel // inputs


def quantised_bytes(numel: int, inputs: int, outputs: int, dtype: WeightsDtype) -> int:
    """Return the bytes of one quantised weight with its scales.

    fp8: 1 B an element, one fp32 scale. int8: 1 B an element, one fp16 scale per output row.
    int4: half a byte an element; each group of 128 inputs of a row has an fp16 scale and a 4-bit
    zero point. mxfp4: half a byte an element, each group of 32 inputs of a row has a scale of one
    byte (OCP Microscaling Formats specification 1.0).
    """
    if dtype is WeightsDtype.FP8:
        return numel + 4
    if dtype is WeightsDtype.INT8:
        return numel + 2 * outputs
    if dtype is WeightsDtype.MXFP4:
        return ceil(numel / 2) + ceil(inputs / _MXFP4_GROUP) * outputs
    groups = ceil(inputs / _INT4_GROUP) * outputs
    return ceil(numel / 2) + 2 * groups + ceil(groups / 2)


def _weight_entry(
    spec: ModelSpec, parameter: ParameterShape, workload: ServingWorkload
) -> LedgerEntry:
    dtype = workload.weights_dtype
    plain = dtype in (WeightsDtype.BF16, WeightsDtype.FP16, WeightsDtype.FP32)
    if plain or not _is_quantised(spec, parameter, dtype):
        stored = dtype if plain else WeightsDtype.BF16
        element_bytes = 4 if stored is WeightsDtype.FP32 else 2
        one_bytes = parameter.numel * element_bytes
        formula = f"{parameter.numel:,} elements x {element_bytes} B x {parameter.count}"
    else:
        stored = dtype
        inputs, outputs = _inputs_and_outputs(spec.family, parameter)
        one_bytes = quantised_bytes(parameter.numel, inputs, outputs, dtype)
        formula = f"{parameter.numel:,} elements in {dtype} with scales x {parameter.count}"
    return LedgerEntry(
        name=parameter.name,
        shape=parameter.shape,
        dtype=str(stored),
        count=parameter.count,
        bytes=one_bytes * parameter.count,
        component="parameters",
        owner=parameter.group,
        phases=("prefill", "decode"),
        formula=formula,
    )


def _cached_vectors(spec: ModelSpec) -> tuple[int, int]:
    """Return the vectors that a layer caches per token and the elements of all of them.

    Keys and values of every key-value head; latent attention caches one latent and the rotated
    part of the keys, for all heads together.
    """
    if spec.latent is not None:
        return 2, spec.latent.kv_rank + spec.latent.rope_dim
    return 2 * spec.num_kv_heads, 2 * spec.kv_size


def kv_bytes_per_layer_token(spec: ModelSpec, dtype: KvDtype) -> int:
    """Return the bytes that a layer caches per token: its cached elements, with int8 scales.

    2 x kv_heads x head_dim elements, or kv_lora_rank + qk_rope_head_dim of latent attention.
    """
    vectors, elements = _cached_vectors(spec)
    scales_bytes = _INT8_KV_SCALE_BYTES * vectors if dtype is KvDtype.INT8 else 0
    return elements * KV_ELEMENT_BYTES[dtype] + scales_bytes


def kv_bytes_per_token(spec: ModelSpec, dtype: KvDtype) -> int:
    """Return the cache bytes that one more token costs while no window is full."""
    return spec.num_layers * kv_bytes_per_layer_token(spec, dtype)


def kv_sequence_bytes(spec: ModelSpec, dtype: KvDtype, tokens: int) -> int:
    """Return the cache of one request of `tokens`; a sliding layer stops at its window."""
    windowed = min(tokens, spec.sliding_window or tokens)
    full_layers = spec.num_layers - spec.num_sliding_layers
    stored = full_layers * tokens + spec.num_sliding_layers * windowed
    return stored * kv_bytes_per_layer_token(spec, dtype)


def _kv_entry(
    spec: ModelSpec, workload: ServingWorkload, sliding: bool, layers: int
) -> LedgerEntry:
    tokens = workload.context_length
    window = spec.sliding_window if sliding else None
    tokens = min(tokens, window) if window else tokens
    per_token_bytes = kv_bytes_per_layer_token(spec, workload.kv_dtype)
    kind = "sliding" if sliding else "full"
    shape: tuple[int, ...] = (2, workload.sequences, spec.num_kv_heads, tokens, spec.head_dim)
    elements = f"2 x {spec.num_kv_heads} heads x {spec.head_dim}"
    if spec.latent is not None:
        shape = (workload.sequences, tokens, spec.latent.kv_rank + spec.latent.rope_dim)
        elements = f"{spec.latent.kv_rank} latent + {spec.latent.rope_dim} rotated"
    return LedgerEntry(
        name=f"kv_cache.{kind}",
        shape=shape,
        dtype=str(workload.kv_dtype),
        count=layers,
        bytes=layers * workload.sequences * tokens * per_token_bytes,
        component="kv_cache",
        owner="layer",
        phases=("prefill", "decode"),
        formula=(
            f"{layers} layers x {workload.sequences} sequences x {tokens:,} tokens x "
            f"{per_token_bytes:,} B ({elements} x {workload.kv_dtype})"
        ),
    )


def _activation_width(spec: ModelSpec) -> int:
    """Return the elements alive per token at the widest moment of a layer, without autograd.

    Residual and normed input, with either q, k, v and the attention output, or the MLP's wide
    tensors: gate, up and their product (two for a plain MLP), once per expert visited.
    """
    attention = spec.query_size + spec.attended_size
    attention += spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    expert_width = spec.experts_per_token * spec.expert_size + spec.shared_expert_size
    dense_width = spec.intermediate_size if spec.num_expert_layers < spec.num_layers else 0
    mlp = spec.mlp_products * max(dense_width, expert_width)
    return 2 * spec.hidden_size + max(attention, mlp)


def _activation_entry(spec: ModelSpec, phase: str, tokens: int, element_bytes: int) -> LedgerEntry:
    width = _activation_width(spec)
    return LedgerEntry(
        name=f"{phase}.activations",
        shape=(tokens, width),
        dtype="fp32" if element_bytes == 4 else "16-bit",
        count=1,
        bytes=tokens * width * element_bytes,
        component="activations",
        owner="layer",
        phases=(phase,),
        formula=f"{tokens:,} tokens x {width:,} elements of the widest layer x {element_bytes} B",
    )


def _logits_entry(spec: ModelSpec, phase: str, rows: int, element_bytes: int) -> LedgerEntry:
    return LedgerEntry(
        name=f"{phase}.logits",
        shape=(rows, spec.vocab_size),
        dtype="compute + fp32",
        count=1,
        bytes=rows * spec.vocab_size * (element_bytes + 4),
        component="logits",
        owner="head",
        phases=(phase,),
        formula=f"{rows:,} rows x {spec.vocab_size:,} x ({element_bytes} B + 4 B for sampling)",
    )


def _ledger(spec: ModelSpec, workload: ServingWorkload) -> tuple[LedgerEntry, ...]:
    element_bytes = 4 if workload.weights_dtype is WeightsDtype.FP32 else _ACTIVATION_ELEMENT_BYTES
    sliding = spec.num_sliding_layers
    kinds = ((False, spec.num_layers - sliding), (True, sliding))
    chunk = min(workload.context_length, PREFILL_CHUNK_TOKENS)
    return (
        *(_weight_entry(spec, p, workload) for p in parameter_shapes(spec)),
        *(_kv_entry(spec, workload, kind, layers) for kind, layers in kinds if layers),
        _activation_entry(spec, "prefill", chunk, element_bytes),
        _logits_entry(spec, "prefill", 1, element_bytes),
        _activation_entry(spec, "decode", workload.sequences, element_bytes),
        _logits_entry(spec, "decode", workload.sequences, element_bytes),
    )


def _max_tokens(spec: ModelSpec, dtype: KvDtype, context_length: int, pool_bytes: int) -> int:
    """Return how many cached tokens the pool holds in requests of `context_length`.

    Whole requests first, then one shorter request in what is left.
    """
    per_layer_bytes = kv_bytes_per_layer_token(spec, dtype)
    whole, rest_bytes = divmod(pool_bytes, kv_sequence_bytes(spec, dtype, context_length))
    window = min(spec.sliding_window or context_length, context_length)
    to_window = min(rest_bytes // (spec.num_layers * per_layer_bytes), window)
    rest_bytes -= to_window * spec.num_layers * per_layer_bytes
    full_layers = spec.num_layers - spec.num_sliding_layers
    beyond = rest_bytes // (full_layers * per_layer_bytes) if full_layers else 0
    last = to_window + (beyond if to_window == window else 0)
    return whole * context_length + min(last, context_length)


def _activation_bytes(ledger: Iterable[LedgerEntry], phase: str) -> int:
    return sum(
        entry.bytes
        for entry in ledger
        if phase in entry.phases and entry.component in ("activations", "logits")
    )


def serving_memory(spec: ModelSpec, workload: ServingWorkload, visible_bytes: int) -> ServingMemory:
    """Return the memory of a serving plan on a GPU with `visible_bytes`.

    The cache may take what is left of utilization x visible after weights, the larger phase's
    activations and logits, and the CUDA context. More sequences also need more decode activations:
    `max_sequences` is the largest number for which both phases stay within the budget.
    """
    ledger = _ledger(spec, workload)
    weights_bytes = sum(entry.bytes for entry in ledger if entry.component == "parameters")
    prefill_bytes = _activation_bytes(ledger, "prefill")
    decode_bytes = _activation_bytes(ledger, "decode")
    budget_bytes = int(workload.utilization * visible_bytes)
    # Allocated bytes are rounded up to whole segments.
    usable_bytes = (budget_bytes - CONTEXT_BYTES) // _SEGMENT_BYTES * _SEGMENT_BYTES
    left_bytes = max(usable_bytes - weights_bytes, 0)
    pool_bytes = max(left_bytes - max(prefill_bytes, decode_bytes), 0)
    sequence_bytes = kv_sequence_bytes(spec, workload.kv_dtype, workload.context_length)
    max_sequences = min(
        max(left_bytes - prefill_bytes, 0) // sequence_bytes,
        left_bytes // (sequence_bytes + decode_bytes // workload.sequences),
    )
    return ServingMemory(
        ledger=ledger,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token(spec, workload.kv_dtype),
        kv_bytes_per_sequence=sequence_bytes,
        activation_bytes=max(prefill_bytes, decode_bytes),
        budget_bytes=budget_bytes,
        kv_pool_bytes=pool_bytes,
        max_tokens=_max_tokens(spec, workload.kv_dtype, workload.context_length, pool_bytes),
        max_sequences=max_sequences,
        fits_sequences=workload.sequences <= max_sequences,
    )
