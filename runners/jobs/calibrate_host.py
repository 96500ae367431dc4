"""What `calibrate` measures of the host: how long it takes to start a step's work.

Every family's smallest model (256 wide, 128 tokens) is trained for a few steps by the real engines at two
depths. Its kernels take less time than the host needs to start them, so what passes is the host's
time: a part for each layer, and the rest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from planner.config_keys import own_names
from planner.errors import PlanError
from planner.plan import Plan, parse_plan
from planner.presets import all_presets
from runners.contract import World
from runners.jobs.host_pace import measure_host_pace
from runners.jobs.train_step import Trainer, build_model
from runners.worlds import Launch, RunningWorld, open_world

DEPTHS = (3, 8)
_WARMUPS, _STEPS = 3, 7
_RANKS = 8
_PHASES = ("forward", "backward", "optimizer")
_HARDWARE = {"preset": "h200-sxm5-141gb"}  # a plan needs one; nothing here depends on it
_SIZES: Mapping[str, int] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCase:
    """What a step is made of, as far as the host's work goes."""

    family: str
    engine: str = "peakmark"
    stage: int = 0
    attention: str = "sdpa"
    precision: str = "bf16"
    checkpointing: str = "none"
    optimizer: str = "adamw_fused"
    adapters: str = ""

    @property
    def ranks(self) -> int:
        """One where nothing is sharded, else eight, of which this process plays the first."""
        return _RANKS if self.stage else 1

    def plan(self, layers: int) -> Plan:
        """The plan of a small model with that many layers."""
        workload: dict[str, Any] = {
            "micro_batch": 1,
            "sequence_length": 128,
            "precision": self.precision,
            "attention": self.attention,
            "checkpointing": self.checkpointing,
            "optimizer": self.optimizer,
        }
        if self.adapters:
            workload |= {"lora_rank": 16, "lora_targets": self.adapters}
        return parse_plan(
            {
                "job": "train",
                "model": {"config": small_config(self.family, layers)},
                "workload": workload,
                "parallelism": {
                    "engine": self.engine,
                    "zero_stage": self.stage,
                    "world_size": self.ranks,
                },
                "hardware": _HARDWARE,
            }
        )


def small_config(family: str, layers: int) -> dict[str, Any]:
    """Return the configuration of the family's first model in the fact table, made small."""
    preset = next(one for one in all_presets() if one.model_type == family)
    names = own_names(family)  # own name -> common name
    config: dict[str, Any] = {"model_type": family, **preset.hf_fields}
    heads = next(config[own] for own in config if names.get(own, own) == "num_attention_heads")
    for own, value in config.items():
        common = names.get(own, own)
        if common in ("num_hidden_layers", "num_layers"):
            config[own] = layers
        elif common == "num_key_value_heads":
            config[own] = 4 if value == heads else min(2, value)
        elif value is not None and common in _SIZES:
            config[own] = min(value, _SIZES[common])
    return config


def _family_cases() -> Iterator[HostCase]:
    families = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "opt", "falcon", "phi3", "olmo2")
    for family in (*families, "mistral", "gemma3_text", "mixtral", "qwen3_moe"):
        yield HostCase(family=family)
    yield HostCase(family="gemma2", attention="eager")
    yield HostCase(family="gpt_oss", attention="eager")
    yield from (HostCase(family=family) for family in ("deepseek_v2", "deepseek_v3"))


def host_cases(is_cuda: bool) -> list[HostCase]:
    """Return every case: families first, then what a workload chooses, then engines.

    The CPU, on which nothing is started ahead of time, gets one.
    """
    if not is_cuda:
        return [HostCase(family="llama")]
    cases = list(_family_cases())
    for family in ("llama", "qwen2", "qwen3", "gpt2"):
        cases += [
            HostCase(family=family, checkpointing="full"),
            HostCase(family=family, precision="autocast"),
            HostCase(family=family, attention="eager"),
        ]
    for stage in (0, 1, 2, 3):
        cases.append(HostCase(family="llama", stage=stage, precision="mixed"))
    cases += [
        HostCase(family="llama", engine="fsdp2", stage=2, precision="mixed"),
        HostCase(family="llama", engine="fsdp2", stage=3, precision="mixed"),
        HostCase(family="llama", stage=3, precision="mixed", checkpointing="full"),
        HostCase(family="llama", engine="fsdp2", stage=3, precision="mixed", checkpointing="full"),
        HostCase(family="llama", engine="ddp"),
        HostCase(family="llama", engine="zero_redundancy", stage=1),
    ]
    for optimizer in ("adamw_foreach", "adamw_loop", "sgd", "adafactor", "muon", "adamw_8bit"):
        cases.append(HostCase(family="llama", optimizer=optimizer))
    for adapters in ("qv", "all_linear"):
        cases.append(HostCase(family="llama", adapters=adapters))
    for stage in (1, 2, 3):
        cases.append(HostCase(family="llama", engine="deepspeed", stage=stage, precision="mixed"))
    # Last: it compiles first.
    cases.append(HostCase(family="llama", attention="triton"))
    return cases


def measure_host(device: torch.device, seed: int, ends_at: float) -> Iterator[dict[str, Any]]:
    """Yield each case with the host's seconds per phase at every depth, until the time is over.

    Each depth has the `host_pace` of its moment, which tells a slow one from a case that takes long.
    A case that this machine cannot run is yielded with its reason.
    """
    for case in host_cases(device.type == "cuda"):
        if time.monotonic() > ends_at:
            return
        row: dict[str, Any] = asdict(case)
        try:
            depths = [{"layers": n, **_times_s(case, n, device, seed)} for n in DEPTHS]
            yield row | {"depths": depths}
        except (ImportError, PlanError, RuntimeError, ValueError) as error:
            yield row | {"reason": str(error).splitlines()[0][:200]}


def _times_s(case: HostCase, layers: int, device: torch.device, seed: int) -> dict[str, Any]:
    plan = case.plan(layers)
    world = World.SOLO if device.type == "cuda" or case.ranks > 1 else World.CPU
    with open_world(
        world, world_size=case.ranks, rank=0, launch=Launch(), device=device
    ) as running:
        found = _phase_times_s(plan, running, seed)
    gc.collect()
    return found


def _phase_times_s(plan: Plan, world: RunningWorld, seed: int) -> dict[str, Any]:
    trainer = Trainer(plan, build_model(plan), world, seed)
    seen: dict[str, list[float]] = {f"{name}_s": [] for name in _PHASES}
    marks: list[float] = []
    trainer.meter.on_phase = lambda name: marks.append(time.perf_counter())
    for index in range(_WARMUPS + _STEPS):
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        marks.clear()
        trainer.step()
        marks.append(time.perf_counter())
        if index >= _WARMUPS:
            for name, start_s, end_s in zip(_PHASES, marks, marks[1:], strict=False):
                seen[f"{name}_s"].append(end_s - start_s)
    medians = {name: median(times) for name, times in seen.items()}
    return medians | {"host_pace": measure_host_pace(world.device)}
