"""The part of a model that one GPU of a model-parallel group holds.

Tensor parallelism gives it its share of heads, MLP width and vocabulary, a pipeline stage some of
the layers, expert parallelism some of the experts. It is a model of its own dimensions, so whatever
is computed from a model (parameter shapes, traced templates, operations) is computed from it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.model import ModelSpec, ParameterShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(ModelSpec):
    """A model as one GPU sees it.

    With sequence parallelism it holds `1 / hidden_shards` of the tokens outside attention and MLP.
    `num_experts` counts all experts, of which it holds `1 / expert_shards`.
    """

    has_embedding: bool
    has_head: bool
    hidden_shards: int
    expert_shards: int

    def runs(self, section: str) -> bool:
        """Whether this part of the model runs a section of the step, such as "embed" or "loss"."""
        if section.startswith("embed"):
            return self.has_embedding
        return self.has_head or not section.startswith(("head", "loss"))

    def held(self, shapes: Sequence[ParameterShape]) -> tuple[ParameterShape, ...]:
        """Keep of the parameters those that this GPU holds, experts as their share."""
        here = {"embedding": self.has_embedding, "head": self.has_head}
        return tuple(self._share(shape) for shape in shapes if here.get(shape.group, True))

    def _share(self, parameter: ParameterShape) -> ParameterShape:
        if self.expert_shards == 1 or not is_expert(parameter):
            return parameter
        experts, *rest = parameter.shape
        return replace(parameter, shape=(experts // self.expert_shards, *rest))

    def share_of(self, monomial: str) -> float:
        """The share that this GPU holds of a tensor whose size is a product of named dimensions.

        Heads, MLP width and vocabulary are its own already. What remains: tensors of tokens times
        hidden size, which sequence parallelism shares, and weights of experts.
        """
        names = set(monomial.split("*"))
        if names == {"batch", "seq", "hidden"}:
            return 1 / self.hidden_shards
        # DeepSeek's experts are counted as groups times the experts of a group.
        counts_experts = "experts" in names or {"expert_groups", "group_experts"} <= names
        is_weight = counts_experts and not names.isdisjoint(("ffn", "moe_ffn"))
        return 1 / self.expert_shards if is_weight else 1.0


def is_expert(parameter: ParameterShape) -> bool:
    """Whether a parameter stacks the weights of all routed experts in its first dimension."""
    return ".experts." in parameter.name


def with_all_experts(spec: ModelSpec) -> ModelSpec:
    """Return the part of a model with the experts of all ranks that split them."""
    return replace(spec, expert_shards=1) if isinstance(spec, RankSpec) else spec
