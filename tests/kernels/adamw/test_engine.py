"""Our engine's optimizer `adamw_triton`: the kernel's steps to the bit, torch's states, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.adamw.reference import reference_adamw
from kernels.adamw.triton import step_factors
from runners.zero import triton_adamw
from runners.zero.engine import ZeroEngine
from runners.zero.optimizer import ShardOptimizer, shard_optimizer

LR = 1e-2
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 32,
}


def written_out(values: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return `values` after a step with each gradient, from moments of zero."""
    mean, square = torch.zeros_like(values), torch.zeros_like(values)
    for number, gradient in enumerate(gradients, start=1):
        factors = step_factors(step=number, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
        values, mean, square = reference_adamw(values, gradient, mean, square, factors)
    return values


def test_a_master_copy_is_stepped_with_16_bit_gradients_and_rounded_to_the_buffer(
    device: str,
) -> None:
    torch.manual_seed(0)
    shard = torch.randn(3001, device=device).half()
    expected, gradients = shard.float(), [torch.randn(3001, device=device).half() for _ in range(3)]
    optimizer = shard_optimizer(shard, kind="adamw_triton", lr=LR, with_master=True)
    for gradient in gradients:
        optimizer.step(gradient)
    expected = written_out(expected, gradients)
    assert torch.equal(optimizer.values, expected)
    assert torch.equal(shard, expected.half())
    # Master copy and two moments in fp32, and one fp32 counter.
    assert optimizer.state_bytes() == 3 * 4 * 3001 + 4


def test_it_goes_on_from_the_states_of_torchs_adamw(device: str) -> None:
    torch.manual_seed(0)
    values, gradients = torch.randn(100, device=device), torch.randn(4, 100, device=device)
    theirs = ShardOptimizer(values.clone(), kind="adamw_loop", lr=LR, with_master=False)
    ours = shard_optimizer(values.clone(), kind="adamw_triton", lr=LR, with_master=False)
    for gradient in gradients[:2]:
        theirs.step(gradient.clone())
    [state] = theirs.states()
    factors = step_factors(step=3, lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    moments = state["exp_avg"], state["exp_avg_sq"]
    expected = reference_adamw(theirs.values, gradients[2], *moments, factors)[0]
    ours.values.copy_(theirs.values)
    ours.restore(theirs.states())
    ours.step(gradients[2].clone())
    assert torch.equal(ours.values, expected)
    assert sorted(ours.states()[0]) == sorted(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_trains_as_with_torchs_adamw(stage: int, device: str) -> None:
    """Three steps; a step moves a value by about LR, and both round it a few times in fp32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **CONFIG)
    tokens = torch.randint(0, 61, (2, 9), device=device)
    trained = []
    for kind in ("adamw_triton", "adamw_loop"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).train()
        options: dict[str, Any] = {"precision": "fp32", "lr": LR, "device": torch.device(device)}
        engine = ZeroEngine(model, stage=stage, optimizer=kind, **options)
        for _ in range(3):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss, last_micro_batch=True)
            engine.step()
        trained.append(engine.full_parameters())
    ours, theirs = trained
    for name, values in theirs.items():
        torch.testing.assert_close(ours[name], values, rtol=2e-6, atol=1e-4 * LR)


def test_it_says_what_it_steps_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"fp32 values, not torch\.bfloat16: use precision mixed"):
        shard_optimizer(torch.ones(4).bfloat16(), kind="adamw_triton", lr=LR, with_master=False)
    monkeypatch.setattr(triton_adamw, "INTERPRETED", False)
    with pytest.raises(ValueError, match="needs a GPU: use adamw_fused here"):
        shard_optimizer(torch.ones(4), kind="adamw_triton", lr=LR, with_master=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_in_mixed_precision_a_step_allocates_and_waits_for_nothing_and_follows_torchs(
    stage: int,
) -> None:
    config = AutoConfig.for_model("llama", **{**CONFIG, "hidden_size": 512, "vocab_size": 4096})
    tokens = torch.randint(0, 61, (2, 9), device="cuda")
    trained, losses = [], []
    for kind in ("adamw_triton", "adamw_fused"):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).train()
        options: dict[str, Any] = {"precision": "mixed", "lr": LR, "device": torch.device("cuda")}
        engine = ZeroEngine(model, stage=stage, optimizer=kind, **options)
        for number in range(3):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss, last_micro_batch=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            # The first steps make states and compile.
            torch.cuda.set_sync_debug_mode("error" if number == 2 else "default")
            engine.step()
            torch.cuda.set_sync_debug_mode("default")
            added = torch.cuda.max_memory_allocated() - before
        losses.append(loss.item())
        trained.append((added, [optimizer.values.clone() for optimizer in engine._optimizers]))
    (none, ours), (cast, theirs) = trained
    assert none == 0
    # The embedding's gradient in fp32, which torch's kernel needs.
    assert cast >= 4 * 4096 * 512
    assert losses[0] == pytest.approx(losses[1], abs=1e-2)
    # A gradient that differs in its last bf16 bit may turn a small step around, not move it further.
    assert all((a - b).abs().max() <= 6 * LR for a, b in zip(ours, theirs, strict=True))
