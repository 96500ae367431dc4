"""DDP and ZeroRedundancyOptimizer against our engine at stage 0, which is tested against plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from runners.engines.ddp import DdpEngine
from runners.engines.zero_redundancy import ZeroRedundancyEngine
from runners.zero.collectives import LocalCollectives
from tests.runners import forks

HERE = Path(__file__).parent
MODELS = ("llama", "gpt2")
ENGINES = ("ddp", "zero_redundancy")
# Elements of all parameters, worked out from the configurations in zero/rank_main.py.
NUMELS = {"llama": 610 + 2 * 950 + 620, "gpt2": 900 + 2 * 763 + 20}
Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    out = tmp_path_factory.mktemp("ranks")
    script = str(HERE / "rank_cases.py")
    logs = [out / f"rank{rank}.log" for rank in range(2)]
    processes = [
        forks.begin([script, str(rank), "2", str(out)], log) for rank, log in enumerate(logs)
    ]
    for process, log in zip(processes, logs, strict=True):
        assert forks.finish(process, timeout_s=300) == 0, log.read_text()[-2000:]
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("variant", ["", "/adafactor/fp32", "/adamw_foreach/bf16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_five_steps_equal_our_stage_0_bit_by_bit(
    ranks: Ranks, model: str, engine: str, variant: str
) -> None:
    expected = ranks[0][f"{model}/peakmark{variant}"]["parameters"]
    for rank in ranks:
        found = rank[f"{model}/{engine}{variant}"]["parameters"]
        assert found.keys() == expected.keys()
        for name, values in found.items():
            assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize("variant", ["each", "last"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", MODELS)
def test_micro_batches_add_up_whenever_they_are_reduced(
    ranks: Ranks, model: str, engine: str, variant: str
) -> None:
    expected = ranks[0][f"{model}/peakmark/each"]["parameters"]
    found = ranks[1][f"{model}/{engine}/{variant}"]
    for name, values in found["parameters"].items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)
    reductions = 2 if variant == "each" else 1
    assert found["traffic"]["all_reduce"]["bytes"] == reductions * 4 * NUMELS[model]


@pytest.mark.parametrize(("syncs", "reductions"), [(True, 6), (False, 2)])
def test_reductions_are_as_many_as_buckets_were_given_to_them(syncs: bool, reductions: int) -> None:
    reduced: list[Tensor] = []

    def double(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.buffer().clone())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer().mul_(2))
        return future

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 1, bias=False)
        chosen = {"optimizer": "sgd", "precision": "fp32", "lr": 0.0, "device": torch.device("cpu")}
        engine = DdpEngine(
            model,
            stage=0,
            collectives=LocalCollectives(rank=0, world_size=1),
            sync_each_micro_batch=syncs,
            **chosen,
        )
        double.__annotations__.clear()  # DDP reads a hook's annotations, which must not be text
        engine.module.register_comm_hook(None, double)
        rows = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]])
        for _ in range(2):
            for index, row in enumerate(rows):
                loss = engine.module(row).sum()
                engine.backward(loss, last_micro_batch=index == 2)
            gradient = model.weight.grad
            assert gradient is not None
            # The sum of a linear layer's output has its input as gradient.
            expected = ((rows[0] * 2 + rows[1]) * 2 + rows[2]) * 2 if syncs else rows.sum(0) * 2
            assert torch.equal(gradient[0], expected)
            engine.step()
        assert len(reduced) == reductions
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("model", MODELS)
def test_only_the_optimizer_is_dealt_out_by_whole_parameters(ranks: Ranks, model: str) -> None:
    whole = 4 * NUMELS[model]
    both = [rank[f"{model}/zero_redundancy"]["state"] for rank in ranks]
    ddp = ranks[0][f"{model}/ddp"]["state"]
    for state in (*both, ddp):
        assert (state["parameter_bytes"], state["gradient_bytes"]) == (whole, whole)
    assert both[0]["optimizer_bytes"] + both[1]["optimizer_bytes"] == ddp["optimizer_bytes"]
    broadcast = ranks[0][f"{model}/zero_redundancy"]["traffic"]["broadcast"]
    assert broadcast == {"calls": 21 if model == "llama" else 28, "bytes": whole}


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (DdpEngine, {"stage": 1}, "DdpEngine has no ZeRO stage 1"),
        (ZeroRedundancyEngine, {"stage": 0}, "ZeroRedundancyEngine has no ZeRO stage 0"),
        (DdpEngine, {"stage": 0, "precision": "mixed"}, "keeps no master weights"),
    ],
)
def test_what_an_engine_has_not_is_refused(
    engine: type[DdpEngine], options: dict[str, Any], message: str
) -> None:
    chosen = {"optimizer": "sgd", "precision": "fp32", "lr": 0.1, **options}
    collectives = LocalCollectives(rank=0, world_size=1)
    with pytest.raises(ValueError, match=message):
        engine(nn.Linear(2, 2), device=torch.device("cpu"), collectives=collectives, **chosen)


@pytest.mark.parametrize(("engine", "stage"), [("ddp", 0), ("zero_redundancy", 1)])
def test_the_job_trains_one_rank_of_eight_alone(tmp_path: Path, engine: str, stage: int) -> None:
    model = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    plan = {
        "schema": 1,
        "job": "train",
        "model": {"config": model, "name": "tiny"},
        "workload": {"sequence_length": 16, "precision": "bf16"},
        "parallelism": {"engine": engine, "zero_stage": stage, "world_size": 8},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    spec = {"schema": 1, "kind": "train_step", "world": "solo", "rank": 0, "device": "cpu"}
    spec |= {"warmup": 2, "steps": 1, "plan": plan}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    arguments = ["-m", "runners.jobs.train_step", str(tmp_path / "spec.json"), str(tmp_path)]
    assert forks.run_ranks(arguments, 1, tmp_path / "log", timeout_s=200) == [0]
    measured = json.loads((tmp_path / "result.json").read_text())["measured"]
    # 64*32 + 3*(2*32*32 + 2*16*32 + 3*48*32 + 2*32) + 32, in bf16.
    whole = 2 * (2048 + 3 * 7744 + 32)
    state = measured["state"]
    assert (state["parameter_bytes"], state["gradient_bytes"]) == (whole, whole)
    assert measured["communication"]["all_reduce"]["bytes"] == whole
    # Two bf16 moments of everything, or of about an eighth: whole parameters are dealt out.
    own = 2 * whole if stage == 0 else 2 * whole / 8
    assert own <= state["optimizer_bytes"] < 1.2 * own
