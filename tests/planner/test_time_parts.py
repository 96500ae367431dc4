"""What kernels and operations belong to: names as profiles on an H200 and on a CPU show them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from planner.time_parts import (
    PART_WORDS,
    Part,
    part_of_kernel,
    part_of_nested,
    part_of_operation,
    part_of_work,
)

ROOT = Path(__file__).resolve().parents[2]
NATIVE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
KERNELS = [
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_splitK_NNN", Part.MATMUL),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>", Part.MATMUL),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>", Part.MATMUL),
    ("void gemmk1_kernel<int, float, 256, 5, true, false>", Part.MATMUL),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", Part.ATTENTION),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*)", Part.ATTENTION),
    ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", Part.ATTENTION),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", Part.ATTENTION),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", Part.ATTENTION),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Part.COMMUNICATION),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", Part.COMMUNICATION),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", Part.OPTIMIZER),
    ("Memcpy HtoD (Pinned -> Device)", Part.COPIES),
    ("Memset (Device)", Part.COPIES),
    (NATIVE + "FillFunctor<float>, std::array<char*, 1ul> >(int)", Part.COPIES),
    (NATIVE + "bfloat16_copy_kernel_cuda(at::TensorIteratorBase&)", Part.COPIES),
    ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>", Part.COPIES),
    ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>", Part.COPIES),
    # A lambda is no LAMB, the optimizer.
    (NATIVE + "rsqrt_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}::operator()", Part.ELEMENTWISE),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>", Part.ELEMENTWISE),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>", Part.ELEMENTWISE),
    ("void at_cuda_detail::cub::detail::scan::DeviceScanKernel<long>", Part.ELEMENTWISE),
    ("triton_poi_fused_add_mul_3", Part.ELEMENTWISE),
    ("my_company_secret_sauce", Part.OTHER),
]  # fmt: skip


@pytest.mark.parametrize(("name", "part"), KERNELS)
def test_a_kernel_s_name_says_what_it_does(name: str, part: Part) -> None:
    assert part_of_kernel(name) is part


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("aten::addmm", Part.MATMUL),
        ("aten::_grouped_mm", Part.MATMUL),
        ("aten::bmm", Part.ATTENTION),
        ("aten::_softmax_backward_data", Part.ATTENTION),
        ("aten::_log_softmax_backward_data", Part.ELEMENTWISE),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", Part.ATTENTION),
        ("aten::_fused_adamw_", Part.OPTIMIZER),
        ("c10d::_reduce_scatter_base_", Part.COMMUNICATION),
        ("gloo:all_reduce", Part.COMMUNICATION),
        ("fsdp::all_gather_copy_in", Part.COPIES),
        ("aten::_to_copy", Part.COPIES),
        ("aten::silu_backward", Part.ELEMENTWISE),
        ("aten::view", Part.HOST),
        ("autograd::engine::evaluate_function: AddmmBackward0", Part.HOST),
        ("MulBackward0", Part.HOST),
        ("peakmark::attention_backward", Part.ATTENTION),
        ("peakmark::adamw", Part.OPTIMIZER),
        ("peakmark::swiglu_forward", Part.ELEMENTWISE),
        ("library<3>", Part.OTHER),
    ],
)
def test_an_operation_s_name_says_what_it_does(name: str, part: Part) -> None:
    assert part_of_operation(name) is part


def test_the_operation_tells_apart_our_kernels_of_one_name() -> None:
    assert part_of_work("forward_kernel", ["peakmark::rms_norm_forward"], None) is Part.ELEMENTWISE
    assert part_of_work("forward_kernel", ["peakmark::attention_forward"], None) is Part.ATTENTION
    # Replayed as a graph no operation is known: there it is a norm or an activation.
    assert part_of_work("forward_kernel", [], "decode") is Part.ELEMENTWISE


def test_a_product_within_attention_is_attention_s() -> None:
    chain = ["aten::scaled_dot_product_attention", "aten::matmul", "aten::bmm"]
    assert (
        part_of_work("nvjet_sm90_tst_64x8_64x16_4x2_h_bz_TNT", chain, "forward") is Part.ATTENTION
    )
    assert part_of_work("nvjet_sm90_tst_64x8_64x16_4x2_h_bz_TNT", ["aten::mm"], None) is Part.MATMUL


def test_what_the_optimizer_s_phase_computes_is_the_optimizer_s() -> None:
    name = NATIVE + "BinaryFunctor<float, float, float>>"
    assert part_of_work(name, ["aten::mul"], "optimizer") is Part.OPTIMIZER
    assert part_of_work(name, ["aten::mul"], "backward") is Part.ELEMENTWISE
    gather = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    assert part_of_work(gather, [], "optimizer") is Part.COMMUNICATION
    assert part_of_nested(["aten::to", "aten::copy_"], "optimizer") is Part.OPTIMIZER


def test_a_kernel_of_no_known_name_goes_by_its_operation() -> None:
    assert part_of_work("generated_7", ["aten::addmm"], None) is Part.MATMUL
    assert part_of_work("generated_7", [], None) is Part.OTHER


def test_every_kernel_of_ours_is_known() -> None:
    """A new kernel needs a rule: one that nobody placed would count as other."""
    names = {
        node.name
        for path in (ROOT / "kernels").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and node.name.endswith("_kernel")
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(names) > 10
    assert {
        name: part_of_kernel(name) for name in names if part_of_kernel(name) is Part.OTHER
    } == {}


def test_every_part_has_words() -> None:
    assert set(PART_WORDS) == set(Part)
