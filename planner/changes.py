"""Single changes of a training plan, each in words: of the system, or of the algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from planner.config_keys import modelled_keys
from planner.errors import PlanError
from planner.memory.parallel import group_size, is_split
from planner.obstacles import check_parallelism
from planner.plan import Plan, parse_plan
from planner.workload import (
    Attention,
    Checkpointing,
    Engine,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    TrainingWorkload,
)

LORA_RANK = 16
WINDOWS = (4096, 1024)
GPU_FACTORS = (2, 4, 8)
_STAGES = (0, 1, 2, 3)
_FEWER_BYTES: Mapping[Precision, tuple[Precision, ...]] = {
    Precision.FP32: (Precision.AUTOCAST, Precision.MIXED, Precision.BF16),
    Precision.AUTOCAST: (Precision.MIXED, Precision.BF16),
    Precision.MIXED: (Precision.BF16,),
    Precision.BF16: (),
}


class Kind(StrEnum):
    """What a change is of: the system computes the same model, the algorithm another one."""

    SYSTEM = "system"
    ALGORITHM = "algorithm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """New values for some fields of a plan; `caution` says what else changes with them.

    `updates` are by part of the plan's document ("overrides" are the model's) and field.
    """

    words: str
    kind: Kind
    updates: Mapping[str, Mapping[str, Any]] = field(hash=False)
    caution: str = ""

    def applied_to(self, plan: Plan) -> Plan:
        """Return the changed plan; raises PlanError where it cannot be planned."""
        document = plan.to_dict()
        for part, values in self.updates.items():
            if part == "overrides":
                overrides = {**document["model"].get("overrides", {}), **values}
                document["model"] = {**document["model"], "overrides": overrides}
            else:
                document[part] = {**document[part], **values}
        # No change is one of the GPU, whose document does not hold what was measured on it.
        return replace(parse_plan(document), hardware=plan.hardware)

    def beside(self, other: Change) -> Change | None:
        """Return both changes as one; None where they set the same field."""
        if any(
            set(values) & set(other.updates.get(part, ())) for part, values in self.updates.items()
        ):
            return None
        parts = {*self.updates, *other.updates}
        return Change(
            words=f"{self.words.replace(' and ', ', ')} and {other.words}",
            kind=max(self.kind, other.kind, key=lambda kind: kind is Kind.ALGORITHM),
            updates={
                part: {**self.updates.get(part, {}), **other.updates.get(part, {})}
                for part in parts
            },
            caution=", ".join(filter(None, (self.caution, other.caution))),
        )


def changes_of(plan: Plan) -> list[Change]:
    """Return the single changes of a training plan; not every one can be planned.

    Those of the system keep the sequences of a step where they can. Raises PlanError for a serving
    plan.
    """
    workload, parallelism = plan.workload, plan.parallelism
    if not isinstance(workload, TrainingWorkload):
        raise PlanError("job", str(plan.job), "train, as these are changes of a training plan")
    return [
        *_kernels(workload),
        *_batches(workload),
        *_spreads(parallelism),
        *_fewer_gpus(workload, parallelism),
        *more_gpus(plan, GPU_FACTORS),
        *_splits(workload, parallelism),
        *_places(workload),
        *_precisions(workload),
        *_algorithms(plan, workload),
    ]


def _work(words: str, values: Mapping[str, Any], caution: str = "") -> Change:
    updates = {"workload": values}
    return Change(words=words, kind=Kind.SYSTEM, updates=updates, caution=caution)


def _kernels(workload: TrainingWorkload) -> Iterator[Change]:
    """What computes layers, attention, loss and update; all are exact."""
    for checkpointing in Checkpointing:
        if checkpointing is not workload.checkpointing:
            every = {"checkpoint_every": 1} if checkpointing is Checkpointing.NONE else {}
            values = {"checkpointing": str(checkpointing), **every}
            yield _work(f"checkpointing {checkpointing}", values)
    for attention in Attention:
        if attention is not workload.attention:
            yield _work(f"attention {attention}", {"attention": str(attention)})
    for loss in Loss:
        if loss is not workload.loss:
            yield _work(f"{str(loss).replace('_', ' ')} loss", {"loss": str(loss)})
    if workload.optimizer is Optimizer.ADAMW_FUSED:
        yield _work("optimizer adamw triton", {"optimizer": str(Optimizer.ADAMW_TRITON)})


def _batches(workload: TrainingWorkload) -> Iterator[Change]:
    """Other micro-batches with the same sequences in a step."""
    own, rows = workload.micro_batch, workload.micro_batch * workload.grad_accumulation
    for micro_batch in dict.fromkeys((own // 2, 1, 2 * own, rows)):
        if micro_batch and micro_batch != own and rows % micro_batch == 0:
            rounds = rows // micro_batch
            accumulated = f" × {rounds} accumulated" if rounds > 1 else ""
            values = {"micro_batch": micro_batch, "grad_accumulation": rounds}
            yield _work(f"micro-batch {micro_batch}{accumulated}", values)


def _spread(words: str, **values: Any) -> Change:
    return Change(words=words, kind=Kind.SYSTEM, updates={"parallelism": values})


def _spreads(parallelism: Parallelism) -> Iterator[Change]:
    """Other stages of the engine, and other engines at the nearest stage they have."""
    for stage in _STAGES:
        if stage != parallelism.zero_stage:
            yield _spread(f"ZeRO stage {stage}", zero_stage=stage)
    for engine in Engine:
        if engine is not parallelism.engine:
            own = parallelism.zero_stage
            stage = min(filter(lambda s: _has(engine, s), _STAGES), key=lambda s: abs(s - own))
            at_stage = "" if stage == own else f" at stage {stage}"
            yield _spread(f"engine {engine}{at_stage}", engine=str(engine), zero_stage=stage)


def _has(engine: Engine, stage: int) -> bool:
    try:
        check_parallelism(Parallelism(engine=engine, zero_stage=stage))
    except PlanError:
        return False
    return True


def _fewer_gpus(workload: TrainingWorkload, parallelism: Parallelism) -> Iterator[Change]:
    """Half of the data-parallel ranks, with the same sequences in a step."""
    ranks, rounds = parallelism.world_size, workload.grad_accumulation
    if ranks % 2 == 0:
        yield _ranks(parallelism, ranks // 2, 2 * rounds)


def more_gpus(plan: Plan, factors: Iterable[int]) -> Iterator[Change]:
    """Return more data-parallel ranks, with the same sequences in a step where that can be."""
    assert isinstance(plan.workload, TrainingWorkload)
    ranks, rounds = plan.parallelism.world_size, plan.workload.grad_accumulation
    for factor in factors:
        fewer, rest = divmod(rounds, factor)
        caution = f"a step has {factor} times the sequences" if rest else ""
        yield _ranks(plan.parallelism, ranks * factor, rounds if rest else fewer, caution)


def _ranks(parallelism: Parallelism, ranks: int, rounds: int, caution: str = "") -> Change:
    gpus = ranks * group_size(parallelism)
    words = f"{gpus:,} GPU{'s' if gpus > 1 else ''}"
    updates = {"parallelism": {"world_size": ranks}, "workload": {"grad_accumulation": rounds}}
    return Change(words=words, kind=Kind.SYSTEM, updates=updates, caution=caution)


def _splits(workload: TrainingWorkload, parallelism: Parallelism) -> Iterator[Change]:
    """The same GPUs and sequences with a model or a sequence split over some of the GPUs."""
    if is_split(parallelism):
        return
    sizes = {"tensor_parallel": (2, 4, 8), "pipeline_parallel": (2, 4), "context_parallel": (2, 4)}
    for name, degrees in sizes.items():
        for degree in (degree for degree in degrees if parallelism.world_size % degree == 0):
            more = {"sequence_parallel": True} if name == "tensor_parallel" else {}
            spread = {name: degree, "world_size": parallelism.world_size // degree, **more}
            rounds = {"grad_accumulation": workload.grad_accumulation * degree}
            yield Change(
                words=f"{name.replace('_', ' ')} {degree} on the same GPUs",
                kind=Kind.SYSTEM,
                updates={"parallelism": spread, "workload": rounds},
            )


def _places(workload: TrainingWorkload) -> Iterator[Change]:
    """Where bytes are: segments that grow, the optimizer in host memory."""
    named = {
        "expandable_segments": "expandable segments",
        "offload_optimizer": "optimizer in host memory",
    }
    for name, words in named.items():
        used = getattr(workload, name)
        yield _work(f"no {words}" if used else words, {name: not used})


def _precisions(workload: TrainingWorkload) -> Iterator[Change]:
    for precision in _FEWER_BYTES[workload.precision]:
        kept = "no fp32 weights are kept" if precision is Precision.BF16 else "computes in bf16"
        yield _work(f"precision {precision}", {"precision": str(precision)}, kept)
    if workload.optimizer is not Optimizer.ADAMW_8BIT:
        rounded = "its moments are rounded to 8 bits"
        yield _work("optimizer adamw 8bit", {"optimizer": str(Optimizer.ADAMW_8BIT)}, rounded)


def _algorithms(plan: Plan, workload: TrainingWorkload) -> Iterator[Change]:
    """What makes it another model, or trains it otherwise."""
    model, length = plan.model, workload.sequence_length

    def another(words: str, caution: str, **updates: Any) -> Change:
        return Change(words=words, kind=Kind.ALGORITHM, updates=updates, caution=caution)

    if length > 1:
        half = {"sequence_length": length // 2}
        words = f"sequences of {length // 2:,} tokens"
        yield another(words, "a step has half the tokens", workload=half)
    if not workload.lora_rank and not workload.frozen_layers:
        words = f"LoRA of rank {LORA_RANK}"
        yield another(words, "trains adapters alone", workload={"lora_rank": LORA_RANK})
    keys = modelled_keys(model.family) if model.trace is None else frozenset()
    # Families with a switch for it need more than a window's size.
    if "sliding_window" in keys and "use_sliding_window" not in keys:
        for window in WINDOWS:
            if window < min(length, model.sliding_window or length):
                words = f"sliding window of {window:,} tokens"
                overrides = {"sliding_window": window}
                yield another(words, "layers see less of the text", overrides=overrides)
    if "num_key_value_heads" in keys and model.latent is None:
        for heads in (model.num_heads // 4, model.num_heads // 8, 1):
            if 0 < heads < model.num_kv_heads and model.num_heads % heads == 0:
                words = f"{heads} key-value head{'s' if heads > 1 else ''}"
                overrides = {"num_key_value_heads": heads}
                yield another(words, "query heads share them", overrides=overrides)
