"""The job `train_step`: a real Hugging Face model trained for a few steps on random tokens.

python -m runners.jobs.train_step SPEC.json OUT_DIR      (or under torchrun)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.plan import Plan, parse_plan
from planner.workload import Attention, Engine, Loss, ReduceDtype, TrainingWorkload
from runners.contract import JobKind, JobSpec
from runners.engines.base import TrainingEngine
from runners.engines.precision import forward_context
from runners.jobs.adapters import choose_trained
from runners.jobs.attention_calls import recorded_sdpa_call
from runners.jobs.checkpointing import checkpoint_layers
from runners.jobs.harness import JobSession, run_job
from runners.jobs.host_pace import measure_paced_steps
from runners.jobs.kernel_times import measure_kernels
from runners.jobs.losses import install_chunked_loss, install_fused_loss
from runners.jobs.section_meter import CudaCounter, MemoryCounter, SectionMeter, watched_sections
from runners.measure import (
    StepMeter,
    allocator_counters,
    device_used_bytes,
    host_peak_bytes,
    time_statistics,
)
from runners.worlds import RunningWorld, open_world
from runners.zero.engine import ZeroEngine

if TYPE_CHECKING:
    from runners.jobs.saved_steps import SavedSteps

LEARNING_RATE = 1e-4
MIN_WARMUP_STEPS = 2
_STEADY_PHASES = ("forward", "backward", "optimizer")
_ATTENTION_NAMES = {
    Attention.EAGER: "eager",
    Attention.SDPA: "sdpa",
    Attention.TRITON: "peakmark_triton",
}


def build_model(plan: Plan) -> nn.Module:
    """Return the plan's model on the meta device, in training mode, checkpointing as planned."""
    workload = _training_workload(plan)
    if workload.attention is Attention.TRITON:
        # Imported here: Triton's import takes a while and the other plans have no use for it.
        from kernels.attention.hf import register

        register()
    config = AutoConfig.for_model(**plan.model.hf_config)
    with torch.device("meta"):
        # The engine sets the stored precision; a dtype in the config must not.
        model: nn.Module = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=_ATTENTION_NAMES[workload.attention],
            dtype=torch.float32,
        )
        choose_trained(model, workload)
    checkpoint_layers(model, workload.checkpointing, workload.checkpoint_every)
    _install_loss(model, workload.loss)
    return model.train()


def _install_loss(model: nn.Module, loss: Loss) -> None:
    if loss is Loss.CHUNKED:
        install_chunked_loss(model)
    elif loss is Loss.FUSED_LINEAR:
        install_fused_loss(model)


def build_engine(model: nn.Module, plan: Plan, world: RunningWorld, seed: int) -> TrainingEngine:
    """Return the plan's engine around `model`, with its parameters on the world's device."""
    workload = _training_workload(plan)
    return engine_class(plan.parallelism.engine)(
        model,
        stage=plan.parallelism.zero_stage,
        optimizer=workload.optimizer,
        precision=workload.precision,
        lr=LEARNING_RATE,
        device=world.device,
        collectives=world.collectives,
        seed=seed,
        sync_each_micro_batch=workload.sync_each_micro_batch,
        **_rare_options(workload),
    )


def _rare_options(workload: TrainingWorkload) -> dict[str, Any]:
    """What plans choose for engines that have it; the others refuse such plans."""
    chosen: dict[str, Any] = {"max_grad_norm": workload.max_grad_norm}
    if workload.offload_optimizer:
        chosen["offload_optimizer"] = True
    if workload.reduce_dtype is not ReduceDtype.AUTO:
        chosen["reduce_dtype"] = workload.reduce_dtype
    return chosen


def engine_class(engine: Engine) -> Callable[..., TrainingEngine]:
    """The class of an engine, imported only here: torch's take seconds that others need not wait."""
    match engine:
        case Engine.FSDP2:
            from runners.engines.fsdp2 import Fsdp2Engine

            return Fsdp2Engine
        case Engine.DDP:
            from runners.engines.ddp import DdpEngine

            return DdpEngine
        case Engine.ZERO_REDUNDANCY:
            from runners.engines.zero_redundancy import ZeroRedundancyEngine

            return ZeroRedundancyEngine
        case Engine.DEEPSPEED:
            from runners.engines.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine
    return ZeroEngine


class Trainer:
    """Runs one plan's training steps and measures them."""

    def __init__(self, plan: Plan, model: nn.Module, world: RunningWorld, seed: int) -> None:
        self.workload = _training_workload(plan)
        self.world = world
        self.meter = StepMeter(world.device)
        self.losses = LossLog(world.device) if world.has_real_losses else None
        self.state: dict[str, int] = {}
        self._model = model
        with self.meter.phase("init"):
            self.engine = build_engine(model, plan, world, seed)
        self._inputs = self._draw_inputs(plan.model.vocab_size, seed)

    def step(self, *, reads_state: bool = False) -> None:
        """Run one optimizer step over all micro-batches, measured by phase.

        The host waits for nothing in it. `reads_state` looks at every tensor of the engine, which
        takes time.
        """
        self.world.collectives.reset_traffic()
        accumulation = self.workload.grad_accumulation
        with self.meter.step():
            for index in range(accumulation):
                with self.meter.phase("forward"):
                    loss = self._forward()
                    loss = loss / accumulation if accumulation > 1 else loss
                with self.meter.phase("backward"):
                    self.engine.backward(loss, last_micro_batch=index == accumulation - 1)
                loss = loss.detach()
                if self.losses is not None:
                    self.losses.add(loss)
            if reads_state:
                self.state = self.engine.state_bytes()
            with self.meter.phase("optimizer"):
                self.engine.step()

    def step_losses(self) -> list[float | None] | None:
        """Return the measured steps' losses; None in a world in which they mean nothing."""
        if self.losses is None:
            return None
        return self.losses.sums(self.workload.grad_accumulation)

    def timeline(self, counter: MemoryCounter) -> list[list[str | int]]:
        """Run one step more, watched section by section; figures taken before stay as they are."""
        sections = SectionMeter(counter)
        self.meter.on_phase = sections.enter_phase
        with watched_sections(self._model, sections):
            self.step()
        self.meter.on_phase = None
        return sections.rows()

    def _forward(self) -> Tensor:
        with forward_context(self.workload.precision, self.world.device):
            call = self.engine.module
            output = call(**self._inputs, use_cache=False)
        loss: Tensor = output.loss
        return loss

    def _draw_inputs(self, vocab_size: int, seed: int) -> dict[str, Tensor]:
        rank, device = self.world.collectives.rank, self.world.device
        rows, length = self.workload.micro_batch, self.workload.sequence_length
        generator = torch.Generator(device).manual_seed(seed * 100_003 + rank)
        tokens = torch.randint(vocab_size, (rows, length), generator=generator, device=device)
        inputs = {"input_ids": tokens, "labels": tokens}
        if self.workload.packed:
            starts = torch.randint(1, length, (rows, 1), generator=generator, device=device)
            inputs["position_ids"] = packed_positions(starts, length)
        return inputs


class LossLog:
    """Losses of micro-batches, copied to the host behind the device's work: nobody waits."""

    _CHUNK = 1024

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[Tensor] = []
        self._count = 0

    def add(self, loss: Tensor) -> None:
        """Copy one loss, a scalar on the device."""
        number, index = divmod(self._count, self._CHUNK)
        if number == len(self._chunks):
            pinned = self._device.type == "cuda"
            self._chunks.append(torch.empty(self._CHUNK, dtype=loss.dtype, pin_memory=pinned))
        self._chunks[number][index].copy_(loss, non_blocking=True)
        self._count += 1

    def clear(self) -> None:
        """Forget what was copied; its room stays, for it takes the driver time to give."""
        self._count = 0

    def sums(self, micro_batches: int) -> list[float | None]:
        """Return the sum of each step's losses; waits for the device.

        JSON has no word for a sum that is not a number: None.
        """
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        values = [value for chunk in self._chunks for value in chunk.tolist()][: self._count]
        steps = range(0, self._count, micro_batches)
        sums = [sum(values[start : start + micro_batches]) for start in steps]
        return [value if math.isfinite(value) else None for value in sums]


def packed_positions(starts: Tensor, length: int) -> Tensor:
    """Positions [rows, length] of two documents per row; `starts` [rows, 1] are the second's.

    That they begin again at 0 tells transformers to hide the first document from the second.
    """
    index = torch.arange(length, device=starts.device)
    return torch.where(index < starts, index, index - starts)


def measure_training(session: JobSession) -> None:
    """Build, warm up, measure; fills `session.measured` (see docs on recorded rows)."""
    spec = session.spec
    plan = parse_plan(spec.plan)
    workload = _training_workload(plan)
    saved = _saved_steps(spec, plan)
    session.events.phase("build")
    model = build_model(plan)
    parallelism = plan.parallelism
    session.take_device()
    with open_world(
        spec.world,
        world_size=parallelism.world_size,
        rank=spec.rank,
        launch=session.launch,
        device=session.device,
    ) as world:
        session.events.phase("init")
        trainer = Trainer(plan, model, world, spec.seed)
        if saved is not None:
            saved.load(session, trainer.engine)
        _warm_up(session, trainer, workload)
        for index in range(spec.steps):
            session.events.phase("step", index=index)
            trainer.step()
        session.events.phase("collect")
        _collect(session, trainer)
        if saved is not None:
            saved.save(session, trainer.engine)
        if session.device.type == "cuda":
            session.events.phase("timeline")
            session.measured["timeline"] = trainer.timeline(CudaCounter(session.device))
        # After all that is measured of memory, and before a profiler slows what is started.
        session.events.phase("host_pace")
        paced = measure_paced_steps(trainer.step, session.device)
        session.measured["host_pace"] = world.gather(paced)
        if session.device.type == "cuda" and spec.kernel_times:
            session.events.phase("kernel_times")
            seen = measure_kernels(trainer.step, session.device)
            session.measured["kernel_times"] = world.gather(seen)


def _saved_steps(spec: JobSpec, plan: Plan) -> SavedSteps | None:
    if spec.save_to is None and spec.load_from is None:
        return None
    # Imported here: torch.distributed.checkpoint takes over a second, and few runs have a use for it.
    from runners.jobs.saved_steps import SavedSteps

    return SavedSteps.of(spec, plan, _warmup_steps(spec) + spec.steps)


def _warm_up(session: JobSession, trainer: Trainer, workload: TrainingWorkload) -> None:
    """Run the steps before the measured ones; optimizer states appear in the first."""
    measured, meter = session.measured, trainer.meter
    measured["phases"] = {"init": _phase_bytes(meter, "init")}
    session.events.phase("first_step")
    with recorded_sdpa_call() as call:
        trainer.step()
    backend = _ATTENTION_NAMES[workload.attention]
    measured["attention_backend"] = f"{backend}:{call['backend']}" if call else backend
    measured["attention_call"] = call or None
    measured["phases"]["first_step"] = _largest_phase(meter)
    for index in range(_warmup_steps(session.spec) - 1):
        session.events.phase("warmup", index=index)
        trainer.step(reads_state=True)
    meter.reset()
    if trainer.losses is not None:
        trainer.losses.clear()


def _warmup_steps(spec: JobSpec) -> int:
    """Steps before the measured ones, the first included."""
    return max(spec.warmup, MIN_WARMUP_STEPS)


def _collect(session: JobSession, trainer: Trainer) -> None:
    measured, meter, world = session.measured, trainer.meter, trainer.world
    step_times_s = meter.step_times_s()
    measured["phases"].update((name, _phase_bytes(meter, name)) for name in _STEADY_PHASES)
    measured.update(_memory_figures(session, meter))
    measured["step_times_s"] = step_times_s
    measured["step_time_statistics"] = time_statistics(step_times_s)
    measured["step_time_s"] = measured["step_time_statistics"]["median_s"]
    measured["host_times_s"] = meter.host_times_s()
    for name in _STEADY_PHASES:
        measured[f"{name}_time_s"] = time_statistics(meter.phase_times_s(name))["median_s"]
    measured["tokens_per_s"] = _step_tokens(trainer.workload) / measured["step_time_s"]
    measured["state"] = trainer.state
    measured["communication"] = world.collectives.traffic()
    measured["losses"] = trainer.step_losses()
    if not world.has_real_losses:
        measured["losses_reason"] = "solo: the other ranks' gradients are not computed"
    own = ("allocated_bytes", "reserved_bytes", "device_bytes", "host_bytes", "phases", "state")
    figures = {"rank": world.collectives.rank, **{name: measured[name] for name in own}}
    measured["per_rank"] = world.gather(figures)


def _memory_figures(session: JobSession, meter: StepMeter) -> dict[str, Any]:
    device, phases = session.device, session.measured["phases"]
    figures: dict[str, Any] = {
        "host_bytes": host_peak_bytes(),
        "allocated_bytes": None,
        "reserved_bytes": None,
        "device_bytes": None,
    }
    session.measured.setdefault("device_baseline_bytes", None)
    if device.type != "cuda":
        phases["after_step_bytes"] = None
        return figures
    phases["after_step_bytes"] = torch.cuda.memory_allocated(device)
    peaks = [phases[name]["peak_allocated_bytes"] for name in _STEADY_PHASES]
    figures["allocated_bytes"] = max(peaks)
    figures["reserved_bytes"] = meter.reserved_peak_bytes
    figures["device_bytes"] = device_used_bytes(device)
    figures["allocator"] = allocator_counters(device)
    return figures


def _phase_bytes(meter: StepMeter, name: str) -> dict[str, int] | None:
    return asdict(meter.bytes[name]) if name in meter.bytes else None


def _largest_phase(meter: StepMeter) -> dict[str, int] | None:
    """Return the first step's figures as one phase: the largest peak, the last end."""
    if not meter.bytes:
        return None
    return {
        "peak_allocated_bytes": max(meter.bytes[n].peak_allocated_bytes for n in _STEADY_PHASES),
        "end_allocated_bytes": meter.bytes[_STEADY_PHASES[-1]].end_allocated_bytes,
    }


def _step_tokens(workload: TrainingWorkload) -> int:
    """Tokens that one rank trains on in a step."""
    return workload.micro_batch * workload.sequence_length * workload.grad_accumulation


def _training_workload(plan: Plan) -> TrainingWorkload:
    if not isinstance(plan.workload, TrainingWorkload):
        raise ValueError("train_step runs a training plan, and this plan serves")
    return plan.workload


if __name__ == "__main__":
    sys.exit(run_job(JobKind.TRAIN_STEP, measure_training))
