"""How much a serving engine's cache holds: tokens, requests of a length, in whole pages.

What is left for the cache depends on the engine: ours counts what `runners/serving` allocates, vLLM
reserves by its own rule, which changed between its releases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from planner.hardware import Gpu
from planner.memory.overheads import CONTEXT_BYTES
from planner.model import ModelSpec
from planner.serving.memory import kv_bytes_per_layer_token, kv_bytes_per_token, serving_memory
from planner.serving.part import serving_part
from planner.serving.runs import graphs_bytes, widest_bytes
from planner.units import GIB_BYTES, format_bytes
from planner.workload import KvDtype, ServingWorkload, WeightsDtype


class ServingEngine(StrEnum):
    """Whose rule says what is left for the cache; a release of vLLM stands for those until the next."""

    PEAKMARK = "peakmark"
    VLLM_0_11 = "vllm 0.11"
    VLLM_0_17 = "vllm 0.17"


# What vLLM's profile of a step holds, in copies of fp32 logits of as many rows as it takes at once: a
# constant of its sampler. Means of the cases of recorded/public/serving.json: 0.11 to 0.16, where Mistral
# Small held 4.2 for a reason that is not known, and 0.17 to 0.19.
_VLLM_LOGITS = {ServingEngine.VLLM_0_11: 9.7, ServingEngine.VLLM_0_17: 4.0}
_VLLM_ROWS, VLLM_PAGE = 1024, 16
# Outside torch, NCCL among it with several GPUs (the same cases).
_VLLM_OUTSIDE_BYTES = {False: int(0.13 * GIB_BYTES), True: int(0.55 * GIB_BYTES)}
MAX_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one GPU of a group holds beside the cache, and what the cache holds; bytes are per GPU.

    `graphs_bytes` are those of `max_sequences` rows. `sequence_bytes` is a request of `length` tokens in
    whole pages, `wasted_bytes` what its last pages leave empty. `kv_copies` is how often the group keeps
    every key-value head.
    """

    engine: ServingEngine
    length: int
    page_tokens: int
    budget_bytes: int
    weights_bytes: int
    activation_bytes: int
    graphs_bytes: int
    outside_bytes: int
    pool_bytes: int
    token_bytes: int
    sequence_bytes: int
    wasted_bytes: int
    kv_copies: int
    max_sequences: int
    max_tokens: int
    notes: tuple[str, ...]


def capacity(
    spec: ModelSpec,
    workload: ServingWorkload,
    gpu: Gpu,
    *,
    engine: ServingEngine = ServingEngine.PEAKMARK,
    tensor_parallel: int = 1,
    page_tokens: int = 64,
    chunk_tokens: int = 2048,
    rows: int | None = None,
) -> Capacity:
    """Return what each GPU's cache holds in requests of `workload.context_length` tokens.

    `rows` is the most requests at once that our engine has graphs for; None: as many as fit. vLLM's pages
    are of 16 tokens, whatever `page_tokens` says. Raises PlanError where the model cannot be divided over
    `tensor_parallel` GPUs.
    """
    part = serving_part(spec, tensor_parallel)
    weights = serving_memory(part, workload, gpu.visible_bytes).weights_bytes
    page = page_tokens if engine is ServingEngine.PEAKMARK else VLLM_PAGE
    length = workload.context_length
    one = sequence_bytes(part, workload, length, page)
    rest = _Rest.of(spec, part, workload, engine, min(chunk_tokens, length), tensor_parallel)
    budget = int(workload.utilization * gpu.visible_bytes)
    left = budget - weights - rest.activation_bytes - rest.outside_bytes
    most = rest.most(left, one, rows)
    graphs = rest.graphs_bytes(rows or max(most, 1))
    pool = max(left - graphs, 0)
    # One request more, as long as its pages reach, unless no more may be there at once.
    is_full = most == (rows or rest.most_rows)
    more = 0 if is_full else _longest(part, workload, pool - most * one, page)
    return Capacity(
        engine=engine,
        length=length,
        page_tokens=page,
        budget_bytes=budget,
        weights_bytes=weights,
        activation_bytes=rest.activation_bytes,
        graphs_bytes=graphs,
        outside_bytes=rest.outside_bytes,
        pool_bytes=pool,
        token_bytes=kv_bytes_per_token(part, workload.kv_dtype),
        sequence_bytes=one,
        wasted_bytes=one - sequence_bytes(part, workload, length, 1),
        kv_copies=max(1, tensor_parallel // spec.num_kv_heads) if spec.latent is None else 1,
        max_sequences=most,
        max_tokens=most * length + more,
        notes=_notes(spec, engine, workload.kv_dtype, tensor_parallel),
    )


def sequence_bytes(part: ModelSpec, workload: ServingWorkload, tokens: int, page: int) -> int:
    """Return the cache of one request of so many tokens, in whole pages.

    A sliding layer keeps its window, and the page in which that begins.
    """
    pages = ceil(tokens / page)
    window = part.sliding_window or tokens
    windowed = min(pages, ceil(window / page) + (page > 1))
    sliding = part.num_sliding_layers
    held = (part.num_layers - sliding) * pages + sliding * windowed
    return held * page * kv_bytes_per_layer_token(part, workload.kv_dtype)


def _longest(part: ModelSpec, workload: ServingWorkload, free_bytes: int, page: int) -> int:
    """Tokens of the longest request, shorter than the workload's, that so many bytes hold."""
    pages = range(1, ceil(workload.context_length / page))
    found = bisect_right(
        pages, free_bytes, key=lambda count: sequence_bytes(part, workload, count * page, page)
    )
    return found * page


@dataclass(frozen=True, slots=True)
class _Rest:
    """What an engine holds beside weights and cache; `row_bytes` for each request, 0 under vLLM."""

    activation_bytes: int
    outside_bytes: int
    row_bytes: int
    most_rows: int

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        part: ModelSpec,
        workload: ServingWorkload,
        engine: ServingEngine,
        chunk_tokens: int,
        tensor_parallel: int,
    ) -> _Rest:
        """Count what an engine holds; vLLM's logits are those of the whole vocabulary on every GPU."""
        if engine is not ServingEngine.PEAKMARK:
            logits = int(_VLLM_LOGITS[engine] * _VLLM_ROWS * spec.vocab_size * 4)
            return cls(logits, _VLLM_OUTSIDE_BYTES[tensor_parallel > 1], 0, _VLLM_ROWS)
        element_bytes = 4 if workload.weights_dtype is WeightsDtype.FP32 else 2
        widest = widest_bytes(part, chunk_tokens, element_bytes)
        # A graph for every power of two of rows: their logits are together at most twice the widest's.
        row = 2 * spec.vocab_size * element_bytes
        return cls(widest, CONTEXT_BYTES, row, MAX_ROWS)

    def graphs_bytes(self, rows: int) -> int:
        """Workspaces and logits of the graphs that so many rows need; vLLM takes them from what is left."""
        if not self.row_bytes:
            return 0
        return graphs_bytes((rows - 1).bit_length() + 1) + rows * self.row_bytes

    def most(self, left_bytes: int, sequence_bytes: int, rows: int | None) -> int:
        """The largest number of requests that fit beside the graphs they need, those of `rows` if given."""
        counts = range(1, (rows or self.most_rows) + 1)
        return bisect_right(
            counts,
            left_bytes,
            key=lambda count: count * sequence_bytes + self.graphs_bytes(rows or count),
        )


def _notes(
    spec: ModelSpec, engine: ServingEngine, kv_dtype: KvDtype, tensor_parallel: int
) -> tuple[str, ...]:
    notes = []
    if engine is not ServingEngine.PEAKMARK:
        notes.append(
            f"{engine}: at most {_VLLM_ROWS:,} requests at once; utilization × visible, less weights, {_VLLM_LOGITS[engine]:g} × 1,024 rows of fp32 "
            "logits and memory outside torch; its CUDA graphs come on top until release 0.20."
        )
        if kv_dtype is KvDtype.INT8:
            notes.append(
                "An int8 cache needs a vLLM of 2026 (int8_per_token_head); older ones have none."
            )
        if spec.num_sliding_layers and spec.num_sliding_layers < spec.num_layers:
            notes.append(
                "vLLM gives mixed layers pages of one size, so it holds less; how much less changed "
                "between releases."
            )
    if spec.latent is not None and tensor_parallel > 1:
        notes.append("Every GPU caches the whole latents: they are not divided over the group.")
    elif tensor_parallel > spec.num_kv_heads:
        copies = tensor_parallel // spec.num_kv_heads
        notes.append(
            f"{tensor_parallel} GPUs share {spec.num_kv_heads} key-value heads: each is kept {copies} times."
        )
    return tuple(notes)


CAPACITY_COLUMNS = (
    *(
        "engine",
        "may take",
        "weights",
        "largest step",
        "outside torch",
        "CUDA graphs",
        "left for the cache",
    ),
    *("requests of that length", "tokens", "empty in a request's last pages"),
)


def capacity_cells(found: Iterable[Capacity]) -> list[tuple[str, ...]]:
    """Return CAPACITY_COLUMNS of each engine, for people."""
    return [
        (
            str(one.engine),
            *(
                format_bytes(size)
                for size in (
                    one.budget_bytes,
                    one.weights_bytes,
                    one.activation_bytes,
                    one.outside_bytes,
                    one.graphs_bytes,
                    one.pool_bytes,
                )
            ),
            f"{one.max_sequences:,}",
            f"{one.max_tokens:,}",
            format_bytes(one.wasted_bytes),
        )
        for one in found
    ]
