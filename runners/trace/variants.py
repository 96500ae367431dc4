"""The variants of a training step that are traced, and the names of their templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.memory.templates import ONE_GROUPING, ONE_ROW
from runners.trace.standins import TRITON_NAME
from runners.trace.symbols import PRIMES

FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "opt",
    "falcon",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
)
COMPUTES = ("bf16", "fp32", "autocast")
OTHER_LOSSES = ("chunked", "fused_linear")
# Families traced with rows of several documents, and, with the compute dtypes, those traced with
# 4-bit weights below adapters: all their wide layers are linear.
PACKED = ("llama", "mistral", "qwen2", "qwen3")
FOUR_BIT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PACKED, ("bf16", "autocast")),
    **dict.fromkeys(("phi3", "olmo2", "gemma2", "gemma3_text"), ("bf16",)),
    **dict.fromkeys(("gpt_neox", "opt", "falcon"), ("bf16",)),
}
# Families whose eager attention was traced with a batch of one row too, and for which compute dtypes.
ONE_ROW_COMPUTES: dict[str, tuple[str, ...]] = {
    "gemma2": ("bf16", "autocast"),
    "gpt2": ("bf16",),
    "llama": ("bf16",),
    "olmo2": ("bf16",),
    "qwen3": ("bf16",),
}
WINDOWED = ("mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe")

_SELECTIVE = ("eager", "sdpa", "triton", "eager_direct", "sdpa_direct")
# Under a window's mask; `sdpa_mha` is also SDPA without grouped heads in fp32.
_ALSO_SELECTIVE = (("sdpa_mha", "bf16"), ("sdpa_mqa", "bf16"))


@dataclass(frozen=True, slots=True)
class Variant:
    """What changes the tensors that a step of one family keeps."""

    family: str
    attention: str  # eager, sdpa or triton; "_mha": no grouped heads; "_mqa": one for all
    # "_direct": queries of latent attention projected in one step; "_packed": rows of several
    # documents; "_single", the last: a batch of one row
    compute: str  # bf16, fp32 or autocast
    checkpointing: str  # none, full or selective
    loss: str = "hf"  # or chunked, fused_linear
    adapters: str = ""  # or the layers that carry them: qv, all_linear
    base: str = ""  # or nf4: how the frozen weights below adapters are stored

    @property
    def key(self) -> str:
        """The name under which the template is stored."""
        key = "/".join((self.attention, self.compute, self.checkpointing))
        loss = () if self.loss == "hf" else (self.loss,)
        base = f"_{self.base}" if self.base else ""
        adapters = (f"lora_{self.adapters}{base}",) if self.adapters else ()
        return "/".join((key, *loss, *adapters))

    @property
    def implementation(self) -> str:
        """The name transformers knows the attention by."""
        kernel = self.attention.split("_")[0]
        return TRITON_NAME if kernel == "triton" else kernel

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several documents."""
        return "_packed" in self.attention

    @property
    def has_other_losses(self) -> bool:
        """Whether other losses than Hugging Face's are traced too: below adapters in bf16 only."""
        return not self.adapters or self.compute == "bf16"

    @property
    def batch(self) -> int:
        """Rows of the traced batch: one row's heads need no copies to be multiplied."""
        return 1 if self.attention.endswith(ONE_ROW) else PRIMES["batch"]

    @property
    def differs_little(self) -> bool:
        """Whether a batch of one row lacks only copies of several rows' heads (see `traced`)."""
        has_one_head = self.family == "falcon" or "_mqa" in self.attention
        return self.attention.endswith(ONE_ROW) and not has_one_head


def _attentions(family: str) -> list[str]:
    attentions = ["eager", "sdpa", "triton"]
    if family == "gemma2":  # transformers offers it eager attention only (logit softcap)
        attentions = ["eager", "eager_mha"]
    elif family == "falcon":  # it takes no attention function from outside
        attentions = ["eager", "sdpa", "eager_single", "sdpa_single"]
    elif family == "gpt_oss":  # attention sinks
        attentions = ["eager"]
    elif family == "deepseek_v2":  # keys and values of two sizes; the small model's queries
        attentions = ["eager_direct", "sdpa_direct"]
    elif family == "deepseek_v3":
        attentions = ["eager", "sdpa"]
    elif family == "gemma3_text":
        attentions += ["eager_mqa", "eager_mqa_single", "sdpa_mqa"]
    elif family not in ONE_GROUPING:
        attentions.append("eager_mha")
    if family in WINDOWED:
        attentions.append("sdpa_mha")  # a mask makes SDPA copy keys and values to every head
    return attentions


def _of_one_row(family: str, attentions: Sequence[str]) -> list[tuple[str, str]]:
    """Eager attention of a batch of one row, where that is not there already, by compute dtype."""
    eager = [name for name in attentions if name.startswith("eager") and ONE_ROW not in name]
    names = [name + ONE_ROW for name in eager if name + ONE_ROW not in attentions]
    return [(name, compute) for name in names for compute in ONE_ROW_COMPUTES.get(family, ())]


def variants(family: str) -> list[Variant]:
    """Every variant of a family whose tensors differ from the others'."""
    attentions = _attentions(family)
    one_row = _of_one_row(family, attentions)
    kinds = [(a, compute) for a in attentions for compute in COMPUTES] + one_row
    if "sdpa" in attentions and family not in (*ONE_GROUPING, *WINDOWED, "gemma3_text"):
        kinds.append(("sdpa_mha", "fp32"))  # grouped heads have no fused fp32 kernel
    # Of selective checkpointing, fewer layouts are traced. GPT-OSS adds its biases to the experts'
    # products in place, and torch refuses to reuse a saved tensor that has been written to.
    kept = [] if family == "gpt_oss" else [kind for kind in kinds if kind[0] in _SELECTIVE]
    kept += [kind for kind in one_row if kept and kind[0].removesuffix(ONE_ROW) in _SELECTIVE]
    kept += [kind for kind in kinds if kind in _ALSO_SELECTIVE]
    selective = [(*kind, "selective") for kind in kept]
    modes = [(*kind, checkpointing) for kind in kinds for checkpointing in ("none", "full")]
    packed = [(*kind, ckpt) for kind in _packed_kinds(family) for ckpt in ("none", "full")]
    return [Variant(family, *mode) for mode in (*modes, *selective, *packed)]


def _packed_kinds(family: str) -> list[tuple[str, str]]:
    """Attention and compute dtype of the variants with packed rows: their mask copies K and V."""
    if family not in PACKED:
        return []
    several = [f"{kernel}_packed{heads}" for kernel in ("eager", "sdpa") for heads in ("", "_mha")]
    kinds = [(attention, compute) for attention in several for compute in ("bf16", "autocast")]
    return kinds + _of_one_row(family, several)


def adapter_variants(family: str) -> list[Variant]:
    """The variants of a family that are traced with adapters on a frozen model.

    Eager attention only where there is no other. Selective checkpoints on whole weights, and rows of
    several documents, in bf16 only.
    """
    attentions = _attentions(family)
    fused = [attention for attention in attentions if not attention.startswith("eager")]
    modes = [("", compute, mode) for compute in ("bf16", "autocast") for mode in ("none", "full")]
    if family != "gpt_oss":
        modes.append(("", "bf16", "selective"))
    four_bit = FOUR_BIT.get(family, ())
    modes += [("nf4", compute, mode) for compute in four_bit for mode in ("none", "full")]
    kinds = [(attention, *mode) for mode in modes for attention in fused or attentions]
    if family in PACKED:
        packed = ("sdpa_packed", "sdpa_packed_mha")
        kinds += [
            (attention, "", "bf16", mode) for attention in packed for mode in ("none", "full")
        ]
    return [
        Variant(family, attention, compute, checkpointing, adapters=adapters, base=base)
        for attention, base, compute, checkpointing in kinds
        for adapters in ("qv", "all_linear")
    ]
