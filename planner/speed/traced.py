"""The times of a traced model of no family: of its kinds of operations, whose shapes are not known."""

from __future__ import annotations

from typing import Any

from planner.model import ModelSpec
from planner.speed.gpu_time import Part
from planner.speed.rates import Rates, layout_number
from planner.speed.stream_kinds import stream_number
from planner.traced import step_costs
from planner.workload import Precision, TrainingWorkload

# What a layer of a family's model launches; traced models do not say.
_LAUNCHES = {"forward": 45.0, "backward": 90.0}
# Products go at the rate of this square one, operations on tensors at that of this many bytes.
_SQUARE, _TENSOR_BYTES = 4096.0, 2.0**26
_LENGTH, _HEAD_DIM = 4096.0, 128.0


def traced_parts(
    spec: ModelSpec, workload: TrainingWorkload, rates: Rates, b: Any, s: Any
) -> list[Part]:
    """Return the operations of one micro-batch of b rows of s tokens, by phase and kind."""
    dtype = "fp32" if workload.precision is Precision.FP32 else "bf16"
    product_s = rates.product_s("mm", dtype, layout_number("nt"), 1.0, (_SQUARE,) * 3)
    flop_s = 2 * _SQUARE**3 / float(product_s)
    moved_s = float(rates.warm_stream_s(stream_number("binary", dtype), _TENSOR_BYTES))
    attention_s = rates.attention_s("attention_forward_sdpa", 128.0, _LENGTH, _HEAD_DIM, 1e12)
    parts = []
    for name, flops, moved in step_costs(spec, workload, b, s):
        phase, kind = name.split(".")
        if kind == "products":
            time_s = flops / flop_s
        elif kind == "attention":
            time_s = flops * float(attention_s) / 1e12
        else:
            time_s = moved * moved_s / _TENSOR_BYTES
        launches = _LAUNCHES[phase] * spec.num_layers if kind == "elementwise" else 0.0
        parts.append(Part(phase, kind, flops, moved, launches, time_s))
    return parts
