"""What FSDP2 allocates around a model's sections, in order and stream by stream (see `replay`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.memory.adapters import trained_groups
from planner.memory.fsdp2 import reduced_bytes
from planner.memory.groups import GroupShapes, Rows, group_shapes, rows_of
from planner.memory.optimizers import Stepped
from planner.memory.replay import Blocks, Memory
from planner.memory.replay_base import EngineBase
from planner.memory.states import Precisions
from planner.model import ModelSpec
from planner.workload import Engine, Parallelism, Precision, TrainingWorkload

_GATHER_STREAM, _REDUCE_STREAM = 1, 2


class Fsdp2Replay(EngineBase):
    """FSDP2 with its gather and reduce streams (torch/distributed/fsdp/_fully_shard)."""

    repeats = True

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
        self._reduced = reduced_bytes(workload.precision, workload.reduce_dtype)
        self._ranks, self._reshards = parallelism.world_size, parallelism.zero_stage == 3
        trained = trained_groups(spec, workload)
        self._every = rows_of(trained.shapes) if trained else group_shapes(spec)
        self._trained = rows_of(trained.trained_shapes) if trained else self._every
        # Nothing needs a gradient before the first trained layer: FSDP2 hears of the end of its
        # backward only when the whole backward ends.
        self._late_layer = trained.first_layer if trained else -1
        self._late_gradients: Blocks = []
        self._root_gradients: Blocks = []
        self._whole: dict[tuple[str, int], Blocks] = {}

    def _units(self) -> list[tuple[str, int]]:
        return [*(("layer", index) for index in range(self._num_layers)), ("root", 0)]

    def _shapes(self, unit: tuple[str, int]) -> Rows:
        return _unit_rows(self._every, unit)

    def _shards(self, unit: tuple[str, int]) -> list[int]:
        return self._rank_rows(self._shapes(unit))

    def _rank_rows(self, shapes: Rows) -> list[int]:
        return [-(-rows // self._ranks) * columns for rows, columns in shapes]

    def start(self) -> None:
        """Empty shards of all parameters, then each filled from a whole tensor."""
        memory = self._memory
        ordered = self._in_model_order(self._every)
        for unit, index in ordered:
            memory.take(("parameter", unit, index), self._shards(unit)[index] * self._stored)
        if self._tied:  # the head's own, which the embedding's then becomes
            memory.take("tied", self._shards(("root", 0))[0] * self._stored)
            memory.give(("parameter", ("root", 0), 0))
        for unit, index in ordered:
            rows, columns = self._shapes(unit)[index]
            memory.take("whole", rows * columns * self._stored)
            memory.give("whole")
        self._take_tokens()

    def _in_model_order(self, shapes: GroupShapes) -> list[tuple[tuple[str, int], int]]:
        before = len(shapes["embedding"])
        root = [(("root", 0), index) for index in range(before + len(shapes["head"]))]
        layers = [
            (("layer", layer), index)
            for layer in range(self._num_layers)
            for index in range(len(shapes["layers"][layer]))
        ]
        return [*root[:before], *layers, *root[before:]]

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
            # The buffer before it is dropped as this one's wait returns (wait_for_unshard).
            self._copy_out(unit)
            self._memory.give(("gathered", ("layer", layer - 1) if layer else ("root", 0)))

    def _before_backward(self, unit: tuple[str, int]) -> None:
        if not self._reshards or unit[1] < self._late_layer:
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
            self._end_backward([*self._root_gradients, *gradients])
        elif section.endswith("layer_backward"):
            if layer > self._late_layer:
                self._reduce(("layer", layer), gradients)
            elif layer == self._late_layer:
                self._late_gradients = gradients
        elif "layer" in section and self._reshards:
            self._free_copy(("layer", layer))

    def _end_backward(self, root_gradients: Blocks) -> None:
        """Reduce the root, then, in order, the units of which nothing said that they are done.

        torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _root_post_backward_final_callback.
        """
        self._reduce(("root", 0), root_gradients)
        for layer in range(self._late_layer + 1):
            is_last = layer == self._late_layer
            self._reduce(("layer", layer), self._late_gradients if is_last else ())
            self._memory.give(("gathered", ("layer", layer)))
        self._memory.give("reduced")

    def _keep_whole(self, unit: tuple[str, int], gradients: Sequence[Any]) -> Blocks:
        """Add gradients to the whole ones that wait for the last micro-batch; the first begin them.

        torch/distributed/fsdp/_fully_shard/_fsdp_param.py: in the reduction's dtype, if another.
        """
        blocks = [block for block in gradients if block is not None]
        if unit in self._whole:
            self._release(blocks)
        elif self._compute != self._reduced:
            self._whole[unit] = []
            for rows, columns in _unit_rows(self._trained, unit):
                size_bytes = rows * columns * self._reduced
                self._whole[unit].append(self._memory.allocator.allocate(size_bytes))
            self._release(blocks)
        else:
            self._whole[unit] = blocks
        return self._whole[unit]

    def _release(self, blocks: Blocks) -> None:
        for block in blocks:
            self._memory.allocator.release(block)

    def _held_in_reduction(self, unit: tuple[str, int], blocks: Blocks) -> Blocks:
        """The gradient of the unit's last parameter: a loop's variable keeps it to the end.

        torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce, 2.11; it has no
        such loop on one rank.
        """
        if self._ranks == 1 or not blocks:
            return []
        rows, columns = _unit_rows(self._trained, unit)[-1]
        size_bytes = rows * columns * self._compute
        return [min(blocks, key=lambda block: abs(block.size_bytes - size_bytes))]

    def _reduce(self, unit: tuple[str, int], gradients: Sequence[Any]) -> None:
        memory, trained = self._memory, self._rank_rows(_unit_rows(self._trained, unit))
        numel = sum(trained)
        if not self._reduces or unit in self._whole:
            gradients = self._keep_whole(unit, gradients)
        self._free_copy(unit)
        if not self._reduces:
            return
        self._whole.pop(unit, None)
        memory.give("reduced")
        memory.take("reduced", numel * self._reduced * self._ranks)
        blocks = [block for block in gradients if block is not None]
        held = self._held_in_reduction(unit, blocks)
        self._release([block for block in blocks if block not in held])
        # The output is cast to the parameters' dtype where the reduction has another.
        is_cast, kept = self._reduced != self._stored, ("gradient", unit)
        if is_cast:
            memory.take("output", numel * self._reduced, _REDUCE_STREAM)
        added = kept if not memory.holds(kept) else "added"
        memory.take(added, numel * self._stored, _REDUCE_STREAM)
        memory.give("output", "added")
        self._release(held)

    def optimizer_step(self) -> None:
        """Step all parameters at once (foreach, fused) or one by one, then free the gradients."""
        numels = [
            self._rank_rows(_unit_rows(self._trained, unit))[index]
            for unit, index in self._in_model_order(self._trained)
        ]
        self._clip(len(numels), self._state)
        self._step_tensors("all", [Stepped((numel,), self._state) for numel in numels])
        self._memory.give(*(("gradient", unit) for unit in self._units()))


def _unit_rows(shapes: GroupShapes, unit: tuple[str, int]) -> Rows:
    """The parameters of a decoder layer or, as one unit, of all that is around the layers."""
    return shapes["embedding"] + shapes["head"] if unit[0] == "root" else shapes["layers"][unit[1]]
