"""Models traced at their own dimensions, against what real modules save and known templates."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.ledger import kept_parts
from planner.memory.templates import load_saved, monomial_values, traced
from planner.memory.training import training_memory
from planner.model import ModelSpec
from planner.traced import (
    FOLDER_VARIABLE,
    file_name,
    find_trace,
    spec_from_trace,
    traceable_config,
)
from planner.workload import Attention, Engine, Parallelism, Precision, TrainingWorkload
from runners.trace.own_file import trace_model
from runners.trace.own_model import UntraceableError

BATCH, SEQ = 2, 24
FP32_EAGER = TrainingWorkload(
    sequence_length=SEQ, micro_batch=BATCH, precision=Precision.FP32, attention=Attention.EAGER
)
COMMON = {"vocab_size": 101, "hidden_size": 48, "num_attention_heads": 6}
LLAMA_LIKE = COMMON | {
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, dict[str, Any]] = {
    "bloom": {"vocab_size": 101, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "stablelm": LLAMA_LIKE | {"num_key_value_heads": 6, "use_qkv_bias": True},
    "olmoe": LLAMA_LIKE
    | {"num_key_value_heads": 6, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0},
}


def trace_into(folder: Path, config: dict[str, Any], attention: str, compute: str) -> None:
    hf_config, _ = traceable_config(config)
    path = folder / file_name(hf_config)
    text = trace_model(
        hf_config,
        attentions=(attention,),
        computes=(compute,),
        checkpointings=("none",),
        known=path,
        watch=lambda done, of, what: None,
    )
    path.write_text(text)


def predicted_saved_bytes(spec: ModelSpec) -> int:
    saved = load_saved(traced(spec, FP32_EAGER, SEQ))
    values = monomial_values(spec, tuple(t.monomial for t in saved), BATCH, SEQ)
    pairs = zip(saved, values.tolist(), strict=True)
    return round(sum(value * t.coefficient_bytes * len(t.places) for t, value in pairs))


def really_saved_bytes(spec: ModelSpec) -> int:
    """Bytes of the distinct storages that autograd keeps, less parameters and inputs."""
    config = AutoConfig.for_model(**spec.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    tokens = torch.randint(spec.vocab_size, (BATCH, SEQ))
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    given.add(tokens.untyped_storage().data_ptr())
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, labels=tokens, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", TINY)
def test_saved_bytes_equal_what_the_real_module_saves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    config = {"model_type": kind, **TINY[kind]}
    trace_into(tmp_path, config, "eager", "fp32")
    spec = spec_from_config(config, name=f"tiny {kind}")
    real = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.hf_config))
    assert spec.parameters == sum(p.numel() for p in real.parameters())
    predicted, saved = predicted_saved_bytes(spec), really_saved_bytes(spec)
    # The trace also holds what is alive without being saved: the loss, positions, rotary tables.
    alive_unsaved_bytes = 8 * SEQ * (spec.head_dim + BATCH * 4) + 64
    assert saved <= predicted <= saved + alive_unsaved_bytes
    # Score matrices of every layer: fp32, kept once, before and after nothing else changes them.
    scores_bytes = kept_parts(spec, traced(spec, FP32_EAGER, SEQ), BATCH, SEQ)["attention"]
    assert scores_bytes >= 3 * BATCH * 6 * SEQ * SEQ * 4


LLAMA = LLAMA_LIKE | {"model_type": "llama", "num_hidden_layers": 6, "num_key_value_heads": 2}


def test_a_llama_traced_by_itself_peaks_where_its_template_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    family = spec_from_config(LLAMA, name="llama")
    trace_into(tmp_path, dict(family.hf_config), "sdpa", "bf16")
    hf_config, flags = traceable_config(family.hf_config)
    found = find_trace(hf_config)
    assert found is not None
    own = spec_from_trace(found, hf_config, name="llama", flags=flags)
    assert own.parameters == family.parameters
    workload = TrainingWorkload(sequence_length=500, micro_batch=3, attention=Attention.SDPA)
    for engine, stage, ranks in (
        (Engine.PEAKMARK, 0, 1),
        (Engine.PEAKMARK, 3, 8),
        (Engine.FSDP2, 3, 4),
    ):
        parallelism = Parallelism(engine=engine, zero_stage=stage, world_size=ranks)
        ours = training_memory(own, workload, parallelism)
        theirs = training_memory(family, workload, parallelism)
        assert ours.allocated_bytes == theirs.allocated_bytes
        assert ours.peak_phase == theirs.peak_phase


def test_an_earlier_trace_keeps_the_variants_that_are_not_traced_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    config = {"model_type": "bloom", **TINY["bloom"], "n_layer": 1}
    trace_into(tmp_path, config, "eager", "fp32")
    (path,) = tmp_path.iterdir()
    before = {v["key"] for v in json.loads(path.read_text())["variants"]}
    trace_into(tmp_path, config, "eager", "bf16")
    after = {v["key"] for v in json.loads(path.read_text())["variants"]}
    assert (before, after) == ({"eager/fp32/none"}, {"eager/fp32/none", "eager/bf16/none"})
    spec = spec_from_config(config, name="tiny bloom")
    assert predicted_saved_bytes(replace(spec)) > 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 32}, "carries a state"),
        ({"model_type": "t5"}, "no decoder-only language model"),
        ({"model_type": "bert"}, "not causal"),
        ({"model_type": "nonsense"}, "knows no architecture 'nonsense'"),
    ],
)
def test_what_is_no_causal_transformer_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UntraceableError, match=words):
        trace_model(
            config,
            attentions=("eager",),
            computes=("bf16",),
            checkpointings=("none",),
            known=Path("nowhere"),
            watch=lambda done, of, what: None,
        )
