"""Parameter groups of a model whose layers differ: two dense layers, then three of experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from planner.memory import fsdp2, groups, states
from planner.memory.fsdp2 import Fsdp2States
from planner.memory.groups import GroupShapes, PerLayer, Place, group_shapes, rows_numel
from planner.memory.states import PeakmarkStates
from planner.model import ModelSpec
from planner.presets import resolve_model
from planner.workload import Optimizer, Precision

DENSE, EXPERTS = ((10, 4), (5, 1)), ((8, 30), (6, 2))  # 45 and 252 elements
MIXED: GroupShapes = {
    "embedding": ((16, 4),),
    "layers": (DENSE, DENSE, EXPERTS, EXPERTS, EXPERTS),
    "head": ((4, 1), (16, 4)),
}


@pytest.fixture
def mixed_spec(monkeypatch: pytest.MonkeyPatch) -> ModelSpec:
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 5})
    numels = groups.GroupSizes(64, PerLayer.of(MIXED["layers"], rows_numel), 68)
    for module in (states, fsdp2):
        monkeypatch.setattr(module, "group_shapes", lambda _: MIXED)
    monkeypatch.setattr(states, "group_numels", lambda _: numels)
    return spec


def test_sizes_of_layers_are_summed_and_named_by_kind() -> None:
    layers = PerLayer.of(MIXED["layers"], rows_numel)
    assert [layers[i] for i in range(5)] == [45, 45, 252, 252, 252]
    assert layers.total() == 2 * 45 + 3 * 252
    assert (layers.total(1), layers.total(0, 3), layers.total(5)) == (45 + 756, 90 + 252, 0)
    assert layers.largest() == 252
    assert layers.by_kind() == [("layers 0-1", 2, 45), ("layers 2-4", 3, 252)]
    alternating = PerLayer.of([DENSE, EXPERTS] * 6, rows_numel)
    assert alternating.by_kind()[0][0] == "layers 0, 2, 4, 6, ..."


def test_a_layer_has_the_tensors_that_exist_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Tensor:
        group: str
        shape: tuple[int, ...]
        layers: tuple[int, ...] = ()

        def names(self) -> list[str]:
            return [f"model.layers.{i}.w1.weight" for i in self.layers]

    tensors = (
        Tensor("embedding", (7, 3)),
        Tensor("layer", (4, 2), (0, 1, 2)),
        Tensor("layer", (9,), (0,)),
        Tensor("layer", (5, 6, 2), (1, 2)),
        Tensor("head", (3,)),
    )
    monkeypatch.setattr(groups, "parameter_shapes", lambda _: tensors)
    groups.group_tensors.cache_clear()
    spec = resolve_model("meta-llama/Llama-3.1-8B", {"num_hidden_layers": 3})
    shapes = group_shapes.__wrapped__(spec)
    groups.group_tensors.cache_clear()
    assert shapes["layers"] == (((4, 2), (9, 1)), ((4, 2), (5, 12)), ((4, 2), (5, 12)))
    assert (shapes["embedding"], shapes["head"]) == (((7, 3),), ((3, 1),))


def test_our_engine_sums_and_gathers_layer_by_layer(mixed_spec: ModelSpec) -> None:
    engine = PeakmarkStates(
        mixed_spec, Precision.BF16, Optimizer.ADAMW_LOOP, 3, 2, accumulates=False
    )
    # Shards over two ranks: 32, 23 (one element of padding), 126, 34.
    assert engine.persistent()["parameters"] == 2 * (32 + 2 * 23 + 3 * 126 + 34)
    assert engine.at(Place("layer", 1))["gathered"] == 2 * (46 + 252)
    assert engine.at(Place("layer", 4))["gathered"] == 2 * (252 + 68)
    assert engine.at(Place("layer_backward", 2))["gathered"] == 2 * (252 + 46)
    # As the backward of layer 1 begins, the head and layers 2 to 4 have sharded gradients, and the
    # reduction of layer 2 reads its whole one.
    assert engine.at(Place("layer_backward", 1))["gradients"] == 2 * (34 + 3 * 126 + 252)
    assert engine.flat(Place("layer_backward", 1)) == (128, 92, 136)
    # The shard of layer 2 comes as the whole gradient of layer 3 goes, which is larger.
    assert engine.at_section_end(Place("layer_backward", 2))["gradients"] == 0
    assert engine.at_section_end(Place("loss_backward"))["gradients"] == 2 * 34
    assert engine.optimizer_step()["temporary"] == 2 * 126 * 2
    held = {(group.name, group.number, group.kept) for group in engine.held_numels()}
    assert held >= {("layers 0-1", 2, 23), ("layers 2-4", 3, 126)}


def test_fsdp2_gathers_the_next_layer_whatever_its_size(mixed_spec: ModelSpec) -> None:
    worlds = np.array([1, 2, 8])
    engine = Fsdp2States(
        mixed_spec, Precision.BF16, Optimizer.ADAMW_FUSED, 3, worlds, accumulates=False
    )
    # ceil(10 / 8) = 2 rows of 4 and ceil(5 / 8) = 1 of 1; 1 row of 30 and 1 of 2.
    assert engine.shard.layers[0].tolist() == [45, 23, 9]
    assert engine.shard.layers[4].tolist() == [252, 126, 32]
    # Backward of layer 2: its own copy (252) and the gather buffer of dense layer 1.
    root = 64 + 68
    gathered = engine.at(Place("layer_backward", 2))["gathered"] / 2
    assert gathered.tolist() == [root + 252, root + 252 + 46, root + 252 + 72]
    # The input of layer 2's reduction is alive while layer 1 runs: every rank's padded rows.
    assert engine.at(Place("layer_backward", 1))["temporary"].tolist() == [504, 504, 512]
    assert engine.at(Place("layer_backward", 1))["gradients"].tolist() == [
        2 * (3 * 252 + 68),
        2 * (3 * 126 + 68),
        2 * (3 * 32 + 68),
    ]
