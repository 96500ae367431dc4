"""What our engine allocates around a model's sections, in order (see `replay`)."""

from __future__ import annotations

from planner.memory.adapters import trained_groups
from planner.memory.groups import GroupSizes, group_numels
from planner.memory.optimizers import stepped_groups
from planner.memory.replay import Blocks, Memory
from planner.memory.replay_base import EngineBase
from planner.memory.sections import FLAT_GROUPS
from planner.memory.states import Precisions
from planner.model import ModelSpec
from planner.rank import with_all_experts
from planner.workload import Engine, Parallelism, TrainingWorkload

_FP32_BYTES = 4


class PeakmarkReplay(EngineBase):
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
        self._finished: set[tuple[str, int]] = set()
        self._stage = parallelism.zero_stage
        self._sizes = Precisions.of(workload.precision, Engine.PEAKMARK)
        ranks = parallelism.world_size
        spread, own = group_numels(with_all_experts(spec)), group_numels(spec)
        trained = trained_groups(spec, workload)
        # What is frozen of a group is a group of its own, in front of what is trained.
        self._frozen: GroupSizes | None = None
        self._first_trained = 0
        if trained is not None:
            self._frozen = trained.frozen.map(lambda numel: -(-numel // ranks))
            self._first_trained = trained.first_layer
            self._tied = False  # a frozen weight has no shares of a gradient
            spread = own = trained.trained
        self._shard = spread.map(lambda numel: -(-numel // ranks))
        self._whole = own.map(lambda numel: -(-numel // ranks) * ranks)
        self._ranks = ranks
        layers = [("layer", index) for index in range(spec.num_layers)]
        self._groups = [("embedding", 0), *layers, ("head", 0)]
        stepped = self._whole if self._stage == 0 else self._shard
        self._tensors = stepped_groups(spec, workload.optimizer, stepped, self._sizes.state)

    def start(self) -> None:
        """Flat parameters group by group, then the master copies."""
        memory, sizes = self._memory, self._sizes
        for group in self._groups:
            if self._frozen is not None:
                self._keep_frozen(group, self._frozen.of(*group) * sizes.parameter)
            memory.take(("whole", group), self._whole.of(*group) * sizes.parameter)
            if self._stage == 3:
                memory.take(("shard", group), self._shard.of(*group) * sizes.parameter)
                memory.give(("whole", group))
        for group in self._groups:
            memory.take(("master", group), self._stepped(group) * sizes.master)
        self._take_tokens()

    def _keep_frozen(self, group: tuple[str, int], shard_bytes: int) -> None:
        self._memory.take(("whole frozen", group), shard_bytes * self._ranks)
        if self._stage == 3:
            self._memory.take(("shard", "frozen", group), shard_bytes)
            self._memory.give(("whole frozen", group))

    def _release_frozen(self, *groups: tuple[str, int]) -> None:
        self._memory.give(*(("whole frozen", group) for group in groups))

    def before(self, section: str, layer: int) -> None:
        """Gather the groups of stage 3."""
        if self._stage == 3:
            is_backward = section.endswith("layer_backward")
            if is_backward:
                self._release_frozen(("layer", layer + 1), ("embedding", 0), ("head", 0))
            if is_backward and layer < self._first_trained:
                return
            for group in _groups_of(section, layer):
                if self._frozen is not None:
                    size_bytes = self._frozen.of(*group) * self._ranks * self._sizes.parameter
                    self._memory.take(("whole frozen", group), size_bytes)
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
                self._release_frozen(("layer", layer))
                self._memory.give(("whole", ("layer", layer)))
            return
        self._finish(_finished_group(section, layer))
        if self._stage == 3 and section == "embed_backward":
            self._release_frozen(("layer", 0))

    def last_gradient(self, group: int, layer: int) -> None:
        """Reduce the group; what is left of its section's backward comes after that."""
        name = FLAT_GROUPS[group].removeprefix("flat_")
        self._finish((name, layer if name == "layer" else 0))

    def start_micro_batch(self, is_last: bool) -> None:
        """No group is finished yet."""
        super().start_micro_batch(is_last)
        self._finished.clear()

    def _finish(self, group: tuple[str, int]) -> None:
        if group in self._finished:
            return
        self._finished.add(group)
        if group[0] == "head" and self._tied:
            self._take_gradient(group)  # the final norm's, after the tied weight's share
        if self._stage >= 2 and self._reduces:
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
            if not numel:
                continue
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
