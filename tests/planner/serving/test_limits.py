"""What keeps a serving choice from paying off in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.hardware import resolve_gpu
from planner.presets import resolve_model
from planner.serving.limits import Limit, decode_limit
from planner.serving.times import ServedModel, StepTimes
from planner.workload import KvDtype, WeightsDtype

LLAMA = ServedModel(spec=resolve_model("meta-llama/Llama-3.1-8B"), gpu=resolve_gpu("h200"))


def limit(batch: int = 32, context: int = 8192, **changes: Any) -> Limit:
    """Return the limit of a change of Llama-3.1-8B on an H200."""
    after = StepTimes(replace(LLAMA, **changes))
    return decode_limit(StepTimes(LLAMA), after, batch, batch * context)


def test_half_the_bytes_of_a_cache_are_not_half_the_step() -> None:
    found = limit(kv_dtype=KvDtype.FP8)
    assert found.part == "attention" and found.byte_factor == pytest.approx(2, rel=0.01)
    # Attention, 63 % of the step, takes 130 (32 x 8,192 tokens) to 166 us (64 x 4,096) of 248: measured.
    assert 1 / (1 - 0.63 * (1 - 166 / 248)) < found.speed_up < 1 / (1 - 0.63 * (1 - 130 / 248))
    assert found.most == pytest.approx(1 / (1 - found.share))
    assert "with 2.00 times fewer bytes; were it free, a step would be" in found.sentence


def test_a_scale_for_each_token_takes_back_a_part_of_what_a_smaller_cache_gains() -> None:
    found, per_head = limit(kv_dtype=KvDtype.FP8, token_scales=True), limit(kv_dtype=KvDtype.FP8)
    # Attention, 63 % of the step, takes 154.5 of 253.6 us: kernels timed by themselves.
    assert found.speed_up == pytest.approx(1 / (1 - 0.63 * (1 - 154.5 / 253.6)), rel=0.03)
    assert found.byte_factor is not None
    assert 1 < found.speed_up < per_head.speed_up < found.byte_factor
    assert "of its time with 1.94 times fewer bytes" in found.sentence


def test_smaller_weights_help_what_reads_weights() -> None:
    few, many = limit(1, 1000, weights_dtype=WeightsDtype.INT4), limit(
        64, 8192, weights_dtype=WeightsDtype.INT4
    )  # fmt: skip
    assert few.part == many.part == "products"
    assert few.speed_up > 1.5 > 1.2 > many.speed_up and few.share > many.share


def test_more_gpus_pay_for_adding_up() -> None:
    found = limit(1, 1000, tensor_parallel=2)
    assert found.part == "products" and found.byte_factor == pytest.approx(2, rel=0.01)
    assert 1 < found.speed_up < 2 < found.most
    assert "changes, most of it reading the layers' weights: that takes 0." in found.sentence
    assert found.sentence.endswith(
        "; adding up between the GPUs and gathering the logits come on top."
    )


def test_without_graphs_the_host_comes_on_top() -> None:
    found = limit(1, 1000, graphs=False)
    assert found.speed_up < 1
    assert found.sentence == "The host that starts the kernels comes on top."


def test_a_short_context_gains_nothing_from_a_window() -> None:
    windowed = replace(LLAMA.spec, sliding_window=4096, sliding_layers=(True,) * 32)
    found = limit(4, 1000, spec=windowed)
    assert found.speed_up == 1 and found.sentence == "A decode step takes as long as before."
    assert limit(4, 32_768, spec=windowed).speed_up > 1.2
