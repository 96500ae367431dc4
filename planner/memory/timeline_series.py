"""The replayed step as a series: live bytes by component at every section's high point and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.memory.overheads import TYPICAL_SEGMENT_SHARE
from planner.memory.parallel import is_split
from planner.memory.replay import EngineReplay, Memory, ModelReplay, replay
from planner.memory.replay_engines import build_replay
from planner.memory.sections import COMPONENTS
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
    "cast": "temporary",
    "temporary": "temporary",
    "collective": "temporary",
    "piece": "temporary",
    "clone": "temporary",
    "norm": "temporary",
    "fp32 gradient": "temporary",
}
_FROM_ELSEWHERE = "temporary"


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
    series = _Series()
    memory = _NamedMemory(workload.expandable_segments, _own_names(plan))
    key = traced(plan.model, workload, workload.sequence_length)
    model, engine = build_replay(
        *(plan.model, workload, plan.parallelism, key, plan.hardware, memory),
        model_kind=_NamedModel,
        watch=lambda engine: _WatchedEngine(engine, memory.allocator, series),
    )
    replay(model, engine, memory, workload.grad_accumulation)
    return tuple(series.sections)


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


class _NamedAllocator:
    """An allocator that knows, of every live block, the component that it belongs to."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._component_of: dict[int, tuple[str, int]] = {}
        self.component = _FROM_ELSEWHERE
        self.live: Counter[str] = Counter()
        self.high: Counter[str] = Counter()
        self._high_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._allocator, name)

    def allocate(self, size_bytes: int, stream: int = 0) -> Any:
        """Allocate for `component`; what the block has beyond the tensor is rounding."""
        block = self._allocator.allocate(size_bytes, stream)
        self._component_of[id(block)] = (self.component, size_bytes)
        self.live[self.component] += size_bytes
        self.live["rounding"] += block.size_bytes - size_bytes
        if self._allocator.allocated_bytes > self._high_bytes:
            self._high_bytes, self.high = self._allocator.allocated_bytes, Counter(self.live)
        return block

    def release(self, block: Any) -> None:
        """Release a block of this allocator."""
        component, size_bytes = self._component_of.pop(id(block))
        self.live[component] -= size_bytes
        self.live["rounding"] -= block.size_bytes - size_bytes
        self._allocator.release(block)

    def begin_section(self) -> None:
        """Start a new high point at what is live now."""
        self._high_bytes, self.high = self._allocator.allocated_bytes, Counter(self.live)


class _NamedMemory(Memory):
    """Holds an engine's blocks, each named by its key."""

    def __init__(self, expandable_segments: bool, own_names: Mapping[str, str]) -> None:
        super().__init__(None, expandable_segments)
        self.allocator: Any = _NamedAllocator(self.allocator)
        self._component_of = {**_COMPONENT_OF, **own_names}

    def take(self, key: Any, size_bytes: int, stream: int = 0) -> None:
        """Allocate under `key`, as the component that such keys belong to.

        Raises KeyError for a key that nobody has named: guessed, it would be drawn as a wrong part.
        """
        name = key[0] if isinstance(key, tuple) else key
        self.allocator.component = self._component_of[str(name)]
        super().take(key, size_bytes, stream)
        self.allocator.component = _FROM_ELSEWHERE


class _NamedModel(ModelReplay):
    """Runs the traced sections and names every tensor by its row's component."""

    def _serve(self, first: int, end: int) -> None:
        named: Any = self._allocator
        layout, blocks = self._requests.layout, self._blocks
        sizes_bytes = self._requests.sizes_bytes[first:end].tolist()
        slots, components = layout.slots[first:end], layout.components[first:end]
        for slot, size, component in zip(slots, sizes_bytes, components, strict=True):
            if size > 0:
                named.component = COMPONENTS[component]
                blocks[slot] = named.allocate(size)
            elif size and blocks[slot] is not None:
                named.release(blocks[slot])
                blocks[slot] = None
        named.component = "gradients"  # two shares of one weight, summed


class _Series:
    """The sections seen since the last forward began."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._label: str | None = None

    def begin(self, label: str, allocator: _NamedAllocator) -> None:
        """End the running section and begin one; a forward's first forgets what was before."""
        self.end(allocator)
        if label == section_label("embed"):
            self.sections.clear()
        self._label = label
        allocator.begin_section()

    def end(self, allocator: _NamedAllocator) -> None:
        """Keep the running section, if there is one."""
        if self._label is not None:
            self.sections.append(
                Section(
                    label=self._label,
                    high_parts=_held(allocator.high),
                    end_parts=_held(allocator.live),
                    reserved_bytes=allocator.reserved_bytes,
                )
            )
        self._label = None


def _held(parts: Counter[str]) -> dict[str, int]:
    return {name: size for name, size in parts.items() if size}


class _WatchedEngine:
    """An engine whose sections are noted: each from before its gathers to after its releases."""

    def __init__(self, engine: EngineReplay, allocator: _NamedAllocator, series: _Series) -> None:
        self._engine, self._allocator, self._series = engine, allocator, series

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def before(self, section: str, layer: int) -> None:
        """Begin a section."""
        self._series.begin(section_label(section, layer), self._allocator)
        self._engine.before(section, layer)

    def optimizer_step(self) -> None:
        """Begin and end the last section."""
        self._series.begin(section_label("optimizer"), self._allocator)
        self._engine.optimizer_step()
        self._series.end(self._allocator)
