"""The table of stages and engines: the ideal by hand, what stages save, what ZeRO leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import PlanError
from planner.interconnects import interconnect, interconnects
from planner.memory.groups import Place
from planner.memory.ideal import IdealStates, ideal_bytes
from planner.plan import Plan, default_plan, parse_plan
from planner.presets import resolve_model
from planner.workload import Checkpointing, Engine, TrainingWorkload
from planner.zero import (
    PARTS,
    Links,
    ZeroRow,
    plan_links,
    remainder,
    stage_savings,
    training,
    work_of,
    zero_table,
)

LLAMA = resolve_model("meta-llama/Llama-3.1-8B")
LAYER = 218_112_000
EMBEDDING, HEAD = 128_256 * 4096, 128_256 * 4096 + 4096
P = EMBEDDING + 32 * LAYER + HEAD
LINKS = Links(in_node_bytes_s=450e9, network_bytes_s=50e9)


def at(stage: int, ranks: int, place: Place, **workload: Any) -> dict[str, float]:
    """Bytes by part that a place must hold, without the model's own tensors."""
    states = IdealStates(LLAMA, TrainingWorkload(**workload), stage, ranks)
    return {**states.persistent(), **states.at(place)}


def test_the_ideal_keeps_shards_and_a_master_once() -> None:
    kept = {stage: at(stage, 8, Place("embed")) for stage in range(4)}
    assert [(k["parameters"], k["optimizer"]) for k in kept.values()] == [
        (2 * P, 12 * P),
        # The fp32 master is the parameter: 4 bytes, and 8 of AdamW.
        *[(4 * P / 8, 8 * P / 8)] * 3,
    ]


def test_at_stage_three_the_unit_in_use_and_the_next_one_are_whole() -> None:
    assert at(3, 8, Place("embed"))["gathered"] == 2 * (EMBEDDING + LAYER)
    assert at(3, 8, Place("layer", 4))["gathered"] == 2 * 2 * LAYER
    assert at(3, 8, Place("layer", 31))["gathered"] == 2 * (LAYER + HEAD)
    assert at(3, 8, Place("loss"))["gathered"] == 2 * HEAD
    assert at(3, 8, Place("layer_backward", 4))["gathered"] == 2 * 2 * LAYER


def test_at_stages_one_and_two_what_the_forward_reached_and_the_backward_not_left_is_whole() -> (
    None
):
    for stage in (1, 2):
        assert at(stage, 8, Place("embed"))["gathered"] == 2 * (EMBEDDING + LAYER)
        assert at(stage, 8, Place("layer", 4))["gathered"] == 2 * (EMBEDDING + 6 * LAYER)
        assert at(stage, 8, Place("layer", 31))["gathered"] == 2 * P
        assert at(stage, 8, Place("loss"))["gathered"] == 2 * P
        # No backward reads an embedding that is not the head too.
        assert at(stage, 8, Place("loss_backward"))["gathered"] == 2 * (P - EMBEDDING)
        assert at(stage, 8, Place("layer_backward", 4))["gathered"] == 2 * 5 * LAYER
        assert at(stage, 8, Place("embed_backward"))["gathered"] == 0
        # A step's middle micro-batch finds all whole and frees nothing.
        several = at(stage, 8, Place("layer_backward", 4), grad_accumulation=3)
        assert several["gathered"] == 2 * P


def test_of_two_micro_batches_the_higher_one_counts() -> None:
    place = Place("layer_backward", 30)
    made = LAYER + HEAD
    # The first has all parameters and the gradients of a layer and the head, of which the layer's
    # are being reduced; the last has all gradients, and parameters of 31 layers.
    first = 2 * P + 2 * (made / 64 + LAYER)
    last = 2 * 31 * LAYER + 2 * (P / 64 + LAYER)
    found = at(2, 64, place, grad_accumulation=2)
    assert found["gathered"] + found["gradients"] == max(first, last) == first


def test_gradients_are_shards_but_for_the_group_being_reduced() -> None:
    place = Place("layer_backward", 4)
    above = 27 * LAYER + HEAD
    assert at(0, 8, place)["gradients"] == 2 * above
    assert at(2, 8, place)["gradients"] == 2 * (above / 8 + LAYER)
    # One rank alone has nothing in flight.
    assert at(2, 1, place)["gradients"] == 2 * above
    assert at(2, 8, Place("layer", 4))["gradients"] == 0
    assert at(1, 8, Place("layer", 4), grad_accumulation=2)["gradients"] == 2 * P


def test_our_engine_is_at_most_a_percent_above_the_ideal() -> None:
    table = zero_table(
        default_plan(), engines=[Engine.PEAKMARK], stages=range(4), world_sizes=[8], links=LINKS
    )
    assert [row.zero_stage for row in table.rows] == [0, 1, 2, 3]
    for row in table.rows:
        assert row.distance_percent is not None and 0 <= row.distance_percent < 1


@pytest.fixture(scope="module")
def peers() -> dict[tuple[Engine, int], ZeroRow]:
    engines = (Engine.FSDP2, Engine.DEEPSPEED)
    table = zero_table(
        default_plan(), engines=engines, stages=range(4), world_sizes=[8], links=LINKS
    )
    assert not table.refused
    return {(row.engine, row.zero_stage): row for row in table.rows}


def test_each_engine_has_its_own_stages_and_parts_that_sum(
    peers: dict[tuple[Engine, int], ZeroRow],
) -> None:
    assert sorted(peers) == [
        *((Engine.DEEPSPEED, stage) for stage in (1, 2, 3)),
        *((Engine.FSDP2, stage) for stage in (2, 3)),
    ]
    for row in peers.values():
        assert tuple(row.parts) == PARTS
        assert sum(row.parts.values()) == row.allocated_bytes


def test_time_is_sent_bytes_over_the_slowest_link(
    peers: dict[tuple[Engine, int], ZeroRow],
) -> None:
    gathered, scattered = peers[Engine.FSDP2, 2].sent
    assert (gathered.payload_bytes, scattered.payload_bytes) == (2 * P, 4 * P)
    assert gathered.time_s == pytest.approx(2 * P * 7 / 8 / 450e9)
    _, reduced = peers[Engine.DEEPSPEED, 2].sent
    assert reduced.sent_bytes == pytest.approx(2 * 2 * P * 7 / 8)
    links = plan_links(default_plan().hardware, 450e9, 50e9)
    assert [links.slowest_bytes_s(gpus) for gpus in (8, 9)] == [450e9, 50e9]
    assert Links(20e9, 50e9).slowest_bytes_s(64) == 20e9


def test_savings_pair_a_stage_with_the_one_below(
    peers: dict[tuple[Engine, int], ZeroRow],
) -> None:
    pairs = stage_savings(list(peers.values()))
    assert [(below.engine, below.zero_stage, row.zero_stage) for below, row in pairs] == [
        (Engine.DEEPSPEED, 1, 2),
        (Engine.DEEPSPEED, 2, 3),
        (Engine.FSDP2, 2, 3),
    ]


def test_an_engine_that_cannot_run_the_plan_says_why() -> None:
    table = zero_table(
        default_plan(), engines=[Engine.DDP], stages=range(4), world_sizes=[8], links=LINKS
    )
    assert not table.rows
    assert "keeps no fp32 master weights" in table.refused[Engine.DDP]


def changed(**workload: Any) -> Plan:
    plan = default_plan()
    return replace(plan, workload=replace(training(plan), **workload))


def test_when_activations_dominate_it_says_so_with_what_helps() -> None:
    found = remainder(changed(micro_batch=2))
    assert found.is_dominated and found.model_share > 0.6
    # 34 bytes per token, hidden unit and layer at Llama-3's shape (Korthikanti's count for fused
    # kernels), and the logits in bf16 and fp32 with their gradient.
    assert found.model_bytes > 2 * 4096 * 4096 * 32 * 34
    words = [lever.change for lever in found.levers]
    assert words[0] == "full checkpointing"
    assert "micro-batch 1 and twice the accumulation" in words
    assert "sequences of 2,048 tokens" in words
    assert all(lever.allocated_bytes < found.allocated_bytes for lever in found.levers)


def test_when_states_dominate_there_is_nothing_to_say_instead() -> None:
    found = remainder(changed(sequence_length=512, checkpointing=Checkpointing.FULL))
    assert not found.is_dominated and not found.levers
    # Four bytes of a parameter and eight of AdamW, over eight ranks.
    assert found.state_bytes >= 12 * P / 8


def test_plans_of_one_work_differ_in_engine_stage_and_ranks_alone() -> None:
    document = default_plan().to_dict()
    fewer = {**document, "parallelism": {"engine": "fsdp2", "zero_stage": 2}}
    assert work_of(fewer)[0] == work_of(document)[0]
    assert work_of(fewer)[1] == {"engine": "fsdp2", "zero_stage": 2, "world_size": 8}
    split = {**document, "parallelism": {"tensor_parallel": 2}}
    longer = {**document, "workload": {"sequence_length": 8192}}
    assert len({work_of(other)[0] for other in (document, split, longer)}) == 3


def test_a_split_model_has_no_ideal_and_a_serving_plan_no_stages() -> None:
    plan = default_plan()
    split = replace(plan.parallelism, tensor_parallel=2)
    assert ideal_bytes(plan.model, training(plan), split) is None
    serving = parse_plan({**plan.to_dict(), "job": "serve", "workload": {}})
    with pytest.raises(PlanError, match="ZeRO shards the state of training"):
        training(serving)


def test_links_come_from_the_table() -> None:
    assert interconnect("infiniband-ndr400").bytes_s == 50e9
    kinds = [(link.in_node, link.between_nodes) for link in interconnects()]
    assert (True, False) in kinds and (False, True) in kinds and (True, True) not in kinds
    with pytest.raises(PlanError, match="one of nvlink2-node"):
        interconnect("string-and-cans")
