"""Which layers are checkpointed, and what a selective checkpoint saves: jobs and traces share this."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from planner.workload import Checkpointing
from runners.zero.groups import decoder_layers

# Matrix products and attention: what costs most to compute again. Attention by SDPA's CUDA kernels,
# by ours, and by the stand-ins of traces.
SAVED_OPERATIONS = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"),
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "peakmark::attention_forward",
        "peakmark_trace::attention_forward",
        "peakmark_trace::grouped_forward",
    )
)


def selective_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of SAVED_OPERATIONS and recompute all others."""
    if operation._schema.name in SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """Contexts of a checkpoint's forward and of its recomputation under `selective_policy`."""
    return create_selective_checkpoint_contexts(selective_policy)


def checkpoint_layers(model: nn.Module, checkpointing: Checkpointing, every: int = 1) -> None:
    """Checkpoint layers 0, `every`, 2 * `every`, ... of a Hugging Face model, wholly or selectively."""
    if checkpointing is Checkpointing.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpointing is Checkpointing.SELECTIVE:
        options["context_fn"] = selective_contexts
    model.gradient_checkpointing_enable(options)  # type: ignore[operator]
    for index, layer in enumerate(decoder_layers(model)):
        layer.gradient_checkpointing = index % every == 0  # type: ignore[assignment]
