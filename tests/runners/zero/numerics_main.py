"""Worlds of two, three and four ranks that train alike at every stage, for test_numerics.py.

Run as `python numerics_main.py OUT_DIR DEVICE BACKEND WORLD_SIZE...`: imports once and forks the
ranks of one world after the other. DEVICE is cpu, cuda (all ranks on one GPU) or cuda:rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from runners.engines.ddp import DdpEngine
from runners.zero.collectives import ProcessGroupCollectives
from runners.zero.engine import ZeroEngine
from runners.zero.saving import load_checkpoint, save_checkpoint

STEPS = 10
BOUND_STEPS = 2
SAVED_STEP = 5
LR = 1e-2
DDP = 9
# Widths such that the groups' numels leave remainders: buffers are padded at 2, 3 and 4 ranks.
CONFIGS: dict[str, dict[str, Any]] = {
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
# On a GPU the order of a product's sums depends on whether its operands are aligned to 16 bytes. In
# DDP all parameters are; in a flat buffer they are where all sizes are multiples of eight elements.
ALIGNED: dict[str, dict[str, Any]] = {
    "llama": {**CONFIGS["llama"], "hidden_size": 16, "intermediate_size": 24, "head_dim": 8},
    "gpt2": {**CONFIGS["gpt2"], "n_embd": 16, "n_inner": 24, "n_positions": 32},
}


@dataclass(frozen=True)
class Case:
    """One training; gpt2's head is tied to its embedding. Stage DDP is torch's own engine."""

    model: str
    stage: int = 0
    precision: str = "fp32"
    accumulation: int = 1
    sync: bool = True
    checkpointing: bool = False
    lora: bool = False
    max_grad_norm: float = 0.0

    def at(self, stage: int) -> Case:
        """Return the same training at another stage."""
        return replace(self, stage=stage)


TIED = Case("gpt2", accumulation=2, sync=False, checkpointing=True)
ALIKE = {
    1: (),
    2: (Case("llama"), Case("llama", precision="mixed", checkpointing=True)),
    3: (TIED, Case("gpt2", precision="bf16")),
    4: (Case("llama", lora=True, checkpointing=True),),
}
BOUNDED = (
    Case("gpt2", accumulation=2),
    Case("llama", accumulation=2, precision="mixed"),
)
BOUNDED_WORLDS = (3,)
CLIPPED = {
    2: (Case("llama", max_grad_norm=0.1),),
    3: (Case("gpt2", accumulation=2, sync=False, checkpointing=True, max_grad_norm=0.1),),
}
# What two ranks go on with at stage 1 and save, three load at stage 3.
GROWS = Case("gpt2")
SAVED = (GROWS, Case("llama", precision="mixed"), Case("llama", lora=True))


def stages_loaded(world_size: int) -> tuple[int, ...]:
    """Stages that load what the world of twice as many ranks, or of four, saved."""
    return {1: (1,), 2: (1, 0), 3: (2,)}[world_size]


def engines_of(case: Case) -> list[Case]:
    """The stages of a case, and DDP where it has the precision."""
    stages = (0, 1, 2, 3) if case.precision == "mixed" else (0, 1, 2, 3, DDP)
    return [case.at(stage) for stage in stages]


def sum_in_pairs(parts: list[Tensor]) -> Tensor:
    """Add neighbours, then their sums: (0 + 1) + (2 + 3), so that two ranks can stand for four."""
    while len(parts) > 1:
        pairs = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        parts = [pair for pair in pairs if isinstance(pair, Tensor)]
    return parts[0]


class OrderedCollectives(ProcessGroupCollectives):
    """Reductions in one order of sums, whatever the buffers are: nothing else may differ then."""

    def _ordered(self, tensor: Tensor, op: Any) -> Tensor:
        parts = tensor.new_empty(self.world_size, tensor.numel())
        self._all_gather(parts.view(-1), tensor.reshape(-1))
        total = sum_in_pairs(list(parts)).view_as(tensor)
        return total / self.world_size if op == dist.ReduceOp.AVG else total

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        tensor.copy_(self._ordered(tensor, op))

    def _reduce_scatter(self, output: Tensor, full: Tensor, op: Any) -> None:
        output.copy_(self._ordered(full, op).view(self.world_size, -1)[self.rank])


def build_model(case: Case, device: torch.device) -> nn.Module:
    """Return a tiny model with reproducible weights, adapters with a part in the output too."""
    sizes = (ALIGNED if device.type == "cuda" else CONFIGS)[case.model]
    config = AutoConfig.for_model(case.model, **sizes)
    torch.manual_seed(1)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if case.lora:
        rank = 8 if device.type == "cuda" else 3
        adapter = LoraConfig(r=rank, lora_alpha=6, target_modules=["q_proj", "down_proj"])
        inject_adapter_in_model(adapter, model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
            if "lora_B" in name:
                nn.init.normal_(parameter.data, std=0.1)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train().to(device)


def batch(step: int, index: int, device: torch.device) -> Tensor:
    """Return tokens [2, 9] of the step's micro-batch `index`, over all ranks."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, 61, (2, 9), generator=generator).to(device)


def loss_of(model: nn.Module, case: Case, rank: int, step: int, micro: int) -> Tensor:
    """Return the loss of a rank's micro-batch; ranks take neighbouring micro-batches."""
    device = next(model.parameters()).device
    tokens = batch(step, rank * case.accumulation + micro, device)
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


@dataclass
class Training:
    """A case with its engine, on this rank."""

    case: Case
    engine: Any
    collectives: ProcessGroupCollectives

    @classmethod
    def begin(
        cls, case: Case, collectives: ProcessGroupCollectives, device: torch.device
    ) -> Training:
        """Build the model and its engine."""
        is_ddp = case.stage == DDP
        model = build_model(case, device)
        engine = (DdpEngine if is_ddp else ZeroEngine)(
            model,
            stage=0 if is_ddp else case.stage,
            optimizer="adamw_foreach",
            precision=case.precision,
            lr=LR,
            device=device,
            collectives=collectives,
            sync_each_micro_batch=case.sync,
            max_grad_norm=case.max_grad_norm,
        )
        if is_ddp:
            # DDP reads a hook's annotations, which must not be text: a lambda has none.
            hook = lambda state, bucket: average_bucket(state, bucket.buffer())  # noqa: E731
            engine.module.register_comm_hook(collectives, hook)
        return cls(case, engine, collectives)

    def backward(self, step: int) -> list[float]:
        """Run the micro-batches of a step; return their losses."""
        losses, number = [], self.case.accumulation
        for micro in range(number):
            is_last = micro == number - 1
            loss = loss_of(self.engine.module, self.case, self.collectives.rank, step, micro)
            self.engine.backward(loss / number, last_micro_batch=is_last)
            losses.append(loss.item())
        return losses

    def gradients(self) -> dict[str, Tensor]:
        """Return what the step is about to apply, whole and reduced."""
        if isinstance(self.engine, DdpEngine):
            named = self.engine.module.module.named_parameters()
            return {name: p.grad.clone() for name, p in named if p.requires_grad}
        found: dict[str, Tensor] = {}
        for group in self.engine.trained:
            full = group.gradient
            if self.case.stage:
                own = group.own_gradient()
                full = own.new_empty(group.layout.padded_numel)
                with self.collectives.uncounted():
                    self.collectives.all_gather(full, own)
            slots = zip(group.layout.slots, group.layout.views(full), strict=True)
            found.update((slot.name, view.clone()) for slot, view in slots)
        return found

    def note_clipped(self) -> list[dict[str, Tensor]]:
        """Return a list that will hold, for each step, what the optimizer is given."""
        noted: list[dict[str, Tensor]] = []
        if isinstance(self.engine, DdpEngine):
            note = lambda *_: noted.append(self.gradients())  # noqa: E731
            self.engine._optimizers[0].register_step_pre_hook(note)
            return noted
        clip = self.engine._clipper.clip

        def clip_and_note(parts: list[Tensor]) -> None:
            clip(parts)
            noted.append(self.gradients())

        self.engine._clipper.clip = clip_and_note
        return noted

    def run(self, first: int, last: int) -> dict[str, Any]:
        """Train steps `first` to `last` - 1; return losses, gradients and parameters."""
        losses, gradients = [], []
        for step in range(first, last):
            losses += self.backward(step)
            gradients.append(self.gradients())
            self.engine.step()
        parameters = self.engine.full_parameters()
        return {"losses": losses, "gradients": gradients, "parameters": parameters}


def average_bucket(
    collectives: ProcessGroupCollectives, buffer: Tensor
) -> torch.futures.Future[Tensor]:
    """Reduce one of DDP's buckets in the order of `collectives`."""
    collectives.all_reduce(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer.div_(collectives.world_size))
    return future


def worst_share_of_bound(case: Case, device: torch.device) -> float:
    """Return max |g - exact| / bound of the reduced gradients over a few steps: at most 1.

    Exact is the sum in float64 of what each micro-batch of each rank gives at the same parameters.
    Each such term is rounded when it is added over ranks (N - 1 times), divided (once), and added
    over micro-batches (A - 1 times), in any order: N + A - 1 roundings of relative size u each,
    so |g - exact| <= gamma * sum|terms| / N with gamma = k u / (1 - k u), k = N + A - 1
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). u is 2^-24 in fp32 and
    2^-8 in bf16.
    """
    collectives = ProcessGroupCollectives()
    training = Training.begin(case, collectives, device)
    ranks, worst = collectives.world_size, 0.0
    roundings = (ranks + case.accumulation - 1) * (2**-24 if case.precision == "fp32" else 2**-8)
    gamma = roundings / (1 - roundings)
    plain = build_model(case, device).to(dtype=next(training.engine.module.parameters()).dtype)
    for step in range(BOUND_STEPS):
        plain.load_state_dict(training.engine.full_parameters(), strict=False)
        exact, size = exact_gradients(plain, case, collectives, step)
        training.backward(step)
        for name, gradient in training.gradients().items():
            error = (gradient.double() - exact[name]).abs()
            bound = gamma * size[name]
            assert torch.all(error[bound == 0] == 0)
            worst = max(worst, (error / bound.clamp_min(1e-300)).max().item())
        training.engine.step()
    return worst


def train_clipped(
    case: Case, collectives: ProcessGroupCollectives, device: torch.device
) -> dict[str, Any]:
    """Train with clipping; add, of each step, whether it clipped and its `share_of_bound`."""
    training = Training.begin(case, collectives, device)
    clipped = training.note_clipped()
    found = training.run(0, STEPS)
    pairs = list(zip(found["gradients"], clipped, strict=True))
    found["clips"] = [any(not torch.equal(b[n], a[n]) for n in b) for b, a in pairs]
    ranks = collectives.world_size
    found["shares"] = [share_of_bound(case, before, after, ranks) for before, after in pairs]
    return found


def share_of_bound(
    case: Case, before: dict[str, Tensor], after: dict[str, Tensor], ranks: int
) -> float:
    """Return max |clipped - exact| / bound of one step's gradients in fp32: at most 1.

    Exact is g min(1, M / (norm + 1e-6)) in float64, as torch.nn.utils.clip_grad_norm_ defines it.
    The squares of n elements are rounded, and n + ranks terms are added in some order, over groups
    or parameters whose roots are taken and squared again; root, sum, quotient and product round ten
    times more at most: n + ranks + 10 roundings of relative size u = 2^-24, so that the relative
    error is at most k u / (1 - k u) (Higham, section 3.1).
    """
    numel = sum(gradient.numel() for gradient in before.values())
    norm = torch.stack([g.double().square().sum() for g in before.values()]).sum().sqrt().item()
    scale = min(1.0, case.max_grad_norm / (norm + 1e-6))
    roundings = (numel + ranks + 10) * 2**-24
    gamma = roundings / (1 - roundings)
    worst = 0.0
    for name, gradient in before.items():
        exact = gradient.double() * scale
        error, bound = (after[name].double() - exact).abs(), gamma * exact.abs()
        assert torch.all(error[bound == 0] == 0)
        worst = max(worst, (error / bound.clamp_min(1e-300)).max().item())
    return worst


def exact_gradients(
    plain: nn.Module, case: Case, collectives: ProcessGroupCollectives, step: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return mean and mean magnitude over the ranks of the micro-batches' sums, in float64."""
    named = dict(plain.named_parameters())
    mean = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    size = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
    for micro in range(case.accumulation):
        loss = loss_of(plain, case, collectives.rank, step, micro) / case.accumulation
        for name, term in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
            mean[name] += term.double()
            size[name] += term.double().abs()
    for total in (*mean.values(), *size.values()):
        dist.all_reduce(total)
        total /= collectives.world_size
    return mean, size


def save_midway(out: Path, collectives: ProcessGroupCollectives, device: torch.device) -> dict:
    """Save at stage 3 in mid-training, and go on: what half the ranks have to reproduce."""
    results = {}
    for index, case in enumerate(SAVED):
        training = Training.begin(case.at(3), collectives, device)
        training.run(0, SAVED_STEP)
        save_checkpoint(training.engine, out / f"saved{index}", step=SAVED_STEP)
        saved = training.engine.full_parameters()
        results["saved", case] = training.run(SAVED_STEP, STEPS) | {"saved": saved}
    return results


def load_elsewhere(out: Path, collectives: ProcessGroupCollectives, device: torch.device) -> dict:
    """Load what the first world saved and go on, with two micro-batches where it had one."""
    results = {}
    for index, case in enumerate(SAVED):
        for stage in stages_loaded(collectives.world_size):
            here = replace(case.at(stage), accumulation=2, sync=False)
            training = Training.begin(here, collectives, device)
            step = load_checkpoint(training.engine, out / f"saved{index}")
            loaded = training.engine.full_parameters()
            went_on = training.run(step, STEPS)
            results["loaded", here] = went_on | {"saved": loaded}
            if (case, stage, collectives.world_size) == (GROWS, 1, 2):
                save_checkpoint(training.engine, out / "grows", step=STEPS)
    if collectives.world_size == 3:
        training = Training.begin(GROWS.at(3), collectives, device)
        load_checkpoint(training.engine, out / "grows")
        results["grown", GROWS] = training.engine.full_parameters()
    return results


def run_world(
    rank: int, world_size: int, out: Path, device_name: str, backend: str, is_first: bool
) -> None:
    """Play one rank of a world and store what came out; the first world saves for the others."""
    device = torch.device(device_name.replace("rank", str(rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
    store = dist.FileStore(str(out / f"store{world_size}"), world_size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    # A sum of two has one order: there the backend's own reductions must agree bit by bit.
    collectives = ProcessGroupCollectives() if world_size == 2 else OrderedCollectives()
    results: dict[Any, Any] = {
        case: Training.begin(case, collectives, device).run(0, STEPS)
        for alike in ALIKE[world_size]
        for case in engines_of(alike)
    }
    for case in chain.from_iterable(map(engines_of, CLIPPED.get(world_size, ()))):
        results["clipped", case] = train_clipped(case, collectives, device)
    if world_size in BOUNDED_WORLDS:
        for case in (c.at(stage) for c in BOUNDED for stage in range(4)):
            results["bound", case] = worst_share_of_bound(case, device)
    results |= (save_midway if is_first else load_elsewhere)(out, collectives, device)
    torch.save(
        {repr(key): value for key, value in results.items()}, out / f"{world_size}.{rank}.pt"
    )
    dist.destroy_process_group()


def fork_ranks(world_size: int, play: Callable[[int], None]) -> bool:
    """Fork a world's ranks, each of which plays its part; return whether all came to their end."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                play(rank)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    # All are waited for, also after one that failed.
    statuses = [os.waitpid(child, 0)[1] for child in children]
    return not any(statuses)


def main(out: Path, device: str, backend: str, world_sizes: list[int]) -> int:
    """Fork the ranks of each world in turn; return 1 where one failed."""
    for number in world_sizes:
        place = (number, out, device, backend, number == world_sizes[0])
        if not fork_ranks(number, lambda rank, place=place: run_world(rank, *place)):
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], [int(n) for n in sys.argv[4:]]))
