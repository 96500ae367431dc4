"""Exports, read back by the real libraries where they are installed, else held to published fields."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import tomllib
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import PlanError
from planner.export.plan_export import export, parse_target
from planner.export.target import HINTS, SERVES, Export, Target, settings
from planner.export.text import toml_text
from planner.plan import Plan, parse_plan

TRAINING = [target for target in Target if target not in SERVES]
EVIL = "my train.py; $(touch owned) `id` 'x' \"y\""
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_VLLM = importlib.util.find_spec("vllm") is not None


def plan(job: str = "train", model: str = "meta-llama/Llama-3.1-8B", **parts: Any) -> Plan:
    return parse_plan(
        {
            "job": job,
            "model": {"preset": model},
            "hardware": {"preset": "h200-sxm5-141gb"},
            **parts,
        }
    )


def trained(engine: str = "fsdp2", stage: int = 3, ranks: int = 8, **workload: Any) -> Plan:
    spread = {"engine": engine, "zero_stage": stage, "world_size": ranks}
    return plan(workload=workload, parallelism=spread)


def text(found: Export, name: str) -> str:
    return next(file.text for file in found.files if file.name == name)


def said(found: Export) -> str:
    return "\n".join([*found.notes, *(file.text for file in found.files)])


def every_training_plan() -> list[Plan]:
    engines = {"peakmark": (0, 1, 2, 3), "fsdp2": (2, 3), "ddp": (0,), "deepspeed": (1, 2, 3)}
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"checkpointing": "full", "max_grad_norm": 0.5, "grad_accumulation": 4},
        {"checkpointing": "selective", "reduce_dtype": "fp32"},
        {"offload_optimizer": True},
    )
    found = []
    for (engine, stages), precision, more, ranks in product(
        engines.items(), ("mixed", "bf16", "fp32", "autocast"), changes, (1, 16)
    ):
        for stage in stages:
            try:
                found.append(trained(engine, stage, ranks, precision=precision, **more))
            except PlanError:
                continue
    return found


PLANS = every_training_plan()


def exports(target: Target) -> list[tuple[Plan, Export]]:
    """Every plan that the target can have; the others are refused in a sentence that names it."""
    found = []
    for one in PLANS:
        try:
            found.append((one, export(one, target)))
        except PlanError as error:
            assert str(error).startswith(f"export.to is '{target}' and ")
    assert len(found) > 50
    return found


def test_deepspeeds_json_by_hand() -> None:
    found = export(
        trained("deepspeed", 3, max_grad_norm=1.0, grad_accumulation=4, micro_batch=2),
        Target.DEEPSPEED,
    )
    assert json.loads(text(found, "ds_config.json")) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
    assert "sequence_length 4096" in said(found)
    assert "optimizer adamw_fused" in said(found)


# deepspeed/runtime/config.py, precision_config.py, constants.py and zero/config.py of DeepSpeed 0.19.8.
DEEPSPEED_FIELDS = {
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "bf16": dict,
    "torch_autocast": dict,
    "communication_data_type": str,
    "zero_optimization": dict,
    "zero_allow_untested_optimizer": bool,
}
DEEPSPEED_PARTS = {
    "bf16": {"enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states"},
    "torch_autocast": {"enabled", "dtype"},
    "zero_optimization": {"stage", "offload_optimizer"},
}


def test_deepspeeds_json_has_published_fields_alone() -> None:
    for one, found in exports(Target.DEEPSPEED):
        config = json.loads(text(found, "ds_config.json"))
        assert all(isinstance(config[name], DEEPSPEED_FIELDS[name]) for name in config)
        assert all(set(config.get(name, ())) <= known for name, known in DEEPSPEED_PARTS.items())
        # bf16 master weights are supported with ZeRO stages 1 to 3 only.
        is_whole = config.get("bf16", {}).get("bf16_master_weights_and_grads", False)
        assert not (is_whole and one.parallelism.zero_stage == 0)
        if HAS_DEEPSPEED:
            from deepspeed.runtime.config import DeepSpeedConfig

            read = DeepSpeedConfig(config)
            assert read.zero_optimization_stage == one.parallelism.zero_stage


def test_accelerate_reads_every_yaml(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.utils import FullyShardedDataParallelPlugin

    kinds = set()
    for one, found in exports(Target.ACCELERATE):
        path = tmp_path / "accelerate.yaml"
        path.write_text(text(found, path.name))
        read = config_args.load_config_from_file(str(path))
        kinds.add(read.distributed_type.value)
        assert read.num_processes == one.parallelism.world_size
        assert read.num_machines == -(-one.parallelism.world_size // 8)
        if read.fsdp_config:
            options = {key.removeprefix("fsdp_"): v for key, v in read.fsdp_config.items()}
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=options["version"],
                reshard_after_forward=options["reshard_after_forward"],
                auto_wrap_policy=options["auto_wrap_policy"].lower(),
                activation_checkpointing=options["activation_checkpointing"],
                cpu_offload=options["offload_params"],
                state_dict_type=options["state_dict_type"],
                cpu_ram_efficient_loading=options["cpu_ram_efficient_loading"],
            )
            assert plugin.reshard_after_forward is (one.parallelism.zero_stage == 3)
    assert kinds == {"FSDP", "DEEPSPEED", "MULTI_GPU", "NO"}


def test_accelerate_points_to_deepspeeds_own_json() -> None:
    found = export(trained("deepspeed", 2), Target.ACCELERATE)
    values = yaml.safe_load(text(found, "accelerate.yaml"))
    assert values["deepspeed_config"]["deepspeed_config_file"] == "ds_config.json"
    # With a file of its own accelerate refuses to be told a precision too.
    assert "mixed_precision" not in values
    assert json.loads(text(found, "ds_config.json"))["zero_optimization"] == {"stage": 2}


# torchtitan/config/job_config.py (JobConfig, the form with TOML files).
TITAN_FIELDS = {
    "job": {"description"},
    "model": {"name", "flavor"},
    "optimizer": {"name", "implementation"},
    "training": {
        *("local_batch_size", "global_batch_size", "seq_len", "max_norm", "dtype"),
        *("mixed_precision_param", "mixed_precision_reduce"),
    },
    "parallelism": {
        *("data_parallel_replicate_degree", "data_parallel_shard_degree"),
        *("fsdp_reshard_after_forward", "tensor_parallel_degree", "pipeline_parallel_degree"),
        *("context_parallel_degree", "expert_parallel_degree"),
    },
    "activation_checkpoint": {"mode", "selective_ac_option"},
}


def test_torchtitans_toml() -> None:
    for one, found in exports(Target.TORCHTITAN):
        values = tomllib.loads(text(found, "torchtitan.toml"))
        assert all(set(values[name]) <= TITAN_FIELDS[name] for name in values)
        spread, section = values["parallelism"], values["training"]
        degrees = spread["data_parallel_replicate_degree"] * spread["data_parallel_shard_degree"]
        assert degrees == one.parallelism.world_size
        assert section["max_norm"] in (0.5, float("inf"))
        words = shlex.split(text(found, "torchtitan.sh").splitlines()[-1])
        options = dict(pairwise(words))
        assert options["--training.seq-len"] == str(section["seq_len"])
        assert options["--training.max-norm"] == str(section["max_norm"])
        assert options["--module"] == "llama3"
        # The subcommands of torchtitan 0.3.0's own parser.
        assert words[-1] == f"activation-checkpoint:{one.workload.checkpointing}"


def test_torchtitan_splits_and_counts_its_batch() -> None:
    spread = {
        "engine": "fsdp2",
        "zero_stage": 3,
        "world_size": 4,
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "pipeline_parallel": 2,
    }
    one = plan(
        workload={"micro_batch": 2, "grad_accumulation": 4, "attention": "sdpa"}, parallelism=spread
    )
    found = export(one, Target.TORCHTITAN)
    values = tomllib.loads(text(found, "torchtitan.toml"))
    assert values["training"]["global_batch_size"] == 2 * 4 * 4
    assert values["parallelism"]["tensor_parallel_degree"] == 2
    assert values["parallelism"]["pipeline_parallel_degree"] == 2
    # 4 x 2 x 2 GPUs on nodes of 8.
    assert "--nnodes=2 --nproc-per-node=8" in text(found, "torchtitan.sh")


def torchrun_arguments(words: list[str]) -> Any:
    from torch.distributed.run import get_args_parser

    assert words[0] == "torchrun"
    return get_args_parser().parse_args(words[1:])


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (8, 1), (12, 2), (64, 8)])
def test_torchrun_starts_as_many_processes_as_the_plan_has_ranks(ranks: int, nodes: int) -> None:
    found = export(trained(ranks=ranks), Target.TORCHRUN, EVIL)
    line = text(found, "train.sh").splitlines()[-1].removeprefix("exec ")
    read = torchrun_arguments(shlex.split(line))
    each = int(read.nproc_per_node)
    assert each * int(read.nnodes.split(":")[0]) == ranks
    assert int(read.nnodes.split(":")[0]) == nodes
    assert read.training_script == EVIL


def test_slurm_runs_what_is_written_and_nothing_else(tmp_path: Path) -> None:
    found = export(trained(ranks=16, expandable_segments=True), Target.SBATCH, EVIL)
    script = tmp_path / "train.sbatch"
    script.write_text(text(found, script.name))
    for name, body in {
        "srun": 'printf "%s\\0" "$@" > "$OUT"; printf "%s" "$PYTORCH_CUDA_ALLOC_CONF" > "$OUT.env"',
        "scontrol": "printf 'node7\\nnode8\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "out"),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    subprocess.run(["bash", str(script)], check=True, env=environment, cwd=tmp_path)
    read = torchrun_arguments((tmp_path / "out").read_text().rstrip("\0").split("\0"))
    assert (read.nnodes, read.nproc_per_node) == ("2", "8")
    assert read.rdzv_endpoint == "node7:29500"
    assert read.training_script == EVIL
    assert not (tmp_path / "owned").exists()
    assert (tmp_path / "out.env").read_text() == "expandable_segments:True"
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    # sbatch(1): all four take =value.
    assert [line.split("=")[0] for line in options] == [
        f"#SBATCH --{name}" for name in ("job-name", "nodes", "ntasks-per-node", "gpus-per-node")
    ]


def test_fsdp2s_file_shards_and_steps_a_model(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from transformers import LlamaConfig, LlamaForCausalLM

    found = export(
        trained(
            stage=2, precision="fp32", checkpointing="full", max_grad_norm=0.1, attention="sdpa"
        ),
        Target.FSDP2,
    )
    path = tmp_path / "shard.py"
    path.write_text(text(found, path.name))
    made = runpy.run_path(str(path))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
        made["shard"](model, "cpu")
        optimizer = made["make_optimizer"](model, 1e-2)
        before = model.model.layers[0].mlp.up_proj.weight.full_tensor().clone()
        tokens = torch.arange(8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        made["clip_gradients"](model)
        norms = [p.grad.full_tensor().norm() for p in model.parameters()]
        assert torch.stack(norms).norm() == pytest.approx(0.1, rel=1e-3)
        optimizer.step()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert not torch.equal(before, model.model.layers[0].mlp.up_proj.weight.full_tensor())
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    finally:
        dist.destroy_process_group()


# vllm/engine/arg_utils.py, and CacheDType of vllm/config/cache.py.
VLLM_OPTIONS = {
    *("--dtype", "--quantization", "--kv-cache-dtype", "--max-model-len", "--max-num-seqs"),
    *("--max-num-batched-tokens", "--gpu-memory-utilization", "--data-parallel-size"),
}
VLLM_CHOICES = {
    "--dtype": {"bfloat16", "float16", "float32"},
    "--kv-cache-dtype": {"bfloat16", "float16", "fp8", "int8_per_token_head"},
    "--quantization": {"fp8"},
}


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "fp8", "int8"])
@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp32", "fp8", "int8", "int4"])
def test_vllms_arguments(weights: str, kv_dtype: str) -> None:
    serving = {"weights_dtype": weights, "kv_dtype": kv_dtype, "sequences": 4096}
    one = plan("serve", workload=serving, parallelism={"world_size": 2})
    found = export(one, Target.VLLM)
    words = shlex.split(text(found, "serve.sh").splitlines()[-1])
    assert words[:4] == ["exec", "vllm", "serve", "meta-llama/Llama-3.1-8B"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert set(options) <= VLLM_OPTIONS
    assert all(options[name] in known for name, known in VLLM_CHOICES.items() if name in options)
    assert options["--max-num-seqs"] == options["--max-num-batched-tokens"] == "4096"
    assert options["--data-parallel-size"] == "2"
    if weights in ("int8", "int4"):
        assert f"weights_dtype {weights}" in said(found)
    if HAS_VLLM:
        read = read_by_vllm(words[3:])
        assert (read.max_num_seqs, read.max_num_batched_tokens) == (4096, 4096)
        assert read.kv_cache_dtype == options["--kv-cache-dtype"]
        assert (read.dtype, read.quantization) == (
            options["--dtype"],
            options.get("--quantization"),
        )
        assert read.data_parallel_size == 2


def read_by_vllm(words: list[str]) -> Any:
    """Return what vLLM's own parser makes of a model and arguments, on a machine without a GPU too."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    # As it is imported vLLM asks which device it is for; the arguments are the same for all.
    vllm.platforms._current_platform = CpuPlatform()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", *words]))


CHANGES: dict[str, Any] = {
    "sequence_length": 2048,
    "micro_batch": 3,
    "grad_accumulation": 2,
    "optimizer": "sgd",
    "precision": "bf16",
    "attention": "eager",
    "checkpointing": "full",
    "loss": "chunked",
    "lora_rank": 8,
    "frozen_layers": 2,
    "packed": True,
    "expandable_segments": True,
    "offload_optimizer": True,
    "reduce_dtype": "bf16",
    "max_grad_norm": 0.25,
}


@pytest.mark.parametrize("target", TRAINING)
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_no_setting_is_dropped_in_silence(target: Target, name: str) -> None:
    """A changed setting changes a file or is named in a note."""
    engine = "peakmark" if name in ("lora_rank", "frozen_layers", "offload_optimizer") else "fsdp2"
    more = {"precision": "bf16"} if name == "lora_rank" else {}
    try:
        changed = trained(engine, **{**more, name: CHANGES[name]})
        found = export(changed, target)
    except PlanError as error:
        assert name in str(error) or str(CHANGES[name]) in str(error)
        return
    before = export(trained(engine, **more), target)
    assert said(found) != said(before)


@pytest.mark.parametrize("target", [t for t in TRAINING if t != Target.DEEPSPEED])
def test_an_optimizer_that_no_other_program_has_is_told_with_one_like_it(target: Target) -> None:
    found = said(export(trained("peakmark", optimizer="adamw_triton"), target))
    assert "adamw_triton (Peakmark's own kernel; torch.optim.AdamW(fused=True) elsewhere)" in found


def test_what_a_target_cannot_do_is_refused_with_what_to_do_instead() -> None:
    refused = {
        Target.FSDP2: (trained("peakmark", 1), "take one of them, or export to deepspeed"),
        Target.TORCHTITAN: (trained("peakmark", 1), "export to deepspeed"),
        Target.ACCELERATE: (trained("peakmark", 0), "take autocast, bf16 or fp32"),
        Target.VLLM: (trained(), "export it to deepspeed, accelerate"),
    }
    for target, (one, words) in refused.items():
        with pytest.raises(PlanError, match=words):
            export(one, target)
    spread = {"engine": "peakmark", "zero_stage": 3, "world_size": 2, "tensor_parallel": 2}
    for target in (Target.DEEPSPEED, Target.ACCELERATE, Target.FSDP2):
        with pytest.raises(PlanError, match=r"tensor_parallel is 2.*export to torchtitan"):
            export(plan(parallelism=spread), target)
    for target in TRAINING:
        with pytest.raises(PlanError, match="export a serving plan to vllm"):
            export(plan("serve"), target)
    own = parse_plan(
        {
            **trained().to_dict(),
            "model": {**trained().model_source, "overrides": {"num_hidden_layers": 2}},
        }
    )
    with pytest.raises(PlanError, match="torchtitan has no configuration of it"):
        export(own, Target.TORCHTITAN)


@pytest.mark.parametrize("script", ["", " ", "-c", "a\nb", "x" * 501, "a\x00b"])
def test_a_script_that_no_file_can_be_named_is_refused(script: str) -> None:
    for target in (Target.TORCHRUN, Target.SBATCH):
        with pytest.raises(PlanError, match=r"export\.script"):
            export(trained(), target, script)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(PlanError, match=r"export\.to is 'megatron': it must be one of deepspeed"):
        parse_target("megatron")


def test_settings_and_hints_name_fields_of_a_plan() -> None:
    fields = {*trained().workload.__dataclass_fields__}
    assert set(HINTS) <= fields
    assert settings(trained())["world_size"] == 8
    assert "lora_targets" not in settings(trained())
    assert set(settings(plan("serve"))) == {
        *("context_length", "sequences", "weights_dtype", "kv_dtype", "utilization", "world_size")
    }


def test_toml_is_read_back() -> None:
    values = {"a": {"text": 'q" \\ é\n', "on": True, "number": 2, "part": 0.5, "all": float("inf")}}
    assert tomllib.loads(toml_text(values, "head\nline")) == values
