"""What attention kernels hold while a backward runs: by hand, as the kernels say, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kernels.attention.dispatch import MAX_BACKWARD_HEAD_DIM
from kernels.attention.schedule import FORWARD_TILES, ForwardWork, forward_table, single_tile
from planner.hardware import resolve_gpu
from planner.memory.attention import attention_workspaces, tile_list_bytes
from planner.memory.requests import ATTENTION_GRADIENTS, Layout, Section, lay_out
from planner.memory.templates import load_steps, monomial_values, traced
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.workload import Attention, Checkpointing, Precision, TrainingWorkload

LLAMA = resolve_model("meta-llama/Llama-3.2-1B")  # 32 query heads over 8, of 64
H200 = resolve_gpu("h200")


def workload_of(length: int = 300, batch: int = 2, **changes: Any) -> TrainingWorkload:
    plain = TrainingWorkload(sequence_length=length, micro_batch=batch, attention=Attention.TRITON)
    return replace(plain, **changes)


def test_our_backward_on_hopper_takes_two_buffers_in_every_layer() -> None:
    """300 queries are padded to 384: 2 x 4 x (2 x 32) x 384 and 4 x 2 x 300 x 32 x 64 bytes."""
    found = attention_workspaces(LLAMA, workload_of(), H200)
    assert found == ((196_608, 4_915_200),) * LLAMA.num_layers


@pytest.mark.parametrize(
    ("change", "gpu"),
    [
        ({}, "a100-sxm4-80gb"),
        ({}, "b200-sxm-180gb"),
        ({"precision": Precision.FP32}, "h200"),
        ({"attention": Attention.EAGER}, "h200"),
    ],
)
def test_other_gpus_and_fp32_take_none(change: dict[str, Any], gpu: str) -> None:
    workload = workload_of(**change)
    assert not any(attention_workspaces(LLAMA, workload, resolve_gpu(gpu)))
    assert not tile_list_bytes(LLAMA, workload, resolve_gpu(gpu))


@pytest.mark.parametrize("head_dim", [192, 256, 60])
def test_heads_that_the_hopper_kernels_do_not_take(head_dim: int) -> None:
    assert head_dim > MAX_BACKWARD_HEAD_DIM or 2 * head_dim % 16
    spec = resolve_model("meta-llama/Llama-3.2-1B", {"head_dim": head_dim})
    assert not any(attention_workspaces(spec, workload_of(), H200))


def test_windows_that_hide_something_take_the_buffers_and_no_list() -> None:
    spec = resolve_model("mistralai/Mistral-7B-v0.1")  # a window of 4,096 in every layer
    assert all(attention_workspaces(spec, workload_of(4096, 1), H200))
    assert all(attention_workspaces(spec, workload_of(4097, 1), H200))
    assert tile_list_bytes(spec, workload_of(4096, 1), H200) > 0
    assert tile_list_bytes(spec, workload_of(4097, 1), H200) == 0


def test_what_ran_otherwise_takes_none() -> None:
    backward = replace(LLAMA, portable_attention=("backward",))
    assert not any(attention_workspaces(backward, workload_of(), H200))
    assert tile_list_bytes(backward, workload_of(), H200) > 0
    forward = replace(LLAMA, portable_attention=("forward",))
    assert all(attention_workspaces(forward, workload_of(), H200))
    assert tile_list_bytes(forward, workload_of(), H200) == 0


def test_cudnn_takes_one_buffer() -> None:
    found = attention_workspaces(LLAMA, workload_of(attention=Attention.SDPA), H200)
    rows = 2 * 300 * 32
    assert found == ((rows * 64 * 8 + 4 * rows + 256,),) * LLAMA.num_layers


@pytest.mark.parametrize(("head_dim", "length"), [(64, 2048), (64, 100), (128, 1000), (256, 1000)])
def test_the_tiles_list_is_the_kernel_s(head_dim: int, length: int) -> None:
    spec = resolve_model("meta-llama/Llama-3.2-1B", {"head_dim": head_dim})
    work = ForwardWork(
        seq_q=length,
        seq_k=length,
        heads=2 * spec.num_heads,
        group=4,
        tile=FORWARD_TILES.get(head_dim) or single_tile(head_dim, head_dim),
        right=0,
    )
    found = tile_list_bytes(spec, workload_of(length), H200)
    assert found == 4 * len(forward_table(work, workers=132))


def _stretches(
    spec: ModelSpec, workload: TrainingWorkload
) -> tuple[Layout, list[float], list[Section]]:
    """Return a model's layout, the size of each kind, and the backwards of its layers."""
    sequence = load_steps(traced(spec, workload, workload.sequence_length), "kept")
    layout = lay_out(sequence, stops_at_attention=True)
    batch, length = workload.micro_batch, workload.sequence_length
    values = monomial_values(spec, sequence.steps.monomials, batch, length)
    sizes = [values[m] * f for m, f in zip(layout.monomials, layout.factors, strict=True)]
    return layout, sizes, [s for s in layout.backward if s.place.section == "layer_backward"]


@pytest.mark.parametrize("checkpointing", list(Checkpointing))
@pytest.mark.parametrize(
    "model",
    [
        *("meta-llama/Llama-3.2-1B", "Qwen/Qwen3-1.7B", "openai-community/gpt2"),
        *("microsoft/phi-4", "EleutherAI/pythia-1.4b", "mistralai/Mixtral-8x7B-v0.1"),
    ],
)
def test_they_come_behind_delta_and_three_gradients(
    model: str, checkpointing: Checkpointing
) -> None:
    """Once in each layer, the recomputed forward aside: fp32 row sums, then dq, dk and dv in bf16."""
    spec = resolve_model(model)
    workload = workload_of(checkpointing=checkpointing)
    layout, sizes, sections = _stretches(spec, workload)
    assert len(sections) == spec.num_layers
    rows = 2 * 300
    queries, keys = 2 * rows * spec.query_size, 2 * rows * spec.kv_size
    for section in sections:
        ends = [end for _, end, cut in section.stretches if cut == ATTENTION_GRADIENTS]
        assert len(ends) == 1
        kinds = layout.kinds[ends[0] - 4 : ends[0]]
        assert [sizes[k] for k in kinds] == [4 * rows * spec.num_heads, queries, keys, keys]
