"""The ledger's saved tensors are, one by one, those that the real Hugging Face module saves.

The module runs on a CPU with real tensors, in bf16 as the job computes under `mixed` and `bf16`, with
eager attention: SDPA's CPU kernels keep other tensors than CUDA's, so stand-ins trace these. What a
CPU does otherwise than CUDA is named in `as_on_a_gpu`; nothing else may differ.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakSet

import pytest
import torch
import transformers.integrations.moe
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.templates import load_saved, monomial_values, traced
from planner.model import ModelSpec
from planner.workload import Attention, Checkpointing, Precision, TrainingWorkload
from runners.jobs.adapters import choose_trained
from runners.jobs.checkpointing import SAVED_OPERATIONS, checkpoint_layers
from runners.trace.variants import FAMILIES

BATCH, SEQ, LAYERS = 2, 24, 3
COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
UNGROUPED = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
LATENT = UNGROUPED | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 28,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": COMMON | {"sliding_window": None},
    "qwen2": COMMON,
    "qwen3": COMMON | {"head_dim": 16},
    "phi3": COMMON,
    "olmo2": COMMON,
    "gemma2": COMMON | {"head_dim": 16, "sliding_window": 8},
    "gemma3_text": COMMON | {"head_dim": 16, "sliding_window": 8},
    "gpt2": {
        "vocab_size": 101,
        "n_embd": 48,
        "n_head": 6,
        "n_inner": 80,
        "n_layer": LAYERS,
        "n_positions": 64,
        "tie_word_embeddings": False,
    },
    "gpt_neox": UNGROUPED | {"rotary_pct": 0.5},
    "opt": UNGROUPED,
    "falcon": UNGROUPED,
    "mixtral": COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": COMMON
    | {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "gpt_oss": COMMON
    | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": LATENT | {"q_lora_rank": None},
    "deepseek_v3": LATENT | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2},
}


class Saved(NamedTuple):
    """A tensor between forward and backward; `where` names its module or who holds it."""

    where: str
    shape: tuple[Any, ...]
    dtype: str
    num_bytes: int


class Holder:
    """What autograd holds in place of a saved tensor: gone when its graph is."""

    def __init__(self, module: str, tensor: torch.Tensor) -> None:
        self.module, self.tensor = module, tensor


def tiny_spec(family: str) -> ModelSpec:
    return spec_from_config({"model_type": family, **CONFIGS[family]}, name=f"tiny {family}")


def workload(checkpointing: Checkpointing, lora_rank: int = 0) -> TrainingWorkload:
    return TrainingWorkload(
        attention=Attention.EAGER,
        precision=Precision.BF16,
        checkpointing=checkpointing,
        sequence_length=SEQ,
        micro_batch=BATCH,
        lora_rank=lora_rank,
    )


def predicted(spec: ModelSpec, chosen: TrainingWorkload) -> list[Saved]:
    """Evaluate the template at the model's dimensions."""
    saved = load_saved(traced(spec, chosen, SEQ))
    monomials = tuple(tensor.monomial for tensor in saved)
    numels = monomial_values(spec, monomials, BATCH, SEQ, chosen.lora_rank)
    return [
        Saved(
            f"{place.section} {place.layer}, {tensor.module}, {tensor.op}",
            tensor.shape,
            tensor.dtype,
            round(float(numel) * tensor.coefficient_bytes),
        )
        for tensor, numel in zip(saved, numels, strict=True)
        for place in tensor.places
    ]


def seen(spec: ModelSpec, chosen: TrainingWorkload) -> list[Saved]:
    """Run the real module's forward and return every storage that is alive behind it.

    Autograd's by its hooks, with the module that was entered last before; what a selective
    checkpoint or the model itself holds by a look at every tensor that Python knows.
    """
    config = AutoConfig.for_model(**spec.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    choose_trained(model, chosen)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    checkpoint_layers(model, chosen.checkpointing)
    tokens = torch.randint(spec.vocab_size, (BATCH, SEQ))
    given = {_address(t) for t in (*model.parameters(), *model.buffers(), tokens)}
    holders: WeakSet[Holder] = WeakSet()
    entered = [""]

    def keep(tensor: torch.Tensor) -> Holder:
        holder = Holder(entered[0], tensor)
        holders.add(holder)
        return holder

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: entered.__setitem__(0, name))
    with only_new_objects(), grouped_products():
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda holder: holder.tensor)
        with hooks:
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        gc.collect()
        alive = [(holder.module, holder.tensor) for holder in holders]
        alive += [("Python", t) for t in gc.get_objects() if type(t) is torch.Tensor]
    assert loss.requires_grad
    storages = {_address(t): (where, t) for where, t in reversed(alive) if _address(t) not in given}
    return [_as_saved(where, tensor) for where, tensor in storages.values()]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _as_saved(where: str, tensor: torch.Tensor) -> Saved:
    num_bytes = tensor.untyped_storage().nbytes()
    return Saved(where, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), num_bytes)


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Hide what exists from `gc.get_objects`."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@torch.library.custom_op("peakmark_trace_test::grouped_mm", mutates_args=())
def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each expert's rows by its weights: CUDA has one operation for it, a CPU a loop."""
    out = rows.new_zeros(rows.shape[0], weights.shape[-1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        out[start:end] = rows[start:end] @ weights[expert]
        start = end
    return out


grouped_mm.register_autograd(
    lambda ctx, grad: (None, None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@contextmanager
def grouped_products() -> Iterator[None]:
    """Give mixtures of experts one operation for all, which selective checkpoints save."""
    operations = frozenset(("peakmark_trace_test::grouped_mm",))
    saved = mock.patch("runners.jobs.checkpointing.SAVED_OPERATIONS", SAVED_OPERATIONS | operations)

    def product(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return grouped_mm(rows.to(weights.dtype), weights, offs)

    with saved, mock.patch.object(transformers.integrations.moe, "_grouped_mm", product):
        yield


def as_on_a_gpu(tensor: Saved, family: str) -> Saved | None:
    """What a tensor seen on a CPU is on a GPU; None if it is no tensor of the GPU's.

    A CPU's layer norm keeps mean and 1/std in bf16, CUDA's in fp32. A checkpoint keeps the state of
    the CPU's generator, and numbers (0-dimensional fp64) that operations were called with: in host
    memory on a GPU too. Gemma's scale of the embeddings is a buffer's cast, held on the host.
    Falcon splits heads by indices of 8 bytes.
    """
    is_of_tokens = tensor.shape[-1:] == (1,) and prod(tensor.shape) == BATCH * SEQ
    if tensor.dtype == "bfloat16" and is_of_tokens:
        return tensor._replace(dtype="float32", num_bytes=2 * tensor.num_bytes)
    is_state = tensor.dtype == "uint8" and len(tensor.shape) == 1
    is_number = tensor.shape == () and tensor.dtype in ("float64", "bfloat16")
    is_index = family == "falcon" and tensor.num_bytes == 8 and tensor.dtype == "int64"
    return None if is_state or is_number or is_index else tensor


def mismatches(expected: list[Saved], found: list[Saved]) -> list[str]:
    """Name every tensor that only one of the lists holds, by (bytes, dtype)."""
    sizes = [Counter((t.num_bytes, t.dtype) for t in tensors) for tensors in (expected, found)]
    lines = []
    for tensors, own, other, words in (
        (expected, *sizes, "predicted, not saved"),
        (found, *reversed(sizes), "saved, not predicted"),
    ):
        for (num_bytes, dtype), count in (own - other).items():
            alike = [t for t in tensors if (t.num_bytes, t.dtype) == (num_bytes, dtype)]
            names = "; ".join(f"{t.where} {list(t.shape)}" for t in alike[:4])
            lines.append(f"{words}: {count} of {len(alike)} of {num_bytes} B {dtype}: {names}")
    return lines


# Torch refuses selective checkpoints of GPT-OSS (see runners/trace/variants.py).
CASES = [(f, c) for f in FAMILIES for c in Checkpointing if (f, c) != ("gpt_oss", "selective")]


def unlike(family: str, chosen: TrainingWorkload) -> list[str]:
    spec = tiny_spec(family)
    found = [tensor for t in seen(spec, chosen) if (tensor := as_on_a_gpu(t, family))]
    lines = mismatches(predicted(spec, chosen), found)
    return [f"{family}, checkpointing {chosen.checkpointing}:", *lines] if lines else []


@pytest.mark.parametrize(("family", "checkpointing"), CASES)
def test_every_saved_tensor_is_predicted(family: str, checkpointing: Checkpointing) -> None:
    lines = unlike(family, workload(checkpointing))
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("checkpointing", Checkpointing)
def test_every_tensor_saved_with_adapters_is_predicted(checkpointing: Checkpointing) -> None:
    """In the family whose adapters are traced with eager attention, which a CPU has too."""
    lines = unlike("gemma2", workload(checkpointing, lora_rank=5))
    assert not lines, "\n".join(lines)


def test_a_mismatch_names_the_tensor() -> None:
    found = seen(tiny_spec("llama"), workload(Checkpointing.FULL))
    changed = [t._replace(num_bytes=t.num_bytes + 2) for t in found if t.shape == (BATCH, SEQ, 48)]
    (line,) = mismatches(found[:0] + changed[:1], [])
    assert line.startswith("predicted, not saved: 1 of 1 of 4610 B bfloat16: model.layers.")
