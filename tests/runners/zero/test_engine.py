"""The ZeRO engine against plain torch: by hand-written sums over ranks, bit by bit."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.engines.precision import forward_context
from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine
from tests.runners import forks

HERE = Path(__file__).parent
CPU = torch.device("cpu")
STAGES = (0, 1, 2, 3)
MODELS = ("llama", "gpt2")


def _load_rank_main() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_main", HERE / "rank_main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_main"] = module
    spec.loader.exec_module(module)
    return module


rank_main = _load_rank_main()
Case = rank_main.Case


def _run_ranks(world_size: int, out: Path) -> list[dict[str, Any]]:
    script = str(HERE / "rank_main.py")
    logs = [out / f"rank{rank}.log" for rank in range(world_size)]
    processes = [
        forks.begin([script, str(rank), str(world_size), str(out)], log)
        for rank, log in enumerate(logs)
    ]
    for process, log in zip(processes, logs, strict=True):
        assert forks.finish(process, timeout_s=300) == 0, log.read_text()[-2000:]
    return [torch.load(out / f"rank{r}.pt") for r in range(world_size)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the ranks: CPU sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _run_ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _run_ranks(4, tmp_path_factory.mktemp("four"))


def _assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert torch.equal(values, right[name]), name


def _plain_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rank_main.LR, momentum=0.9)
    if kind == "adafactor":
        return torch.optim.Adafactor(model.parameters(), lr=rank_main.LR)
    return torch.optim.AdamW(model.parameters(), lr=rank_main.LR, foreach=True)


def _gradients(model: nn.Module, rank: int, step: int, micro: int, accumulation: int) -> list:
    tokens = rank_main.batch(rank, step, micro)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / accumulation
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _train_plainly(
    name: str, *, world_size: int, optimizer: str, accumulation: int, reduce_each: bool
) -> dict[str, Tensor]:
    """Train without any engine: all ranks' batches on one model, gradients summed by hand.

    `reduce_each` sums over the ranks within each micro-batch (stages 2 and 3), otherwise over
    the micro-batches within each rank first (stages 0 and 1).
    """
    model = rank_main.build_model(name)
    stepper = _plain_optimizer(optimizer, model)
    for step in range(rank_main.STEPS):
        of = [
            [_gradients(model, rank, step, micro, accumulation) for micro in range(accumulation)]
            for rank in range(world_size)
        ]
        for index, parameter in enumerate(model.parameters()):
            parts = [[of[r][m][index] for m in range(accumulation)] for r in range(world_size)]
            outer = list(zip(*parts, strict=True)) if reduce_each else parts
            parameter.grad = sum(sum(inner) for inner in outer) / world_size
        stepper.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _train_engine(engine: ZeroEngine, model: nn.Module, precision: str = "fp32") -> list[float]:
    losses = []
    for step in range(rank_main.STEPS):
        tokens = rank_main.batch(0, step, 0)
        with forward_context(precision, CPU):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        losses.append(loss.item())
        engine.backward(loss, last_micro_batch=True)
        engine.step()
    return losses


def _engine(model: nn.Module, stage: int, **options: Any) -> ZeroEngine:
    chosen = {"optimizer": "adamw_foreach", "precision": "fp32", "lr": rank_main.LR} | options
    return ZeroEngine(model, stage=stage, device=CPU, **chosen)


@pytest.mark.parametrize("optimizer", ["adamw_foreach", "sgd"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_equals_plain_torch_bit_by_bit(name: str, stage: int, optimizer: str) -> None:
    expected = _train_plainly(
        name, world_size=1, optimizer=optimizer, accumulation=1, reduce_each=False
    )
    model = rank_main.build_model(name)
    engine = _engine(model, stage, optimizer=optimizer)
    _train_engine(engine, model)
    _assert_same(engine.full_parameters(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_adafactor_at_stage_0_steps_every_parameter_in_its_shape(name: str) -> None:
    expected = _train_plainly(
        name, world_size=1, optimizer="adafactor", accumulation=1, reduce_each=False
    )
    model = rank_main.build_model(name)
    engine = _engine(model, 0, optimizer="adafactor")
    _train_engine(engine, model)
    _assert_same(engine.full_parameters(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_muon_steps_the_matrices_of_layers_and_adamw_the_rest(name: str) -> None:
    model, plain = rank_main.build_model(name), rank_main.build_model(name)
    engine = _engine(model, 0, optimizer="muon")
    _train_engine(engine, model)
    own = {n: p for n, p in plain.named_parameters() if ".layers." in n or ".h." in n}
    matrices = [p for p in own.values() if p.dim() == 2]
    ids = {id(p) for p in matrices}
    rest = [p for p in plain.parameters() if id(p) not in ids]
    steppers = [
        torch.optim.Muon(matrices, lr=rank_main.LR),
        torch.optim.AdamW(rest, lr=rank_main.LR, fused=True),
    ]
    for step in range(rank_main.STEPS):
        for parameter, gradient in zip(
            plain.parameters(), _gradients(plain, 0, step, 0, 1), strict=True
        ):
            parameter.grad = gradient
        for stepper in steppers:
            stepper.step()
    assert len(matrices) == (14 if name == "llama" else 8)
    _assert_same(engine.full_parameters(), dict(plain.named_parameters()))


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_whole_matrix_optimizers_refuse_shards(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} steps whole matrices, which stage 1 shards"):
        _engine(rank_main.build_model("llama"), 1, optimizer=kind)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_sums_by_hand_bit_by_bit(
    two_ranks: list[dict[str, Any]], name: str, stage: int
) -> None:
    for optimizer, checkpointing in (("adamw_foreach", False), ("sgd", True)):
        case = Case(name, stage, optimizer=optimizer, checkpointing=checkpointing)
        expected = _train_plainly(
            name, world_size=2, optimizer=optimizer, accumulation=1, reduce_each=False
        )
        for rank in two_ranks:
            _assert_same(rank[repr(case)]["parameters"], expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", MODELS)
def test_accumulation_adds_in_the_order_of_the_stage(
    two_ranks: list[dict[str, Any]], name: str, stage: int
) -> None:
    """Stages 2 and 3 reduce each micro-batch: the one reason to differ from stages 0 and 1."""
    case = Case(name, stage, accumulation=2, checkpointing=True)
    expected = _train_plainly(
        name, world_size=2, optimizer="adamw_foreach", accumulation=2, reduce_each=stage >= 2
    )
    _assert_same(two_ranks[0][repr(case)]["parameters"], expected)


@pytest.mark.parametrize("engine", ["peakmark", "fsdp2"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_without_sync_micro_batches_are_summed_before_ranks(
    two_ranks: list[dict[str, Any]], name: str, stage: int, engine: str
) -> None:
    case = Case(name, stage, accumulation=3, sync=False, engine=engine)
    expected = _train_plainly(
        name, world_size=2, optimizer="adamw_foreach", accumulation=3, reduce_each=False
    )
    result = two_ranks[0][repr(case)]
    _assert_same(result["parameters"], expected)
    everything = 4 * sum(_padded(name, 2)) if engine == "peakmark" else None
    reduced = result["traffic"]["reduce_scatter"]["bytes"]
    assert everything is None or reduced == everything  # once a step, not once a micro-batch


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_agree_across_stages(four_ranks: list[dict[str, Any]], name: str) -> None:
    """gloo sums the same buffer in the same order in all-reduce and reduce-scatter."""
    for options in ({}, {"optimizer": "sgd", "checkpointing": True}):
        base = four_ranks[0][repr(Case(name, 0, **options))]["parameters"]
        for rank in four_ranks:
            for stage in STAGES:
                _assert_same(rank[repr(Case(name, stage, **options))]["parameters"], base)


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_with_accumulation_agree_where_the_order_of_sums_does(
    four_ranks: list[dict[str, Any]], name: str
) -> None:
    def result(stage: int) -> dict[str, Tensor]:
        case = Case(name, stage, accumulation=2, checkpointing=True)
        return four_ranks[0][repr(case)]["parameters"]

    _assert_same(result(1), result(0))
    _assert_same(result(3), result(2))


@pytest.mark.parametrize("options", [("mixed", "adamw_loop"), ("bf16", "adamw_fused")])
@pytest.mark.parametrize("name", MODELS)
def test_low_precision_agrees_across_stages(
    two_ranks: list[dict[str, Any]], name: str, options: tuple[str, str]
) -> None:
    precision, optimizer = options
    cases = [Case(name, stage, precision=precision, optimizer=optimizer) for stage in STAGES]
    base = two_ranks[0][repr(cases[0])]["parameters"]
    assert all(values.dtype == torch.bfloat16 for values in base.values())
    for case in cases[1:]:
        _assert_same(two_ranks[1][repr(case)]["parameters"], base)


@pytest.mark.parametrize("name", MODELS)
def test_autocast_agrees_across_stages(two_ranks: list[dict[str, Any]], name: str) -> None:
    base = two_ranks[0][repr(Case(name, 0, precision="autocast"))]["parameters"]
    for stage in STAGES[1:]:
        case = Case(name, stage, precision="autocast")
        _assert_same(two_ranks[0][repr(case)]["parameters"], base)


@pytest.mark.parametrize("name", MODELS)
def test_fsdp2_equals_our_stages(two_ranks: list[dict[str, Any]], name: str) -> None:
    for stage in (2, 3):
        for options in ({}, {"accumulation": 2, "checkpointing": True}):
            theirs = two_ranks[0][repr(Case(name, stage, engine="fsdp2", **options))]
            ours = two_ranks[0][repr(Case(name, stage, **options))]
            _assert_same(theirs["parameters"], ours["parameters"])


# Elements per group, worked out from the configurations in rank_main.CONFIGS:
# llama: embedding 61*10; layer 2*80 + 2*40 + 3*230 + 20; head 10 + 61*10
# gpt2: embedding (61+29)*10; layer 2*20 + 330 + 110 + 143 + 140; head 20
GROUPS = {"llama": (610, 950, 950, 620), "gpt2": (900, 763, 763, 20)}


def _padded(name: str, world_size: int) -> tuple[int, ...]:
    return tuple(-(-numel // world_size) * world_size for numel in GROUPS[name])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_traffic_is_the_formula(
    two_ranks: list[dict[str, Any]],
    four_ranks: list[dict[str, Any]],
    name: str,
    world_size: int,
) -> None:
    """Payload per step, P = bytes of all padded buffers: 2P less all-reduce's own doubling."""
    embedding, first, second, head = _padded(name, world_size)
    everything = 4 * (embedding + first + second + head)
    # A tied weight is gathered for the embedding and again for the head.
    ends = (2 if name == "gpt2" else 1) * embedding + head
    layers_twice = 4 * (ends + 2 * (first + second))
    ranks = two_ranks if world_size == 2 else four_ranks
    for accumulation in (1, 2):
        options = {"accumulation": 2, "checkpointing": True} if accumulation == 2 else {}

        def traffic(stage: int, options: dict[str, Any] = options) -> dict[str, Any]:
            found = ranks[0][repr(Case(name, stage, **options))]["traffic"]
            return {collective: count["bytes"] for collective, count in found.items()}

        each = accumulation * everything
        assert traffic(0) == {"all_reduce": everything}
        assert traffic(1) == {"reduce_scatter": everything, "all_gather": everything}
        assert traffic(2) == {"reduce_scatter": each, "all_gather": everything}
        assert traffic(3) == {"reduce_scatter": each, "all_gather": accumulation * layers_twice}


@pytest.mark.parametrize("name", MODELS)
def test_state_bytes_shrink_by_stage(four_ranks: list[dict[str, Any]], name: str) -> None:
    full = 4 * sum(_padded(name, 4))
    step_counters = 4 * len(GROUPS[name])
    states = [four_ranks[3][repr(Case(name, stage))]["state"] for stage in STAGES]
    # Read after the backward: from stage 1 on nothing is whole any more.
    assert [s["parameter_bytes"] for s in states] == [full, full // 4, full // 4, full // 4]
    assert [s["gradient_bytes"] for s in states] == [full, full, full // 4, full // 4]
    assert [s["optimizer_bytes"] - step_counters for s in states] == [
        2 * full,
        *[2 * full // 4] * 3,
    ]


def test_mixed_keeps_an_fp32_shard_and_two_moments(two_ranks: list[dict[str, Any]]) -> None:
    elements = sum(_padded("llama", 2))
    case = Case("llama", 2, precision="mixed", optimizer="adamw_loop")
    assert two_ranks[0][repr(case)]["state"] == {
        "parameter_bytes": 4 * elements // 2,
        "gradient_bytes": 2 * elements // 2,
        "optimizer_bytes": 8 * elements // 2 + 4 * len(GROUPS["llama"]),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_gradient_count_as_zero_gradient(stage: int) -> None:
    def without_mlp() -> nn.Module:
        model = rank_main.build_model("llama")
        model.model.layers[1].mlp.forward = torch.zeros_like
        return model

    plain = without_mlp()
    stepper = _plain_optimizer("adamw_foreach", plain)
    for step in range(rank_main.STEPS):
        tokens = rank_main.batch(0, step, 0)
        plain(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        for parameter in plain.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stepper.step()
        stepper.zero_grad()
    model = without_mlp()
    engine = _engine(model, stage)
    _train_engine(engine, model)
    _assert_same(
        engine.full_parameters(), {n: p.detach().clone() for n, p in plain.named_parameters()}
    )


def test_stage_3_holds_full_parameters_only_while_used() -> None:
    model = rank_main.build_model("llama")
    engine = _engine(model, 3, collectives=LocalCollectives(1, 4))

    def held() -> list[bool]:
        return [group.flat.untyped_storage().nbytes() > 0 for group in engine.groups]

    assert held() == [False, False, False, False]
    tokens = rank_main.batch(0, 0, 0)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    assert held() == [False, False, False, True]
    engine.backward(loss, last_micro_batch=True)
    assert held() == [False, False, False, False]
    engine.step()
    assert engine.state_bytes()["gradient_bytes"] == 0


def test_stage_2_frees_each_full_gradient_before_the_next_layer() -> None:
    model = rank_main.build_model("llama")
    engine = _engine(model, 2, collectives=LocalCollectives(0, 4))
    held: list[list[bool]] = []
    for group in engine.groups:
        group.parameters[0].register_post_accumulate_grad_hook(
            lambda _: held.append([g.gradient is not None for g in engine.groups])
        )
    tokens = rank_main.batch(0, 0, 0)
    engine.backward(model(input_ids=tokens, labels=tokens).loss, last_micro_batch=True)
    assert max(map(sum, held)) == 1


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
FAMILIES = {
    "llama": {**TINY, **HEADS},
    "mistral": {**TINY, **HEADS},
    "qwen2": {**TINY, **HEADS, "tie_word_embeddings": True},
    "qwen3": {**TINY, **HEADS},
    "phi3": {**TINY, "num_attention_heads": 2, "num_key_value_heads": 2},
    "olmo2": {**TINY, **HEADS},
    "gemma2": {**TINY, **HEADS},
    "gpt2": rank_main.CONFIGS["gpt2"],
    "mixtral": {**TINY, **HEADS, "num_local_experts": 2, "num_experts_per_tok": 1},
}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _family_model(family: str, device: str) -> nn.Module:
    config = AutoConfig.for_model(family, **(FAMILIES[family] | NO_TOKENS))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


@pytest.mark.parametrize("family", FAMILIES)
def test_meta_models_of_every_family_train_with_real_buffers(family: str) -> None:
    model = _family_model(family, "meta")
    engine = _engine(model, 3)
    for name, buffer in _family_model(family, "cpu").named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert sum(v.numel() for v in engine.full_parameters().values()) == sum(
        p.numel() for p in _family_model(family, "meta").parameters()
    )
    losses = _train_engine(engine, model)
    assert all(4.0 < loss < 4.3 for loss in losses[:1])  # ln 61 = 4.11: nothing learned yet
    assert all(v.isfinite().all() for v in engine.full_parameters().values())


def test_values_drawn_for_a_meta_model_do_not_depend_on_stage_or_world_size() -> None:
    def drawn(stage: int, world_size: int) -> dict[str, Tensor]:
        model = rank_main.build_model("llama", device="meta")
        collectives = LocalCollectives(0, world_size)
        return _engine(model, stage, collectives=collectives, seed=5).full_parameters()

    base = drawn(0, 1)
    _assert_same(drawn(0, 3), base)
    _assert_same(drawn(1, 1), base)
    _assert_same(drawn(3, 1), base)
    assert not torch.equal(base["lm_head.weight"], base["model.embed_tokens.weight"])


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="stage 4 is not one of 0, 1, 2, 3"):
        _engine(rank_main.build_model("llama"), 4)
