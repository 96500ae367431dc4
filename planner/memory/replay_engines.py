"""What the engines allocate around a model's sections, in order (see `replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from planner.hardware import Gpu
from planner.memory.groups import Rows, group_numels, group_shapes
from planner.memory.optimizers import (
    Stepped,
    keeps_step_on_device,
    optimizer_calls,
    shared_states,
    step_temporaries,
    stepped_groups,
    tensor_states,
)
from planner.memory.overheads import workspace_bytes
from planner.memory.replay import Blocks, EngineReplay, Memory, ModelReplay, Replayed, replay
from planner.memory.sections import FLAT_GROUPS
from planner.memory.states import Precisions
from planner.memory.templates import load_steps
from planner.model import ModelSpec
from planner.workload import Engine, Parallelism, Precision, TrainingWorkload

_TOKEN_BYTES, _SCALAR_BYTES, _FP32_BYTES = 8, 4, 4
_GATHER_STREAM, _REDUCE_STREAM = 1, 2


class _Engine:
    """What both engines share: the token batch, library workspaces, optimizer states."""

    def __init__(
        self, spec: ModelSpec, workload: TrainingWorkload, memory: Memory, workspaces_bytes: int
    ) -> None:
        self._memory, self._workload = memory, workload
        self._num_layers, self._tied = spec.num_layers, spec.tie_word_embeddings
        self._workspace_bytes = workspaces_bytes // 2

    def _take_tokens(self) -> None:
        tokens = self._workload.micro_batch * self._workload.sequence_length
        self._memory.take("tokens", tokens * _TOKEN_BYTES)

    def _take_workspace(self, section: str) -> None:
        # One per thread that multiplies: the main thread's here, autograd's at its first product.
        if section == "first_layer":
            self._memory.take(("workspace", "forward"), self._workspace_bytes)

    def first_backward_product(self) -> None:
        """Autograd's thread multiplies for the first time."""
        self._memory.take(("workspace", "backward"), self._workspace_bytes)

    def _step_tensors(self, key: Any, tensors: Sequence[Stepped]) -> None:
        """Step the optimizers of `tensors`; states appear the first time."""
        for number, called in enumerate(optimizer_calls(self._workload.optimizer, tensors)):
            for index, tensor in enumerate(called):
                self._take_states((key, number, index), tensor)
            for state in shared_states(self._workload.optimizer):
                self._memory.take(("state", key, state.name), state.size_bytes)
            self._bind_temporaries(called)

    def _take_states(self, key: Any, tensor: Stepped) -> None:
        optimizer = self._workload.optimizer
        if keeps_step_on_device(optimizer, tensor):
            self._memory.take(("step", key), _SCALAR_BYTES)
        for state in tensor_states(optimizer, tensor):
            self._memory.take(("state", key, state.name), state.size_bytes)

    def _bind_temporaries(self, tensors: Sequence[Stepped]) -> None:
        bound: dict[Any, Any] = {}
        for number, (name, size_bytes) in enumerate(
            step_temporaries(self._workload.optimizer, tensors)
        ):
            self._memory.take(("temporary", number), size_bytes)
            self._memory.give(bound.get(name))
            bound[name] = ("temporary", number)


class PeakmarkReplay(_Engine):
    """Our engine: flat groups on the default stream (runners/zero/engine.py)."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: TrainingWorkload,
        parallelism: Parallelism,
        memory: Memory,
        workspaces_bytes: int,
    ) -> None:
        super().__init__(spec, workload, memory, workspaces_bytes)
        self._stage = parallelism.zero_stage
        self._sizes = Precisions.of(workload.precision, Engine.PEAKMARK)
        ranks = parallelism.world_size
        self._shard = group_numels(spec).map(lambda numel: -(-numel // ranks))
        self._whole = self._shard.map(lambda shard: shard * ranks)
        layers = [("layer", index) for index in range(spec.num_layers)]
        self._groups = [("embedding", 0), *layers, ("head", 0)]
        stepped = self._whole if self._stage == 0 else self._shard
        self._tensors = stepped_groups(spec, workload.optimizer, stepped, self._sizes.state)

    def start(self) -> None:
        """Flat parameters group by group, then the master copies."""
        memory, sizes = self._memory, self._sizes
        for group in self._groups:
            memory.take(("whole", group), self._whole.of(*group) * sizes.parameter)
            if self._stage == 3:
                memory.take(("shard", group), self._shard.of(*group) * sizes.parameter)
                memory.give(("whole", group))
        for group in self._groups:
            memory.take(("master", group), self._stepped(group) * sizes.master)
        self._take_tokens()

    def before(self, section: str, layer: int) -> None:
        """Gather the groups of stage 3."""
        if self._stage == 3:
            for group in _groups_of(section, layer):
                self._memory.take(("whole", group), self._whole.of(*group) * self._sizes.parameter)
        self._take_workspace(section)

    def first_gradient(self, group: int, layer: int) -> None:
        """Make the group's flat gradient."""
        name = FLAT_GROUPS[group].removeprefix("flat_")
        self._take_gradient((name, layer if name == "layer" else 0))

    def _take_gradient(self, group: tuple[str, int]) -> None:
        size_bytes = self._whole.of(*group) * self._sizes.gradient
        self._memory.take(("gradient", group), size_bytes)

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Release a layer after its forward; reduce a group after its backward."""
        if not section.endswith("_backward"):
            if self._stage == 3 and "layer" in section:
                self._memory.give(("whole", ("layer", layer)))
            return
        group = _finished_group(section, layer)
        if section == "loss_backward" and self._tied:
            self._take_gradient(group)  # the final norm's, after the tied weight's share
        if self._stage >= 2:
            self._reduce(group)
        if self._stage == 3:
            self._memory.give(("whole", group))

    def _reduce(self, group: tuple[str, int]) -> None:
        memory, size_bytes = self._memory, self._shard.of(*group) * self._sizes.gradient
        kept = ("gradient shard", group)
        is_first = not memory.holds(kept)
        memory.take(kept if is_first else "reduced", size_bytes)
        memory.give(("gradient", group), "reduced")

    def _stepped(self, group: tuple[str, int]) -> int:
        numel: int = (self._whole if self._stage == 0 else self._shard).of(*group)
        return numel

    def optimizer_step(self) -> None:
        """Step group by group, with the gradient cast to fp32 beside a master copy."""
        for group in self._groups:
            numel = self._stepped(group)
            if self._sizes.master:
                self._memory.take("cast", numel * _FP32_BYTES)
            self._step_tensors(group, self._tensors.of(*group))
            self._memory.give("cast")
        for group in self._groups:
            self._memory.give(("gradient", group), ("gradient shard", group))


def _groups_of(section: str, layer: int) -> list[tuple[str, int]]:
    if "layer" in section:
        return [("layer", layer)]
    return {"embed": [("embedding", 0)], "head": [("head", 0)]}.get(section, [])


def _finished_group(section: str, layer: int) -> tuple[str, int]:
    named = {"loss_backward": ("head", 0), "embed_backward": ("embedding", 0)}
    return named.get(section, ("layer", layer))


class Fsdp2Replay(_Engine):
    """FSDP2 with its gather and reduce streams (torch/distributed/fsdp/_fully_shard)."""

    def __init__(
        self,
        spec: ModelSpec,
        workload: TrainingWorkload,
        parallelism: Parallelism,
        memory: Memory,
        workspaces_bytes: int,
    ) -> None:
        super().__init__(spec, workload, memory, workspaces_bytes)
        sizes = Precisions.of(workload.precision, Engine.FSDP2)
        low = workload.precision in (Precision.MIXED, Precision.BF16)
        self._compute, self._stored, self._state = 2 if low else 4, sizes.parameter, sizes.state
        self._ranks, self._reshards = parallelism.world_size, parallelism.zero_stage == 3
        shapes = group_shapes(spec)
        self._layer_shapes, self._root_shapes = (
            shapes["layers"],
            shapes["embedding"] + shapes["head"],
        )
        self._embedding_parameters = len(shapes["embedding"])
        self._root_gradients: Blocks = []

    def _units(self) -> list[tuple[str, int]]:
        return [*(("layer", index) for index in range(self._num_layers)), ("root", 0)]

    def _shapes(self, unit: tuple[str, int]) -> Rows:
        return self._root_shapes if unit[0] == "root" else self._layer_shapes[unit[1]]

    def _shards(self, unit: tuple[str, int]) -> list[int]:
        return [-(-rows // self._ranks) * columns for rows, columns in self._shapes(unit)]

    def start(self) -> None:
        """Empty shards of all parameters, then each filled from a whole tensor."""
        memory = self._memory
        ordered = self._in_model_order()
        for unit, index in ordered:
            memory.take(("parameter", unit, index), self._shards(unit)[index] * self._stored)
        for unit, index in ordered:
            rows, columns = self._shapes(unit)[index]
            memory.take("whole", rows * columns * self._stored)
            memory.give("whole")
        self._take_tokens()

    def _in_model_order(self) -> list[tuple[tuple[str, int], int]]:
        root = [(("root", 0), index) for index in range(len(self._root_shapes))]
        layers = [
            (("layer", layer), index)
            for layer in range(self._num_layers)
            for index in range(len(self._layer_shapes[layer]))
        ]
        return [*root[: self._embedding_parameters], *layers, *root[self._embedding_parameters :]]

    def before(self, section: str, layer: int) -> None:
        """Gather as FSDP2's hooks do: a unit at its forward, the next one ahead in the backward."""
        self._gather_for(section, layer)
        self._take_workspace(section)

    def _gather_for(self, section: str, layer: int) -> None:
        unit = ("layer", layer)
        if section == "embed":
            self._gather(("root", 0))
            self._copy_out(("root", 0))
        elif section == "loss_backward" and self._reshards:
            self._gather(("layer", self._num_layers - 1))
        elif section.endswith("layer_backward"):
            self._before_backward(unit)
        elif "layer" in section:
            self._gather(unit)
            self._memory.give(("gathered", ("layer", layer - 1) if layer else ("root", 0)))
            self._copy_out(unit)

    def _before_backward(self, unit: tuple[str, int]) -> None:
        if not self._reshards:
            return
        self._copy_out(unit)
        self._memory.give(("gathered", unit))
        if unit[1] > 0:
            self._gather(("layer", unit[1] - 1))

    def _gather(self, unit: tuple[str, int]) -> None:
        if self._ranks == 1:
            return
        memory, size_bytes = self._memory, sum(self._shards(unit)) * self._compute
        if self._compute != self._stored:
            memory.take("cast", size_bytes, _GATHER_STREAM)
        memory.take(("gathered", unit), size_bytes * self._ranks, _GATHER_STREAM)
        memory.give("cast")

    def _copy_out(self, unit: tuple[str, int]) -> None:
        for index, shard in enumerate(self._shards(unit)):
            size_bytes = shard * self._ranks * self._compute
            if self._ranks == 1 and self._compute != self._stored:
                self._memory.take("cast", size_bytes)
            self._memory.take(("copy", unit, index), size_bytes)
            self._memory.give("cast")

    def _free_copy(self, unit: tuple[str, int]) -> None:
        self._memory.give(*(("copy", unit, i) for i in range(len(self._shapes(unit)))))

    def first_gradient(self, group: int, layer: int) -> None:
        """Nothing: FSDP2 takes the gradients that autograd made."""

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Free a unit after its forward, reduce it after its backward."""
        if section == "loss":
            self._memory.give(("gathered", ("layer", self._num_layers - 1)))
        elif section == "loss_backward":
            self._root_gradients = gradients
        elif section == "embed_backward":
            self._reduce(("root", 0), [*self._root_gradients, *gradients])
            self._memory.give("reduced")
        elif section.endswith("layer_backward"):
            self._reduce(("layer", layer), gradients)
        elif "layer" in section and self._reshards:
            self._free_copy(("layer", layer))

    def _reduce(self, unit: tuple[str, int], gradients: Sequence[Any]) -> None:
        memory, shard_bytes = self._memory, sum(self._shards(unit)) * self._stored
        self._free_copy(unit)
        memory.give("reduced")
        memory.take("reduced", shard_bytes * self._ranks)
        for block in gradients:
            if block is not None:
                memory.allocator.release(block)
        kept = ("gradient", unit)
        memory.take(kept if not memory.holds(kept) else "added", shard_bytes, _REDUCE_STREAM)
        memory.give("added")

    def optimizer_step(self) -> None:
        """Step all parameters at once (foreach, fused) or one by one, then free the gradients."""
        numels = [self._shards(unit)[index] for unit, index in self._in_model_order()]
        self._step_tensors("all", [Stepped((numel,), self._state) for numel in numels])
        self._memory.give(*(("gradient", unit) for unit in self._units()))


@lru_cache(maxsize=256)
def replay_training(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    key: str,
    hardware: Gpu | None,
) -> Replayed:
    """Replay a plan's steps on rank 0; `key` is its template's (see `training.template_key`)."""
    memory = Memory()
    kind = PeakmarkReplay if parallelism.engine is Engine.PEAKMARK else Fsdp2Replay
    engine: EngineReplay = kind(spec, workload, parallelism, memory, workspace_bytes(hardware))
    gradients = "added" if parallelism.engine is Engine.PEAKMARK else "kept"
    steps = load_steps(spec.family, key, gradients)
    model = ModelReplay(spec, steps, memory, engine, workload.micro_batch, workload.sequence_length)
    return replay(model, engine, memory, workload.grad_accumulation)
