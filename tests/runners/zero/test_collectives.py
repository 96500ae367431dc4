"""Collectives of one rank alone: outputs filled, no surprises in place, bytes counted."""

from __future__ import annotations

import pytest
import torch

from runners.zero.collectives import LocalCollectives


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 3), (1, 3), (2, 3), (511, 1024)])
def test_a_gather_repeats_the_own_shard(rank: int, world_size: int) -> None:
    shard = torch.tensor([1.0, 2.0])
    output = torch.full((2 * world_size,), float("nan"))
    LocalCollectives(rank, world_size).all_gather(output, shard)
    assert torch.equal(output, shard.repeat(world_size))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_gather_in_place_keeps_the_own_part(rank: int) -> None:
    output = torch.arange(6.0)
    own = output[2 * rank : 2 * rank + 2]
    expected = own.clone().repeat(3)
    LocalCollectives(rank, 3).all_gather(output, own)
    assert torch.equal(output, expected)


def test_a_reduce_scatter_takes_the_own_part_and_fills_the_output() -> None:
    full = torch.arange(6.0)
    output = torch.full((2,), float("nan"))
    LocalCollectives(1, 3).reduce_scatter(output, full)
    assert output.tolist() == [2.0, 3.0]
    LocalCollectives(2, 3).reduce_scatter(full[4:], full)
    assert full.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_traffic_counts_the_full_buffers_until_reset() -> None:
    collectives = LocalCollectives(0, 4)
    full = torch.zeros(8, dtype=torch.bfloat16)
    collectives.all_reduce(full)
    collectives.reduce_scatter(torch.zeros(2, dtype=torch.bfloat16), full)
    collectives.all_gather(full, full[:2])
    collectives.all_gather(full, full[:2])
    with collectives.uncounted():
        collectives.all_gather(full, full[:2])
    assert collectives.traffic() == {
        "all_reduce": {"calls": 1, "bytes": 16},
        "reduce_scatter": {"calls": 1, "bytes": 16},
        "all_gather": {"calls": 2, "bytes": 32},
    }
    collectives.reset_traffic()
    assert collectives.traffic() == {}
