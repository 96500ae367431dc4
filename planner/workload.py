"""What a job does and how it is spread: the choices of a plan and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any


class Optimizer(StrEnum):
    """Update rule and implementation; SGD has momentum 0.9."""

    ADAMW_FUSED = "adamw_fused"
    ADAMW_FOREACH = "adamw_foreach"
    ADAMW_LOOP = "adamw_loop"
    ADAMW_TRITON = "adamw_triton"
    ADAMW_8BIT = "adamw_8bit"
    SGD = "sgd"
    ADAFACTOR = "adafactor"
    MUON = "muon"


class Precision(StrEnum):
    """Element types of parameters, gradients, optimizer states and compute."""

    MIXED = "mixed"
    BF16 = "bf16"
    FP32 = "fp32"
    AUTOCAST = "autocast"


class Attention(StrEnum):
    """Implementation of the attention operation."""

    EAGER = "eager"
    SDPA = "sdpa"
    TRITON = "triton"


class Checkpointing(StrEnum):
    """What layers recompute in the backward.

    `full`: all but their input. `selective`: all but the results of matrix products and attention.
    """

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


class Loss(StrEnum):
    """How logits and cross-entropy are computed.

    `hf`: all logits at once, as transformers does. `chunked`: chunk by chunk of the tokens, each
    recomputed in the backward. `fused_linear`: gradients made in the forward, no stored logits.
    """

    HF = "hf"
    CHUNKED = "chunked"
    FUSED_LINEAR = "fused_linear"


class LoraTargets(StrEnum):
    """Which linear layers carry adapters: q and v projections, or all linear layers of a block."""

    QV = "qv"
    ALL_LINEAR = "all_linear"


class BaseDtype(StrEnum):
    """How the frozen weights below adapters are stored; `nf4` is QLoRA's."""

    AS_PRECISION = "as_precision"
    NF4 = "nf4"


class Engine(StrEnum):
    """What shards the training state."""

    PEAKMARK = "peakmark"
    FSDP2 = "fsdp2"
    DDP = "ddp"
    ZERO_REDUNDANCY = "zero_redundancy"
    DEEPSPEED = "deepspeed"


class ReduceDtype(StrEnum):
    """In what gradients are reduced; `auto` is each engine's own choice.

    That is the dtype in which they are made, but for FSDP2 and DeepSpeed under `mixed`.
    """

    AUTO = "auto"
    BF16 = "bf16"
    FP32 = "fp32"


class WeightsDtype(StrEnum):
    """Element type of served weights; `mxfp4` is that of GPT-OSS's experts, all else in bf16."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"
    MXFP4 = "mxfp4"


class KvDtype(StrEnum):
    """Element type of the key-value cache."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkload:
    """One optimizer step on one rank: `grad_accumulation` micro-batches of `micro_batch` rows.

    `checkpoint_every` k checkpoints layers 0, k, 2k, ... only. `sync_each_micro_batch` reduces
    gradients over the ranks after every micro-batch, not only after the last. `lora_rank` 0 trains
    the model itself. `frozen_layers` k freezes the embedding and the first k layers. `packed` rows
    hold two documents, each blind to the other. `offload_optimizer` keeps the optimizer's values and
    moments in host memory and steps them there. `max_grad_norm` 0 clips no gradients.
    """

    sequence_length: int = 4096
    micro_batch: int = 1
    grad_accumulation: int = 1
    optimizer: Optimizer = Optimizer.ADAMW_FUSED
    precision: Precision = Precision.MIXED
    attention: Attention = Attention.SDPA
    checkpointing: Checkpointing = Checkpointing.NONE
    checkpoint_every: int = 1
    loss: Loss = Loss.HF
    sync_each_micro_batch: bool = True
    lora_rank: int = 0
    lora_targets: LoraTargets = LoraTargets.ALL_LINEAR
    base_dtype: BaseDtype = BaseDtype.AS_PRECISION
    frozen_layers: int = 0
    packed: bool = False
    expandable_segments: bool = False
    offload_optimizer: bool = False
    reduce_dtype: ReduceDtype = ReduceDtype.AUTO
    max_grad_norm: float = 0.0

    def of_any_size(self) -> TrainingWorkload:
        """The same with one row of one token: what depends on neither is known by it."""
        return _of_any_size(self)


@lru_cache(maxsize=1024)
def _of_any_size(workload: TrainingWorkload) -> TrainingWorkload:
    return replace(workload, micro_batch=1, sequence_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingWorkload:
    """Requests held at once on one GPU, each up to `context_length` tokens.

    `utilization` is the share of visible memory that the engine may take.
    """

    context_length: int = 8192
    sequences: int = 8
    weights_dtype: WeightsDtype = WeightsDtype.BF16
    kv_dtype: KvDtype = KvDtype.BF16
    utilization: float = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the job is spread: `world_size` data-parallel ranks share the state by `zero_stage`.

    Each of them is a group of tensor x pipeline x context parallel GPUs. `expert_parallel` ranks
    of the data-parallel ones split a layer's experts.
    """

    engine: Engine = Engine.PEAKMARK
    zero_stage: int = 3
    world_size: int = 8
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1


def field_words(name: str) -> str:
    """Return a field's name as people write it: `micro_batch` is micro-batch, `zero_stage` zero stage."""
    return name.replace("micro_batch", "micro-batch").replace("_", " ")


def flat_dict(values: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, choices as text; nested values stay as they are.

    `dataclasses.asdict` copies every value, which would take a third of a prediction's time.
    """
    found = {name: getattr(values, name) for name in values.__dataclass_fields__}
    for name, value in found.items():
        if isinstance(value, StrEnum):
            found[name] = value.value
    return found


# `flat_dict` of each part of a plan as it is without a word from a person; to be read only.
DEFAULTS: Mapping[type[Any], Mapping[str, Any]] = {
    kind: flat_dict(kind()) for kind in (TrainingWorkload, ServingWorkload, Parallelism)
}


def written_dict(values: TrainingWorkload | ServingWorkload | Parallelism) -> dict[str, Any]:
    """Return `flat_dict` without the later fields at their default.

    A plan that does not use them keeps the JSON, and so the hash, it always had.
    """
    default = DEFAULTS[type(values)]
    return {
        name: value
        for name, value in flat_dict(values).items()
        if name not in _LATER_FIELDS or value != default[name]
    }


_LATER_FIELDS = frozenset(
    (
        *("checkpoint_every", "loss", "sync_each_micro_batch", "lora_rank", "lora_targets"),
        *("base_dtype", "frozen_layers", "packed", "expandable_segments", "offload_optimizer"),
        *("reduce_dtype", "max_grad_norm"),
        *("tensor_parallel", "sequence_parallel", "pipeline_parallel", "context_parallel"),
        "expert_parallel",
    )
)
