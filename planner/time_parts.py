"""What a kernel or an operation of a profiled step belongs to, by its name alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum


class Part(StrEnum):
    """What the time of a step or a request goes to."""

    ATTENTION = "attention"
    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication"
    COPIES = "copies"
    OTHER = "other"
    HOST = "host"
    DATA = "data"


PART_WORDS: Mapping[Part, str] = {
    Part.ATTENTION: "Attention",
    Part.MATMUL: "Matrix products",
    Part.ELEMENTWISE: "Norms, elementwise, loss",
    Part.OPTIMIZER: "Optimizer",
    Part.COMMUNICATION: "Communication",
    Part.COPIES: "Copies, casts, fills",
    Part.OTHER: "Other",
    Part.HOST: "Host gaps",
    Part.DATA: "Data and tokenizer",
}
# The part that a device can do; host gaps and data are what is left of a step.
DEVICE_PARTS = (
    *(Part.ATTENTION, Part.MATMUL, Part.ELEMENTWISE, Part.OPTIMIZER),
    *(Part.COMMUNICATION, Part.COPIES, Part.OTHER),
)

# Prefix of the operations that kernels/ defines.
OURS = "peakmark::"
# The first that matches counts, so attention's own products come before products.
# fmha and flash are FlashAttention, cuDNN and memory-efficient attention as torch starts them. Ours
# are the kernels in kernels/; several are called forward_kernel and backward_kernel: there the
# operation says which, and in a CUDA graph, which hides it, they are norms and activations.
_KERNELS: tuple[tuple[str, Part], ...] = (
    (r"^nccl|^ncclDev|all_?reduce|all_?gather|reduce_?scatter|^nvshmem|^multimem_", Part.COMMUNICATION),
    (r"flash|fmha|cudnn::fusion|\bmha_|attention|_sdpa_|sdpa|compute_delta|dot_do_o|softmax_warp|paged", Part.ATTENTION),
    (r"^single_forward_kernel|^(query|key)_gradient_kernel", Part.ATTENTION),
    (r"^(delta|decode|byte|combine|append|state|output|pad_rows)_kernel", Part.ATTENTION),
    (r"^adamw_kernel|adam|multi_tensor_apply|FusedOptimizer|lamb(?!d)|sgd_", Part.OPTIMIZER),
    (r"^mem(cpy|set)|direct_copy_kernel|CatArray|chunk_cat|split_with_sizes_copy|copy_device_to_device|transpose_readWrite", Part.COPIES),
    (r"FillFunctor|fill_kernel|bfloat16_copy_kernel|float8_copy|_copy_kernel", Part.COPIES),
    (r"gemm|gemv|cutlass|cublas|xmma|wgmma|\bnvjet|^nvjet|splitKreduce|triton_tem_", Part.MATMUL),
    (r"^(forward|backward|weight_gradient|scale|rope|cross_entropy)_kernel|layer_?norm|rms_?norm|swiglu|rope", Part.ELEMENTWISE),
    (r"cross_?entropy|softmax|nll_loss|dropout|embedding|indexing_backward|indexSelect", Part.ELEMENTWISE),
    (r"elementwise|reduce_kernel|at::native|at_cuda_detail|cub::|^triton_(poi|red|per)_|scan|gather|scatter|sort", Part.ELEMENTWISE),
)  # fmt: skip

# Operations of torch, with or without "aten::". What only looks at a tensor another way, and what
# steps through autograd's graph, is the host's.
_OPS: tuple[tuple[str, Part], ...] = (
    (r"^fsdp::\w*(copy|cat)|_chunk_cat$|_copy_?$", Part.COPIES),
    (r"c10d::|gloo:|nccl:|all_?reduce|all_?gather|reduce_?scatter|^record_param_comms", Part.COMMUNICATION),
    (r"^peakmark::(attention|decode_attention|append_to_cache|linear_attention)", Part.ATTENTION),
    (r"^peakmark::adamw", Part.OPTIMIZER),
    (r"^peakmark::", Part.ELEMENTWISE),
    (r"^(autograd::engine|torch::autograd|\w+Backward\d*$|Optimizer\.)", Part.HOST),
    (r"scaled_dot_product|flash_attention|efficient_attention|_attention_(forward|backward)|^_(safe_)?softmax(_backward_data)?$|^softmax$", Part.ATTENTION),
    (r"^(bmm|baddbmm)", Part.ATTENTION),
    (r"adam|_sgd|lamb(?!d)|muon", Part.OPTIMIZER),
    (r"^(mm|addmm|addmv|mv|matmul|linear|_?grouped_mm|_scaled_mm|einsum|dot|_addmm_activation|mkldnn_linear|mkldnn::)", Part.MATMUL),
    (r"^(copy_|_to_copy|to|contiguous|clone|cat|stack|fill_|zero_|zeros|ones|full|narrow_copy|index_copy_|new_zeros|_pad|constant_pad|pin_memory)", Part.COPIES),
    (r"^(view|_?reshape|_reshape_alias|t|transpose|permute|expand|as_strided|select|slice|split|chunk|unsqueeze|squeeze|detach|alias|empty|new_empty|resize_|resolve_|result_type|unbind|narrow|lift_fresh|_unsafe_view|item|is_nonzero|_local_scalar_dense|set_|unflatten|flatten|broadcast_tensors|movedim|real|numpy_T)\w*$", Part.HOST),
    (r"^[A-Z]\w*$", Part.HOST),
    (r"^[a-z_]\w*$", Part.ELEMENTWISE),
)  # fmt: skip
_COMPILED_KERNELS = tuple((re.compile(p, re.IGNORECASE), part) for p, part in _KERNELS)
_COMPILED_OPS = tuple((re.compile(p), part) for p, part in _OPS)


def part_of_kernel(name: str) -> Part:
    """Return what a GPU kernel or copy does, by its name; `other` for a name that no rule knows."""
    return _first(_COMPILED_KERNELS, name)


def part_of_operation(name: str) -> Part:
    """Return what an operation of torch does, by its name; `other` for a name that no rule knows."""
    return _first(_COMPILED_OPS, name.removeprefix("aten::"))


def part_of_work(kernel: str, operations: Sequence[str], phase: str | None) -> Part:
    """Return what a kernel does that the innermost of `operations` (outermost first) started.

    Within attention all is attention's, products too; what the phase `optimizer` computes is the
    optimizer's. Our operations, and a kernel of no known name, go by the operation.
    """
    inner = operations[-1] if operations else ""
    own = part_of_kernel(kernel)
    if inner.startswith(OURS) or (own is Part.OTHER and inner):
        own = part_of_operation(inner)
    return _settled(own, operations, phase)


def part_of_nested(operations: Sequence[str], phase: str | None) -> Part:
    """Return what an operation's own time is, on a CPU; `operations` are outermost first."""
    return _settled(part_of_operation(operations[-1]), operations, phase)


def _settled(own: Part, operations: Sequence[str], phase: str | None) -> Part:
    if own in (Part.COMMUNICATION, Part.ATTENTION):
        return own
    if any(part_of_operation(name) is Part.ATTENTION for name in operations):
        return Part.ATTENTION
    if phase == "optimizer" and own is not Part.HOST:
        return Part.OPTIMIZER
    return own


def _first(rules: Sequence[tuple[re.Pattern[str], Part]], name: str) -> Part:
    return next((part for pattern, part in rules if pattern.search(name)), Part.OTHER)
