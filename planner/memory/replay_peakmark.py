"""What our engine allocates around a model's sections, in order (see `replay`)."""

from __future__ import annotations

from typing import Any

from planner.memory.adapters import trained_groups
from planner.memory.groups import GroupSizes, group_numels
from planner.memory.optimizers import casts_gradients, stepped_groups
from planner.memory.replay import Blocks, Memory
from planner.memory.replay_base import EngineBase
from planner.memory.sections import FLAT_GROUPS
from planner.memory.states import Precisions, compute_bytes, parameter_stage, reduction_bytes
from planner.model import ModelSpec
from planner.rank import with_all_experts
from planner.workload import Engine, Loss, Parallelism, TrainingWorkload

# What of a whole group is not trained, and what is.
_WHOLE = ("whole frozen", "whole")


class PeakmarkReplay(EngineBase):
    """Our engine: flat groups, all allocated on the default stream (runners/zero/engine.py).

    Stages 1 and 2 gather ahead in the forward and free in the last micro-batch's backward; stage 3
    has the unit in use and the next one whole (runners/zero/gathering.py). From stage 2 on what a
    reduction reads is held until the next group is finished (runners/zero/reduction.py).
    """

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
        self._finished: set[tuple[str, int]] = set()
        self._last_layer = spec.num_layers - 1
        self._stage, self._is_last = parallelism.zero_stage, True
        self._gathers = parameter_stage(spec, self._stage)
        self._sizes = Precisions.of(
            workload.precision, Engine.PEAKMARK, self._gathers, workload.offload_optimizer
        )
        self._compute = compute_bytes(workload.precision)
        self._sent, self._kept = reduction_bytes(
            workload.precision, workload.reduce_dtype, self._sizes.gradient
        )
        if self._stage < 2 and self._sent != self._sizes.gradient:
            self.reduces_each = False  # these stages reduce after the last micro-batch anyway
        self._casts = self._kept != self._sizes.state and casts_gradients(workload.optimizer)
        ranks = parallelism.world_size
        spread, own = group_numels(with_all_experts(spec)), group_numels(spec)
        trained = trained_groups(spec, workload)
        # What is frozen of a group is a group of its own, in front of what is trained.
        self._frozen: GroupSizes | None = None
        self._first_trained = 0
        if trained is not None:
            self._frozen = trained.frozen.map(lambda numel: -(-numel // ranks))
            self._first_trained = trained.first_layer
            spread = own = trained.trained
        self._shard = spread.map(lambda numel: -(-numel // ranks))
        self._whole = own.map(lambda numel: -(-numel // ranks) * ranks)
        self._ranks = ranks
        layers = [("layer", index) for index in range(spec.num_layers)]
        self._groups = [("embedding", 0), *layers, ("head", 0)]
        # What was gathered and may be whole, and the order in which it is freed.
        self._gathered: set[tuple[str, int]] = set()
        self._place_of = {g: place for place, g in enumerate((*self._groups[1:], self._groups[0]))}
        stepped = self._whole if self._stage == 0 else self._shard
        self._tensors = stepped_groups(spec, workload.optimizer, stepped, self._sizes.state)
        tied: list[tuple[str, int]] = [("embedding", 0)] if spec.tie_word_embeddings else []
        self._head_unit = [("head", 0), *tied]
        self._read: list[Any] = []

    @property
    def _is_last_alike(self) -> bool:
        return self.reduces_each and self._gathers in (0, 3)

    @property
    def _moves(self) -> bool:
        """Whether a shard is held in the whole group alone while that is there."""
        return self._gathers in (1, 2) and self._sizes.parameter == self._compute

    def start(self) -> None:
        """Flat parameters group by group, then the master copies of stage 0."""
        memory, sizes = self._memory, self._sizes
        for group in self._groups:
            if self._frozen is not None:
                self._keep_frozen(group, self._frozen.of(*group) * self._compute)
            memory.take(("whole", group), self._whole.of(*group) * self._compute)
            if self._gathers and not self._is_its_shard:
                memory.take(("shard", group), self._shard.of(*group) * sizes.parameter)
                memory.give(("whole", group))
        for group in self._groups:
            memory.take(("master", group), self._stepped(group) * sizes.master)
        self._take_tokens()

    @property
    def _is_its_shard(self) -> bool:
        """Whether nothing is gathered or freed: one rank's shard is the whole group."""
        return self._moves and self._ranks == 1

    def _keep_frozen(self, group: tuple[str, int], shard_bytes: int) -> None:
        self._memory.take(("whole frozen", group), shard_bytes * self._ranks)
        if self._stage == 3:
            self._memory.take(("shard", "frozen", group), shard_bytes)
            self._memory.give(("whole frozen", group))

    def _gather(self, *groups: tuple[str, int]) -> None:
        self._gathered.update(groups)
        for group in groups:
            if self._frozen is not None and self._stage == 3:
                size_bytes = self._frozen.of(*group) * self._ranks * self._compute
                self._memory.take(("whole frozen", group), size_bytes)
            self._memory.take(("whole", group), self._whole.of(*group) * self._compute)
            if self._moves and not self._is_its_shard:
                self._memory.give(("shard", group))

    def _free(self, group: tuple[str, int]) -> None:
        """Free what is whole of a trained group."""
        if self._is_its_shard:
            return
        if self._moves:
            shard_bytes = self._shard.of(*group) * self._sizes.parameter
            self._memory.take(("shard", group), shard_bytes)
        self._memory.give(("whole", group))

    def _keep_only(self, *kept: tuple[str, int]) -> None:
        gone = sorted(self._gathered.difference(kept), key=self._place_of.__getitem__)
        self._memory.give(*((name, group) for group in gone for name in _WHOLE))
        self._gathered.intersection_update(kept)

    def before(self, section: str, layer: int) -> None:
        """Gather what the section uses and, ahead, what the next one does."""
        if self._stage == 3:
            self._gather_and_free(section, layer)
        elif self._gathers:
            self._gather_once(section, layer)
        self._take_workspace(section)

    def _following(self, layer: int) -> list[tuple[str, int]]:
        return self._head_unit if layer == self._last_layer else [("layer", layer + 1)]

    def _gather_once(self, section: str, layer: int) -> None:
        embedding = ("embedding", 0)
        if section == "embed" and self._whole.of(*embedding):
            self._gather(embedding, ("layer", 0))
        elif section == "layer":
            self._gather(("layer", layer), *self._following(layer))
        elif section == "loss_backward" and self._is_last and embedding not in self._head_unit:
            self._free(embedding)  # its backward does not read it

    def _gather_and_free(self, section: str, layer: int) -> None:
        own = ("layer", layer)
        if section == "embed":
            self._gather(("embedding", 0), ("layer", 0))
        elif section == "layer":
            following = self._following(layer)
            self._gather(own)
            self._keep_only(own, *following)
            self._gather(*following)
        elif section in ("head", "loss_backward"):
            self._gather(*self._head_unit)
        elif section == "layer_backward" and layer >= self._first_trained:
            following = [("layer", layer - 1)] if layer > self._first_trained else []
            self._keep_only(own, *following)
            self._gather(own, *following)

    def before_backward_product(self) -> None:
        """Gather the last layer ahead, where the head is a module that says when logits are done."""
        if self._stage == 3 and self._workload.loss is Loss.HF:
            self._gather(("layer", self._last_layer))

    def first_gradient(self, group: int, layer: int) -> None:
        """Make the group's flat gradient."""
        name = FLAT_GROUPS[group].removeprefix("flat_")
        self._take_gradient((name, layer if name == "layer" else 0))

    def _take_gradient(self, group: tuple[str, int]) -> None:
        size_bytes = self._whole.of(*group) * self._sizes.gradient
        self._memory.take(("gradient", group), size_bytes)

    def after(self, section: str, layer: int, gradients: Blocks) -> None:
        """Release a layer after its forward; reduce a group after its backward."""
        if section == "layer" and self._stage == 3:
            self._memory.give(*((name, ("layer", layer)) for name in _WHOLE))
        if section.endswith("_backward"):
            self._finish(_finished_group(section, layer))
        if section == "embed_backward":
            self._settle()
            if self._stage == 3:
                self._keep_only()

    def last_gradient(self, group: int, layer: int) -> None:
        """Reduce the group; what is left of its section's backward comes after that."""
        name = FLAT_GROUPS[group].removeprefix("flat_")
        self._finish((name, layer if name == "layer" else 0))

    def start_micro_batch(self, is_last: bool) -> None:
        """No group is finished yet."""
        super().start_micro_batch(is_last)
        self._is_last = is_last
        self._finished.clear()

    def _finish(self, group: tuple[str, int]) -> None:
        if group in self._finished or not self._whole.of(*group):
            return
        self._finished.add(group)
        if group[0] == "head" and self._tied:
            self._take_gradient(group)  # the final norm's, after the tied weight's share
        if self._stage == 3 or (self._gathers and self._is_last):
            self._free(group)
        is_cast = self._sent != self._sizes.gradient
        if self._reduces and (self._stage >= 2 or is_cast):
            self._settle()
            whole = self._send(group) if is_cast else ("gradient", group)
            if self._stage > 0:
                self._reduce(group, whole)

    def _send(self, group: tuple[str, int]) -> tuple[str, Any]:
        """Cast the whole gradient to the reduction's dtype; the one that was made goes.

        At stage 0 the cast stays for the step, or goes once it has been copied back.
        """
        sent = ("gradient", (group, "sent"))
        self._memory.take(sent, self._whole.of(*group) * self._sent)
        if self._stage > 0 or self._kept == self._sent:
            self._memory.give(("gradient", group))
        else:
            self._read = [sent]
        return sent

    def _reduce(self, group: tuple[str, int], whole: tuple[str, Any]) -> None:
        memory, numel = self._memory, self._shard.of(*group)
        kept, reduced = ("gradient shard", group), ("reduced", group)
        if self._kept != self._sent:
            memory.take(reduced, numel * self._sent)
            memory.take(kept, numel * self._kept)
        else:
            memory.take(reduced if memory.holds(kept) else kept, numel * self._kept)
        self._read = [reduced, whole]

    def _settle(self) -> None:
        """Free what the last reduction has read."""
        self._memory.give(*self._read)
        self._read = []

    def _stepped(self, group: tuple[str, int]) -> int:
        numel: int = (self._whole if self._stage == 0 else self._shard).of(*group)
        return numel

    def optimizer_step(self) -> None:
        """Step group by group, with the gradient cast to fp32 where torch's optimizers step."""
        self._clip(sum(bool(self._stepped(group)) for group in self._groups))
        for group in self._groups:
            numel = self._stepped(group)
            if not numel:
                continue
            if self._casts:
                self._memory.take("cast", numel * self._sizes.state)
            self._step_tensors(group, self._tensors.of(*group))
            self._memory.give("cast")
        for group in self._groups:
            self._memory.give(("gradient", group), ("gradient", (group, "sent")))
            self._memory.give(("gradient shard", group))


def _finished_group(section: str, layer: int) -> tuple[str, int]:
    named = {"loss_backward": ("head", 0), "embed_backward": ("embedding", 0)}
    return named.get(section, ("layer", layer))
