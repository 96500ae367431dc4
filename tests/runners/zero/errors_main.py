"""One rank of the tests of the engine's errors; run as `errors_main.py CASE RANK WORLD_SIZE DIR`."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import rank_main
import torch
import torch.distributed as dist

from runners.zero.collectives import ProcessGroupCollectives
from runners.zero.engine import ZeroEngine

CPU = torch.device("cpu")


def _engine(model: torch.nn.Module, **options: object) -> ZeroEngine:
    chosen = {"stage": 3, "optimizer": "sgd", "precision": "fp32", "lr": 0.1} | options
    return ZeroEngine(model, device=CPU, collectives=ProcessGroupCollectives(), **chosen)


def _backward(engine: ZeroEngine, rank: int) -> None:
    tokens = rank_main.batch(rank, 0, 0)
    loss = engine.module(input_ids=tokens, labels=tokens, use_cache=False).loss
    engine.backward(loss, last_micro_batch=True)


def _unequal_model(rank: int) -> None:
    model = rank_main.build_model("llama")
    if rank == 1:
        model.model.norm.weight.requires_grad_(False)
    _engine(model)


def _unequal_option(rank: int) -> None:
    _engine(rank_main.build_model("llama"), stage=3 if rank else 2)


def _lost(rank: int) -> None:
    engine = _engine(rank_main.build_model("llama"))
    if rank == 1:
        os._exit(3)
    _backward(engine, rank)


def _silent(rank: int) -> None:
    engine = _engine(rank_main.build_model("llama"))
    if rank == 1:
        signal.pause()  # until the test kills it
    _backward(engine, rank)


def _not_finite(rank: int) -> None:
    engine = _engine(rank_main.build_model("llama"), checks_gradients=True)
    if rank == 1:
        norm = engine.module.model.norm
        norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    _backward(engine, rank)
    engine.step()


CASES = {
    "unequal_model": _unequal_model,
    "unequal_option": _unequal_option,
    "lost": _lost,
    "silent": _silent,
    "not_finite": _not_finite,
}


def main(case: str, rank: int, world_size: int, out: Path) -> None:
    """Run a case and write what it raised."""
    store = dist.FileStore(str(out / "store"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=10)
    )
    try:
        CASES[case](rank)
        said = "nothing"
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    (out / f"rank{rank}.txt").write_text(said)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
