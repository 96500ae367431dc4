"""Models of any other architecture, as `peakmark trace` saw them: data, found by configuration.

A trace is one JSON file: the configuration, its parameters, and what a training step of that very
model allocates, section by section, for any rows and tokens (`planner.memory.sections`). Files lie
in a folder of this machine, and those that recorded measurements need beside the planner's own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from planner.checks import canonical_json, check_mapping
from planner.errors import PlanError, describe_key, describe_value
from planner.model import ModelSpec, ParameterShape
from planner.traced_file import MAX_FILE_BYTES, TraceFile, TraceVariant, read_trace
from planner.workload import Precision, TrainingWorkload

FOLDER_VARIABLE, DATABASE_VARIABLE = "PEAKMARK_TRACED", "PEAKMARK_DATABASE_URL"
DEFAULT_FOLDER = Path("var") / "traced"
# Above it a model is refused before it is built: building takes time for every layer.
MAX_LAYERS = 1024
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_LONGEST = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Keys that say where a configuration is from and change no tensor of a training step.
_IRRELEVANT = frozenset(
    (
        *("_name_or_path", "name_or_path", "architectures", "transformers_version"),
        *("torch_dtype", "dtype", "use_cache", "_commit_hash", "_attn_implementation"),
    )
)


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A trace file that was read; `trace_id` is a hash of its content."""

    trace_id: str
    file: TraceFile
    data: Mapping[str, Any] = field(hash=False, repr=False)


_models: dict[str, TracedModel] = {}


def own_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this machine keeps its traces: `$PEAKMARK_TRACED`, else beside the SQLite database.

    Without either variable that is `var/traced` here.
    """
    named = environment.get(FOLDER_VARIABLE)
    if named:
        return Path(named)
    database = environment.get(DATABASE_VARIABLE, "").removeprefix("sqlite:///")
    return (
        Path(database).parent / "traced" if database and "://" not in database else DEFAULT_FOLDER
    )


def traceable_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a configuration as it is traced and run, and sentences about what was changed.

    Dropout is off. Raises PlanError for one that needs code of its repository, is quantised, or
    has more layers than are traced.
    """
    values = check_mapping("model.config", config)
    if not isinstance(values.get("model_type"), str):
        raise PlanError("model.config.model_type", values.get("model_type"), "a name")
    if values.get("auto_map"):
        sentence = (
            "model.config.auto_map names code in the model's repository, which is never run: only "
            "architectures that transformers itself has are traced."
        )
        raise PlanError("model.config.auto_map", values["auto_map"], "absent", sentence=sentence)
    if values.get("quantization_config"):
        sentence = "model.config.quantization_config is given: only whole weights are trained."
        raise PlanError("model.config.quantization_config", None, "absent", sentence=sentence)
    for key in _LAYER_COUNTS:
        count = values.get(key)
        if type(count) is int and not 1 <= count <= MAX_LAYERS:
            raise PlanError(f"model.config.{key}", count, f"an integer from 1 to {MAX_LAYERS}")
    flags: list[str] = []
    kept = {key: value for key, value in values.items() if key not in _IRRELEVANT}
    return _without_dropout(kept, flags), flags


def _without_dropout(values: Mapping[str, Any], flags: list[str]) -> dict[str, Any]:
    without: dict[str, Any] = {}
    for key, value in values.items():
        is_share = type(value) in (int, float) and ("drop" in key or key.endswith("_pdrop"))
        if is_share and value:
            flags.append(f"{describe_key(key)} is {value:g}: planned and run without dropout.")
            value = type(value)(0)  # some configurations take whole numbers only
        without[key] = _without_dropout(value, flags) if isinstance(value, Mapping) else value
    return without


def config_digest(hf_config: Mapping[str, Any]) -> str:
    """Return the hash that names the trace of a configuration from `traceable_config`."""
    text = canonical_json("model.config", hf_config)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def file_name(hf_config: Mapping[str, Any]) -> str:
    """Return the name of the file that holds the trace of a configuration."""
    kind = "".join(c for c in str(hf_config["model_type"]) if c.isalnum() or c in "_-")[:40]
    return f"{kind}-{config_digest(hf_config)}.json"


def find_trace(hf_config: Mapping[str, Any]) -> TracedModel | None:
    """Return the trace of a configuration, this machine's before the planner's own; None without.

    Raises PlanError where its file is damaged.
    """
    name = file_name(hf_config)
    shipped = Path(str(resources.files("planner.memory").joinpath("traced")))
    for path in (own_folder() / name, shipped / name):
        try:
            status = path.stat()
        except OSError:
            continue
        if status.st_size > MAX_FILE_BYTES:
            raise _damaged(path, f"it is larger than {MAX_FILE_BYTES:,} bytes")
        return _load(path, status.st_mtime_ns, status.st_size)
    return None


def read_trace_of(hf_config: Mapping[str, Any]) -> TraceFile:
    """Return what the trace of a configuration says; raises PlanError where there is none."""
    found = find_trace(hf_config)
    if found is None:
        raise _damaged(own_folder() / file_name(hf_config), "it is gone")
    return found.file


@lru_cache(maxsize=64)
def _load(path: Path, changed_ns: int, size_bytes: int) -> TracedModel:
    try:
        content = path.read_bytes()
        data = json.loads(content)
        file = read_trace(data)
    except OSError as error:
        raise _damaged(path, str(error.strerror)) from None
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise _damaged(path, reason[:160]) from None
    trace_id = hashlib.sha256(content).hexdigest()[:24]
    return _models.setdefault(trace_id, TracedModel(trace_id, file, data))


def _damaged(path: Path, reason: str) -> PlanError:
    sentence = f"The trace {path.name} cannot be used ({reason}): run `peakmark trace` again."
    return PlanError("model.config", path.name, "a trace that can be read", sentence=sentence)


def traced_model(spec: ModelSpec) -> TracedModel:
    """Return the trace that a spec of `spec_from_trace` stands for."""
    assert spec.trace is not None
    return _models[spec.trace]


def trace_data(trace_id: str) -> Mapping[str, Any]:
    """Return a loaded trace's templates: monomials, sections and their index."""
    return _models[trace_id].data


def parameters_of(spec: ModelSpec) -> tuple[ParameterShape, ...]:
    """Return every parameter of a traced model, as `families.parameter_shapes` does."""
    return tuple(
        ParameterShape(name=p.name, shape=p.shape, group=p.group, layers=p.layers)
        for p in traced_model(spec).file.parameters
    )


def find_variant(
    spec: ModelSpec, key: str, micro_batch: int, sequence_length: int
) -> TraceVariant | None:
    """Return what was traced under `key` ("sdpa/bf16/none") for this batch; None if nothing was.

    Where one row runs other operations than several, it was traced by itself.
    """
    found = [
        variant
        for variant in traced_model(spec).file.variants
        if variant.key == key and variant.first <= sequence_length <= variant.last
    ]
    rows = ("one", "any") if micro_batch == 1 else ("any",)
    return next((v for name in rows for v in found if v.rows == name), None)


def step_costs(
    spec: ModelSpec, workload: TrainingWorkload, b: Any, s: Any
) -> list[tuple[str, Any, Any]]:
    """Return (name, FLOPs, bytes) of each kind of operation of one micro-batch, forward and backward.

    For arrays of rows `b` or tokens `s`, as the workload's own length runs them.
    """
    variant = _timed_variant(spec, workload, is_one_row=np.ndim(b) == 0 and float(b) == 1.0)
    rows = []
    for phase, costs in (("forward", variant.forward), ("backward", variant.backward)):
        for kind in dict.fromkeys(cost.kind for cost in costs):
            totals = {"flops": 0.0 * b * s, "bytes": 0.0 * b * s}
            for cost in costs:
                if cost.kind == kind:
                    totals[cost.unit] = (
                        totals[cost.unit] + cost.count * b**cost.rows * s**cost.tokens
                    )
            rows.append((f"{phase}.{kind}", totals["flops"], totals["bytes"]))
    return rows


def forward_flops(spec: ModelSpec, b: Any, s: Any) -> Any:
    """Return the FLOPs of one micro-batch's forward: products, and attention's causal pairs."""
    workload = TrainingWorkload(precision=Precision.BF16)
    return sum(
        flops for name, flops, _ in step_costs(spec, workload, b, s) if name.startswith("forward.")
    )


def _timed_variant(spec: ModelSpec, workload: TrainingWorkload, is_one_row: bool) -> TraceVariant:
    """Return the workload's variant; of a length or choices that were not traced, the first one."""
    mixed = workload.precision is Precision.MIXED
    compute = "bf16" if mixed else str(workload.precision)
    key = "/".join((str(workload.attention), compute, str(workload.checkpointing)))
    rows = 1 if is_one_row else 2
    found = find_variant(spec, key, rows, workload.sequence_length)
    every = traced_model(spec).file.variants
    return found or next(v for v in every if v.rows == "any")


def spec_from_config_of_other(config: Mapping[str, Any], *, name: str) -> ModelSpec:
    """Return the spec of a configuration of no known family; raises PlanError without its trace."""
    hf_config, flags = traceable_config(config)
    found = find_trace(hf_config)
    if found is None:
        kind = describe_value(hf_config["model_type"])
        sentence = (
            f"model.config.model_type is {kind}, an architecture that has no template here: run "
            "`peakmark trace CONFIG.json` (or with the model's hub id) once, then plan it again."
        )
        field_name = "model.config.model_type"
        raise PlanError(field_name, hf_config["model_type"], "a traced model", sentence=sentence)
    return spec_from_trace(found, hf_config, name=name, flags=flags)


def spec_of_refused(config: Mapping[str, Any], *, name: str) -> ModelSpec | None:
    """Return the spec of a configuration that its family refuses, where it was traced; else None."""
    try:
        hf_config, flags = traceable_config(config)
        found = find_trace(hf_config)
    except PlanError:
        return None
    return None if found is None else spec_from_trace(found, hf_config, name=name, flags=flags)


def spec_from_trace(
    found: TracedModel, hf_config: Mapping[str, Any], *, name: str, flags: list[str]
) -> ModelSpec:
    """Return the spec of a traced model; dimensions that only families know are 0."""
    file = found.file
    heads = _first_size(hf_config, _HEAD_COUNTS) or 1
    head_dim = _first_size(hf_config, ("head_dim",)) or max(1, file.hidden_size // heads)
    num_layers = file.num_layers
    return ModelSpec(
        name=name,
        family=str(hf_config["model_type"]),
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=_first_size(hf_config, ("intermediate_size", "ffn_dim", "n_inner")) or 0,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=_first_size(hf_config, ("num_key_value_heads",)) or heads,
        head_dim=head_dim,
        rotary_dim=head_dim,
        max_positions=file.longest,
        tie_word_embeddings=file.ties_embeddings,
        sliding_window=None,
        sliding_layers=(False,) * num_layers,
        num_experts=0,
        experts_per_token=0,
        expert_groups=1,
        groups_per_token=1,
        expert_size=0,
        shared_expert_size=0,
        expert_layers=(False,) * num_layers,
        latent=None,
        qkv_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        attention_logit_softcap=None,
        final_logit_softcap=None,
        parameters=sum(p.numel for p in file.parameters),
        hf_config=hf_config,
        flags=(*flags, traced_note(file)),
        trace=found.trace_id,
    )


def traced_note(file: TraceFile) -> str:
    """Return the sentence that says where a traced model's memory is from."""
    return (
        f"traced: {file.architecture} of transformers {file.transformers} at its own dimensions, "
        f"on {file.date}; no family's template."
    )


def longest_sequence(hf_config: Mapping[str, Any], otherwise: int) -> int:
    """Return how many positions a configuration says its model has."""
    return _first_size(hf_config, _LONGEST) or otherwise


def _first_size(hf_config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    found = (hf_config.get(key) for key in keys)
    return next((size for size in found if type(size) is int and size > 0), None)
