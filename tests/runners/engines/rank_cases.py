"""One rank of the tests of torch's engines: trains the tiny models of the ZeRO engine's tests.

Run as `python rank_cases.py RANK WORLD_SIZE OUT_DIR`; test_ddp.py starts it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "zero"))
from rank_main import CONFIGS, Case, train

from runners.zero.collectives import ProcessGroupCollectives

ENGINES = {"ddp": 0, "zero_redundancy": 1}


def all_cases() -> dict[str, tuple[Case, dict[str, bool]]]:
    """Every case by name, with what its engine is told besides."""
    cases = {}
    for model in CONFIGS:
        for engine, stage in {"peakmark": 0, **ENGINES}.items():
            name = f"{model}/{engine}"
            cases[name] = (Case(model, stage, engine=engine), {})
            options = {"accumulation": 2, "checkpointing": True, "engine": engine}
            cases[f"{name}/each"] = (Case(model, stage, **options), {})
            if engine != "peakmark":
                last_only = {"sync_each_micro_batch": False}
                cases[f"{name}/last"] = (Case(model, stage, **options), last_only)
            for optimizer, precision in (("adafactor", "fp32"), ("adamw_foreach", "bf16")):
                case = Case(model, stage, optimizer, precision, engine=engine)
                cases[f"{name}/{optimizer}/{precision}"] = (case, {})
    return cases


def main(rank: int, world_size: int, out: Path) -> None:
    """Run every case and save this rank's results."""
    store = dist.FileStore(str(out / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    collectives = ProcessGroupCollectives()
    results = {
        name: train(case, collectives, **options) for name, (case, options) in all_cases().items()
    }
    torch.save(results, out / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
