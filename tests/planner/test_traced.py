"""Models of other architectures: found by configuration, checked as they are read, refused in words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from planner.config_input import spec_from_config
from planner.errors import PlanError
from planner.families import parameter_shapes
from planner.memory.section_rows import NUM_COMPONENTS, NUM_MARKS, NUM_SECTIONS
from planner.memory.sections import COMPONENTS, MARKS, SECTIONS
from planner.plan import Plan, parse_plan, plan_hash
from planner.predict import predict
from planner.traced import (
    DATABASE_VARIABLE,
    FOLDER_VARIABLE,
    config_digest,
    file_name,
    own_folder,
    step_costs,
    traceable_config,
)
from planner.workload import TrainingWorkload

ROWS = json.loads(
    (Path(__file__).resolve().parents[2] / "recorded/matrices/traced.json").read_text()
)["runs"]
BLOOM = {
    "model_type": "bloom",
    "vocab_size": 250880,
    "hidden_size": 1024,
    "n_layer": 24,
    "n_head": 16,
    "layer_norm_epsilon": 1e-5,
}


def plan_of(config: dict[str, Any] = BLOOM, **changed: Any) -> Plan:
    workload = {"attention": "eager", "sequence_length": 1024, "micro_batch": 2}
    return parse_plan(
        {
            "job": changed.pop("job", "train"),
            "model": {"config": config, "name": "bloom-560m"},
            "hardware": {"preset": "h200-sxm5-141gb"},
            "parallelism": changed.pop("parallelism", {}),
            **({"workload": {**workload, **changed}} if changed.pop("trains", True) else {}),
        }
    )


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine's traces: none yet."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def shipped_text(config: dict[str, Any]) -> str:
    import planner.memory

    folder = Path(planner.memory.__file__).parent / "traced"
    return (folder / file_name(traceable_config(config)[0])).read_text()


def test_a_traced_model_is_planned_from_its_configuration_alone() -> None:
    plan = plan_of()
    assert plan.model.trace is not None
    # BLOOM 560m: embedding 250880 x 1024 and its norm, 24 x (12 h^2 + 13 h), final norm.
    h = 1024
    assert plan.model.parameters == 250880 * h + 2 * h + 24 * (12 * h * h + 13 * h) + 2 * h
    assert sum(p.total_numel for p in parameter_shapes(plan.model)) == plan.model.parameters
    assert plan.model.tie_word_embeddings
    again = parse_plan(plan.to_dict())
    assert again == plan
    assert plan_hash(again) == plan_hash(plan)


def test_its_prediction_says_that_it_was_traced_and_by_what() -> None:
    prediction = predict(plan_of()).to_dict()
    (note,) = [note for note in prediction["notes"] if note.startswith("traced:")]
    assert "BloomForCausalLM of transformers 5." in note
    memory = prediction["memory"]
    named = sum(entry["bytes"] for entry in memory["ledger"])
    assert named == memory["allocated_bytes"]
    scores = next(c for c in memory["components"] if c["name"] == "attention")
    # At least the bf16 probabilities of 24 layers: 2 rows x 16 heads x 1024^2.
    assert scores["bytes"] >= 24 * 2 * 16 * 1024**2 * 2


def test_memory_and_operations_grow_with_rows_and_tokens() -> None:
    base = predict(plan_of()).memory["allocated_bytes"]
    assert predict(plan_of(micro_batch=3)).memory["allocated_bytes"] > base
    assert predict(plan_of(sequence_length=1025)).memory["allocated_bytes"] > base


def test_the_forwards_products_are_two_flops_per_weight_and_token() -> None:
    spec, workload = plan_of().model, TrainingWorkload()
    b, s, h = 2.0, 512.0, 1024
    flops = {name: flops for name, flops, _ in step_costs(spec, workload, b, s)}
    weights = 24 * 12 * h * h + 250880 * h
    # Eager attention: the whole square of every head, once for the scores, once for the values.
    attention = 24 * 2 * 2 * b * s * s * h
    assert flops["forward.products"] == 2 * weights * b * s + attention
    assert flops["backward.products"] == 2 * flops["forward.products"]


def test_what_only_a_template_knows_is_refused_in_one_sentence() -> None:
    for changed, words in (
        ({"attention": "triton"}, "use eager or sdpa"),
        ({"precision": "fp32"}, "run `peakmark trace` with --precision"),
        ({"sequence_length": 1}, "was traced for other lengths; use 2 to"),
        ({"lora_rank": 8}, "use 0"),
        ({"frozen_layers": 1}, "use 0"),
        ({"loss": "chunked"}, "use hf"),
        ({"parallelism": {"tensor_parallel": 2}}, "is not predicted; use 1"),
        ({"parallelism": {"engine": "deepspeed", "zero_stage": 2}}, "use peakmark, fsdp2 or ddp"),
        ({"job": "serve", "trains": False}, "plan its training"),
    ):
        with pytest.raises(PlanError, match=words):
            plan_of(**changed)


def test_an_architecture_without_a_trace_is_refused_with_the_command_that_makes_one(
    own: Path,
) -> None:
    with pytest.raises(PlanError, match=r"run `peakmark trace CONFIG\.json`"):
        spec_from_config({"model_type": "bloom", "n_layer": 2}, name="x")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n_layer": 1_000_000}, "from 1 to 1024"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "never run"),
        ({"quantization_config": {"bits": 4}}, "only whole weights"),
    ],
)
def test_a_configuration_that_is_not_traced_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        traceable_config({**BLOOM, **changed})


def test_dropout_is_off_and_what_changes_no_tensor_is_no_part_of_the_hash() -> None:
    plain, none = traceable_config(BLOOM)
    told, flags = traceable_config(
        {**BLOOM, "torch_dtype": "float16", "architectures": ["X"], "use_cache": True}
    )
    dropped, sentences = traceable_config({**BLOOM, "nested": {"attn_pdrop": 0.1}})
    assert config_digest(plain) == config_digest(told)
    assert (none, flags) == ([], [])
    assert dropped["nested"] == {"attn_pdrop": 0.0}
    assert sentences == ["attn_pdrop is 0.1: planned and run without dropout."]


def test_traces_lie_beside_the_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.delenv(DATABASE_VARIABLE, raising=False)
    assert own_folder() == Path("var/traced")
    monkeypatch.setenv(DATABASE_VARIABLE, "sqlite:////data/peakmark.db")
    assert own_folder() == Path("/data/traced")
    monkeypatch.setenv(DATABASE_VARIABLE, "postgresql://user@host/name")
    assert own_folder() == Path("var/traced")


def test_this_machines_trace_goes_before_the_planners_own(own: Path) -> None:
    text = shipped_text(BLOOM)
    (own / file_name(traceable_config(BLOOM)[0])).write_text(
        text.replace('"date": "2', '"date": "9')
    )
    note = next(flag for flag in plan_of().model.flags if flag.startswith("traced"))
    assert "on 9" in note


def broken(data: dict[str, Any], change: str) -> Any:
    """A trace with one fault."""
    sections = data["sections"]
    rows = next(i for i, section in enumerate(sections) if isinstance(section, list) and section)
    match change:
        case "no object":
            return [data]
        case "another schema":
            data["schema"] = 2
        case "no parameters":
            data["parameters"] = []
        case "a layer too many":
            data["parameters"][-1]["layers"] = [9999]
        case "an unknown field":
            data["code"] = "import os"
        case "an index behind the end":
            sections[rows] = [[0, len(data["monomials"]), 2]]
        case "an unknown dimension":
            data["monomials"][0] = "batch*secret"
        case "a row of another form":
            sections[rows] = [[0, 0, 0, 0]]
        case "a template that is missing":
            data["templates"].popitem()
        case "kinds of too few layers":
            data["variants"][0]["kinds"] = ["plain"]
    return data


@pytest.mark.parametrize(
    "change",
    [
        "no object",
        "another schema",
        "no parameters",
        "a layer too many",
        "an unknown field",
        "an index behind the end",
        "an unknown dimension",
        "a row of another form",
        "a template that is missing",
        "kinds of too few layers",
    ],
)
def test_a_damaged_trace_is_refused_and_says_to_trace_again(own: Path, change: str) -> None:
    data = json.loads(shipped_text(BLOOM))
    path = own / file_name(traceable_config(BLOOM)[0])
    path.write_text(json.dumps(broken(copy.deepcopy(data), change)))
    with pytest.raises(PlanError, match=r"cannot be used .* run `peakmark trace` again"):
        plan_of()
    path.write_text("{")
    with pytest.raises(PlanError, match="cannot be used"):
        plan_of()


def test_rows_are_checked_by_the_numbers_that_the_sections_have() -> None:
    found = (len(COMPONENTS), len(MARKS), len(SECTIONS))
    assert found == (NUM_COMPONENTS, NUM_MARKS, NUM_SECTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["plan"]["model"]["name"])
def test_the_models_of_the_recorded_matrix_have_their_traces(row: dict[str, Any]) -> None:
    hardware = {"preset": "h200-sxm5-141gb"}
    plan = parse_plan({"schema": 1, "job": "train", "hardware": hardware, **row["plan"]})
    assert plan.model.trace is not None
    assert predict(plan).memory["allocated_bytes"] > 0
