"""What an engine does on the GPU beside the model: gradients into their buffers, copies, the update.

Bytes per parameter follow from the engines' code: `runners/zero` for ours; torch's
`distributed/fsdp/_fully_shard` for FSDP2, which copies every parameter in and out of its gathers and
into its reductions; `csrc/distributed/c10d/reducer.cpp` for DDP. DeepSpeed's are estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.memory.adapters import trained_groups
from planner.memory.fsdp2 import row_shards
from planner.memory.groups import GroupShapes, PerLayer, Rows, group_shapes, rows_of
from planner.model import ModelSpec
from planner.operations import muon_flops, state_bytes, update_bytes
from planner.speed.gpu_time import Part
from planner.speed.rates import Rates
from planner.speed.stream_kinds import stream_number
from planner.workload import Engine, Optimizer, Precision, ReduceDtype, TrainingWorkload

_FP32_BYTES = 4
# Estimated, not counted in its code, and chosen when recorded steps were known: DeepSpeed's step reads its
# gradients for overflow (2), casts them flat (6), sums their squares (4 + 8 + 8) and scales them (8, which
# 0.19.8 leaves out in bf16 without clipping: stage_1_and_2.py, unscale_and_clip_grads). Parameters are
# cast back (6).
_DEEPSPEED_BYTES = 2 + 6 + 20 + 8 + 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Parameters that are trained and all of them, layers and groups of them, ranks, bytes of one.

    An engine's buffers hold `reduced` elements of gradients and `gathered` of parameters: FSDP2 pads every
    parameter's first dimension to the ranks, so that eight experts over 64 of them take eight times their size.
    """

    trained: float
    whole: float
    groups: int
    ranks: Any
    element_bytes: int
    reduced: Any
    gathered: Any


def trained_parameters(
    spec: ModelSpec, workload: TrainingWorkload, engine: Engine, ranks: Any
) -> Trained:
    """Return what a plan trains, over `ranks` that share it."""
    found = trained_groups(spec, workload)
    whole = float(spec.parameters)
    trained = float(found.trained.total()) if found else whole
    reduced, gathered = trained, whole
    if engine is Engine.FSDP2:
        every = rows_of(found.shapes) if found else group_shapes(spec)
        gathered = _padded(every, ranks)
        reduced = _padded(rows_of(found.trained_shapes), ranks) if found else gathered
    return Trained(
        trained=trained,
        whole=whole,
        groups=spec.num_layers + 2,
        ranks=ranks,
        element_bytes=2 if workload.precision in (Precision.MIXED, Precision.BF16) else 4,
        reduced=reduced,
        gathered=gathered,
    )


def _padded(shapes: GroupShapes, ranks: Any) -> Any:
    def whole(rows: Rows) -> Any:
        return row_shards(rows, ranks) * ranks

    layers = PerLayer.of(shapes["layers"], whole)
    return whole(shapes["embedding"]) + layers.total() + whole(shapes["head"])


def _stream(rates: Rates, phase: str, name: str, kind: str, dtype: str, moved: Any, n: int) -> Part:
    """`n` kernels that move `moved` bytes together."""
    number = stream_number(kind, dtype)
    time_s = n * (rates.warm_stream_s(number, moved / n) + rates.gap_s)
    return Part(phase, name, 0.0 * time_s, moved, float(n), time_s)


def gradient_parts(
    workload: TrainingWorkload, engine: Engine, stage: int, sizes: Trained, rates: Rates
) -> list[Part]:
    """Return what becomes of the gradients in the backwards of a step."""
    rounds, numel, element = workload.grad_accumulation, sizes.trained, sizes.element_bytes
    dtype, groups = "bf16" if element == 2 else "fp32", sizes.groups
    tensors = 9 * groups

    def stream(kind: str, moved: Any, n: int) -> Part:
        return _stream(rates, "backward", "gradients", kind, dtype, moved, n)

    if engine is Engine.PEAKMARK:
        fills = rounds if stage >= 2 else 1
        return [
            stream("fill", fills * element * numel, fills * groups),
            stream("add_in_place", rounds * 3 * element * numel, rounds * tensors),
        ]
    if engine is Engine.FSDP2:
        reduced = _FP32_BYTES if workload.precision is Precision.MIXED else element
        moved = element * numel + reduced * sizes.reduced
        return [stream("chunk_cat", rounds * moved, rounds * groups)]
    if engine is Engine.DEEPSPEED:
        return [
            stream("copy", rounds * 2 * element * numel, rounds * tensors),
            stream("cast_up", rounds * 6 * numel / sizes.ranks, rounds * groups),
        ]
    added = [stream("add_in_place", (rounds - 1) * 3 * element * numel, rounds * tensors)]
    return [stream("copy", 2 * element * numel, tensors), *(added if rounds > 1 else [])]


def gather_parts(
    workload: TrainingWorkload, engine: Engine, stage: int, sizes: Trained, rates: Rates
) -> list[Part]:
    """Return the copies before and after gathers, forward and backward together."""
    rounds, numel, element = workload.grad_accumulation, sizes.gathered, sizes.element_bytes
    is_mixed = workload.precision is Precision.MIXED
    dtype, groups = "bf16" if element == 2 else "fp32", sizes.groups

    def stream(phase: str, kind: str, moved: Any, n: int) -> Part:
        return _stream(rates, phase, "gathers", kind, dtype, moved, n)

    if engine is Engine.PEAKMARK and stage:
        if not is_mixed:
            return []
        times = 1 if stage < 3 else rounds
        own = [stream("forward", "cast_down", times * 6 * numel / sizes.ranks, times * groups)]
        again = stream("backward", "cast_down", rounds * 6 * numel / sizes.ranks, rounds * groups)
        return [*own, *([again] if stage == 3 else [])]
    if engine is not Engine.FSDP2:
        return []
    phases = ("forward", "backward") if stage == 3 else ("forward",)
    own_kind, own_bytes = ("foreach_cast", 6) if is_mixed else ("foreach_copy", 2 * element)
    own, out = own_bytes * numel / sizes.ranks, 2 * element * numel
    return [
        stream(phase, kind, rounds * moved, rounds * groups)
        for phase in phases
        for kind, moved in ((own_kind, own), ("split_copy", out))
    ]


def update_parts(
    spec: ModelSpec,
    workload: TrainingWorkload,
    engine: Engine,
    stage: int,
    sizes: Trained,
    rates: Rates,
) -> list[Part]:
    """Return the optimizer's update of what this rank holds, with the casts around it."""
    local = sizes.trained / (sizes.ranks if stage else 1.0)
    groups = sizes.groups
    is_master = workload.precision is Precision.MIXED
    state = "bf16" if workload.precision is Precision.BF16 else "fp32"
    is_own_kernel = workload.optimizer is Optimizer.ADAMW_TRITON
    kind, update_bytes, kernels = (
        _own_update(workload, stage, local, groups)
        if is_own_kernel
        else _update(workload, local, groups)
    )
    parts = [_stream(rates, "optimizer", "update", kind, state, update_bytes, kernels)]
    if is_master and engine is Engine.PEAKMARK and not is_own_kernel:
        parts.append(_stream(rates, "optimizer", "update", "cast_up", "bf16", 6 * local, groups))
    if is_master and stage == 0 and not is_own_kernel:
        parts.append(_stream(rates, "optimizer", "update", "cast_down", "fp32", 6 * local, groups))
    if engine is Engine.DEEPSPEED:
        moved = _DEEPSPEED_BYTES * local
        parts.append(
            _stream(rates, "optimizer", "update", "mixed_binary", "fp32", moved, 6 * groups)
        )
    if workload.max_grad_norm:
        moved = 4.0 * sizes.element_bytes * local
        parts.append(_stream(rates, "optimizer", "clipping", "foreach_add", state, moved, groups))
    if workload.optimizer is Optimizer.MUON:
        flops = muon_flops(spec)
        time_s = flops / (0.6 * rates.peak_flop_s["bf16"])
        parts.append(Part("optimizer", "update", flops, 0.0, float(5 * groups), time_s))
    return parts


def _own_update(
    workload: TrainingWorkload, stage: int, local: Any, groups: int
) -> tuple[str, Any, int]:
    """(kind, bytes, kernels) of our own AdamW kernel, which runs at the rate of a copy.

    Values and two moments are read and written in fp32, the gradient is read as it was reduced; stage 0
    writes its 16-bit parameters too. The rate: recorded/kernels/h200-adamw.jsonl, 1.03 times a copy's.
    """
    is_mixed = workload.precision is Precision.MIXED
    gradient_bytes = 2 if is_mixed and workload.reduce_dtype is not ReduceDtype.FP32 else 4
    copy_bytes = 2 if is_mixed and stage == 0 else 0
    return "copy", (6 * 4.0 + gradient_bytes + copy_bytes) * local, groups


def _update(workload: TrainingWorkload, local: Any, groups: int) -> tuple[str, Any, int]:
    """(kind, bytes, kernels) of the update itself.

    AdamW's points count parameter, gradient and two states read, and all but the gradient written.
    Other optimizers are operations on whole tensors, one after another.
    """
    if workload.optimizer in (Optimizer.ADAMW_FUSED, Optimizer.ADAMW_FOREACH):
        fused = "adamw_fused" if workload.precision is Precision.BF16 else "adamw"
        kind = fused if workload.optimizer is Optimizer.ADAMW_FUSED else "adamw_foreach"
        return kind, 7.0 * state_bytes(workload.precision) * local, groups
    each_bytes = float(update_bytes(workload.optimizer, workload.precision))
    kind = "foreach_add" if workload.optimizer is Optimizer.SGD else "binary"
    return kind, each_bytes * local, 5 * groups
