"""The job `attention`: time, memory and error of each attention kernel on one shape.

python -m runners.jobs.attention SPEC.json OUT_DIR
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from planner.errors import PlanError
from planner.units import MIB_BYTES
from runners.contract import JobKind, Outcome
from runners.jobs.attention_calls import sdpa_backend
from runners.jobs.attention_kernels import (
    KERNELS,
    Attend,
    AttentionShape,
    backends_that_ran,
    reason_to_skip,
    reference_blocks,
    reference_gradients,
    reference_output,
)
from runners.jobs.harness import JobSession, describe_device_oom, run_job
from runners.measure import Clock, device_used_bytes, host_peak_bytes, time_statistics

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BACKWARD_FLOPS_FACTOR = 2.5
_MAX_DIMENSION = 2**24
# Larger than any L2 cache: zeroed before each repetition, so that none starts with warm data.
_FLUSH_BYTES = 256 * MIB_BYTES
_WARMUP_REPETITIONS = 2
_MIN_REPETITIONS = 10
_MAX_REPETITIONS = 50
_TIMED_S = 0.3
_CPU_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """The tensors of one shape: inputs that want gradients, and the output's gradient."""

    shape: AttentionShape
    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V."""
        return self.query, self.key, self.value


def parse_attention(given: Mapping[str, Any] | None) -> tuple[AttentionShape, str, list[str]]:
    """Read a spec's `attention`: its shape, dtype name and kernels.

    Raises PlanError naming the field at fault.
    """
    values = dict(given or {})
    dtype = values.pop("dtype", "bf16")
    kernels = list(values.pop("kernels", KERNELS))
    names = {field.name for field in fields(AttentionShape)}
    if set(values) != names:
        wrong = sorted(set(values) ^ names)
        raise PlanError("attention", wrong, f"exactly the fields {', '.join(sorted(names))}")
    for name in names - {"causal"}:
        value = values[name]
        if type(value) is not int or not 1 <= value <= _MAX_DIMENSION:
            raise PlanError(f"attention.{name}", value, f"an integer from 1 to {_MAX_DIMENSION}")
    if not isinstance(values["causal"], bool):
        raise PlanError("attention.causal", values["causal"], "true or false")
    if values["heads"] % values["kv_heads"]:
        raise PlanError("attention.kv_heads", values["kv_heads"], "a divisor of attention.heads")
    if dtype not in _DTYPES:
        raise PlanError("attention.dtype", dtype, f"one of {', '.join(_DTYPES)}")
    unknown = [kernel for kernel in kernels if kernel not in KERNELS]
    if unknown or not kernels:
        raise PlanError("attention.kernels", kernels, f"some of {', '.join(KERNELS)}")
    return AttentionShape(**values), dtype, kernels


def measure_attention(session: JobSession) -> None:
    """Measure every kernel of the spec; fills `session.measured`."""
    shape, dtype, kernels = parse_attention(session.spec.attention)
    session.take_device()
    problem = _draw_problem(shape, _DTYPES[dtype], session.device, session.spec.seed)
    references = _References(problem)
    rows: dict[str, Any] = {}
    session.measured["kernels"] = rows
    for kernel in kernels:
        session.events.phase("kernel", kernel=kernel)
        rows[kernel] = _measure_kernel(kernel, problem, references)
    _compare_to_sdpa(rows)
    session.measured["attention_backend"] = f"sdpa:{_chosen_backend(problem)}"
    session.measured["host_bytes"] = host_peak_bytes()
    if session.device.type == "cuda":
        session.measured["device_bytes"] = device_used_bytes(session.device)


def _draw_problem(
    shape: AttentionShape, dtype: torch.dtype, device: torch.device, seed: int
) -> Problem:
    generator = torch.Generator(device).manual_seed(seed)

    def draw(heads: int) -> Tensor:
        size = (shape.batch, heads, shape.sequence_length, shape.head_dim)
        return torch.randn(size, dtype=dtype, device=device, generator=generator)

    query, key, value = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    return Problem(shape, query, key, value, upstream=draw(shape.heads))


class _References:
    """Float64 results of one problem, computed once for all kernels."""

    def __init__(self, problem: Problem) -> None:
        self.blocks = reference_blocks(problem.shape)
        with torch.no_grad():
            self.output = reference_output(problem.shape, *problem.inputs)
        self.gradients = reference_gradients(problem.shape, *problem.inputs, problem.upstream)


def _measure_kernel(kernel: str, problem: Problem, references: _References) -> dict[str, Any]:
    """Return one kernel's figures; being skipped or out of memory is a figure too."""
    device = problem.query.device
    reason = reason_to_skip(kernel, problem.shape, problem.query.dtype, device)
    if reason is not None:
        return {"outcome": "skipped", "reason": reason}
    attend = KERNELS[kernel](problem.shape)
    try:
        # First without measuring: kernels are compiled and workspaces appear.
        errors = _measure_errors(attend, problem, references)
        figures: dict[str, Any] = {"outcome": Outcome.DONE, "error": errors}
        figures["backend"] = backends_that_ran(kernel)
        figures |= _measure_bytes(attend, problem)
        figures |= _measure_times(attend, problem)
    except torch.OutOfMemoryError as error:
        message = str(error)
    else:
        return figures
    # Outside the handler: the error's traceback kept the kernel's tensors alive.
    torch.cuda.empty_cache()
    return {"outcome": Outcome.OOM_DEVICE, **describe_device_oom(message, device)}


def _measure_errors(
    attend: Attend, problem: Problem, references: _References
) -> dict[str, dict[str, float]]:
    output = attend(*problem.inputs)
    compared = torch.cat([output[:1, :, rows] for rows in references.blocks], dim=2)
    errors = {"output": _difference(compared, references.output)}
    gradients = torch.autograd.grad(output, problem.inputs, problem.upstream)
    if references.gradients is not None:
        for name, ours, exact in zip("qkv", gradients, references.gradients, strict=True):
            errors[f"d{name}"] = _difference(ours[:1], exact)
    return errors


def _difference(ours: Tensor, exact: Tensor) -> dict[str, float]:
    """Return the largest absolute error, and the error's norm over the exact result's."""
    error = ours.detach().double() - exact
    relative = error.norm() / exact.norm()
    return {"max_abs": error.abs().max().item(), "relative": relative.item()}


def _measure_bytes(attend: Attend, problem: Problem) -> dict[str, Any]:
    """Return allocated bytes above those of the inputs and the output's gradient."""
    device = problem.query.device
    if device.type != "cuda":
        return {"forward_peak_bytes": None, "saved_bytes": None, "backward_peak_bytes": None}
    base_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = attend(*problem.inputs)
    forward_peak_bytes = torch.cuda.max_memory_allocated(device)
    saved_bytes = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    gradients = torch.autograd.grad(output, problem.inputs, problem.upstream)
    backward_peak_bytes = torch.cuda.max_memory_allocated(device)
    del output, gradients
    return {
        "forward_peak_bytes": forward_peak_bytes - base_bytes,
        "saved_bytes": saved_bytes - base_bytes,
        "backward_peak_bytes": backward_peak_bytes - base_bytes,
    }


def _measure_times(attend: Attend, problem: Problem) -> dict[str, Any]:
    device = problem.query.device
    with torch.no_grad():
        forward = time_statistics(_repeat(lambda: attend(*problem.inputs), device))
    output = attend(*problem.inputs)
    inputs, upstream = problem.inputs, problem.upstream
    backward = time_statistics(
        _repeat(lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True), device)
    )
    flops = problem.shape.forward_flops()
    return {
        "forward": forward,
        "backward": backward,
        "forward_flop_s": flops / forward["median_s"],
        "backward_flop_s": _BACKWARD_FLOPS_FACTOR * flops / backward["median_s"],
    }


def _repeat(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return the time of each repetition of `work`, after warming up, with a cold L2 cache."""
    clock = Clock(device)
    is_cuda = device.type == "cuda"
    flushed = torch.empty(_FLUSH_BYTES if is_cuda else 1, dtype=torch.int8, device=device)

    def once() -> tuple[Any, Any]:
        flushed.zero_()
        start = clock.now()
        work()
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


def _chosen_backend(problem: Problem) -> str:
    shape = problem.shape
    return sdpa_backend(
        *problem.inputs,
        is_causal=shape.causal,
        scale=shape.scale,
        enable_gqa=shape.heads != shape.kv_heads,
    )


if __name__ == "__main__":
    sys.exit(run_job(JobKind.ATTENTION, measure_attention))
