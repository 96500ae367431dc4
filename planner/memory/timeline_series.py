"""The replayed step as a series: live bytes by component at every section's high point and end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.memory.blocks import NOTHING
from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import is_split
from planner.memory.recorder import Recorder
from planner.memory.replay import EngineReplay, Memory, ModelReplay, record
from planner.memory.replay_engines import build_replay
from planner.memory.step_sections import section_label, section_words
from planner.memory.templates import traced
from planner.memory.training import LARGEST_REPLAYED_BYTES, training_memory
from planner.plan import Plan
from planner.workload import Engine, TrainingWorkload

# What an engine holds under each key of its replay.
_COMPONENT_OF: Mapping[str, str] = {
    "parameter": "parameters",
    "shard": "parameters",
    "flat": "parameters",
    "untied": "parameters",
    "tied": "parameters",
    "master": "optimizer",
    "state": "optimizer",
    "step": "optimizer",
    "gathered": "gathered",
    "gather": "gathered",
    "fetched": "gathered",
    "hooked": "gathered",
    "small": "gathered",
    "gradient": "gradients",
    "gradient shard": "gradients",
    "bucket": "gradients",
    "reduced": "gradients",
    "added": "gradients",
    "output": "gradients",
    "beside": "gradients",
    "own": "gradients",
    "gradients": "gradients",
    "whole gradients": "gradients",
    "flat gradient": "gradients",
    "workspace": "workspace",
    "tokens": "activations",
    "positions": "activations",
    "tile list": "attention",
    "cast": "temporary",
    "temporary": "temporary",
    "collective": "temporary",
    "piece": "temporary",
    "clone": "temporary",
    "norm": "temporary",
    "fp32 gradient": "temporary",
}
# Behind all operations.
_END = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One section of a step: bytes by component at its highest moment and as it ends."""

    label: str
    high_parts: Mapping[str, int]
    end_parts: Mapping[str, int]
    reserved_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form; totals are the sums of the parts."""
        return {
            "label": self.label,
            "words": section_words(self.label),
            "high_bytes": sum(self.high_parts.values()),
            "end_bytes": sum(self.end_parts.values()),
            "high_parts": dict(self.high_parts),
            "end_parts": dict(self.end_parts),
            "reserved_bytes": self.reserved_bytes,
        }


def why_no_timeline(plan: Plan) -> str | None:
    """Return why a plan's step is not replayed, as a sentence; None where it is."""
    if not isinstance(plan.workload, TrainingWorkload):
        return "Serving has no training step."
    if is_split(plan.parallelism):
        return "The step of a split model is predicted by its phases only."
    formulas = (plan.model, plan.workload, plan.parallelism, plan.hardware, TYPICAL_SEGMENT_SHARE)
    if training_memory(*formulas).allocated_bytes >= LARGEST_REPLAYED_BYTES:
        return "The step takes more bytes than are followed one by one."
    return None


def step_timeline(plan: Plan) -> tuple[Section, ...]:
    """Replay a plan's third step and return its sections in order (twice a prediction's time).

    Of several micro-batches it is the last one, with the optimizer step behind it. Raises
    ValueError where `why_no_timeline` has a reason.
    """
    workload, reason = plan.workload, why_no_timeline(plan)
    if reason is not None or not isinstance(workload, TrainingWorkload):
        raise ValueError(reason)
    memory = _NamedMemory(workload.expandable_segments, _own_names(plan))
    key = traced(plan.model, workload, workload.sequence_length)
    model, engine = build_replay(
        *(plan.model, workload, plan.parallelism, key, plan.hardware, memory),
        watch=lambda engine: _WatchedEngine(engine, memory.allocator),
    )
    assert isinstance(engine, _WatchedEngine)
    record(model, engine, memory, workload.grad_accumulation)
    return tuple(_sections(model, memory, engine.starts))


def _own_names(plan: Plan) -> dict[str, str]:
    """What keys hold that engines use differently.

    Whole groups are parameters, or those gathered for their use. FSDP2 copies what it gathered,
    DeepSpeed the gradients that it reduces.
    """
    stage, engine = plan.parallelism.zero_stage, plan.parallelism.engine
    frozen = "gathered" if stage == 3 else "parameters"
    whole = "gathered" if stage > 0 and engine is Engine.PEAKMARK else frozen
    copy = "temporary" if engine is Engine.DEEPSPEED else "gathered"
    return {"whole": whole, "whole frozen": frozen, "copy": copy}


class _NamedMemory(Memory):
    """Notes, of every operation that takes memory under a key, the component and the bytes."""

    def __init__(self, expandable_segments: bool, own_names: Mapping[str, str]) -> None:
        super().__init__(None, expandable_segments)
        self._component_of = {**_COMPONENT_OF, **own_names}
        self.named: dict[int, tuple[str, int]] = {}

    def take(self, key: Any, size_bytes: int, stream: int = 0) -> None:
        """Allocate under `key`, as the component that such keys belong to.

        Raises KeyError for a key that nobody has named: guessed, it would be drawn as a wrong part.
        """
        self._name(key, size_bytes)
        super().take(key, size_bytes, stream)

    def take_of_batch(self, key: str, size_bytes: int) -> None:
        """Allocate as `take` does; see there."""
        self._name(key, size_bytes)
        super().take_of_batch(key, size_bytes)

    def _name(self, key: Any, size_bytes: int) -> None:
        name = key[0] if isinstance(key, tuple) else key
        self.named[self.allocator.num_operations] = self._component_of[str(name)], size_bytes


class _WatchedEngine:
    """An engine whose sections are noted: each from before its gathers to after its releases."""

    repeats = False

    def __init__(self, engine: EngineReplay, allocator: Recorder) -> None:
        self._engine, self._allocator = engine, allocator
        self.starts: list[tuple[int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _begin(self, label: str) -> None:
        self.starts.append((self._allocator.num_operations, label))

    def before(self, section: str, layer: int) -> None:
        """Begin a section."""
        self._begin(section_label(section, layer))
        self._engine.before(section, layer)

    def optimizer_step(self) -> None:
        """Begin the step's last section."""
        self._begin(section_label("optimizer"))
        self._engine.optimizer_step()


class _Live:
    """Live bytes by component, event by event, and their high point since a section began."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[str, int, int]] = {}
        self._live: Counter[str] = Counter()
        self._high: Counter[str] = Counter()
        self._bytes = self._high_bytes = self._reserved_bytes = 0

    def move(self, slot: int, other: int) -> None:
        """What was in another slot is in this one."""
        if other in self._tensors:
            self._tensors[slot] = self._tensors.pop(other)

    def take(self, slot: int, component: str, size_bytes: int, block_bytes: int) -> None:
        """A tensor has a block; what the block has beyond it is rounding."""
        self._tensors[slot] = component, size_bytes, block_bytes
        self._add(component, size_bytes, block_bytes)
        if self._bytes > self._high_bytes:
            self._begin_peak()

    def give(self, slot: int) -> None:
        """A slot's tensor is gone."""
        component, size_bytes, block_bytes = self._tensors.pop(slot)
        self._add(component, -size_bytes, -block_bytes)

    def _add(self, component: str, size_bytes: int, block_bytes: int) -> None:
        self._live[component] += size_bytes
        self._live["rounding"] += block_bytes - size_bytes
        self._bytes += block_bytes

    def _begin_peak(self) -> None:
        self._high_bytes, self._high = self._bytes, Counter(self._live)

    def end_section(self, label: str, reserved_bytes: int) -> Section:
        """A section that ends; the next one's high point starts at what is live now."""
        section = Section(
            label=label,
            high_parts=_held(self._high),
            end_parts=_held(self._live),
            reserved_bytes=reserved_bytes,
        )
        self._begin_peak()
        return section


def _held(parts: Counter[str]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


def _sections(
    model: ModelReplay, memory: _NamedMemory, starts: Sequence[tuple[int, str]]
) -> list[Section]:
    """The sections of what was recorded, from the last forward's on; `starts` are their operations."""
    served, live = memory.allocator.serve(with_events=True), _Live()
    tensors, sections, label, reserved_bytes = model.tensors(), [], "", 0
    # In their order: moves and starts of sections come before what their operation serves.
    marks: list[tuple[int, str, tuple[int, int] | None]] = [
        (number, "", (slot, other)) for number, slot, other in memory.allocator.moves()
    ]
    marks += [(number, name, None) for number, name in starts]
    waiting = deque(sorted(marks, key=lambda mark: mark[0]))
    events = [*served.events.tolist(), (_END, NOTHING, 0, 0, served.reserved_bytes)]
    for number, request, slot, block_bytes, reserved in events:
        while waiting and waiting[0][0] <= number:
            _, name, moved = waiting.popleft()
            if moved:
                live.move(*moved)
                continue
            sections.append(live.end_section(label, reserved_bytes))
            label = name
        if block_bytes > 0:
            named = tensors[request] if request >= 0 else memory.named.get(number)
            component, size_bytes = named or ("gradients", block_bytes)
            live.take(slot, component, size_bytes, block_bytes)
        elif block_bytes < 0:
            live.give(slot)
        reserved_bytes = reserved
    sections.append(live.end_section(label, reserved_bytes))
    first = max(i for i, section in enumerate(sections) if section.label == section_label("embed"))
    return sections[first:]
