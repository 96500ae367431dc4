"""The job `attention`: time, memory and error of each variant of attention on one shape.

python -m runners.jobs.attention SPEC.json OUT_DIR
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.attention.problem import (
    EXACT_VARIANTS,
    AttentionProblem,
    Variant,
    is_exact,
    parse_job,
)
from planner.units import GIB_BYTES, MIB_BYTES
from runners.contract import JobKind, Outcome
from runners.jobs.attention_kernels import KERNELS, backends_that_ran, reason_to_skip
from runners.jobs.attention_reference import Reference, reference_of
from runners.jobs.harness import JobSession, describe_device_oom, run_job
from runners.measure import Clock, device_used_bytes, host_peak_bytes, time_statistics

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BACKWARD_FLOPS_FACTOR = 2.5
# Larger than any L2 cache: zeroed before each repetition, so that none starts with warm data.
_FLUSH_BYTES = 256 * MIB_BYTES
# The GPU waits that long (some 1.5 ms) before each repetition, so that the host, which starts the
# work meanwhile, is not part of the time.
_HEAD_START_CYCLES = 3_000_000
_COPIED_BYTES = GIB_BYTES
_PRODUCT_SIZE = 8192
_WARMUP_REPETITIONS = 2
_MIN_REPETITIONS = 10
_MAX_REPETITIONS = 50
_TIMED_S = 0.3
_CPU_REPETITIONS = 3
_CPU_PART = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The tensors of one problem: Q, K and V, which want gradients, and the output's gradient."""

    problem: AttentionProblem
    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V."""
        return self.query, self.key, self.value

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.query.device


def measure_attention(session: JobSession) -> None:
    """Measure every variant of the spec; fills `session.measured`."""
    problem, variants = parse_job(session.spec.attention)
    session.take_device()
    inputs = _draw_inputs(problem, session.device, session.spec.seed)
    measured = session.measured
    rows: dict[str, Any] = {}
    measured["kernels"] = rows
    measured["card"] = _measure_card(problem.dtype, session.device)
    exact = reference_of(problem, Variant.TRITON, inputs.leaves, inputs.upstream)
    for index, variant in enumerate(variants):
        session.events.phase("kernel", kernel=variant, index=index, of=len(variants))
        rows[variant] = _measure_variant(variant, inputs, exact)
    _compare_to_sdpa(rows)
    if "sdpa" in rows and "backend" in rows["sdpa"]:
        measured["attention_backend"] = f"sdpa:{rows['sdpa']['backend']['forward']}"
    measured["host_bytes"] = host_peak_bytes()
    if session.device.type == "cuda":
        measured["device_bytes"] = device_used_bytes(session.device)


def _draw_inputs(problem: AttentionProblem, device: torch.device, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        size = (problem.batch, heads, problem.sequence_length, problem.head_dim)
        return torch.randn(size, dtype=_DTYPES[problem.dtype], device=device, generator=generator)

    query, key, value = draw(problem.heads), draw(problem.kv_heads), draw(problem.kv_heads)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    return Inputs(problem=problem, query=query, key=key, value=value, upstream=draw(problem.heads))


def _measure_card(dtype: str, device: torch.device) -> dict[str, float]:
    """Return what the card does of a roofline's two limits: a large copy and a large product."""
    part = 1 if device.type == "cuda" else _CPU_PART
    source = torch.zeros(_COPIED_BYTES // part, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copied = time_statistics(_repeat(lambda _: target.copy_(source), device))
    size = _PRODUCT_SIZE // part
    left, right = (torch.randn((size, size), device=device).to(_DTYPES[dtype]) for _ in range(2))
    product = time_statistics(_repeat(lambda _: torch.mm(left, right), device))
    return {
        "copy_bytes_s": 2 * source.nbytes / copied["median_s"],
        "product_flop_s": 2.0 * size**3 / product["median_s"],
    }


def _measure_variant(variant: Variant, inputs: Inputs, exact: Reference) -> dict[str, Any]:
    """Return one variant's figures; being skipped or out of memory is a figure too.

    What was measured before the memory ran out stays.
    """
    device, problem = inputs.device, inputs.problem
    reason = reason_to_skip(variant, problem, inputs.query.dtype, device)
    if reason is not None:
        return {"outcome": "skipped", "reason": reason}
    row: dict[str, Any] = {"outcome": Outcome.DONE, "error": {}}
    message = _fill(row, variant, inputs, exact)
    if message is None:
        del row["stage"]
        return row
    # Outside the handler: the error's traceback kept the variant's tensors alive.
    torch.cuda.empty_cache()
    return {**row, "outcome": Outcome.OOM_DEVICE, **describe_device_oom(message, device)}


def _fill(row: dict[str, Any], variant: Variant, inputs: Inputs, exact: Reference) -> str | None:
    """Measure forward, then backward, into `row`; return what the allocator said if it gave up."""
    try:
        reference = exact
        if variant not in EXACT_VARIANTS:
            reference = reference_of(inputs.problem, variant, inputs.leaves, inputs.upstream)
        row["stage"] = "forward"
        _measure_forward(row, variant, inputs, reference, exact)
        row["stage"] = "backward"
        _measure_backward(row, variant, inputs, reference)
        row["backend"] = backends_that_ran(variant, inputs.problem, inputs.leaves)
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


def _measure_forward(
    row: dict[str, Any], variant: Variant, inputs: Inputs, reference: Reference, exact: Reference
) -> None:
    """Fill in error, bytes and time of the forward. It runs once before its bytes are read.

    By then kernels are compiled and the libraries' workspaces are there.
    """
    attend = KERNELS[variant](inputs.problem)
    found = reference.compared(attend(*inputs.leaves))
    row["error"]["output"] = _difference(found, reference.output)
    if not is_exact(inputs.problem, variant):
        row["apart_from_exact"] = {"mean_of_rows": _apart(found, exact.output)}
    del found, attend
    row |= _forward_bytes(variant, inputs)
    attend = KERNELS[variant](inputs.problem)
    with torch.no_grad():
        row["forward"] = time_statistics(_repeat(lambda _: attend(*inputs.leaves), inputs.device))
    row["forward_flop_s"] = inputs.problem.forward_flops() / row["forward"]["median_s"]


def _measure_backward(
    row: dict[str, Any], variant: Variant, inputs: Inputs, reference: Reference
) -> None:
    """Fill in errors, bytes and time of the backward."""
    attend, leaves, upstream = KERNELS[variant](inputs.problem), inputs.leaves, inputs.upstream
    gradients = torch.autograd.grad(attend(*leaves), leaves, upstream)
    for name, ours in zip(("dq", "dk", "dv"), gradients, strict=True):
        if name in reference.gradients:
            compared = reference.compared(ours) if name == "dq" else ours[:1]
            row["error"][name] = _difference(compared, reference.gradients[name])
    del gradients, attend
    row |= _backward_bytes(variant, inputs)
    attend = KERNELS[variant](inputs.problem)
    # A forward before each, not timed: a graph kept for all would hold more than a step does.
    times_s = _repeat(
        lambda output: torch.autograd.grad(output, leaves, upstream),
        inputs.device,
        prepare=lambda: attend(*leaves),
    )
    row["backward"] = time_statistics(times_s)
    flops = _BACKWARD_FLOPS_FACTOR * inputs.problem.forward_flops()
    row["backward_flop_s"] = flops / row["backward"]["median_s"]


def _difference(ours: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest absolute error, and the error's norm over the exact result's."""
    error = ours.detach().double() - exact
    relative = error.norm() / exact.norm()
    return {"max_abs": error.abs().max().item(), "relative": relative.item()}


def _apart(ours: Tensor, exact: Tensor) -> float:
    """Return the error's norm over the exact result's, row by row, as a mean over rows and heads.

    Over all rows at once the first ones would decide, which see few keys and have the largest norms.
    """
    error = (ours.detach().double() - exact).norm(dim=-1)
    return float((error / exact.norm(dim=-1)).mean())


class _Bytes:
    """Bytes above those at the start, by two counters: what tensors ask for, and their blocks."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        # Without cached blocks, which could hold a tensor in more than it asked for.
        torch.cuda.empty_cache()
        self._device = device
        self._start = self._read("current")

    def _read(self, moment: str) -> tuple[int, int]:
        counters = torch.cuda.memory_stats(self._device)
        return tuple(counters[f"{kind}_bytes.all.{moment}"] for kind in ("requested", "allocated"))

    def restart_peaks(self) -> None:
        """Forget the peaks so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def since(self, name: str, moment: str) -> dict[str, int]:
        """Return both counters, peak or current, above the start."""
        pairs = zip(("requested", ""), self._read(moment), self._start, strict=True)
        return {
            f"{name}_{kind}_bytes".replace("__", "_"): now - before for kind, now, before in pairs
        }


def _forward_bytes(variant: Variant, inputs: Inputs) -> dict[str, int]:
    """Return what a forward held above Q, K, V and the upstream gradient, and what it keeps."""
    if inputs.device.type != "cuda":
        return {}
    counted = _Bytes(inputs.device)
    counted.restart_peaks()
    attend = KERNELS[variant](inputs.problem)
    output = attend(*inputs.leaves)
    found = counted.since("forward_peak", "peak") | counted.since("saved", "current")
    del output
    return found


def _backward_bytes(variant: Variant, inputs: Inputs) -> dict[str, int]:
    """Return what a backward held above the same, the forward's result and gradients included."""
    if inputs.device.type != "cuda":
        return {}
    counted = _Bytes(inputs.device)
    attend = KERNELS[variant](inputs.problem)
    output = attend(*inputs.leaves)
    counted.restart_peaks()
    gradients = torch.autograd.grad(output, inputs.leaves, inputs.upstream)
    found = counted.since("backward_peak", "peak")
    del output, gradients
    return found


def _repeat(
    work: Callable[[Any], object],
    device: torch.device,
    prepare: Callable[[], object] = lambda: None,
) -> list[float]:
    """Return the time of each repetition of `work` on what `prepare` gave it, with a cold L2 cache."""
    clock = Clock(device)
    is_cuda = device.type == "cuda"
    if is_cuda:
        # What is flushed must not take a bite of a cached block that scores would need whole.
        torch.cuda.empty_cache()
    flushed = torch.empty(_FLUSH_BYTES if is_cuda else 1, dtype=torch.int8, device=device)

    def once() -> tuple[Any, Any]:
        prepared = prepare()
        flushed.zero_()
        if is_cuda:
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start = clock.now()
        work(prepared)
        return start, clock.now()

    for _ in range(_WARMUP_REPETITIONS):
        trial_s = clock.seconds(*once())
    wanted = int(_TIMED_S / max(trial_s, 1e-6))
    number = min(_MAX_REPETITIONS, max(_MIN_REPETITIONS, wanted)) if is_cuda else _CPU_REPETITIONS
    marks = [once() for _ in range(number)]
    return [clock.seconds(start, end) for start, end in marks]


def _compare_to_sdpa(rows: dict[str, Any]) -> None:
    """Add each kernel's time over sdpa's, where both ran."""
    sdpa = rows.get("sdpa", {})
    for row in rows.values():
        for direction in ("forward", "backward"):
            if direction in row and direction in sdpa:
                ratio = row[direction]["median_s"] / sdpa[direction]["median_s"]
                row[f"{direction}_time_over_sdpa"] = ratio


if __name__ == "__main__":
    sys.exit(run_job(JobKind.ATTENTION, measure_attention))
