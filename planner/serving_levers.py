"""What a serving choice changes: how many requests fit, how soon the first token, how fast the rest.

A *system* lever leaves the model's results as they are but for rounding; a *model* lever is another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from planner.errors import PlanError
from planner.families import count_parameters
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.serving.capacity import Capacity, ServingEngine, capacity
from planner.serving.limits import decode_limit
from planner.serving.part import serving_part
from planner.serving.times import ServedModel, StepTimes
from planner.workload import KvDtype, ServingWorkload, WeightsDtype, flat_dict

CHUNK_TOKENS = 2048
WINDOW_TOKENS = 4096
TENSOR_PARALLEL = (1, 2, 4, 8)
BATCHES = tuple(2**power for power in range(9))
CONTEXTS = tuple(2**power for power in range(9, 18))
SYSTEM, MODEL = "system", "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoint:
    """`batch` requests at once of `prompt_tokens` and `new_tokens` each, on one group of GPUs.

    Without `paged` each has room for `longest_tokens` from the start.
    """

    spec: ModelSpec
    gpu: Gpu
    prompt_tokens: int = 2048
    new_tokens: int = 256
    batch: int = 16
    weights_dtype: WeightsDtype = WeightsDtype.BF16
    kv_dtype: KvDtype = KvDtype.BF16
    tensor_parallel: int = 1
    utilization: float = 0.9
    page_size: int = 64
    paged: bool = True
    longest_tokens: int = 8192

    @property
    def mean_tokens(self) -> int:
        """Tokens that a request holds half way through its answer."""
        return self.prompt_tokens + self.new_tokens // 2

    @property
    def held_tokens(self) -> int:
        """Tokens of cache that a request takes at that moment: whole pages, or its whole room."""
        if not self.paged:
            return max(self.longest_tokens, self.prompt_tokens + self.new_tokens)
        return ceil(self.mean_tokens / self.page_size) * self.page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingAnswer:
    """Of one group of GPUs: bytes are those of each of its GPUs, speeds of all together.

    `decode_s` is a step of the point's batch, or None where that does not fit; `full_*` are of as many
    requests as fit.
    """

    weights_bytes: int
    pool_bytes: int
    token_bytes: int
    max_requests: int
    ttft_s: float
    decode_s: float | None
    tokens_per_s: float | None
    full_decode_s: float | None
    full_tokens_per_s: float | None
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return flat_dict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change of a point, and what it makes of it; `limit` says what a step's time then hangs on."""

    name: str
    kind: str
    note: str
    limit: str
    point: ServingPoint
    answer: ServingAnswer


def check_point(point: ServingPoint) -> None:
    """Raise PlanError for a split that the model does not allow, and for a request beyond the positions."""
    spec = point.spec
    serving_part(spec, point.tensor_parallel)
    total = point.prompt_tokens + point.new_tokens
    if total > spec.max_positions:
        sentence = (
            f"A prompt of {point.prompt_tokens:,} tokens with {point.new_tokens:,} new ones passes the "
            f"{spec.max_positions:,} positions of {spec.name}: shorten one of them."
        )
        raise PlanError(
            "prompt_tokens", point.prompt_tokens, f"{spec.max_positions} in all", sentence=sentence
        )


def step_times(point: ServingPoint) -> StepTimes:
    """Return the times of a point's forwards; a one-byte cache has scales for each token, as ours."""
    return StepTimes(
        ServedModel(
            spec=point.spec,
            gpu=point.gpu,
            weights_dtype=point.weights_dtype,
            kv_dtype=point.kv_dtype,
            tensor_parallel=point.tensor_parallel,
            token_scales=True,
        )
    )


def capacity_of(
    point: ServingPoint,
    engine: ServingEngine = ServingEngine.PEAKMARK,
    *,
    length: int | None = None,
    rows: int | None = None,
) -> Capacity:
    """Return what each GPU's cache holds in requests of `length` tokens, or half way through their answers.

    `rows` is the most at once; None: as many as fit.
    """
    workload = ServingWorkload(
        context_length=length or point.held_tokens,
        weights_dtype=point.weights_dtype,
        kv_dtype=point.kv_dtype,
        utilization=point.utilization,
    )
    return capacity(
        point.spec,
        workload,
        point.gpu,
        engine=engine,
        tensor_parallel=point.tensor_parallel,
        page_tokens=point.page_size,
        chunk_tokens=CHUNK_TOKENS,
        rows=rows,
    )


def answer(point: ServingPoint, times: StepTimes | None = None) -> ServingAnswer:
    """Return what a point holds and how fast it is. Raises PlanError for one that cannot be."""
    check_point(point)
    times = times or step_times(point)
    held = capacity_of(point)
    most = held.max_sequences
    fits = point.batch <= most
    decode_s = times.decode_s(point.batch, point.batch * point.mean_tokens) if fits else None
    full_s = times.decode_s(most, most * point.mean_tokens) if most else None
    return ServingAnswer(
        weights_bytes=held.weights_bytes,
        pool_bytes=held.pool_bytes,
        token_bytes=held.token_bytes,
        max_requests=most,
        ttft_s=first_token_s(times, point.prompt_tokens),
        decode_s=decode_s,
        tokens_per_s=None if decode_s is None else point.batch / decode_s,
        full_decode_s=full_s,
        full_tokens_per_s=None if full_s is None else most / full_s,
        source=times.source,
    )


def first_token_s(times: StepTimes, prompt_tokens: int) -> float:
    """Return the seconds from a prompt's start to its first token, alone, chunk by chunk."""
    starts = range(0, prompt_tokens, CHUNK_TOKENS)
    return sum(times.prefill_s(min(CHUNK_TOKENS, prompt_tokens - start), start) for start in starts)


def levers(point: ServingPoint) -> list[Lever]:
    """Return every single change that is one for this point, system levers first."""
    own, found = step_times(point), []
    for name, kind, note, changed in _changes(point):
        try:
            check_point(changed)
        except PlanError:
            # What so many GPUs cannot share is not a lever here.
            continue
        times = step_times(changed)
        limit = ""
        if changed.batch == point.batch and changed.paged == point.paged:
            tokens = point.batch * point.mean_tokens
            limit = decode_limit(own, times, point.batch, tokens).sentence
        found.append(
            Lever(
                name=name,
                kind=kind,
                note=note,
                limit=limit,
                point=changed,
                answer=answer(changed, times),
            )
        )
    return found


def _changes(point: ServingPoint) -> Iterator[tuple[str, str, str, ServingPoint]]:
    yield from _system_changes(point)
    spec = point.spec
    if spec.latent is None and spec.num_kv_heads > 1:
        one = _with_kv_heads(spec, 1)
        yield "one key-value head (MQA)", MODEL, "trained so", replace(point, spec=one)
    if spec.latent is None and spec.num_kv_heads < spec.num_heads:
        every = _with_kv_heads(spec, spec.num_heads)
        note = "what its grouped heads save, the other way round"
        yield "a key-value head per head (MHA)", MODEL, note, replace(point, spec=every)
    is_long = point.prompt_tokens + point.new_tokens > WINDOW_TOKENS
    if spec.latent is None and not any(spec.sliding_layers) and is_long:
        slid = replace(spec, sliding_window=WINDOW_TOKENS, sliding_layers=(True,) * spec.num_layers)
        note = "sees no farther back"
        yield f"window of {WINDOW_TOKENS:,} tokens", MODEL, note, replace(point, spec=slid)


def _system_changes(point: ServingPoint) -> Iterator[tuple[str, str, str, ServingPoint]]:
    for kv_dtype in (KvDtype.BF16, KvDtype.FP8, KvDtype.INT8):
        if kv_dtype is not point.kv_dtype:
            note = "rounds keys and values" if kv_dtype is not KvDtype.BF16 else ""
            yield f"cache in {kv_dtype}", SYSTEM, note, replace(point, kv_dtype=kv_dtype)
    for dtype in (WeightsDtype.BF16, WeightsDtype.FP8, WeightsDtype.INT4):
        if dtype is not point.weights_dtype:
            note = "rounds weights" if dtype is not WeightsDtype.BF16 else ""
            yield f"weights in {dtype}", SYSTEM, note, replace(point, weights_dtype=dtype)
    room = f"room for {max(point.longest_tokens, point.prompt_tokens + point.new_tokens):,} tokens each"
    name = "no paging" if point.paged else "paging"
    note = room if point.paged else f"pages of {point.page_size} tokens"
    yield name, SYSTEM, note, replace(point, paged=not point.paged)
    for shards in TENSOR_PARALLEL:
        if shards != point.tensor_parallel:
            note = "one model over these GPUs" if shards > 1 else "the model on one GPU"
            changed = replace(point, tensor_parallel=shards)
            yield f"tensor parallel {shards}", SYSTEM, note, changed
    note = "each token later, more of them together"
    yield "twice as many at once", SYSTEM, note, replace(point, batch=2 * point.batch)


def _with_kv_heads(spec: ModelSpec, heads: int) -> ModelSpec:
    changed = replace(spec, num_kv_heads=heads)
    return replace(changed, parameters=count_parameters(changed))


def capacity_curve(
    point: ServingPoint, contexts: Sequence[int] = CONTEXTS
) -> list[tuple[int, int]]:
    """Return (tokens each request holds, how many fit), up to the model's positions."""
    rows = []
    for context in contexts:
        if context <= point.spec.max_positions:
            rows.append((context, capacity_of(point, length=context).max_sequences))
    return rows


def speed_curve(
    point: ServingPoint, times: StepTimes, batches: Sequence[int] = BATCHES
) -> list[tuple[int, float, bool]]:
    """Return (batch, seconds of a step, whether it fits) with every request at the mean length."""
    most = capacity_of(point).max_sequences
    return [
        (batch, times.decode_s(batch, batch * point.mean_tokens), batch <= most)
        for batch in batches
    ]
