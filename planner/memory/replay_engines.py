"""Replay a plan's steps with its engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from planner.hardware import Gpu
from planner.memory.attention import attention_workspaces, tile_list_bytes
from planner.memory.beside import one_stage_beside
from planner.memory.fsdp2 import casts_to_reduce
from planner.memory.offload import OffloadedReplay
from planner.memory.overheads import workspace_bytes
from planner.memory.partial_sums import embedding_buffers
from planner.memory.recorder import Program
from planner.memory.replay import (
    EMBEDDING,
    TILE_LIST,
    EngineReplay,
    Memory,
    ModelReplay,
    Replayed,
    kind_sizes_bytes,
    record,
)
from planner.memory.replay_base import token_bytes
from planner.memory.replay_beside import BufferedEngine
from planner.memory.replay_ddp import DdpReplay
from planner.memory.replay_deepspeed import DeepSpeedReplay
from planner.memory.replay_fsdp2 import Fsdp2Replay
from planner.memory.replay_peakmark import PeakmarkReplay
from planner.memory.replay_stages import StageReplay, replay_stage
from planner.memory.requests import Integers, Layout, rounded_sizes
from planner.memory.templates import Traced, load_steps
from planner.model import ModelSpec
from planner.rank import RankSpec
from planner.workload import Engine, Loss, Parallelism, Precision, TrainingWorkload

_REPLAYS: dict[Engine, Callable[..., EngineReplay]] = {
    Engine.PEAKMARK: PeakmarkReplay,
    Engine.FSDP2: Fsdp2Replay,
    Engine.DDP: DdpReplay,
    Engine.ZERO_REDUNDANCY: DdpReplay,
    Engine.DEEPSPEED: DeepSpeedReplay,
}


@lru_cache(maxsize=256)
def replay_training(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    hardware: Gpu | None,
    capacity_bytes: int | None = None,
    flying: int = 1,
) -> Replayed:
    """Replay a plan's steps on rank 0; see `templates.traced`.

    `flying` micro-batches are in flight in a pipeline's stage.

    Raises ReplayedOutOfMemoryError where segments do not fit in `capacity_bytes`.
    """
    if isinstance(spec, RankSpec):
        return _replay_part(spec, workload, parallelism, template, hardware, capacity_bytes, flying)
    workspaces = attention_workspaces(spec, workload, hardware)
    tiles_bytes = tile_list_bytes(spec, workload, hardware)
    buffers = embedding_buffers(spec, workload)
    known = _known_steps(
        *(spec, workload.of_any_size(), parallelism, template),
        *(workspace_bytes(hardware), tuple(map(len, workspaces)), tiles_bytes > 0, len(buffers)),
    )
    if not known:
        known.append(_record(spec, workload, parallelism, template, hardware))
    taken: dict[Any, int] = {
        **token_bytes(workload),
        **{(at, i): size for at, sizes in enumerate(workspaces) for i, size in enumerate(sizes)},
        **{(EMBEDDING, i): size for i, size in enumerate(buffers)},
        TILE_LIST: tiles_bytes,
    }
    served = (
        known[0]
        .program.with_sizes(taken)
        .serve(
            _rounded_sizes(spec, workload, known[0].layouts),
            known[0].repeats,
            capacity_bytes,
            workload.expandable_segments,
        )
    )
    return Replayed.of(served)


class _Steps(NamedTuple):
    """Steps as they are recorded, for any rows and length: how often they are served, their layouts."""

    program: Program
    repeats: int
    layouts: tuple[tuple[tuple[str, ...], Layout], ...]


@lru_cache(maxsize=256)
def _known_steps(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    workspaces_bytes: int,
    workspaces: tuple[int, ...],
    has_tile_list: bool,
    num_embedding_buffers: int,
) -> list[_Steps]:
    """Where the steps of a plan are, once they are recorded.

    All that decides what is asked for, and in which order, is told: `workload` is any with the rows
    and the length left out, of which only sizes depend; and how many workspaces each layer takes.
    """
    return []


def _record(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    hardware: Gpu | None,
) -> _Steps:
    memory = Memory()
    model, engine = build_replay(spec, workload, parallelism, template, hardware, memory)
    repeats = record(model, engine, memory, workload.grad_accumulation)
    return _Steps(memory.allocator.program(), repeats, model.layouts())


def _rounded_sizes(
    spec: ModelSpec,
    workload: TrainingWorkload,
    layouts: Iterable[tuple[tuple[str, ...], Layout]],
) -> Integers:
    """The bytes of each kind of request, layout by layout."""
    plan = workload.micro_batch, workload.sequence_length, workload.lora_rank
    sizes = [kind_sizes_bytes(spec, monomials, layout, *plan) for monomials, layout in layouts]
    return rounded_sizes(np.concatenate(sizes))


def _replay_part(
    spec: RankSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    hardware: Gpu | None,
    capacity_bytes: int | None,
    flying: int,
) -> Replayed:
    """Replay the steps of one GPU's part of a model."""
    memory = Memory(capacity_bytes, workload.expandable_segments)
    buffers = one_stage_beside(spec, workload, parallelism)
    model, engine = build_replay(
        *(spec, workload, parallelism, template, hardware, memory),
        model_kind=StageReplay,
        watch=lambda engine: BufferedEngine(engine, memory, buffers),
    )
    assert isinstance(model, StageReplay)
    return replay_stage(model, engine, memory, workload.grad_accumulation, flying)


def build_replay(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    template: Traced,
    hardware: Gpu | None,
    memory: Memory,
    model_kind: type[ModelReplay] = ModelReplay,
    watch: Callable[[EngineReplay], EngineReplay] = lambda engine: engine,
) -> tuple[ModelReplay, EngineReplay]:
    """Return model and engine of a plan's replay over `memory`; `watch` may stand between them."""
    kind = OffloadedReplay if workload.offload_optimizer else _REPLAYS[parallelism.engine]
    engine = watch(kind(spec, workload, parallelism, memory, workspace_bytes(hardware)))
    gradients = "kept" if _keeps_gradients(workload, parallelism) else "added"
    steps = load_steps(template, gradients)
    plan = workload, parallelism
    model = model_kind(
        spec,
        steps,
        memory,
        engine,
        workload.micro_batch,
        workload.sequence_length,
        sums_in_place=_sums_in_place(workload, parallelism),
        lora_rank=workload.lora_rank,
        later_steps=load_steps(template, "added") if _adds_to_whole(*plan) else None,
        attention_workspaces=attention_workspaces(spec, workload, hardware),
        tile_list_bytes=tile_list_bytes(spec, workload, hardware),
        embedding_buffers=embedding_buffers(spec, workload),
    )
    return model, engine


def _keeps_gradients(workload: TrainingWorkload, parallelism: Parallelism) -> bool:
    """Whether autograd's gradients stay, or are added to what the engine has and freed."""
    if parallelism.engine is Engine.DEEPSPEED:
        return parallelism.zero_stage == 1
    return parallelism.engine is Engine.FSDP2


def _sums_in_place(workload: TrainingWorkload, parallelism: Parallelism) -> bool:
    """Whether the head's share of a tied gradient is no view, so that the embedding's is added to it.

    DeepSpeed's stage 3 has a linear function of its own, whose backward gives a tensor
    (deepspeed/runtime/zero/linear.py, LinearFunctionForZeroStage3).
    """
    if parallelism.engine is Engine.DEEPSPEED and parallelism.zero_stage == 3:
        return True
    return workload.precision is Precision.AUTOCAST or workload.loss is not Loss.HF


def _adds_to_whole(workload: TrainingWorkload, parallelism: Parallelism) -> bool:
    """Whether autograd finds the gradients of the micro-batch before, left whole.

    DeepSpeed's stage 1 reduces after the last one alone (`replay_deepspeed`).
    """
    if parallelism.engine is Engine.DEEPSPEED:
        return parallelism.zero_stage == 1 and workload.grad_accumulation > 1
    left_whole = parallelism.engine is Engine.FSDP2 and not workload.sync_each_micro_batch
    return left_whole and not casts_to_reduce(workload.precision, workload.reduce_dtype)
