"""The variants of a training step that are traced, and the names of their templates."""

from __future__ import annotations

from dataclasses import dataclass

from planner.memory.templates import ONE_GROUPING
from runners.trace.standins import TRITON_NAME

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "opt",
    "falcon",
    "mixtral",
    "qwen3_moe",
)
OTHER_LOSSES = ("chunked", "fused_linear")
WINDOWED = ("mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Variant:
    """What changes the tensors that a step of one family keeps."""

    family: str
    attention: str  # eager, sdpa or triton; "_masked": a sliding window; "_mha": no grouped heads
    compute: str  # bf16, fp32 or autocast
    checkpointing: str  # none or full
    loss: str = "hf"  # or chunked, fused_linear

    @property
    def key(self) -> str:
        """The name under which the template is stored."""
        key = "/".join((self.attention, self.compute, self.checkpointing))
        return key if self.loss == "hf" else f"{key}/{self.loss}"

    @property
    def masked(self) -> bool:
        """Whether a sliding window shorter than the sequence is in force."""
        return "_masked" in self.attention

    @property
    def implementation(self) -> str:
        """The name transformers knows the attention by."""
        kernel = self.attention.split("_")[0]
        return TRITON_NAME if kernel == "triton" else kernel


def variants(family: str) -> list[Variant]:
    """Every variant of a family whose tensors differ from the others'."""
    attentions = ["eager", "sdpa", "triton"]
    if family == "gemma2":  # transformers offers it eager attention only (logit softcap)
        attentions = ["eager", "eager_mha"]
    elif family == "falcon":  # it takes no attention function from outside
        attentions = ["eager", "sdpa"]
    elif family not in ONE_GROUPING:
        attentions.append("eager_mha")
    if family in WINDOWED:
        attentions += ["sdpa_masked", "sdpa_masked_mha"]
    kinds = [(a, compute) for a in attentions for compute in ("bf16", "fp32", "autocast")]
    if "sdpa" in attentions and family not in ONE_GROUPING:
        kinds.append(("sdpa_mha", "fp32"))  # grouped heads have no fused fp32 kernel
    return [
        Variant(family, attention, compute, checkpointing)
        for attention, compute in kinds
        for checkpointing in ("none", "full")
    ]
