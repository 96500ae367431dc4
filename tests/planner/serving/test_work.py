"""The kernels of a forward: their weights are the model's, their number is what our engine launches."""

from __future__ import annotations

import pytest

from planner.families import parameter_shapes
from planner.presets import model_presets, resolve_model
from planner.serving.part import WHOLE_FAMILIES, serving_part
from planner.serving.work import ForwardWork, forward_work
from planner.workload import WeightsDtype

# One model of each family.
MODELS = list({resolve_model(preset.id).family: preset.id for preset in model_presets()}.values())


def weights(work: ForwardWork) -> int:
    """Elements of all weights of the layers' products."""
    return sum(one.count * one.inner * one.columns * (one.experts or 1) for one in work.products)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("gpus", [1, 2])
def test_products_hold_every_matrix_of_the_layers_once(name: str, gpus: int) -> None:
    spec = resolve_model(name)
    if gpus > 1 and (spec.family in WHOLE_FAMILIES or spec.vocab_size % gpus):
        pytest.skip("not divided")
    part = serving_part(spec, gpus)
    matrices = sum(
        parameter.total_numel
        for parameter in parameter_shapes(part)
        if parameter.group == "layer"
        and len(parameter.shape) > 1
        and not parameter.name.endswith("bias")
    )
    assert weights(forward_work(part, WeightsDtype.BF16)) == matrices


def test_a_layer_of_llama_runs_eleven_kernels_beside_attention_s_three() -> None:
    # Products: qkv, output, gate and up, down; two norms, rotary embedding, activation, two sums. The write to
    # the cache and attention's two kernels belong to attention.
    small = resolve_model("meta-llama/Llama-3.2-1B")
    work = forward_work(small, WeightsDtype.BF16)
    assert sum(one.count for one in work.products) == 16 * 4
    assert sum(one.count for one in work.streams) == 16 * 7
    apart = forward_work(small, WeightsDtype.BF16, joins_qkv=False)
    assert sum(one.count for one in apart.products) == 16 * 6 and weights(apart) == weights(work)


def test_every_norm_moves_what_it_reads_and_writes() -> None:
    # Two of 2,048, and one each over the 32 x 128 queries and 4 x 128 keys, in 48 layers.
    work = forward_work(resolve_model("Qwen/Qwen3-30B-A3B"), WeightsDtype.BF16)
    moved = sum(one.count * one.token_bytes for one in work.streams if one.name == "norms")
    assert moved == 48 * 2 * 2 * (2 * 2048 + 32 * 128 + 4 * 128)


def test_quantised_weights_are_read_with_their_scales_and_the_head_is_not_quantised() -> None:
    work = forward_work(resolve_model("meta-llama/Llama-3.1-8B"), WeightsDtype.INT8)
    [down] = [one for one in work.products if one.name == "mlp_down"]
    assert down.weight_bytes == 14336 * 4096 + 2 * 4096
    assert work.head.weight_bytes == 2 * 4096 * 128_256
