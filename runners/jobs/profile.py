"""The job `profile`: where the time of a real training step or batch of requests goes.

python -m runners.jobs.profile SPEC.json OUT_DIR      (or under torchrun)
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from planner.decode_run import AttentionBackend, DecodeRun, parse_decode
from planner.plan import parse_plan
from planner.time_parts import OURS, Part
from planner.time_shares import account
from planner.workload import TrainingWorkload
from runners.contract import JobKind, World
from runners.jobs.data_source import open_source
from runners.jobs.decode import build_cache, prefill_rows
from runners.jobs.decode import build_model as build_decoding_model
from runners.jobs.harness import JobSession, run_job
from runners.jobs.kernel_times import trace
from runners.jobs.profile_trace import MARK, Work, cpu_work, gpu_work
from runners.jobs.train_step import MIN_WARMUP_STEPS, Trainer, build_model
from runners.measure import Clock, time_statistics
from runners.serving import attention
from runners.serving.decoder import Decoder
from runners.serving.fused import fused_operations
from runners.worlds import open_world

# The kernels that a result names, those of most time first; their names are cut.
SHOWN_KERNELS = 60
NAME_LENGTH = 160


def measure_profile(session: JobSession) -> None:
    """Warm up, time, and trace one step more; fills `session.measured`."""
    if session.spec.decode is None:
        _profile_training(session)
    else:
        _profile_requests(session)


def _profile_training(session: JobSession) -> None:
    spec = session.spec
    plan = parse_plan(spec.plan)
    source = open_source(spec.tokenizer)
    session.events.phase("build")
    model = build_model(plan)
    session.take_device()
    parallelism, workload = plan.parallelism, plan.workload
    assert isinstance(workload, TrainingWorkload)
    with open_world(
        spec.world,
        world_size=parallelism.world_size,
        rank=spec.rank,
        launch=session.launch,
        device=session.device,
    ) as world:
        session.events.phase("init")
        trainer = Trainer(plan, model, world, spec.seed)
        trainer.losses = None
        tokens = workload.micro_batch * workload.sequence_length * workload.grad_accumulation
        session.measured["work"] = "training"
        session.measured["world_moves_data"] = spec.world is not World.SOLO
        rows = workload.micro_batch * workload.grad_accumulation
        data = source.time_batch(rows, workload.sequence_length, session.device)
        _measure(session, trainer.step, _marked_step(trainer), tokens, data)
        own = {
            name: session.measured[name] for name in ("step_time_s", "busy_s", "host_s", "parts")
        }
        session.measured["per_rank"] = world.gather({"rank": world.collectives.rank, **own})


def _marked_step(trainer: Trainer) -> Callable[[], None]:
    """Return the training step with its phases marked in the trace."""

    def step() -> None:
        with _phases() as enter:
            trainer.meter.on_phase = enter
            try:
                trainer.step()
            finally:
                trainer.meter.on_phase = None

    return step


@contextmanager
def _phases() -> Iterator[Callable[[str], None]]:
    """Yield what marks the beginning of a phase, which ends as the next one begins."""
    open_: list[Any] = []

    def close() -> None:
        if open_:
            open_.pop().__exit__(None, None, None)

    def enter(name: str) -> None:
        close()
        mark = record_function(MARK + name)
        mark.__enter__()
        open_.append(mark)

    try:
        yield enter
    finally:
        close()


def _profile_requests(session: JobSession) -> None:
    spec, device = session.spec, session.device
    run, model_spec = parse_decode(spec.decode)
    source = open_source(spec.tokenizer)
    session.take_device()
    session.events.phase("build")
    model = build_decoding_model(run, model_spec, device, spec.seed)
    generator = torch.Generator(device).manual_seed(spec.seed)
    size = (run.batch, run.context)
    prompts = torch.randint(model_spec.vocab_size, size, generator=generator, device=device)
    fuses = run.fused and run.attention is AttentionBackend.PEAKMARK
    with fused_operations(model) if fuses else nullcontext(), _marked_attention():
        batch = _requests(run, model, prompts, device)
        data = source.time_batch(run.batch, run.context, device, answered=run.new_tokens)
        session.measured["work"] = "requests"
        session.measured["world_moves_data"] = True
        _measure(session, batch, batch, run.batch * run.new_tokens, data)


@contextmanager
def _marked_attention() -> Iterator[None]:
    """Name what attention over a cache runs, for in plain torch it is many operations."""
    attend = attention._attend

    def marked(*given: Any) -> Tensor:
        with record_function(OURS + "attention"):
            return attend(*given)

    with patch.object(attention, "_attend", marked):
        yield


def _requests(
    run: DecodeRun, model: torch.nn.Module, prompts: Tensor, device: torch.device
) -> Callable[[], None]:
    """Return what serves all prompts once: prefill, every new token, and their pages given back."""
    cache = build_cache(run, model, device)
    decoder = Decoder(model, cache, run.attention, graphs=run.graphs)

    def batch() -> None:
        with _phases() as enter:
            enter("prefill")
            prefill_rows(decoder, prompts)
            enter("decode")
            for _ in range(run.new_tokens - 1):
                decoder.decode()
        for row in range(run.batch):
            cache.finish(row)

    return batch


def _measure(
    session: JobSession,
    step: Callable[[], None],
    marked: Callable[[], None],
    tokens: int,
    data: dict[str, Any],
) -> None:
    """Time `step` without the profiler, then trace `marked`, and account for its time."""
    spec, measured, device = session.spec, session.measured, session.device
    for index in range(max(spec.warmup, MIN_WARMUP_STEPS)):
        session.events.phase("warmup", index=index)
        step()
    clock, marks = Clock(device), []
    for index in range(spec.steps):
        session.events.phase("step", index=index)
        start = clock.now()
        step()
        marks.append((start, clock.now()))
    found = time_statistics([clock.seconds(*mark) for mark in marks])
    measured["step_time_statistics"], measured["step_time_s"] = found, found["median_s"]
    measured["tokens_per_s"] = tokens / found["median_s"]
    measured["data"] = data
    session.events.phase("trace")
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    traced = trace(marked, device, activities)
    measured["clock"] = "gpu" if on_gpu else "cpu"
    measured["traced_time_s"], measured["traced_host_s"] = traced.wall_s, traced.host_s
    work = gpu_work(traced.events) if on_gpu else cpu_work(traced.events)
    measured |= _account(work)
    # On a GPU kernels take under the profiler what they take without; on a CPU all is slower.
    base_s = max(found["median_s"], measured["busy_s"]) if on_gpu else traced.wall_s
    measured["base_s"] = base_s
    measured["host_s"] = max(0.0, base_s - measured["busy_s"])


def _account(work: Sequence[Work]) -> dict[str, Any]:
    """Return the shares of all work, of each phase, and the kernels of most time."""
    phases: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    kernels: dict[tuple[str, Part], list[float]] = defaultdict(lambda: [0, 0.0])
    for one in work:
        seconds = one.span.end_s - one.span.start_s
        phases[one.phase or "between"][str(one.span.part)] += seconds
        seen = kernels[one.name, one.span.part]
        seen[0] += one.span.calls
        seen[1] += seconds
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:SHOWN_KERNELS]
    return {
        **account([one.span for one in work]),
        "phases": {name: dict(parts) for name, parts in phases.items()},
        "kernels_seen": sum(one.span.calls for one in work),
        "kernel_columns": ["name", "part", "calls", "time_s"],
        "kernels": [
            [name[:NAME_LENGTH], str(part), int(calls), seconds]
            for (name, part), (calls, seconds) in longest
        ],
    }


if __name__ == "__main__":
    sys.exit(run_job(JobKind.PROFILE, measure_profile))
