"""One rank of the engine's tests: trains tiny models at every stage, saves what came out.

Run as `python rank_main.py RANK WORLD_SIZE OUT_DIR`; tests/runners/zero/test_engine.py starts it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from runners.engines.ddp import DdpEngine
from runners.engines.fsdp2 import Fsdp2Engine
from runners.engines.precision import forward_context
from runners.engines.zero_redundancy import ZeroRedundancyEngine
from runners.zero.collectives import Collectives, ProcessGroupCollectives
from runners.zero.engine import ZeroEngine

STEPS = 5
LR = 1e-2
CPU = torch.device("cpu")
ENGINES = {
    "peakmark": ZeroEngine,
    "fsdp2": Fsdp2Engine,
    "ddp": DdpEngine,
    "zero_redundancy": ZeroRedundancyEngine,
}
# Widths such that the groups' numels leave remainders: buffers are padded at 4 ranks.
CONFIGS = {
    "llama": {
        "hidden_size": 10,
        "intermediate_size": 23,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 61,
        "max_position_embeddings": 32,
    },
    "gpt2": {
        "n_embd": 10,
        "n_layer": 2,
        "n_head": 2,
        "n_inner": 13,
        "vocab_size": 61,
        "n_positions": 29,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


@dataclass(frozen=True)
class Case:
    model: str
    stage: int
    optimizer: str = "adamw_foreach"
    precision: str = "fp32"
    accumulation: int = 1
    checkpointing: bool = False
    engine: str = "peakmark"
    sync: bool = True


def all_cases(world_size: int) -> list[Case]:
    """Every combination the tests read; FSDP2 and the precisions with two ranks only."""
    cases = []
    for model in CONFIGS:
        for stage in range(4):
            cases.append(Case(model, stage))
            cases.append(Case(model, stage, accumulation=2, checkpointing=True))
            cases.append(Case(model, stage, optimizer="sgd", checkpointing=True))
            if world_size == 2:
                cases.append(Case(model, stage, precision="mixed", optimizer="adamw_loop"))
                cases.append(Case(model, stage, precision="bf16", optimizer="adamw_fused"))
                cases.append(Case(model, stage, precision="autocast"))
        if world_size == 2:
            for stage in (2, 3):
                cases.append(Case(model, stage, accumulation=3, sync=False))
                cases.append(Case(model, stage, accumulation=3, sync=False, engine="fsdp2"))
                cases.append(Case(model, stage, engine="fsdp2"))
                cases.append(Case(model, stage, engine="fsdp2", accumulation=2, checkpointing=True))
    return cases


def build_model(name: str, *, device: str = "cpu") -> torch.nn.Module:
    """Return a tiny model with reproducible weights."""
    config = AutoConfig.for_model(name, **CONFIGS[name])
    torch.manual_seed(1)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.train()


def batch(rank: int, step: int, micro_batch: int) -> torch.Tensor:
    """Return tokens [2, 9] that depend on rank, step and micro-batch."""
    seed = 10_000 * rank + 100 * step + micro_batch
    return torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(seed))


def train(case: Case, collectives: Collectives, **options: object) -> dict[str, object]:
    """Train STEPS steps; return parameters, state bytes before the last step, its traffic."""
    model = build_model(case.model)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = ENGINES[case.engine](
        model,
        stage=case.stage,
        optimizer=case.optimizer,
        precision=case.precision,
        lr=LR,
        device=CPU,
        collectives=collectives,
        **({} if case.sync else {"sync_each_micro_batch": False}),
        **options,
    )
    losses = []
    for step in range(STEPS):
        collectives.reset_traffic()
        for micro_batch in range(case.accumulation):
            tokens = batch(collectives.rank, step, micro_batch)
            with forward_context(case.precision, CPU):
                loss = engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
            last = micro_batch == case.accumulation - 1
            engine.backward(loss / case.accumulation, last_micro_batch=last)
            losses.append(loss.item())
        state = engine.state_bytes()
        engine.step()
    traffic = collectives.traffic()
    parameters = engine.full_parameters()
    return {"parameters": parameters, "state": state, "traffic": traffic, "losses": losses}


def main(rank: int, world_size: int, out: Path) -> None:
    """Run every case and save this rank's results."""
    store = dist.FileStore(str(out / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    collectives = ProcessGroupCollectives()
    results = {case: train(case, collectives) for case in all_cases(world_size)}
    torch.save({repr(case): result for case, result in results.items()}, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
