"""The job `decode`: a real Hugging Face model prefills and decodes over our caches, beside transformers.

python -m runners.jobs.decode SPEC.json OUT_DIR
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.attention.dispatch import Direction, last_choice
from planner.decode_run import AttentionBackend, CacheKind, DecodeRun, WeightDtype, parse_decode
from planner.model import ModelSpec
from planner.serve_run import ServeRun
from runners.contract import JobKind, Outcome
from runners.jobs.decode_peers import measure_peer
from runners.jobs.harness import JobSession, describe_device_oom, run_job
from runners.measure import (
    Clock,
    allocator_counters,
    device_used_bytes,
    host_peak_bytes,
    time_statistics,
)
from runners.serving.attention import NAME, register
from runners.serving.caches import Cache, ContiguousCache, PagedCache, stored_dtype
from runners.serving.decoder import Decoder
from runners.serving.fused import fused_operations
from runners.serving.shapes import cache_shape

DTYPES = {
    WeightDtype.BF16: torch.bfloat16,
    WeightDtype.FP16: torch.float16,
    WeightDtype.FP32: torch.float32,
}
# A prefill runs as many rows at once as have this many tokens together.
PREFILL_TOKENS = 32_768
_WARMUP_STEPS = 3


def build_model(
    run: DecodeRun | ServeRun, model: ModelSpec, device: torch.device, seed: int
) -> nn.Module:
    """Return the model with random weights on `device`, on our attention, in evaluation mode."""
    register()
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**model.hf_config)
    with device:
        built: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=NAME, dtype=DTYPES[run.dtype]
        )
    return built.requires_grad_(False).eval()


def build_cache(run: DecodeRun, model: nn.Module, device: torch.device) -> Cache:
    """Return the run's cache, with room for all its rows at their end."""
    shape = cache_shape(model.config)
    dtype = stored_dtype(run.cache_dtype, DTYPES[run.dtype])
    if run.cache is CacheKind.CONTIGUOUS:
        return ContiguousCache(shape, run.batch, run.capacity, dtype, device)
    pages = run.batch * -(-run.capacity // run.page_size)
    sizes = {"page_size": run.page_size, "num_pages": pages}
    return PagedCache(shape, run.batch, run.capacity, dtype, device, **sizes)


def measure_decode(session: JobSession) -> None:
    """Build, prefill, decode, then let transformers do the same; fills `session.measured`."""
    run, spec = parse_decode(session.spec.decode)
    session.take_device()
    measured, device = session.measured, session.device
    session.events.phase("build")
    model = build_model(run, spec, device, session.spec.seed)
    measured["weights_bytes"] = weights_bytes(model)
    generator = torch.Generator(device).manual_seed(session.spec.seed)
    prompts = torch.randint(
        spec.vocab_size, (run.batch, run.context), generator=generator, device=device
    )
    measured["fused"] = None
    if run.fused and run.attention is AttentionBackend.PEAKMARK:
        with fused_operations(model) as fused:
            measured["fused"] = fused
            tokens = _measure_ours(session, run, model, prompts)
    else:
        tokens = _measure_ours(session, run, model, prompts)
    measured["host_bytes"] = host_peak_bytes()
    release(device)
    measured["peers"] = {}
    for peer in run.peers:
        session.events.phase("peer", peer=peer)
        figures = surviving(device, lambda peer=peer: measure_peer(peer, model, prompts, tokens))
        measured["peers"][str(peer)] = figures
        if "decode_time_s" in figures:
            ratio = figures["decode_time_s"] / measured["decode_time_s"]
            figures["decode_time_over_ours"] = ratio
        release(device)


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, tied ones once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def _measure_ours(session: JobSession, run: DecodeRun, model: nn.Module, prompts: Tensor) -> Tensor:
    """Prefill twice (the first compiles), decode; return the tokens (B, new_tokens)."""
    measured, device = session.measured, session.device
    cache = build_cache(run, model, device)
    measured["cache_bytes"] = cache.bytes()
    decoder = Decoder(model, cache, run.attention, graphs=run.graphs)
    session.events.phase("warmup")
    # What a graph allocates it allocates when it is captured.
    reset_peak(device)
    rows = _rows_at_once(run)
    measured["prefill_graph"] = decoder.capture_prefill(rows, run.context)
    if rest := run.batch % rows:
        decoder.capture_prefill(rest, run.context)
    # One group of rows is enough: each has the shape of all.
    prefill_rows(decoder, prompts[:rows])
    for row in range(run.batch):
        cache.finish(row)
    session.events.phase("prefill")
    clock = Clock(device)
    start = clock.now()
    first = prefill_rows(decoder, prompts)
    prefill_s = clock.seconds(start, clock.now())
    measured["prefill_time_s"] = prefill_s
    measured["prefill_tokens_per_s"] = prompts.numel() / prefill_s
    measured["prefill_peak_allocated_bytes"] = peak_allocated(device)
    measured["attention_backend"] = _backend(run)
    session.events.phase("decode")
    reset_peak(device)
    tokens = _decode(decoder, clock, run, first, measured)
    note_memory(measured, device)
    return tokens


def _rows_at_once(run: DecodeRun) -> int:
    return max(1, min(run.batch, PREFILL_TOKENS // run.context))


def prefill_rows(decoder: Decoder, prompts: Tensor) -> Tensor:
    """Prefill rows, as many at once as PREFILL_TOKENS allows; return the tokens (B,) that follow."""
    rows, context = prompts.shape
    step = max(1, PREFILL_TOKENS // context)
    groups = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    return torch.cat([decoder.prefill(prompts[group], group) for group in groups])


def _decode(
    decoder: Decoder, clock: Clock, run: DecodeRun, first: Tensor, measured: dict[str, Any]
) -> Tensor:
    """Decode all new tokens; the first steps, which compile and capture, are not timed."""
    tokens = [first.clone()]
    marks = []
    warmups = min(_WARMUP_STEPS, run.new_tokens - 2)
    for index in range(run.new_tokens - 1):
        start = clock.now()
        tokens.append(decoder.decode().clone())
        if index >= warmups:
            marks.append((start, clock.now()))
    times_s = [clock.seconds(*mark) for mark in marks]
    found = time_statistics(times_s)
    measured["decode_statistics"] = found
    measured["decode_time_s"] = measured["step_time_s"] = found["median_s"]
    measured["tokens_per_s"] = run.batch / found["median_s"]
    # From the first timed step's start to the last one's end, so that what lies between counts too.
    whole_s = clock.seconds(marks[0][0], marks[-1][1])
    measured["whole_decode_time_s"] = whole_s / len(marks)
    measured["graphs"] = decoder.uses_graphs
    return torch.stack(tokens, dim=1)


def _backend(run: DecodeRun) -> str:
    if run.attention is AttentionBackend.TORCH:
        return "torch"
    choice = last_choice(Direction.FORWARD)
    return f"peakmark:{choice.backend if choice else 'triton'}"


def reset_peak(device: torch.device) -> None:
    """Forget the allocator's peak, where there is one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_allocated(device: torch.device) -> int | None:
    """Return the most bytes allocated since `reset_peak`; None without a GPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def note_memory(measured: dict[str, Any], device: torch.device) -> None:
    """Note the counters of the job; the peak is the larger of prefill's and decode's."""
    measured |= {"allocated_bytes": None, "reserved_bytes": None, "device_bytes": None}
    measured["decode_peak_allocated_bytes"] = peak_allocated(device)
    if device.type != "cuda":
        return
    peaks = ("prefill_peak_allocated_bytes", "decode_peak_allocated_bytes")
    measured["allocated_bytes"] = max(measured[name] for name in peaks)
    measured["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    measured["device_bytes"] = device_used_bytes(device)
    measured["allocator"] = allocator_counters(device)


def release(device: torch.device) -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def surviving(device: torch.device, measure: Any) -> dict[str, Any]:
    """Return a peer's figures; what ends it is a figure too, for ours have been taken."""
    try:
        return {"outcome": Outcome.DONE, **measure()}
    except torch.OutOfMemoryError as error:
        return {"outcome": Outcome.OOM_DEVICE, **describe_device_oom(str(error), device)}
    except Exception as error:
        return {"outcome": Outcome.FAILED, "message": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    sys.exit(run_job(JobKind.DECODE, measure_decode))
