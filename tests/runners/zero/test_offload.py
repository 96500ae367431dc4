"""The optimizer in host memory: the same training, bit by bit, and what it leaves on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.zero import offload
from runners.zero.engine import ZeroEngine
from runners.zero.offload import HostOptimizer, HostStepper, host_threads
from runners.zero.optimizer import ShardOptimizer
from runners.zero.saving import load_checkpoint, save_checkpoint

CONFIG = {
    "hidden_size": 10,
    "intermediate_size": 23,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 61,
}
CPU = torch.device("cpu")


def begin(
    stage: int, precision: str, device: torch.device = CPU, **options: Any
) -> tuple[nn.Module, ZeroEngine]:
    """Return a tiny model and its engine, alone."""
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", **CONFIG)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    chosen = {"optimizer": "adamw_fused", "lr": 1e-2, "device": device} | options
    engine = ZeroEngine(model.to(device).train(), stage=stage, precision=precision, **chosen)
    return model, engine


def train(model: nn.Module, engine: ZeroEngine, first: int, last: int) -> list[float]:
    """Train steps `first` to `last` - 1; return the losses."""
    losses = []
    for step in range(first, last):
        drawn = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(step))
        tokens = drawn.to(next(model.parameters()).device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss, last_micro_batch=True)
        engine.step()
        losses.append(loss.item())
    return losses


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of parameters are equal, bit by bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_is_the_same_wherever_its_optimizer_is(stage: int, precision: str) -> None:
    (model, engine), (other, offloaded) = (
        begin(stage, precision, offload_optimizer=offloads) for offloads in (False, True)
    )
    assert train(model, engine, 0, 4) == train(other, offloaded, 0, 4)
    assert same(engine.full_parameters(), offloaded.full_parameters())


def test_nothing_of_it_is_on_the_device() -> None:
    model, engine = begin(3, "mixed", offload_optimizer=True)
    train(model, engine, 0, 1)
    held = engine.state_bytes()
    numels = [group.layout.padded_numel for group in engine.groups]
    assert held["optimizer_bytes"] == 0
    assert held["parameter_bytes"] == 2 * sum(numels)
    # Value and two moments, a step counter per group; two buffers each of the longest, in bf16, and
    # its gradient in fp32.
    expected_bytes = 12 * sum(numels) + 4 * len(numels) + (4 * 2 + 4) * max(numels)
    assert held["host_bytes"] == expected_bytes


def test_gradients_reduced_in_fp32_arrive_in_fp32() -> None:
    shard = torch.ones(3, dtype=torch.bfloat16)
    stepper = HostStepper([host := HostOptimizer(shard, lr=0.1)])
    gradient = torch.tensor([1.0, 1.0 + 2**-12, -3.0])  # the second is no bf16 number
    plain = ShardOptimizer(torch.ones(3), kind="adamw_fused", lr=0.1, with_master=False)
    stepper.step([gradient])
    plain.step(gradient.clone())
    assert torch.equal(host.states()[0]["exp_avg"], plain.states()[0]["exp_avg"])
    assert torch.equal(shard, plain.values.bfloat16())


@pytest.mark.parametrize("was_offloaded", [True, False])
def test_a_checkpoint_moves_between_device_and_host(tmp_path: Path, was_offloaded: bool) -> None:
    model, engine = begin(3, "mixed", offload_optimizer=was_offloaded)
    train(model, engine, 0, 2)
    save_checkpoint(engine, tmp_path, step=2)
    other, loaded = begin(1, "mixed", offload_optimizer=not was_offloaded)
    load_checkpoint(loaded, tmp_path)
    assert train(model, engine, 2, 4) == train(other, loaded, 2, 4)
    assert same(engine.full_parameters(), loaded.full_parameters())


def test_shards_of_many_lengths_pass_through_two_buffers() -> None:
    lengths = (3, 7, 1, 5, 7)
    shards = [torch.linspace(-1, 1, n) for n in lengths]
    plain = [
        ShardOptimizer(shard.clone(), kind="adamw_fused", lr=0.1, with_master=False)
        for shard in shards
    ]
    stepper = HostStepper([HostOptimizer(shard, lr=0.1) for shard in shards])
    for _ in range(3):
        gradients = [torch.cos(torch.arange(n) * 1.0 + n) for n in lengths]
        stepper.step(gradients)
        for shard, one, gradient in zip(shards, plain, gradients, strict=True):
            one.step(gradient)
            assert torch.equal(shard, one.values)


@pytest.mark.parametrize(
    ("stage", "options", "message"),
    [
        (0, {}, "stage 0 shards no optimizer to offload: use stage 1, 2 or 3"),
        (1, {"optimizer": "sgd"}, "sgd is not stepped on the host: use adamw_fused"),
        (1, {"precision": "bf16"}, "bf16 has no fp32 values to step on the host: use mixed"),
    ],
)
def test_what_is_not_stepped_on_the_host_is_refused(
    stage: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        begin(stage, **{"precision": "mixed", **options}, offload_optimizer=True)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gpu_trains_as_if_its_optimizer_were_there(stage: int, precision: str) -> None:
    """AdamW of CPU and GPU round apart by a few of fp32's last places per step: 1e-5 is many."""
    device = torch.device("cuda:0")
    (model, engine), (other, offloaded) = (
        begin(stage, precision, device, offload_optimizer=offloads) for offloads in (False, True)
    )
    before = torch.cuda.memory_allocated()
    first = train(model, engine, 0, 1)
    assert first == train(other, offloaded, 0, 1)
    assert torch.cuda.memory_allocated() > before  # moments of the engine that keeps them here
    for name, values in engine.full_parameters().items():
        mine = offloaded.full_parameters()[name]
        tolerance = 1e-5 if precision == "fp32" else 2**-7 * float(values.abs().max())
        assert (values - mine).abs().max().item() <= tolerance, name


@pytest.mark.parametrize(("ranks", "threads"), [(None, 16), ("1", 16), ("2", 8), ("64", 1)])
def test_a_rank_steps_with_half_of_its_share_of_the_cpus(
    ranks: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.os, "sched_getaffinity", lambda _: set(range(32)))
    assert host_threads({} if ranks is None else {"LOCAL_WORLD_SIZE": ranks}) == threads


def test_torch_s_number_of_threads_is_as_before_after_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = torch.zeros(8)
    stepper = HostStepper([HostOptimizer(shard, lr=1.0)])
    seen: list[int] = []
    monkeypatch.setattr(offload, "host_threads", lambda: 3)
    step = HostOptimizer.step

    def noted(own: HostOptimizer, gradient: Tensor) -> None:
        seen.append(torch.get_num_threads())
        step(own, gradient)

    monkeypatch.setattr(HostOptimizer, "step", noted)
    before = torch.get_num_threads()
    stepper.step([torch.ones(8)])
    assert (seen, torch.get_num_threads()) == ([3], before)
