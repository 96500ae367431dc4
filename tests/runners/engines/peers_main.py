"""Ranks that train one model under our engine, DeepSpeed and FSDP2, for test_peers_alike.py.

Run as `python peers_main.py OUT_DIR DEVICE BACKEND WORLD_SIZE...`, DEVICE as for numerics_main.py, whose
models and batches these are. Rank 0 writes OUT_DIR/WORLD_SIZE.jsonl: one line for each training, held to
our engine's stage 0. All begin with numbers that bf16 holds: our engine and DeepSpeed round to it, FSDP2
keeps fp32 numbers as they are.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parents[1] / "zero"))
import numerics_main
from numerics_main import BOUND_STEPS, LR, STEPS, Case, exact_gradients, fork_ranks, loss_of

from planner.workload import Engine
from runners.jobs.train_step import engine_class
from runners.zero.collectives import ProcessGroupCollectives

HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
# Without clipping: ours scales gradients in the dtype they were reduced in, DeepSpeed in fp32.
CASES = (
    Case("llama", precision="mixed"),
    Case("gpt2", precision="mixed", checkpointing=True),
)
# Two ranks sum in one order; more are held to a bound, which one model is enough for.
EXACT_RANKS, BOUNDED = 2, CASES[1:]


@dataclass(frozen=True)
class Peer:
    """An engine at a stage; FSDP2 reduces gradients in fp32, the others in bf16 as they are made."""

    engine: str
    stage: int
    reduce_dtype: str = "auto"

    @property
    def reference(self) -> Peer:
        """Our engine's stage 0 with gradients reduced as the peer reduces them."""
        return Peer("peakmark", 0, "fp32" if self.engine == "fsdp2" else self.reduce_dtype)


PEERS = (
    *(Peer("peakmark", stage) for stage in (1, 2, 3)),
    *(Peer("deepspeed", stage) for stage in (1, 2, 3)),
    *(Peer("peakmark", stage, "fp32") for stage in (1, 2, 3)),
    *(Peer("fsdp2", stage) for stage in (2, 3)),
)


def peers() -> list[Peer]:
    """Return the engines that are installed."""
    return [peer for peer in PEERS if peer.engine != "deepspeed" or HAS_DEEPSPEED]


def build_model(case: Case, device: torch.device) -> nn.Module:
    """Return the tiny model of numerics_main, its values rounded to bf16."""
    model = numerics_main.build_model(case, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def build_engine(
    peer: Peer, case: Case, collectives: ProcessGroupCollectives, device: torch.device
) -> Any:
    """Return the peer's engine around a new model."""
    options: dict[str, Any] = {}
    if peer.reduce_dtype != "auto":
        options["reduce_dtype"] = peer.reduce_dtype
    return engine_class(Engine(peer.engine))(
        build_model(case, device),
        stage=peer.stage,
        # DTensors are stepped by a loop; all variants compute the same value by value.
        optimizer="adamw_loop",
        precision=case.precision,
        lr=LR,
        device=device,
        collectives=collectives,
        **options,
    )


def reduced_gradients(
    engine: Any, peer: Peer, collectives: ProcessGroupCollectives
) -> dict[str, Tensor]:
    """Return what the step is about to clip and apply, whole, by the parameter's name."""
    if peer.engine == "peakmark":
        case = Case("", stage=peer.stage)
        return numerics_main.Training(case, engine, collectives).gradients()
    whole: Callable[[nn.Parameter], Any] = _whole_of_dtensor
    model = engine.module
    if peer.engine == "deepspeed":
        from deepspeed.utils import safe_get_full_grad

        whole, model = safe_get_full_grad, engine.module.module
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def _whole_of_dtensor(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor()


def train(
    peer: Peer, case: Case, collectives: ProcessGroupCollectives, device: torch.device
) -> dict[str, Any]:
    """Train ten steps; return all ranks' losses, and this rank's gradients and parameters."""
    engine = build_engine(peer, case, collectives, device)
    losses, gradients = [], []
    for step in range(STEPS):
        loss = loss_of(engine.module, case, collectives.rank, step, 0)
        engine.backward(loss, last_micro_batch=True)
        losses.append(loss.item())
        gradients.append(reduced_gradients(engine, peer, collectives))
        engine.step()
    everyones: list[list[float]] = [[] for _ in range(collectives.world_size)]
    dist.all_gather_object(everyones, losses)
    parameters = engine.full_parameters()
    return {"losses": everyones, "gradients": gradients, "parameters": parameters}


def compare(found: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
    """Return losses, and whether everything equals the reference, bit by bit."""
    pairs = [
        (mine[name].float(), other.float())
        for mine, theirs in zip(found["gradients"], reference["gradients"], strict=True)
        for name, other in theirs.items()
    ]
    mine, theirs = found["parameters"], reference["parameters"]
    assert mine.keys() == theirs.keys()
    return {
        "losses": found["losses"],
        "losses_equal": found["losses"] == reference["losses"],
        "gradients_worst": max((a - b).abs().max().item() for a, b in pairs),
        # FSDP2's are the fp32 masters that the others compute with rounded to bf16.
        "parameters_equal": all(
            torch.equal(mine[name].bfloat16(), theirs[name].bfloat16()) for name in theirs
        ),
    }


def share_of_bound(
    peer: Peer, case: Case, collectives: ProcessGroupCollectives, device: torch.device
) -> float:
    """Return max |g - exact| / bound of the reduced gradients: at most 1, over any number of ranks.

    As numerics_main.worst_share_of_bound, of one micro-batch: N - 1 sums over ranks and one
    division by N, of unit roundoff 2^-8 in bf16, and in fp32, in which FSDP2 reduces, of 2^-24.
    """
    engine = build_engine(peer, case, collectives, device)
    plain, worst = build_model(case, device).to(torch.bfloat16), 0.0
    in_fp32 = "fp32" in (peer.reduce_dtype, peer.reference.reduce_dtype)
    roundings = collectives.world_size * (2**-24 if in_fp32 else 2**-8)
    gamma = roundings / (1 - roundings)
    for step in range(BOUND_STEPS):
        plain.load_state_dict(engine.full_parameters(), strict=False)
        exact, size = exact_gradients(plain, case, collectives, step)
        loss = loss_of(engine.module, case, collectives.rank, step, 0)
        engine.backward(loss, last_micro_batch=True)
        for name, gradient in reduced_gradients(engine, peer, collectives).items():
            error, bound = (gradient.double() - exact[name]).abs(), gamma * size[name]
            assert torch.all(error[bound == 0] == 0)
            worst = max(worst, (error / bound.clamp_min(1e-300)).max().item())
        engine.step()
    return worst


def run_world(rank: int, world_size: int, out: Path, device_name: str, backend: str) -> None:
    """Play one rank of a world."""
    device = torch.device(device_name.replace("rank", str(rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    store = dist.FileStore(str(out / f"store{world_size}"), world_size)
    place = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=60)}
    dist.init_process_group(backend, store=store, **place)
    collectives, path = ProcessGroupCollectives(), out / f"{world_size}.jsonl"
    if rank == 0:
        path.write_text(json.dumps({"environment": environment(device, backend)}) + "\n")
    for case in CASES if world_size <= EXACT_RANKS else BOUNDED:
        references: dict[Peer, dict[str, Any]] = {}
        for peer in peers():
            line = {"check": "alike", "ranks": world_size, "steps": STEPS, **asdict(case)}
            line |= asdict(peer)
            if world_size > EXACT_RANKS:
                line["share"] = share_of_bound(peer, case, collectives, device)
            else:
                base = peer.reference
                if base not in references:
                    references[base] = train(base, case, collectives, device)
                line |= compare(train(peer, case, collectives, device), references[base])
            everyones: list[Any] = [None] * world_size
            dist.all_gather_object(everyones, line)
            if rank == 0:
                with path.open("a") as file:
                    file.write(json.dumps(_of_all(everyones)) + "\n")
    dist.destroy_process_group()


def environment(device: torch.device, backend: str) -> dict[str, Any]:
    """Return what the first line of a file in recorded/equality says."""
    found = {
        "ranks": dist.get_world_size(),
        "torch": torch.__version__,
        "gpu": None,
        "world": "cpu",
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["world"] = "nccl" if "nccl" in backend else "shared"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if HAS_DEEPSPEED:
        found["deepspeed"] = version("deepspeed")
    return found


def _of_all(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a training's line: equal where every rank's is, the worst of the others."""
    line = dict(lines[0])
    for name in ("losses_equal", "parameters_equal"):
        if name in line:
            line[name] = all(one[name] for one in lines)
    for name in ("gradients_worst", "share"):
        if name in line:
            line[name] = max(one[name] for one in lines)
    return line


def main(out: Path, device: str, backend: str, world_sizes: list[int]) -> int:
    """Fork the ranks of each world in turn; return 1 where one failed."""
    for number in world_sizes:
        place = (number, out, device, backend)
        if not fork_ranks(number, lambda rank, place=place: run_world(rank, *place)):
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [int(n) for n in sys.argv[4:]]))
