"""The job `serve`: a trace of requests, replayed in time, served by continuous batching.

python -m runners.jobs.serve SPEC.json OUT_DIR
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.decode_run import AttentionBackend
from planner.model import ModelSpec
from planner.serve_run import (
    GRAPH_CHUNKS,
    PERCENTILES,
    ServeRun,
    TraceRequest,
    padded_tokens,
    parse_serve,
    percentile,
)
from runners.contract import JobKind
from runners.jobs.decode import (
    DTYPES,
    build_model,
    note_memory,
    peak_allocated,
    release,
    reset_peak,
    surviving,
    weights_bytes,
)
from runners.jobs.harness import JobSession, run_job
from runners.jobs.serve_peers import measure_serve_peer
from runners.measure import host_peak_bytes
from runners.serving.caches import PagedCache, stored_dtype
from runners.serving.decoder import Decoder
from runners.serving.engine import Engine, HostTime, Request, RequestState
from runners.serving.fused import fused_operations
from runners.serving.shapes import cache_shape
from runners.serving.vllm_peer import check_vllm

# So many requests are decoded once more, each alone, and compared.
_CHECKED = 4


def measure_serving(session: JobSession) -> None:
    """Build, warm up, replay the trace, check some requests alone; fills `session.measured`."""
    run, spec = parse_serve(session.spec.serve)
    check_vllm(run)
    session.take_device()
    session.events.phase("build")
    model = build_model(run, spec, session.device, session.spec.seed)
    session.measured["weights_bytes"] = weights_bytes(model)
    if run.fused and run.attention is AttentionBackend.PEAKMARK:
        with fused_operations(model):
            served = _serve(session, run, spec, model)
    else:
        served = _serve(session, run, spec, model)
    session.measured["host_bytes"] = host_peak_bytes()
    session.measured["peers"] = {}
    for peer in run.peers:
        release(session.device)
        session.events.phase("peer", peer=peer)
        session.measured["peers"][str(peer)] = surviving(
            session.device, partial(measure_serve_peer, peer, model, spec, run, served)
        )


def _serve(session: JobSession, run: ServeRun, spec: ModelSpec, model: nn.Module) -> list[Request]:
    measured, device = session.measured, session.device
    cache = _cache(run, model, device)
    measured["cache_bytes"] = cache.bytes()
    decoder = Decoder(model, cache, run.attention, graphs=run.graphs)
    generator = torch.Generator(device).manual_seed(session.spec.seed)
    requests = [_request(one, spec.vocab_size, generator, device) for one in run.trace]
    session.events.phase("warmup")
    # What a graph allocates it allocates when it is captured.
    reset_peak(device)
    measured["prefill_graph"] = _capture(decoder, run)
    _warm_up(decoder, cache, run, requests)
    session.events.phase("serve")
    engine = Engine(decoder, cache, chunk_tokens=run.chunk_tokens)
    start_s = time.monotonic()
    _replay(engine, run.trace, requests, start_s)
    measured["duration_s"] = time.monotonic() - start_s
    measured |= _figures(engine, run, requests, start_s, measured["duration_s"])
    measured["leaked_pages"] = run.pages - cache.num_free()
    measured["graphs"] = decoder.uses_graphs
    # Rows without this were served while graphs were replayed for the first time.
    measured["graphs_replayed_before"] = decoder.uses_graphs
    measured["attention_backend"] = str(run.attention)
    measured["prefill_peak_allocated_bytes"] = peak_allocated(device)
    note_memory(measured, device)
    session.events.phase("check")
    measured["equal_alone"] = _equal_alone(decoder, cache, run, requests)
    return requests


def _cache(run: ServeRun, model: nn.Module, device: torch.device) -> PagedCache:
    return PagedCache(
        cache_shape(model.config),
        run.rows,
        run.capacity,
        stored_dtype(run.cache_dtype, DTYPES[run.dtype]),
        device,
        page_size=run.page_size,
        num_pages=run.pages,
    )


def _request(
    one: TraceRequest, vocab_size: int, generator: torch.Generator, device: torch.device
) -> Request:
    tokens = torch.randint(vocab_size, (one.prompt_tokens,), generator=generator, device=device)
    return Request(tokens, one.new_tokens)


def _capture(decoder: Decoder, run: ServeRun) -> bool:
    """Capture the steps, and every first chunk with its padded parts; say whether prefills are graphs."""
    decoder.capture_all()
    chunk = min(run.chunk_tokens, run.capacity)
    part = padded_tokens(chunk)
    whole = -(-chunk // part) * part
    found = [
        decoder.capture_prefill(1, tokens, past)
        for past in range(0, run.capacity, chunk)[:GRAPH_CHUNKS]
        for tokens in range(part, whole + 1, part)
        if past + tokens - part < run.capacity
    ]
    return any(found)


def _warm_up(decoder: Decoder, cache: PagedCache, run: ServeRun, requests: list[Request]) -> None:
    """Run prefills of one and of several chunks and odd lengths, which compiles what is no graph."""
    longest = max(requests, key=lambda one: len(one.prompt)).prompt
    chunk = run.chunk_tokens
    lengths = (
        len(longest),
        2 * chunk,
        chunk + 16,
        chunk + 17,
        chunk,
        chunk // 32 * 16,
        chunk // 2 + 1,
    )
    engine = Engine(decoder, cache, chunk_tokens=chunk)
    for length in lengths:
        if 1 <= length <= len(longest):
            engine.submit(Request(longest[:length], min(2, run.capacity - length)))
    while not engine.is_idle:
        engine.step()


def _replay(
    engine: Engine, trace: tuple[TraceRequest, ...], requests: list[Request], start_s: float
) -> None:
    """Submit each request at its arrival, cancel it where its client goes away, until none is left."""
    arrived = 0
    leaving: list[tuple[Request, int]] = []
    while arrived < len(trace) or not engine.is_idle:
        now_s = time.monotonic() - start_s
        while arrived < len(trace) and trace[arrived].arrival_s <= now_s:
            engine.submit(requests[arrived])
            limit = trace[arrived].cancel_after
            if limit is not None:
                leaving.append((requests[arrived], limit))
            arrived += 1
        if engine.is_idle:
            time.sleep(max(0.0, trace[arrived].arrival_s - now_s))
            continue
        for request, limit in leaving:
            if len(request.tokens) >= limit:
                engine.cancel(request)
        engine.step()


def _figures(
    engine: Engine, run: ServeRun, requests: list[Request], start_s: float, duration_s: float
) -> dict[str, Any]:
    rows = [_row(one, request, start_s) for one, request in zip(run.trace, requests, strict=True)]
    done = [row for row in rows if row[-1] == RequestState.DONE]
    latency = {
        name: {f"p{p}": percentile(values, p) for p in PERCENTILES}
        for name, place in (("ttft_s", 3), ("tpot_s", 4), ("e2e_s", 5))
        if (values := [row[place] for row in done if row[place] is not None])
    }
    tokens = sum(len(request.tokens) for request in requests)
    device_s = engine.device_s()
    return {
        "requests": rows,
        "request_columns": list(REQUEST_COLUMNS),
        "states": dict(Counter(str(request.state) for request in requests)),
        "latency": latency,
        "tokens_per_s": tokens / duration_s,
        "preemptions": sum(request.preemptions for request in requests),
        "steps": engine.steps,
        "device_s": device_s,
        "device_share": device_s / duration_s,
        "host_time_s": _host_time_s(engine.host, duration_s),
    }


def _host_time_s(host: HostTime, duration_s: float) -> dict[str, float]:
    """Return what the host's seconds went to, by planner.serve_run.HOST_WORDS; together the duration."""
    return {
        "wait": host.wait_s,
        "launch": host.launch_s,
        "schedule": host.steps_s - host.launch_s - host.wait_s,
        "idle": duration_s - host.steps_s,
    }


REQUEST_COLUMNS = (
    *("arrival_s", "prompt_tokens", "new_tokens"),
    *("ttft_s", "tpot_s", "e2e_s", "preemptions", "state"),
)


def _row(one: TraceRequest, request: Request, start_s: float) -> list[Any]:
    """Return REQUEST_COLUMNS; times count from the arrival that the trace asked for."""
    first_s, ended_s = request.first_token_s, request.ended_s
    arrived_s = start_s + one.arrival_s
    between = len(request.tokens) - 1
    ttft_s = None if first_s is None else round(first_s - arrived_s, 6)
    e2e_s = None if ended_s is None else round(ended_s - arrived_s, 6)
    tpot_s = None
    if first_s is not None and ended_s is not None and between > 0:
        tpot_s = round((ended_s - first_s) / between, 6)
    sizes = (one.arrival_s, one.prompt_tokens, len(request.tokens))
    return [*sizes, ttft_s, tpot_s, e2e_s, request.preemptions, str(request.state)]


def to_check(requests: list[Request]) -> list[Request]:
    """Return the finished requests to serve again alone: those that gave way most often, then the first."""
    done = [one for one in requests if one.state is RequestState.DONE]
    return sorted(done, key=lambda one: -one.preemptions)[:_CHECKED]


def _equal_alone(
    decoder: Decoder, cache: PagedCache, run: ServeRun, requests: list[Request]
) -> float | None:
    """Return the share of tokens that some finished requests get when each is served alone."""
    equal: list[bool] = []
    for request in to_check(requests):
        again = Request(request.prompt, request.new_tokens)
        engine = Engine(decoder, cache, chunk_tokens=run.chunk_tokens)
        engine.submit(again)
        while not engine.is_idle:
            engine.step()
        equal += [a == b for a, b in zip(again.tokens, request.tokens, strict=True)]
    return sum(equal) / len(equal) if equal else None


if __name__ == "__main__":
    sys.exit(run_job(JobKind.SERVE, measure_serving))
