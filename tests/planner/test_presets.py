"""Finding a model by name."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.presets import all_presets, model_presets, resolve_model, resolve_preset


@pytest.mark.parametrize(
    ("name", "preset_id"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
        ("gpt2-xl", "openai-community/gpt2-xl"),
        ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1"),
        ("phi-4", "microsoft/phi-4"),
        ("Qwen2.5 0.5B", "Qwen/Qwen2.5-0.5B"),
    ],
)
def test_short_names_find_one_preset(name: str, preset_id: str) -> None:
    assert resolve_preset(name).id == preset_id
    assert resolve_model(name).name == preset_id


def test_a_name_with_several_meanings_lists_them() -> None:
    with pytest.raises(PlanError) as caught:
        resolve_model("qwen3-1")
    message = str(caught.value)
    assert "Qwen/Qwen3-1.7B, Qwen/Qwen3-14B" in message
    assert caught.value.field == "model.preset"


def test_an_unknown_name_suggests_near_ones() -> None:
    lists = r"the nearest are .*Llama-3.1-8B.*; `peakmark presets` lists all"
    with pytest.raises(PlanError, match=lists):
        resolve_model("llama-3.1-9b")


@pytest.mark.parametrize("name", ["opt-1.3b", "pythia-14b", "llama-31-8b"])
def test_a_point_within_a_number_matters(name: str) -> None:
    with pytest.raises(PlanError, match="is not a known preset"):
        resolve_model(name)


def test_a_name_that_is_near_none_names_few_and_what_lists_all() -> None:
    with pytest.raises(PlanError) as caught:
        resolve_model("zzzz")
    named = [preset.id for preset in all_presets() if preset.id in str(caught.value)]
    assert 1 <= len(named) <= 4
    assert "`peakmark presets` lists all" in str(caught.value)
    assert all(preset.id in caught.value.allowed for preset in all_presets())


@pytest.mark.parametrize("name", ["", "---", None, 3, "x" * 10_000, ["gpt2"]])
def test_what_is_no_name_is_refused(name: object) -> None:
    with pytest.raises(PlanError, match=r"^model\.preset is .*"):
        resolve_model(name)


def test_a_family_that_is_not_modelled_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"glm4_moe, which is not modelled: .*llama, mistral"):
        resolve_model("glm-4.5-air")


def test_every_preset_keeps_its_sources() -> None:
    assert all(preset.source for preset in all_presets())
    assert len(model_presets()) == 49


def test_edited_keys_lie_over_a_preset() -> None:
    spec = resolve_model("llama-3.1-8b", {"num_hidden_layers": 2})
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert spec.parameters == 2 * 128256 * 4096 + 4096 + 2 * layer
