"""When the engine has whole parameters, and what a person may do with them between steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)
MODELS = ("llama", "gpt2")
# The llama's groups over four ranks: 610, 950, 950 and 620 elements.
PADDED = 612 + 952 + 952 + 620


def _load_rank_main() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "gathering_models", Path(__file__).with_name("rank_main.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gathering_models"] = module
    spec.loader.exec_module(module)
    return module


rank_main = _load_rank_main()


def begin(model: nn.Module, stage: int, **options: Any) -> ZeroEngine:
    """Return an engine around a model, of one rank unless said otherwise."""
    chosen = {"optimizer": "adamw_foreach", "precision": "fp32", "lr": rank_main.LR} | options
    return ZeroEngine(model, stage=stage, device=CPU, **chosen)


def train(engine: ZeroEngine) -> None:
    """Train three steps."""
    for step in range(3):
        tokens = rank_main.batch(0, step, 0)
        loss = engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss, last_micro_batch=True)
        engine.step()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Hold two sets of parameters to each other, bit by bit."""
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize("precision", ["mixed", "fp32"])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_hold_full_parameters_from_forward_to_the_last_backward(
    stage: int, precision: str
) -> None:
    model = rank_main.build_model("llama")
    engine = begin(model, stage, precision=precision, collectives=LocalCollectives(1, 4))
    at_backward: list[list[bool]] = []
    for group in engine.groups:
        group.parameters[0].register_post_accumulate_grad_hook(lambda _: at_backward.append(held()))

    def held() -> list[bool]:
        return [group.flat.untyped_storage().nbytes() > 0 for group in engine.groups]

    def loss(step: int) -> Tensor:
        tokens = rank_main.batch(0, step, 0)
        value: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return value

    shards = engine.state_bytes()["parameter_bytes"]
    assert held() == [False] * 4
    first = loss(0)
    assert held() == [True] * 4
    # A shard in the parameters' own dtype is not held beside them.
    beside = shards if precision == "mixed" else 0
    itemsize = 2 if precision == "mixed" else 4
    whole = itemsize * PADDED
    assert engine.state_bytes()["parameter_bytes"] == whole + beside
    engine.backward(first, last_micro_batch=False)
    assert held() == [True] * 4
    second = loss(1)
    at_backward.clear()
    engine.backward(second, last_micro_batch=True)
    # The final norm's gradient is the head's last: the head is freed, the embedding was before.
    assert at_backward[0] == [False, True, True, False]
    assert at_backward[-1] == [False, False, False, False]
    assert held() == [False] * 4
    engine.step()
    assert engine.state_bytes()["parameter_bytes"] == shards


@pytest.mark.parametrize("stage", [1, 2])
def test_a_graph_from_before_a_last_backward_still_has_its_parameters(stage: int) -> None:
    """Two losses of one step, both called the last: freed parameters are gathered again."""
    gradients = []
    for is_last in (False, True):
        model = rank_main.build_model("llama")
        engine = begin(model, stage if is_last else 0)
        tokens = [rank_main.batch(0, 0, micro) for micro in range(2)]
        losses = [model(input_ids=t, labels=t, use_cache=False).loss for t in tokens]
        engine.backward(losses[0], last_micro_batch=is_last)
        engine.backward(losses[1], last_micro_batch=True)
        gradients.append([engine._reduced(group).clone() for group in engine.trained])
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_between_backward_and_step_changes_nothing(name: str, stage: int) -> None:
    model, other = rank_main.build_model(name), rank_main.build_model(name)
    engine, plain = begin(model, stage), begin(other, stage)
    tokens = rank_main.batch(0, 9, 0)
    for step in range(3):
        batch = rank_main.batch(0, step, 0)
        for one in (engine, plain):
            loss = one.module(input_ids=batch, labels=batch, use_cache=False).loss
            one.backward(loss, last_micro_batch=True)
        with torch.no_grad():
            model(input_ids=tokens)
        engine.step()
        plain.step()
    assert_same(engine.full_parameters(), plain.full_parameters())


@pytest.mark.parametrize("precision", ["mixed", "bf16", "fp32"])
@pytest.mark.parametrize("stage", STAGES)
def test_whole_parameters_are_read_and_changed_in_place_between_steps(
    stage: int, precision: str
) -> None:
    model = rank_main.build_model("gpt2")
    engine = begin(model, stage, precision=precision, optimizer="adamw_loop")
    train(engine)
    before = engine.full_parameters()
    kept = [optimizer.values.clone() for _, optimizer in engine.stepped_groups() if optimizer]
    with engine.whole_parameters() as whole:
        state = {name: values.clone() for name, values in whole.state_dict().items()}
        with torch.no_grad():
            whole.transformer.h[1].mlp.c_fc.bias[3] = 0.75
    assert all(torch.equal(state[name], before[name]) for name in before)
    after = engine.full_parameters()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"transformer.h.1.mlp.c_fc.bias"}
    assert after["transformer.h.1.mlp.c_fc.bias"][3] == 0.75
    # Of all that is stepped, one value is another: masters keep what bf16 does not say.
    masters = [optimizer.values for _, optimizer in engine.stepped_groups() if optimizer]
    pairs = zip(kept, masters, strict=True)
    assert sum((one != other).sum().item() for one, other in pairs) == 1
    train(engine)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_saved_for_other_programs(tmp_path: Path, stage: int) -> None:
    model = rank_main.build_model("gpt2")
    engine = begin(model, stage)
    train(engine)
    with engine.whole_parameters() as whole:
        whole.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert_same(dict(again.named_parameters()), engine.full_parameters())
