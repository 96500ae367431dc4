"""A real model of any architecture at its own dimensions, on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from planner.workload import Checkpointing
from runners.jobs.checkpointing import checkpoint_layers
from runners.zero.groups import decoder_layers, partition_parameters

_LONGEST_PERIOD, _LONGEST_START = 12, 8


class UntraceableError(Exception):
    """A model that cannot be traced; `str()` is one sentence."""


class OwnModel:
    """Builds one configuration's model; each step is traced on a copy with only its first layers."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self._hf_config = dict(hf_config)
        self._whole = self._build("eager")
        self._shortened: dict[str, nn.Module] = {}
        self.name = type(self._whole).__name__
        self.kinds = find_kinds(decoder_layers(self._whole))
        self.num_traced = shortest_like(self.kinds)

    def _build(self, attention: str) -> nn.Module:
        config = AutoConfig.for_model(**self._hf_config)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
        return model.train()

    @property
    def vocab(self) -> int:
        """Rows of the output embedding."""
        head: nn.Module = self._whole.get_output_embeddings()  # type: ignore[operator]
        return int(head.weight.shape[0])  # type: ignore[index]

    @property
    def hidden(self) -> int:
        """Width of the input embedding."""
        embedding: nn.Module = self._whole.get_input_embeddings()  # type: ignore[operator]
        return int(embedding.weight.shape[1])  # type: ignore[index]

    @property
    def ties_embeddings(self) -> bool:
        """Whether input and output embedding are one parameter."""
        ends = (self._whole.get_input_embeddings, self._whole.get_output_embeddings)
        first, last = (end().weight for end in ends)  # type: ignore[operator]
        return first is last

    def dimensions(self) -> set[int]:
        """Every size in the shapes of parameters and buffers and in the configuration."""
        tensors = (*self._whole.parameters(), *self._whole.buffers())
        sizes = {size for tensor in tensors for size in tensor.shape}
        return sizes | {v for v in self._hf_config.values() if type(v) is int and v > 1}

    def prepared(self, attention: str, compute: str, checkpointing: str) -> nn.Module:
        """The first `num_traced` layers of the model, as an engine and a job prepare them."""
        if attention not in self._shortened:
            built = self._build(attention)
            del decoder_layers(built)[self.num_traced :]
            self._shortened[attention] = built
        model = copied(self._shortened[attention])
        dtype = torch.bfloat16 if compute == "bf16" else torch.float32
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)  # engines store all in one dtype
        try:
            checkpoint_layers(model, Checkpointing(checkpointing))
        except ValueError as error:
            raise UntraceableError(f"{self.name} cannot be checkpointed: {error}") from error
        return model

    def parameters(self) -> list[dict[str, Any]]:
        """Name, shape and group of every parameter, those of a name in several layers together."""
        found: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        first: dict[tuple[str, tuple[int, ...], str], str] = {}
        for members in partition_parameters(self._whole):
            group, _, layer = members.name.partition(".")
            for owners in members.owners:
                name = owners[0].name
                shape = tuple(owners[0].module.get_parameter(owners[0].attribute).shape)
                part = name.replace(f".{layer}.", ".*.", 1) if layer else name
                found.setdefault((part, shape, group), []).extend([int(layer)] if layer else [])
                first.setdefault((part, shape, group), name)
        return [
            {"name": first[key], "shape": list(key[1]), "group": key[2], "layers": layers}
            for key, layers in found.items()
        ]


def copied(model: nn.Module) -> nn.Module:
    """A copy of a meta model: a trace leaves hooks and gradients on the one it runs."""
    return copy.deepcopy(model)


def check_causal(hf_config: Mapping[str, Any]) -> None:
    """Raise UntraceableError for what is no causal language model of transformers' own."""
    kind = str(hf_config["model_type"])
    try:
        config = AutoConfig.for_model(**hf_config)
    except ValueError as error:
        import transformers

        known = f"transformers {transformers.__version__} knows no architecture {kind!r}"
        reason = known if "Unrecognized model" in str(error) else _first_line(error)
        raise UntraceableError(f"model.config cannot be built: {reason}.") from error
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if name is None or getattr(config, "is_encoder_decoder", False):
        raise UntraceableError(
            f"model.config.model_type is {kind!r}: it is no decoder-only language model, and only "
            "those are planned."
        )
    if (
        getattr(config, "is_decoder", True) is False
        and "is_decoder" in type(config).__annotations__
    ):
        raise UntraceableError(
            f"model.config.model_type is {kind!r}: without is_decoder it is an encoder, whose "
            "attention is not causal, and only decoder-only language models are planned."
        )


def check_stateless(model: OwnModel) -> None:
    """Raise UntraceableError for layers that carry a state from token to token."""
    if getattr(model._whole, "_is_stateful", False):
        raise UntraceableError(
            f"{model.name} carries a state from token to token: what its kernels keep on a GPU "
            "cannot be seen without one, so it is not planned."
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rstrip(".:")[:200]


def find_kinds(layers: nn.ModuleList) -> tuple[str, ...]:
    """Name the kind of every layer: alike are those of equal modules, shapes and settings."""
    described = [_describe(layer) for layer in layers]
    numbered = {key for key in described[0] if _counts_layers([d.get(key) for d in described])}
    signatures = [
        tuple(sorted((key, repr(v)) for key, v in d.items() if key not in numbered))
        for d in described
    ]
    order = list(dict.fromkeys(signatures))
    if len(order) == 1:
        return ("plain",) * len(layers)
    return tuple(f"kind{order.index(signature) + 1}" for signature in signatures)


def _describe(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """Modules, shapes of parameters and plain settings of a layer; of numbers that are no counts
    only whether they are zero."""
    described: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        described[name, ""] = type(module).__name__
        for key, value in vars(module).items():
            if key.startswith("_"):
                continue
            if isinstance(value, float):
                value = value != 0.0
            if value is None or isinstance(value, bool | int | str):
                described[name, key] = value
    described |= {(name, "shape"): tuple(p.shape) for name, p in layer.named_parameters()}
    return described


def _counts_layers(values: Sequence[Any]) -> bool:
    """Whether a setting is the layer's number."""
    if len(values) < 2 or not all(type(value) is int for value in values):
        return False
    return all(value == values[0] + index for index, value in enumerate(values))


def shortest_like(kinds: Sequence[str]) -> int:
    """How many first layers run through every neighbourhood that the whole sequence has.

    After a few first layers the kinds of most models repeat with a short period: two periods, ended
    where the model ends in its last, have all of it.
    """
    total, best = len(kinds), len(kinds)
    for start in range(min(_LONGEST_START, total)):
        rest = kinds[start:]
        for period in range(1, _LONGEST_PERIOD + 1):
            if any(rest[i] != rest[i + period] for i in range(len(rest) - period)):
                continue
            least = max(4, 2 * period)
            length = least + (len(rest) - least) % period
            if length <= len(rest):
                best = min(best, start + length)
    return best


def supported_attentions(model: OwnModel, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the wanted attentions that the model can be built with.

    Raises UntraceableError with transformers' reason where it is none.
    """
    found, reason = [], ""
    for attention in wanted:
        try:
            model.prepared(attention, "bf16", "none")
            found.append(attention)
        except (ValueError, ImportError) as error:
            # The first sentence: what follows asks to write to transformers' developers.
            reason = str(error).splitlines()[0].split(". ")[0][:200].rstrip(".")
    if not found:
        raise UntraceableError(f"{model.name} cannot run {' or '.join(wanted)}: {reason}")
    return tuple(found)
