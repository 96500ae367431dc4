"""What a person can do wrong with the engine ends in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.zero.engine import ZeroEngine
from runners.zero.errors import ZeroError
from tests.runners import forks

HERE = Path(__file__).parent
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 61,
}
TOKENS = torch.arange(12).view(2, 6)


def _engine(stage: int, **options: Any) -> tuple[Any, ZeroEngine]:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG)).train()
    chosen = {"optimizer": "sgd", "precision": "fp32", "lr": 0.1} | options
    return model, ZeroEngine(model, stage=stage, device=torch.device("cpu"), **chosen)


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss
    return loss


@pytest.mark.parametrize(
    "use",
    [
        lambda model: model.lm_head.weight.sum(),
        lambda model: torch.cat([model.lm_head.weight]),
        lambda model: model.lm_head.weight + 1,
        lambda model: model.lm_head.weight.detach(),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_released_parameter_says_whose_it_is(use: Callable[[Any], object], stage: int) -> None:
    model, engine = _engine(stage)
    with pytest.raises(
        ZeroError, match=r"lm_head\.weight is used outside its module: .* full_param"
    ):
        use(model)
    engine.backward(_loss(model), last_micro_batch=True)  # inside, it may
    with pytest.raises(ZeroError, match=r"lm_head\.weight is used outside"):
        use(model)
    with engine.whole_parameters():
        use(model)


def test_what_a_released_parameter_is_may_be_read() -> None:
    model, _ = _engine(3)
    weight = model.lm_head.weight
    assert (weight.shape, weight.dtype, weight.numel()) == ((61, 16), torch.float32, 61 * 16)
    assert (weight.device, weight.requires_grad, weight.grad) == (torch.device("cpu"), True, None)
    assert isinstance(weight, nn.Parameter) and model.dtype is torch.float32


def test_a_replaced_parameter_is_refused() -> None:
    model, engine = _engine(2)
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(torch.zeros(24, 16))
    with pytest.raises(
        ZeroError, match=r"layers.1.mlp.up_proj.weight was replaced .* shape \[24, 16\]"
    ):
        engine.backward(_loss(model), last_micro_batch=True)


def test_an_added_parameter_is_refused() -> None:
    model, engine = _engine(2)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ZeroError, match="extra was added after the engine was built"):
        engine.backward(_loss(model), last_micro_batch=True)


def test_a_removed_layer_is_refused() -> None:
    model, engine = _engine(2)
    model.model.layers = nn.ModuleList(list(model.model.layers)[:1])
    with pytest.raises(ZeroError, match=r"layers\.1\.\S+ is no longer part of the model"):
        engine.backward(_loss(model), last_micro_batch=True)


def _set_data(model: Any) -> None:
    model.lm_head.weight.data = torch.zeros(61, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set_data, r"lm_head\.weight was given other values or another dtype after"),
        (lambda model: model.lm_head.requires_grad_(False), r"lm_head\.weight was frozen after"),
        (lambda model: model.model.norm.requires_grad_(True), r"norm\.weight was made trainable"),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_changed_after_a_step_is_named(
    change: Callable[[Any], object], words: str, stage: int
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **CONFIG)).train()
    model.model.norm.requires_grad_(False)
    options = {"optimizer": "sgd", "precision": "fp32", "lr": 0.1}
    engine = ZeroEngine(model, stage=stage, device=torch.device("cpu"), **options)
    engine.backward(_loss(model), last_micro_batch=True)
    engine.step()
    change(model)
    with pytest.raises(ZeroError, match=words):
        engine.backward(_loss(model), last_micro_batch=True)


def test_a_model_cast_after_it_was_given_whole_is_refused() -> None:
    model, engine = _engine(0)
    model.double()
    with pytest.raises(ZeroError, match=r"embed_tokens\.weight was given .* another dtype"):
        engine.backward(_loss(model), last_micro_batch=True)


def test_torch_s_own_backward_is_refused() -> None:
    model, engine = _engine(1)
    with pytest.raises(ZeroError, match=r"call engine.backward\(loss\) instead"):
        _loss(model).backward()
    engine.backward(_loss(model), last_micro_batch=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_not_finite_are_named_before_the_step(stage: int) -> None:
    model, engine = _engine(stage, checks_gradients=True)
    before = engine.full_parameters()
    model.model.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    engine.backward(_loss(model), last_micro_batch=True)
    with pytest.raises(ZeroError, match=r"the gradient of model.norm.weight is not finite"):
        engine.step()
    for name, values in engine.full_parameters().items():
        assert torch.equal(values, before[name])


def _said(case: str, out: Path) -> list[str]:
    """What each of two ranks raised in a case of errors_main.py; empty where it left nothing."""
    script = str(HERE / "errors_main.py")
    first, second = (
        forks.begin([script, case, str(rank), "2", str(out)], out / f"rank{rank}.log")
        for rank in range(2)
    )
    forks.finish(first, timeout_s=120)
    # The second ends with the first, or is the one that hangs.
    second.join(10.0 if case != "silent" else 0.0)
    second.kill()
    second.join()
    files = [out / f"rank{rank}.txt" for rank in range(2)]
    return [file.read_text() if file.exists() else "" for file in files]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unequal_model", "model.norm.weight [10] frozen; model.norm.weight [10] trained"),
        ("unequal_option", "stage 2 option; stage 3 option"),
        ("not_finite", "the gradient of model.norm.weight is not finite"),
    ],
)
def test_all_ranks_say_the_same(case: str, words: str, tmp_path: Path) -> None:
    first, second = _said(case, tmp_path)
    assert first == second
    assert first.startswith("ZeroError") and words in first


@pytest.mark.parametrize("case", ["lost", "silent"])
def test_a_rank_that_dies_or_hangs_stops_the_others(case: str, tmp_path: Path) -> None:
    """The first sees a closed connection, or the group's timeout of ten seconds passes."""
    first, second = _said(case, tmp_path)
    assert first.startswith("RankLostError: all_gather on rank 0 of 2 failed because another rank")
    assert second == ""
