"""The answer about one attention call: what each variant costs, whether it is exact, where it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from planner.attention.backends import BACKWARD, FORWARD, our_backend, sdpa_backend
from planner.attention.costs import flops, moved_bytes, time_s, work
from planner.attention.memory import footprint, input_bytes, outside_bytes
from planner.attention.problem import (
    MAX_DIMENSION,
    AttentionProblem,
    Numbers,
    Variant,
    is_exact,
    obstacle,
)
from planner.attention.times import expected_s
from planner.errors import PlanError
from planner.hardware import Gpu
from planner.speed.calibrated import rates_of

DIRECTIONS = (FORWARD, BACKWARD)
CURVE_LENGTHS = tuple(2**power for power in range(9, 18))

WORDS: Mapping[Variant, str] = {
    Variant.EAGER: "eager",
    Variant.SDPA: "sdpa",
    Variant.TRITON: "ours",
    Variant.WINDOW: "window",
    Variant.GLOBAL_LOCAL: "global + local",
    Variant.BLOCK_SPARSE: "block-sparse",
    Variant.LINEAR: "linear",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One direction of a variant: FLOPs, HBM bytes, its time, and what bounds it.

    `time_s` is at measured rates; `roofline_s` at the vendor's, which no kernel reaches, and `bound`
    says what most of that is spent on: compute or hbm.
    """

    flops: float
    hbm_bytes: float
    time_s: float
    roofline_s: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantAnswer:
    """What one variant costs; bytes are those held beside Q, K, V and the output's gradient.

    `device_bytes` adds these and what the GPU holds beside tensors; `longest` is the longest
    sequence whose forward and backward fit the GPU's memory, None beyond 2^24 tokens.
    """

    variant: Variant
    exact: bool
    exactness: str
    forward_backend: str
    backward_backend: str
    forward: Pass
    backward: Pass
    forward_peak_bytes: int
    saved_bytes: int
    backward_peak_bytes: int
    device_bytes: int
    fits: bool
    longest: int | None
    peak_moment: str
    peak_tensors: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {**asdict(self), "variant": self.variant.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionAnswer:
    """Every chosen variant of one problem on one GPU, and why some cannot compute it."""

    problem: AttentionProblem
    gpu: Gpu
    variants: tuple[VariantAnswer, ...]
    refused: Mapping[str, str]

    @property
    def rates(self) -> str:
        """Where the rates of its times are from."""
        return rates_of(self.gpu).source

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with where the rates of its times are from."""
        return {
            "rates": self.rates,
            "problem": self.problem.to_dict(),
            "gpu": self.gpu.to_dict(),
            "visible_bytes": self.gpu.visible_bytes,
            "variants": [variant.to_dict() for variant in self.variants],
            "refused": dict(self.refused),
        }


def answer(problem: AttentionProblem, variants: Sequence[Variant], gpu: Gpu) -> AttentionAnswer:
    """Return what each variant costs for `problem` on `gpu`.

    Refused are those that cannot run, and those whose rate on a GPU entered by hand is unknown.
    """
    refused = {
        v.value: reason for v in variants if (reason := _refusal(problem, v, gpu)) is not None
    }
    shown = [variant for variant in variants if variant.value not in refused]
    return AttentionAnswer(
        problem=problem,
        gpu=gpu,
        variants=tuple(_one(problem, variant, gpu) for variant in shown),
        refused=refused,
    )


def _refusal(problem: AttentionProblem, variant: Variant, gpu: Gpu) -> str | None:
    try:
        for part in work(problem, variant, gpu, FORWARD, float(problem.sequence_length)):
            part.flop_s(gpu)
    except PlanError as error:
        return str(error)
    return obstacle(problem, variant)


def _one(problem: AttentionProblem, variant: Variant, gpu: Gpu) -> VariantAnswer:
    s = float(problem.sequence_length)
    held = footprint(problem, variant, gpu, s)
    moments = {**held.forward, **held.backward}
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    device_bytes = round(float(_device_bytes(problem, variant, gpu, s)))
    return VariantAnswer(
        variant=variant,
        exact=is_exact(problem, variant),
        exactness=exactness(problem, variant),
        forward_backend=backend_of(problem, variant, gpu, FORWARD),
        backward_backend=backend_of(problem, variant, gpu, BACKWARD),
        forward=_pass(problem, variant, gpu, FORWARD),
        backward=_pass(problem, variant, gpu, BACKWARD),
        forward_peak_bytes=round(float(held.forward_peak_bytes())),
        saved_bytes=round(float(held.saved_bytes())),
        backward_peak_bytes=round(float(held.backward_peak_bytes())),
        device_bytes=device_bytes,
        fits=device_bytes <= gpu.visible_bytes,
        longest=longest_that_fits(problem, variant, gpu),
        peak_moment=peak,
        peak_tensors={name: round(float(size)) for name, size in moments[peak].items()},
    )


def _pass(problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str) -> Pass:
    parts = work(problem, variant, gpu, direction, float(problem.sequence_length))
    spent = {"compute": 0.0, "hbm": 0.0}
    for part in parts:
        is_compute = part.flops * gpu.mem_bandwidth_bytes_s >= part.bytes * part.flop_s(gpu)
        spent["compute" if is_compute else "hbm"] += float(time_s((part,), gpu))
    length = float(problem.sequence_length)
    return Pass(
        flops=float(flops(parts)),
        hbm_bytes=float(moved_bytes(parts)),
        time_s=float(expected_s(problem, variant, gpu, direction, length)),
        roofline_s=float(time_s(parts, gpu)),
        bound=max(spent, key=lambda bound: spent[bound]),
    )


def backend_of(problem: AttentionProblem, variant: Variant, gpu: Gpu, direction: str) -> str:
    """Return the name of the kernel that is expected to run on `gpu`."""
    if variant is Variant.EAGER:
        return "torch"
    if variant is Variant.SDPA:
        return sdpa_backend(problem, gpu)
    return "triton" if variant is Variant.LINEAR else our_backend(problem, variant, gpu, direction)


def exactness(problem: AttentionProblem, variant: Variant) -> str:
    """Say whether a variant gives softmax attention, and what it gives if not."""
    if variant is Variant.EAGER:
        return "exact: softmax attention, its scores stored"
    if variant is Variant.SDPA:
        return "exact: softmax attention, torch's kernel"
    if variant is Variant.TRITON:
        return "exact: softmax attention, our kernel"
    if variant is Variant.LINEAR:
        return "another function: weights elu(q)+1 times elu(k)+1, no softmax"
    if is_exact(problem, variant):
        return "exact here: the pattern hides nothing at this length"
    near = f"keys less than {problem.window:,} tokens {'before it' if problem.causal else 'away'}"
    if variant is Variant.WINDOW:
        return f"not exact: a query sees {near}"
    if variant is Variant.GLOBAL_LOCAL:
        return f"not exact: a query sees {near} and the first {problem.global_tokens:,}"
    return f"not exact: a query sees 1 in {problem.block_stride} blocks of {problem.block:,} keys"


def _device_bytes(problem: AttentionProblem, variant: Variant, gpu: Gpu, s: Numbers) -> Numbers:
    held = footprint(problem, variant, gpu, s).peak_bytes()
    return held + input_bytes(problem, s) + outside_bytes(gpu)


def longest_that_fits(problem: AttentionProblem, variant: Variant, gpu: Gpu) -> int | None:
    """Return the longest sequence whose forward and backward fit, 0 for none, None beyond 2^24."""
    low, high = 0, MAX_DIMENSION
    if _device_bytes(problem, variant, gpu, float(high)) <= gpu.visible_bytes:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _device_bytes(problem, variant, gpu, float(middle)) <= gpu.visible_bytes:
            low = middle
        else:
            high = middle
    return low


def curves(
    problem: AttentionProblem, variants: Sequence[Variant], gpu: Gpu
) -> dict[str, list[dict[str, Any]]]:
    """Return each variant over powers of two from 512 to 131,072 tokens, and the problem's own.

    A point has sequence_length, forward_s, backward_s, peak_bytes, device_bytes and fits.
    """
    lengths = np.array(sorted({*CURVE_LENGTHS, problem.sequence_length}), dtype=np.float64)
    found = {}
    for variant in variants:
        if _refusal(problem, variant, gpu) is not None:
            continue
        columns = {
            "forward_s": expected_s(problem, variant, gpu, FORWARD, lengths),
            "backward_s": expected_s(problem, variant, gpu, BACKWARD, lengths),
            "peak_bytes": footprint(problem, variant, gpu, lengths).peak_bytes(),
            "device_bytes": _device_bytes(problem, variant, gpu, lengths),
        }
        found[variant.value] = _points(lengths, columns, gpu)
    return found


def _points(
    lengths: np.ndarray[Any, Any], columns: Mapping[str, Any], gpu: Gpu
) -> list[dict[str, Any]]:
    points = []
    for index, length in enumerate(lengths):
        figures = {
            name: float(values[index]) if name.endswith("_s") else round(float(values[index]))
            for name, values in columns.items()
        }
        fits = figures["device_bytes"] <= gpu.visible_bytes
        points.append({"sequence_length": int(length), **figures, "fits": fits})
    return points
