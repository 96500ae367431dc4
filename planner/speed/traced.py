"""The times of a traced model of no family: of its kinds of operations, whose shapes are not known."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from planner.memory.kinds import layer_kinds
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.speed.gpu_time import Part, micro_batch_parts
from planner.speed.rates import Rates, layout_number
from planner.traced import step_costs
from planner.workload import Precision, TrainingWorkload

# What a layer of a family's model launches; traced models do not say.
_LAUNCHES = {"forward": 45.0, "backward": 90.0}
# Products go at the rate of this square one, operations on tensors at the mean rate of this model's.
_SQUARE, _LIKE = 4096.0, "meta-llama/Llama-3.1-8B"
_LENGTH, _HEAD_DIM = 4096.0, 128.0


def traced_parts(
    spec: ModelSpec, workload: TrainingWorkload, rates: Rates, b: Any, s: Any
) -> list[Part]:
    """Return the operations of one micro-batch of b rows of s tokens, by phase and kind."""
    dtype = "fp32" if workload.precision is Precision.FP32 else "bf16"
    product_s = rates.product_s("mm", dtype, layout_number("nt"), 1.0, (_SQUARE,) * 3)
    flop_s = 2 * _SQUARE**3 / float(product_s)
    attention_s = rates.attention_s("attention_forward_sdpa", 128.0, _LENGTH, _HEAD_DIM, 1e12)
    parts = []
    for name, flops, moved in step_costs(spec, workload, b, s):
        phase, kind = name.split(".")
        if kind == "products":
            time_s = flops / flop_s
        elif kind == "attention":
            time_s = flops * float(attention_s) / 1e12
        else:
            time_s = moved / _stream_bytes_s(rates, workload.precision, phase)
        launches = _LAUNCHES[phase] * spec.num_layers if kind == "elementwise" else 0.0
        parts.append(Part(phase, kind, flops, moved, launches, time_s))
    return parts


@lru_cache(maxsize=32)
def _stream_bytes_s(rates: Rates, precision: Precision, phase: str) -> float:
    """Bytes per second of the operations bound by memory in a phase of a family's model."""
    spec = resolve_model(_LIKE)
    workload = TrainingWorkload(precision=precision, sequence_length=int(_LENGTH))
    parts = micro_batch_parts(spec, workload, layer_kinds(spec, workload), rates, 1.0, _LENGTH)
    found = [part for part in parts if (part.phase, part.name) == (phase, "elementwise")]
    return sum(float(part.bytes) for part in found) / sum(float(part.time_s) for part in found)
