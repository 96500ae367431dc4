"""Worlds: which launches fit them, and that the solo world leaves nothing uninitialised."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from runners.contract import World
from runners.engines.fsdp2 import Fsdp2Engine
from runners.worlds import Launch, check_world, choose_device, open_world

CPU = torch.device("cpu")
ONE = Launch()


def test_launch_reads_torchrun_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Launch.from_environment() == ONE
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == Launch(rank=5, process_count=8, local_rank=1)


def test_worlds_refuse_launches_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="world size is 4, but 1 processes were started"):
        check_world(World.CPU, 4, 0, ONE)
    with pytest.raises(ValueError, match="rank is 8: it must be 0 to 7"):
        check_world(World.SOLO, 8, 8, ONE)
    with pytest.raises(ValueError, match="world solo is one process, not 2"):
        check_world(World.SOLO, 8, 0, Launch(process_count=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_world_does_not_fall_back_to_the_cpu() -> None:
    with pytest.raises(ValueError, match="world solo runs on a GPU and this machine has none"):
        choose_device(World.SOLO, ONE, None)
    assert choose_device(World.SOLO, ONE, "cpu") == CPU
    assert choose_device(World.CPU, ONE, None) == CPU


def _losses_and_values(rank: int, world_size: int, stage: int) -> tuple[list[float], bool]:
    config = AutoConfig.for_model(
        "llama", hidden_size=12, intermediate_size=20, num_hidden_layers=2, vocab_size=13,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    losses = []
    with open_world(World.SOLO, world_size=world_size, rank=rank, launch=ONE, device=CPU) as world:
        engine = Fsdp2Engine(
            model, stage=stage, optimizer="adamw_foreach", precision="mixed", lr=1e-3,
            device=CPU, collectives=world.collectives,
        )  # fmt: skip
        for _ in range(2):
            tokens = torch.arange(13)[None]
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss, last_micro_batch=True)
            engine.step()
            losses.append(loss.item())
        locals_ = [p.to_local() for p in model.parameters()]
    return losses, all(values.isfinite().all() for values in locals_)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 8), (7, 8), (63, 64)])
def test_fsdp2_alone_reads_no_uninitialised_memory(rank: int, world_size: int, stage: int) -> None:
    """Every `empty` is poisoned with NaN: what no collective fills would spread.

    8 and 64 ranks do not divide 12 or 13 rows: some ranks hold padding or nothing at all.
    """
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        losses, are_finite = _losses_and_values(rank, world_size, stage)
    finally:
        torch.use_deterministic_algorithms(False)
    assert are_finite
    assert all(map(math.isfinite, losses))
