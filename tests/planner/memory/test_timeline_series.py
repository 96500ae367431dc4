"""The replayed step as a series: its sections, its parts, its high point."""

from __future__ import annotations

from typing import Any

import pytest

from planner.memory.step_sections import section_label, section_words
from planner.memory.timeline_series import step_timeline, why_no_timeline
from planner.plan import Plan, parse_plan
from planner.predict import predict

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
# 4 x (4 x 1024^2 + 3 x 1024 x 2048 + 2 x 1024) + 1024 + 2 x 8192 x 1024
PARAMETERS = 4 * (4 * 1024**2 + 3 * 1024 * 2048 + 2 * 1024) + 1024 + 2 * 8192 * 1024


def plan(layers: int = 4, **chosen: Any) -> Plan:
    names = ("engine", "zero_stage", "world_size", "tensor_parallel")
    parallelism = {"engine": "peakmark", "zero_stage": 0, "world_size": 1}
    workload = {"sequence_length": 512}
    for key, value in chosen.items():
        (parallelism if key in names else workload)[key] = value
    return parse_plan(
        {
            "model": {"config": {**CONFIG, "num_hidden_layers": layers}, "name": "made up"},
            "workload": workload,
            "parallelism": parallelism,
            "hardware": {"preset": "h200-sxm5-141gb"},
        }
    )


def test_sections_follow_the_step_in_order() -> None:
    layers = [f"layer {index}" for index in range(4)]
    backward = [f"{layer} backward" for layer in reversed(layers)]
    assert [section.label for section in step_timeline(plan())] == [
        *("embed", *layers, "head", "loss"),
        *("loss backward", *backward, "embed backward", "optimizer"),
    ]


@pytest.mark.parametrize(
    "chosen",
    [
        {"zero_stage": 3, "world_size": 4},
        {"zero_stage": 2, "world_size": 4},
        {"zero_stage": 3, "world_size": 4, "grad_accumulation": 3},
        {"engine": "fsdp2", "zero_stage": 3, "world_size": 2, "checkpointing": "full"},
        {"engine": "fsdp2", "zero_stage": 2, "world_size": 2, "optimizer": "adamw_foreach"},
        {"engine": "ddp", "precision": "fp32"},
        {"precision": "autocast", "attention": "eager"},
        {"expandable_segments": True},
    ],
    ids=lambda chosen: " ".join(str(value) for value in chosen.values()),
)
def test_the_high_point_is_the_predicted_peak_to_the_byte(chosen: dict[str, Any]) -> None:
    sections = step_timeline(plan(**chosen))
    memory = predict(plan(**chosen)).memory
    assert max(sum(s.high_parts.values()) for s in sections) == memory["allocated_bytes"]
    assert sections[-1].reserved_bytes == memory["reserved_bytes"]
    for section in sections:
        assert sum(section.end_parts.values()) <= sum(section.high_parts.values())
        assert min((*section.high_parts.values(), *section.end_parts.values())) > 0


def test_parts_are_the_training_state_counted_by_hand() -> None:
    sections = {section.label: section for section in step_timeline(plan())}
    # bf16 parameters; fp32 master, two fp32 states, a 4-byte step of each of the six groups.
    for section in sections.values():
        assert section.end_parts["parameters"] == 2 * PARAMETERS
        assert section.end_parts["optimizer"] == 12 * PARAMETERS + 4 * 6
    assert sections["embed backward"].end_parts["gradients"] == 2 * PARAMETERS
    assert "gradients" not in sections["optimizer"].end_parts
    # The gradients' cast to fp32, of the largest group: a layer.
    layer = 4 * 1024**2 + 3 * 1024 * 2048 + 2 * 1024
    assert sections["optimizer"].high_parts["temporary"] == 4 * layer


def test_stage_3_gathers_the_next_layer_beside_the_one_in_use() -> None:
    sections = {s.label: s for s in step_timeline(plan(zero_stage=3, world_size=2))}
    layer, vocabulary = 4 * 1024**2 + 3 * 1024 * 2048 + 2 * 1024, 8192 * 1024
    assert sections["embed"].high_parts["gathered"] == 2 * (vocabulary + layer)
    assert sections["layer 1"].high_parts["gathered"] == 2 * 2 * layer
    assert sections["layer 1"].end_parts["gathered"] == 2 * layer
    assert "gathered" not in sections["optimizer"].end_parts


# Two matrices per adapter, of rank 8: beside four of 1024 x 1024 and three of 1024 x 2048 a layer.
ADAPTERS = 4 * 8 * (4 * (1024 + 1024) + 3 * (1024 + 2048))


@pytest.mark.parametrize(
    ("chosen", "parameters"),
    [
        ({"lora_rank": 8}, PARAMETERS + ADAPTERS),
        ({"frozen_layers": 2}, PARAMETERS),
        ({"packed": True}, PARAMETERS),
        ({"attention": "triton"}, PARAMETERS),
        ({"engine": "ddp", "precision": "bf16", "world_size": 2}, PARAMETERS),
        ({"engine": "deepspeed", "zero_stage": 1, "world_size": 2}, PARAMETERS),
        ({"engine": "deepspeed", "zero_stage": 2, "world_size": 2}, PARAMETERS),
        ({"engine": "deepspeed", "zero_stage": 3, "world_size": 2}, PARAMETERS // 2),
    ],
)
def test_every_engine_s_parameters_are_drawn_as_parameters(
    chosen: dict[str, Any], parameters: int
) -> None:
    for section in step_timeline(plan(**chosen)):
        # DeepSpeed pads its flat buffer by less than a KiB.
        assert section.end_parts["parameters"] == pytest.approx(2 * parameters, abs=1024)


def test_frozen_layers_are_gathered_like_others() -> None:
    sections = {
        s.label: s for s in step_timeline(plan(zero_stage=3, world_size=2, frozen_layers=2))
    }
    layer = 4 * 1024**2 + 3 * 1024 * 2048 + 2 * 1024
    assert sections["layer 1"].high_parts["gathered"] == 2 * 2 * layer


def test_gradients_that_wait_are_gradients() -> None:
    waiting = {"grad_accumulation": 2, "sync_each_micro_batch": False}
    ddp = plan(engine="ddp", precision="bf16", world_size=2, **waiting)
    sections = {s.label: s for s in step_timeline(ddp)}
    # The buckets, and beside them the first micro-batch's.
    assert sections["layer 0"].end_parts["gradients"] == 2 * 2 * PARAMETERS


def test_a_step_that_is_not_replayed_says_why() -> None:
    split = plan(tensor_parallel=2)
    reason = why_no_timeline(split)
    assert reason is not None and "split model" in reason
    with pytest.raises(ValueError, match="split model"):
        step_timeline(split)
    huge = why_no_timeline(plan(sequence_length=2**24, micro_batch=2**16, attention="eager"))
    assert huge is not None and "more bytes" in huge


def test_labels_are_the_same_for_layers_of_every_kind() -> None:
    assert section_label("first_layer", 0) == section_label("layer", 0) == "layer 0"
    assert section_label("last_layer_backward", 3) == "layer 3 backward"
    assert section_label("loss_backward") == "loss backward"
    assert section_words("loss backward") == "logits and loss backward"
    assert section_words("embed") == "embedding"
    assert section_words("layer 3 backward") == "layer 3 backward"
