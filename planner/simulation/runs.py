"""A serving run simulated, and the simulation beside what the run measured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from planner.calibration import sheet_of
from planner.decode_run import AttentionBackend
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.records import Kind, RecordedRow
from planner.serve_run import ServeRun, padded_tokens, parse_serve
from planner.serving.capacity import Capacity, ServingEngine, capacity
from planner.serving.runs import TODAY, RanAs, check_room, kv_dtype_of, served_model
from planner.serving.times import StepTimes
from planner.simulation.continuous import simulate
from planner.simulation.server import MAX_REQUESTS, Server, StepTime, server_of
from planner.simulation.static import simulate_static
from planner.simulation.steps import RememberedSteps
from planner.simulation.tally import Simulation
from planner.units import format_seconds, format_signed
from planner.workload import ServingWorkload, WeightsDtype

# Percentiles of a short trace hang on where in a step each arrival falls: they are means over so many
# simulations whose steps are up to so much longer or shorter. Those of a long trace stand by themselves.
_REPLICAS, _SPREAD, _SHORT_REQUESTS = 8, 0.03, 1000
COMPARED = {"ttft_s": "time to first token", "tpot_s": "time per token", "e2e_s": "end to end"}
PREDICTED_PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A run's simulation by continuous batching, and by static batching beside it."""

    run: ServeRun
    model: ModelSpec
    gpu: Gpu
    server: Server
    times: StepTime
    continuous: Simulation
    static: Simulation
    source: str


def simulate_run(run: ServeRun, model: ModelSpec, gpu: Gpu, ran: RanAs = TODAY) -> SimulatedRun:
    """Simulate a run on a GPU. Raises PlanError for a trace that is too long to simulate."""
    times = StepTimes(served_model(run, model, gpu, ran))
    is_padded = run.graphs and ran.prefill_graphs
    remembered = RememberedSteps(times, padded_tokens(run.chunk_tokens) if is_padded else 1)
    server = server_of(run, model)
    return SimulatedRun(
        run=run,
        model=model,
        gpu=gpu,
        server=server,
        times=remembered,
        continuous=simulate(run.trace, server, remembered),
        static=simulate_static(run.trace, server, remembered),
        source=times.source,
    )


def simulate_asked(asked: Mapping[str, Any], gpu: Gpu) -> SimulatedRun:
    """Simulate a spec's `serve` as it is entered. Raises PlanError naming the field at fault."""
    run, model = parse_serve(asked, max_requests=MAX_REQUESTS)
    check_room(run, model, gpu)
    return simulate_run(run, model, gpu)


def engine_capacities(found: SimulatedRun) -> list[Capacity]:
    """Return what each engine's rule leaves for the cache, in requests as long as the run's longest."""
    run = found.run
    workload = ServingWorkload(
        context_length=run.capacity,
        weights_dtype=WeightsDtype(str(run.dtype)),
        kv_dtype=kv_dtype_of(run),
    )
    sizes = {"page_tokens": run.page_size, "chunk_tokens": run.chunk_tokens}
    return [
        capacity(found.model, workload, found.gpu, engine=one, **sizes) for one in ServingEngine
    ]


def simulated_row(
    spec: Mapping[str, Any],
    environment: Mapping[str, Any] | None,
    measured: Mapping[str, Any] | None,
) -> SimulatedRun | None:
    """Return today's simulation of a stored run, on the GPU that ran it.

    None where that is no known GPU, where plain torch computed, and where the spec is another version's.
    """
    try:
        run, model = parse_serve(spec.get("serve"))
        gpu = sheet_of(environment or {})
        is_ours = run.attention is AttentionBackend.PEAKMARK
        ran = RanAs.of(Kind.SERVE, measured or {})
        return simulate_run(run, model, gpu, ran) if gpu and is_ours else None
    except PlanError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One percentile of a latency, simulated and measured, in seconds."""

    quantity: str
    percentile: str
    predicted_s: float
    measured_s: float

    @property
    def error_percent(self) -> float:
        """(predicted / measured - 1) in %."""
        return 100 * (self.predicted_s / self.measured_s - 1)


class _Varied:
    """Step times that are each a little off, at random."""

    def __init__(self, times: StepTime, seed: int) -> None:
        self._times, self._draw = times, random.Random(seed)

    def step_s(
        self,
        prefill_tokens: int,
        prefill_context: int,
        decode_batch: int,
        decode_context_total: int,
        waits: bool = True,
    ) -> float:
        """Return the seconds of one step."""
        asked = (prefill_tokens, prefill_context, decode_batch, decode_context_total, waits)
        return self._times.step_s(*asked) * self._draw.uniform(1 - _SPREAD, 1 + _SPREAD)


def expected_latency(found: SimulatedRun) -> Mapping[str, Mapping[str, float]]:
    """Return the percentiles to expect of a run's latencies, by the names of COMPARED."""
    if len(found.run.trace) > _SHORT_REQUESTS:
        return found.continuous.latency
    varied = [
        simulate(found.run.trace, found.server, _Varied(found.times, seed)).latency
        for seed in range(_REPLICAS)
    ]
    return {
        name: {percent: fmean(one[name][percent] for one in varied) for percent in percentiles}
        for name, percentiles in varied[0].items()
    }


def compare_latency(found: SimulatedRun, measured: Mapping[str, Any]) -> list[Compared]:
    """Return every percentile that both have."""
    latency, expected = measured.get("latency") or {}, expected_latency(found)
    return [
        Compared(
            quantity=name,
            percentile=percentile,
            predicted_s=expected[name][percentile],
            measured_s=latency[name][percentile],
        )
        for name in COMPARED
        if name in expected and name in latency
        for percentile in PREDICTED_PERCENTILES
        if latency[name].get(percentile)
    ]


def simulated_rows(rows: Iterable[RecordedRow]) -> list[tuple[RecordedRow, SimulatedRun]]:
    """Return the recorded serving runs that can be simulated, each with its simulation."""
    pairs = [
        (row, simulated_row(row.spec, row.environment, row.measured))
        for row in rows
        if row.kind is Kind.SERVE
    ]
    return [(row, found) for row, found in pairs if found is not None]


COMPARED_COLUMNS = ("of a request", "percentile", "simulated", "measured", "error")


def compared_cells(compared: Iterable[Compared]) -> list[tuple[str, ...]]:
    """Return COMPARED_COLUMNS for people."""
    return [
        (
            COMPARED[one.quantity],
            one.percentile,
            format_seconds(one.predicted_s),
            format_seconds(one.measured_s),
            format_signed(one.error_percent, 1),
        )
        for one in compared
    ]
