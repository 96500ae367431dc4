"""What the engine allocates and frees, one by one, is what the planner replays for it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from planner.config_input import spec_from_config
from planner.memory.replay import Memory, record, replayed
from planner.memory.replay_engines import build_replay
from planner.memory.step_sections import section_label
from planner.memory.templates import traced
from planner.model import ModelSpec
from planner.workload import (
    Checkpointing,
    Loss,
    Optimizer,
    Parallelism,
    Precision,
    ReduceDtype,
    TrainingWorkload,
)
from runners.engines.precision import forward_context
from runners.jobs.adapters import choose_trained
from runners.jobs.checkpointing import checkpoint_layers
from runners.jobs.losses import install_chunked_loss
from runners.jobs.section_meter import SectionMeter, watched_sections
from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CPU = torch.device("cpu")
STEPS = 2  # the second finds the optimizer's states
# A section's label, or the bytes that came (positive) or went (negative).
Event = str | int
CONFIG = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


PLAIN = TrainingWorkload(
    sequence_length=8, precision=Precision.MIXED, optimizer=Optimizer.ADAMW_FUSED
)


@dataclass(frozen=True)
class Case:
    stage: int
    ranks: int = 3
    tied: bool = False
    workload: TrainingWorkload = PLAIN

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config({**CONFIG, "tie_word_embeddings": self.tied}, name="tiny")

    @property
    def micro_batches(self) -> int:
        return self.workload.grad_accumulation


class Storages(TorchDispatchMode):
    """Notes every storage that code of runners/zero brings into being, and its end."""

    def __init__(self, note: Callable[[int], None]) -> None:
        super().__init__()
        self._note, self._known = note, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if _is_of_the_engine() else 0
        if size:
            self._note(size)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        if size:
            self._note(-size)


def _is_of_the_engine() -> bool:
    """Whether the nearest frame that is not torch's own Python is the engine's."""
    frame = sys._getframe(3)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/runners/zero/" in name:
            return True
        inside_torch = "/torch/" in name and "/autograd/" not in name and "/nn/" not in name
        if not inside_torch:
            return False
        frame = frame.f_back
    return False


@contextmanager
def _watched_resizes(note: Callable[[int], None]) -> Iterator[None]:
    """Note what storages gain and lose; what is empty while it ends is gone already."""
    resize = torch.UntypedStorage.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        if size != storage.nbytes():
            note(size - storage.nbytes())
        return resize(storage, size)

    torch.UntypedStorage.resize_ = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


class _Labels(SectionMeter):
    """Notes the label of every section."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note_label, self._last = note, ""
        self.is_backward = False

    def enter_phase(self, phase: str) -> None:
        self.is_backward = phase == "backward"
        first = {"forward": "embed", "backward": "loss_backward", "optimizer": "optimizer"}
        self.enter(section_label(first[phase]))

    def enter(self, section: str) -> None:
        if section != self._last:
            self._last = section
            self._note_label(section)


def _model(case: Case) -> nn.Module:
    config = AutoConfig.for_model(**case.spec.hf_config)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    choose_trained(model, case.workload)
    checkpoint_layers(model, case.workload.checkpointing, case.workload.checkpoint_every)
    if case.workload.loss is Loss.CHUNKED:
        install_chunked_loss(model)
    return model


def _real_events(case: Case) -> list[Event]:
    """Events of the last step of the real engine."""
    events: list[Event] = []
    workload, model = case.workload, _model(case)
    with Storages(events.append), _watched_resizes(events.append):
        engine = ZeroEngine(
            model,
            stage=case.stage,
            optimizer=workload.optimizer,
            precision=workload.precision,
            lr=1e-3,
            device=CPU,
            collectives=LocalCollectives(0, case.ranks),
            sync_each_micro_batch=workload.sync_each_micro_batch,
            reduce_dtype=workload.reduce_dtype,
            max_grad_norm=workload.max_grad_norm,
            offload_optimizer=workload.offload_optimizer,
        )
        labels = _Labels(events.append)
        tokens = torch.randint(101, (1, 8))
        with watched_sections(model, labels):
            for _ in range(STEPS):
                events.clear()
                for index in range(case.micro_batches):
                    labels.enter_phase("forward")
                    with forward_context(workload.precision, CPU):
                        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    labels.enter_phase("backward")
                    engine.backward(loss, last_micro_batch=index == case.micro_batches - 1)
                labels.enter_phase("optimizer")
                engine.step()
            found = list(events)
    return found


class _NotedMemory(Memory):
    """Notes what an engine's replay takes and gives."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self._events, self._sizes = events, {}

    def take(self, key: Any, size_bytes: int, stream: int = 0) -> None:
        if size_bytes > 0 and not self.holds(key):
            self._sizes[key] = size_bytes
            self._events.append(size_bytes)
        super().take(key, size_bytes, stream)

    def give(self, *keys: Any) -> None:
        for key in keys:
            if self.holds(key):
                self._events.append(-self._sizes.pop(key))
            super().give(key)


class _Noted:
    """An engine's replay whose sections are noted."""

    repeats = False

    def __init__(self, engine: Any, events: list[Event]) -> None:
        self._engine, self._events, self._starts = engine, events, [0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def before(self, section: str, layer: int) -> None:
        if section == "embed" and self._events and self._events[-1] == "end of step":
            self._events.clear()
        self._events.append(section_label(section, layer))
        self._engine.before(section, layer)

    def optimizer_step(self) -> None:
        self._events.append(section_label("optimizer"))
        self._engine.optimizer_step()
        self._events.append("end of step")


def _replayed_events(case: Case) -> list[Event]:
    """Events of the last step of the replay; the workspaces are there by then."""
    events: list[Event] = []
    memory = _NotedMemory(events)
    ranks = Parallelism(zero_stage=case.stage, world_size=case.ranks)
    key = traced(case.spec, case.workload, 8)
    model, engine = build_replay(
        *(case.spec, case.workload, ranks, key, None, memory),
        watch=lambda engine: _Noted(engine, events),
    )
    replayed(memory, record(model, engine, memory, case.micro_batches))
    return events[:-1]


def _by_section(events: list[Event], labels: set[str]) -> list[tuple[str, list[int]]]:
    """Events under each of `labels`; what comes under another one counts to the last before."""
    sections: list[tuple[str, list[int]]] = []
    for event in events:
        if not isinstance(event, str):
            sections[-1][1].append(event)
        elif event in labels:
            sections.append((event, []))
    return sections


def _assert_equal(case: Case) -> None:
    real = _real_events(case)
    # Nothing says that a backward reaches what is below frozen layers: it does not.
    labels = {event for event in real if isinstance(event, str)}
    assert _by_section(real, labels) == _by_section(_replayed_events(case), labels)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": Precision.BF16},
    "fp32": {"precision": Precision.FP32},
    "checkpointed": {"checkpointing": Checkpointing.FULL},
    "every second layer": {"checkpointing": Checkpointing.FULL, "checkpoint_every": 2},
    "selective": {"checkpointing": Checkpointing.SELECTIVE},
    "chunked loss": {"loss": Loss.CHUNKED},
    "accumulated": {"grad_accumulation": 2},
    "without sync": {"grad_accumulation": 3, "sync_each_micro_batch": False},
    "adapters": {"lora_rank": 3},
    "adapters, accumulated": {"lora_rank": 3, "grad_accumulation": 2},
    "frozen layers": {"frozen_layers": 1},
    "reduced in fp32": {"reduce_dtype": ReduceDtype.FP32, "grad_accumulation": 2},
    "bf16 reduced in fp32": {"precision": Precision.BF16, "reduce_dtype": ReduceDtype.FP32},
    "clipped": {"max_grad_norm": 1.0},
}
ONLY_BELOW_STAGE_3: dict[str, dict[str, Any]] = {
    "three micro-batches": {"grad_accumulation": 3},
    "offloaded": {"offload_optimizer": True},
}


def _workload(variant: str) -> TrainingWorkload:
    return replace(PLAIN, **(VARIANTS | ONLY_BELOW_STAGE_3)[variant])


CASES = [
    *((3, variant, tied) for variant in VARIANTS for tied in (False, True)),
    *((2, variant, True) for variant in ("plain", "bf16", "without sync", "adapters")),
    *((2, variant, False) for variant in (*VARIANTS, *ONLY_BELOW_STAGE_3)),
    *((1, variant, True) for variant in ("plain", "bf16", "accumulated", "three micro-batches")),
    *((1, variant, False) for variant in ("plain", "fp32", "reduced in fp32", "frozen layers")),
    *((0, variant, False) for variant in ("checkpointed", "adapters")),
]


@pytest.mark.parametrize(("stage", "variant", "tied"), CASES)
def test_events_are_those_of_the_replay(stage: int, variant: str, tied: bool) -> None:
    case = Case(stage, tied=tied, workload=_workload(variant))
    _assert_equal(case)


@pytest.mark.parametrize("variant", ["plain", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_one_rank_alone_does_the_same(stage: int, variant: str) -> None:
    _assert_equal(Case(stage, ranks=1, workload=_workload(variant)))
