"""What decode and serve runs are predicted to take and to hold, and beside that what they measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from planner.calibration import sheet_of
from planner.comparison import Comparison
from planner.decode_run import CacheDtype, CacheKind, DecodeRun, WeightDtype, parse_decode
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.memory.overheads import CONTEXT_BYTES
from planner.model import ModelSpec
from planner.records import Kind, RecordedRow
from planner.serve_run import GRAPH_CHUNKS, MAX_GRAPH_TOKENS, ServeRun, parse_serve
from planner.serving.fitted import FITTED_PREFILLS, FITTED_STEPS
from planner.serving.times import ServedModel, StepTimes
from planner.units import MIB_BYTES, format_bytes, format_seconds, format_signed
from planner.workload import KvDtype, WeightsDtype

# A prefill runs as many rows at once as have so many tokens together; the first steps are not timed
# (`runners/jobs/decode.py`).
PREFILL_TOKENS, WARMUP_STEPS = 32_768, 3
# cuBLAS keeps a workspace for each stream; a graph is captured on one and warmed up on another.
WORKSPACE_BYTES = 32 * MIB_BYTES
# A decode run holds three, as recorded rows do: of the stream it runs on, of the warm-up's and the capture's.
_DECODE_WORKSPACES = 3
_SCALE_BYTES = 4
_ELEMENT_BYTES = {WeightDtype.BF16: 2, WeightDtype.FP16: 2, WeightDtype.FP32: 4}
_KV_DTYPES = {
    CacheDtype.FP8: KvDtype.FP8,
    CacheDtype.INT8: KvDtype.INT8,
}
# Hidden states alive where a layer is widest: the model's input, the layer's, the residual, what the
# MLP or the experts read and what they return.
_HIDDEN_STATES = 5
# Tensors of the width hidden x experts per token at the peak of a mixture: gathered rows, the experts'
# results, these weighted, and put back in order.
_ROUTED_STATES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RanAs:
    """How a run was made that today would be made otherwise; the defaults are today's.

    `joins_qkv`: query, key and value were one product. `prefill_graphs`: prefills of few tokens over pages
    were CUDA graphs. `graphs_replayed`: a served trace began after every graph had been replayed once; a
    first replay takes 0.3 to 0.8 ms more.
    """

    joins_qkv: bool = True
    prefill_graphs: bool = True
    graphs_replayed: bool = True

    @classmethod
    def of(cls, kind: Kind, measured: Mapping[str, Any]) -> RanAs:
        """Return how a stored run was made; what a served one joined is not written down."""
        joined = "joined_qkv" in (measured.get("fused") or {})
        return cls(
            joins_qkv=joined or kind is Kind.SERVE,
            prefill_graphs="prefill_graph" in measured,
            graphs_replayed="graphs_replayed_before" in measured or kind is Kind.DECODE,
        )


TODAY = RanAs()


def served_model(
    run: DecodeRun | ServeRun, spec: ModelSpec, gpu: Gpu, ran: RanAs = TODAY
) -> ServedModel:
    """Return what a run serves, as `StepTimes` takes it."""
    return ServedModel(
        spec=spec,
        gpu=gpu,
        weights_dtype=WeightsDtype(str(run.dtype)),
        kv_dtype=kv_dtype_of(run),
        token_scales=True,
        expands_latents=True,
        graphs=run.graphs,
        joins_qkv=ran.joins_qkv,
        graphed_tokens=_graphed_tokens(run) if ran.prefill_graphs else 0,
        fused=run.fused,
    )


def _graphed_tokens(run: DecodeRun | ServeRun) -> int:
    """Tokens before a chunk from which on its prefill is no graph, 0 for none at all."""
    if isinstance(run, ServeRun):
        return GRAPH_CHUNKS * run.chunk_tokens
    return 1 if run.cache is CacheKind.PAGED else 0


def kv_dtype_of(run: DecodeRun | ServeRun) -> KvDtype:
    """Return the dtype of a run's cache."""
    return _KV_DTYPES.get(run.cache_dtype, KvDtype(str(run.dtype)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePrediction:
    """What a decode run is predicted to take; the peaks are of allocated bytes."""

    prefill_time_s: float
    decode_time_s: float
    weights_bytes: int
    cache_bytes: int
    prefill_peak_allocated_bytes: int
    decode_peak_allocated_bytes: int


def predict_decode(
    run: DecodeRun, spec: ModelSpec, gpu: Gpu, ran: RanAs = TODAY
) -> DecodePrediction:
    """Return the times of a run's prefill and of a step half way through its timed ones, and its bytes."""
    times = StepTimes(served_model(run, spec, gpu, ran))
    weights, cache = weights_bytes(spec, run.dtype), decode_cache_bytes(run, spec)
    cache_held = cache
    element_bytes = _ELEMENT_BYTES[run.dtype]
    rows = rows_at_once(run)
    middle = run.context + 1 + (WARMUP_STEPS + run.new_tokens - 1) // 2
    prefilling = widest_bytes(spec, rows * run.context, element_bytes) + WORKSPACE_BYTES
    if ran.prefill_graphs and run.cache is CacheKind.PAGED:
        # The spare page, and a workspace more where the prefill is a graph.
        cache_held += run.page_size * spec.num_layers * _token_bytes(run, spec)
        prefilling += WORKSPACE_BYTES * is_graphed(run)
    decoding = widest_bytes(spec, run.batch, element_bytes) + _DECODE_WORKSPACES * WORKSPACE_BYTES
    decoding += run.batch * spec.vocab_size * element_bytes
    return DecodePrediction(
        prefill_time_s=_prefill_s(times, run, rows),
        decode_time_s=times.decode_s(run.batch, run.batch * middle),
        weights_bytes=weights,
        cache_bytes=cache,
        prefill_peak_allocated_bytes=weights + cache_held + prefilling,
        decode_peak_allocated_bytes=weights + cache_held + decoding,
    )


def _prefill_s(times: StepTimes, run: DecodeRun, rows: int) -> float:
    whole, rest = divmod(run.batch, rows)
    total_s = whole * times.prefill_s(run.context, 0, rows)
    return total_s + (times.prefill_s(run.context, 0, rest) if rest else 0.0)


def weights_bytes(spec: ModelSpec, dtype: WeightDtype) -> int:
    """Return the bytes of all parameters of a run's model."""
    return spec.parameters * _ELEMENT_BYTES[dtype]


def decode_cache_bytes(run: DecodeRun, spec: ModelSpec) -> int:
    """Return the bytes of a decode run's cache: room for all rows at their end."""
    tokens = run.batch * run.capacity
    if run.cache is CacheKind.PAGED:
        tokens = run.batch * ceil(run.capacity / run.page_size) * run.page_size
    return tokens * spec.num_layers * _token_bytes(run, spec)


def _token_bytes(run: DecodeRun | ServeRun, spec: ModelSpec) -> int:
    """Bytes of a token in a layer of our caches: latents expanded, values as wide as keys."""
    vectors = 2 * (spec.num_heads if spec.latent else spec.num_kv_heads)
    if run.cache_dtype is CacheDtype.MODEL:
        return vectors * spec.head_dim * _ELEMENT_BYTES[run.dtype]
    return vectors * (spec.head_dim + _SCALE_BYTES)


def widest_bytes(spec: ModelSpec, tokens: int, element_bytes: int) -> int:
    """Return what a forward of so many tokens holds at its widest: a layer's MLP or experts.

    Hidden states, with gate and up joined and their product, or a mixture's gathered and returned rows.
    DeepSeek weights them in fp32, so these two count twice.
    """
    routed = spec.experts_per_token * spec.hidden_size
    wide = _ROUTED_STATES * routed + (2 * routed if spec.latent else 0)
    if not spec.num_expert_layers:
        wide = spec.mlp_products * spec.intermediate_size
    return tokens * (_HIDDEN_STATES * spec.hidden_size + wide) * element_bytes


def graphs_bytes(widths: int) -> int:
    """Return the workspaces of a server with steps of so many widths: one for each, and one for all prefills."""
    return (widths + 1) * WORKSPACE_BYTES


def serve_peak_bytes(run: ServeRun, spec: ModelSpec) -> int:
    """Return the most bytes that serving a trace allocates: weights, pages, a chunk and the graphs.

    Steps are captured at every power of two of rows, and at all of them.
    """
    widths = {min(run.rows, 1 << (rows - 1).bit_length()) for rows in range(1, run.rows + 1)}
    element_bytes = _ELEMENT_BYTES[run.dtype]
    longest = max(one.prompt_tokens for one in run.trace)
    page = run.page_size * spec.num_layers * _token_bytes(run, spec)
    held = weights_bytes(spec, run.dtype) + run.pages * page
    held += widest_bytes(spec, min(run.chunk_tokens, longest), element_bytes)
    if not run.graphs:
        return held + WORKSPACE_BYTES
    return held + page + sum(widths) * spec.vocab_size * element_bytes + graphs_bytes(len(widths))


def check_room(run: ServeRun, spec: ModelSpec, gpu: Gpu) -> None:
    """Raise PlanError where a GPU has no room for a served run's weights, chunk, graphs and pages."""
    excess = serve_peak_bytes(run, spec) + CONTEXT_BYTES - gpu.visible_bytes
    if excess <= 0:
        return
    page_bytes = run.page_size * spec.num_layers * _token_bytes(run, spec)
    most = run.pages - ceil(excess / page_bytes)
    sentence = f"serve.pages is {run.pages}: beside {spec.name}'s weights {gpu.name} has room for "
    sentence += f"{most} pages of {run.page_size} tokens." if most > 0 else "none."
    raise PlanError("serve.pages", run.pages, f"at most {max(most, 0)}", sentence=sentence)


def compare_served(row: RecordedRow) -> list[Comparison]:
    """Pair what a decode or serve row measured with today's prediction; none without a GPU of ours.

    A time that a constant was fitted to is left out.
    """
    gpu = sheet_of(row.environment)
    if gpu is None:
        return []
    if row.kind is Kind.SERVE:
        served, spec = parse_serve(row.spec["serve"])
        peak_bytes = serve_peak_bytes(served, spec)
        return _comparisons([("serve_allocated", peak_bytes, "allocated_bytes")], row.measured)
    run, spec = parse_decode(row.spec["decode"])
    by_host = waits_for_host(row, run)
    left_out = {name for name in ("prefill_time", "decode_time") if is_fitted(name, run, spec)}
    return [
        replace(one, quantity="prefill_by_host_time")
        if by_host and one.quantity == "prefill_time"
        else one
        for one in compare_decode(row.spec["decode"], row.measured, gpu)
        if one.quantity not in left_out
    ]


def compare_decode(given: object, measured: Mapping[str, Any], gpu: Gpu) -> list[Comparison]:
    """Pair what a decode run on a GPU measured with today's prediction of it as it was made."""
    run, spec = parse_decode(given)
    found = predict_decode(run, spec, gpu, RanAs.of(Kind.DECODE, measured))
    peaks = ("prefill_peak_allocated_bytes", "decode_peak_allocated_bytes")
    pairs: list[tuple[str, float, str]] = [
        ("decode_weights", found.weights_bytes, "weights_bytes"),
        ("decode_cache", found.cache_bytes, "cache_bytes"),
        ("prefill_allocated", found.prefill_peak_allocated_bytes, peaks[0]),
        ("decode_allocated", found.decode_peak_allocated_bytes, peaks[1]),
        ("prefill_time", found.prefill_time_s, "prefill_time_s"),
        ("decode_time", found.decode_time_s, "decode_time_s"),
    ]
    return _comparisons(pairs, measured)


COMPARED_COLUMNS = ("what", "predicted", "measured", "error")
_COMPARED_WORDS = {
    "decode_weights": "weights",
    "decode_cache": "key-value cache",
    "prefill_allocated": "peak while prefilling",
    "decode_allocated": "peak while decoding",
    "prefill_time": "prefill",
    "decode_time": "a step",
}


def decode_cells(
    given: object, measured: Mapping[str, Any], environment: Mapping[str, Any] | None
) -> list[tuple[str, ...]]:
    """Return COMPARED_COLUMNS of a stored decode run, for people; none where its GPU is not known."""
    try:
        gpu = sheet_of(environment or {})
        found = [] if gpu is None else compare_decode(given, measured, gpu)
    except PlanError:
        # Another version's spec.
        return []
    return [
        (
            _COMPARED_WORDS[one.quantity],
            *(
                format_seconds(value) if one.quantity.endswith("time") else format_bytes(int(value))
                for value in (one.predicted, one.measured)
            ),
            format_signed(one.error_percent, 1),
        )
        for one in found
    ]


def is_fitted(quantity: str, run: DecodeRun, spec: ModelSpec) -> bool:
    """Whether a constant was fitted to the `prefill_time` or `decode_time` of such runs."""
    fitted = FITTED_PREFILLS if quantity == "prefill_time" else FITTED_STEPS
    return (spec.name, run.batch, run.context) in fitted


def waits_for_host(row: RecordedRow, run: DecodeRun) -> bool:
    """Whether a row's prefill was made of kernels started one by one where today it is one graph.

    Its time is the host's, which was up to twice as slow in one session as in another.
    """
    return is_graphed(run) and "prefill_graph" not in row.measured


def is_graphed(run: DecodeRun) -> bool:
    """Whether a run's prefill is a CUDA graph today."""
    tokens = rows_at_once(run) * run.context
    return run.graphs and run.cache is CacheKind.PAGED and tokens <= MAX_GRAPH_TOKENS


def rows_at_once(run: DecodeRun) -> int:
    """Return how many rows a prefill runs together."""
    return max(1, min(run.batch, PREFILL_TOKENS // run.context))


def _comparisons(
    pairs: Iterable[tuple[str, float, str]], measured: Mapping[str, Any]
) -> list[Comparison]:
    return [
        Comparison(quantity=name, predicted=float(ours), measured=float(measured[field]))
        for name, ours, field in pairs
        if measured.get(field)
    ]


def served_traits(row: RecordedRow) -> dict[str, str]:
    """Return what a decode or serve row is grouped by."""
    given = row.spec.get("decode") or row.spec.get("serve") or {}
    run, spec = (parse_decode if row.kind is Kind.DECODE else parse_serve)(given)
    return {
        "job": row.kind.value,
        "architecture": spec.family,
        "cache": str(run.cache) if isinstance(run, DecodeRun) else "paged",
        "cache dtype": str(run.cache_dtype),
        "batch": str(run.batch) if isinstance(run, DecodeRun) else "served",
    }
