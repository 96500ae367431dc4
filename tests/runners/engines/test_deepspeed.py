"""DeepSpeed behind the engine interface: what is refused, and its shards where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from runners.engines.deepspeed import DeepSpeedEngine
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
