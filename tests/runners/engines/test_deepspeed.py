"""DeepSpeed behind the engine interface: what is refused, and its shards where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from runners.engines.deepspeed import DeepSpeedEngine, _counted
from runners.zero.collectives import LocalCollectives

IS_INSTALLED = importlib.util.find_spec("deepspeed") is not None


def build(**options: Any) -> DeepSpeedEngine:
    chosen = {"stage": 2, "optimizer": "adamw_loop", "precision": "mixed", "lr": 0.1, **options}
    return DeepSpeedEngine(
        nn.Linear(4, 4),
        device=torch.device("cpu"),
        collectives=LocalCollectives(rank=0, world_size=8),
        **chosen,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 0}, "stage 1, 2 or 3 here, not 0"),
        ({"precision": "bf16"}, "bf16 is precision mixed, not bf16"),
        ({"sync_each_micro_batch": False}, "decide by themselves"),
    ],
)
def test_what_it_has_not_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.skipif(IS_INSTALLED, reason="DeepSpeed is installed")
def test_the_missing_extra_is_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with pytest.raises(ValueError, match=r"pip install 'peakmark\[deepspeed\]'"):
            build()
    finally:
        dist.destroy_process_group()


def test_what_it_sends_by_itself_is_counted_by_its_whole_buffer_but_no_scalar() -> None:
    collectives, called = LocalCollectives(rank=0, world_size=8), []
    gather = _counted(lambda *args, **options: called.append(args), "all_gather", collectives)
    gather(torch.empty(24, dtype=torch.bfloat16), input_tensor=torch.empty(3, dtype=torch.bfloat16))
    scatter = _counted(lambda *args, **options: called.append(args), "reduce_scatter", collectives)
    scatter(torch.empty(3), torch.empty(24), group=None)
    norm = _counted(lambda *args, **options: called.append(args), "all_reduce", collectives)
    norm(torch.empty(1))
    assert collectives.traffic() == {
        "all_gather": {"calls": 1, "bytes": 48},
        "reduce_scatter": {"calls": 1, "bytes": 96},
    }
    assert len(called) == 3
