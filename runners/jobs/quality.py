"""The job `quality`: what each change of attention or of the system does to a model's answers.

python -m runners.jobs.quality SPEC.json OUT_DIR
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from planner.errors import PlanError
from planner.model import ModelSpec
from planner.quality_run import (
    CHUNK_TOKENS,
    SYSTEM_CHANGES,
    Change,
    QualityRun,
    Variable,
    parse_quality,
    variable_of,
)
from runners.contract import JobKind
from runners.jobs.decode import DTYPES
from runners.jobs.harness import JobSession, run_job
from runners.measure import host_peak_bytes
from runners.serving.quality import (
    NAME,
    Probe,
    Prober,
    divergence,
    register,
    rounding_floor,
    settings_of,
    with_change,
)
from runners.serving.recall import ASKED, CHANCE, Questions, ask, shares_right, train

# Questions that a trained model is asked, with a seed of their own.
QUESTIONS = 256
_SEED = 1_000_003


def measure_quality(session: JobSession) -> None:
    """Train the small model and probe it, then the named model; fills `session.measured`."""
    run, spec = parse_quality(session.spec.quality, session.spec.world)
    session.take_device()
    probe = Probe(
        change=None,
        window=run.window,
        block=run.block,
        block_stride=run.block_stride,
        kv_heads=run.kv_heads,
    )
    measured = session.measured
    measured["models"] = {}
    measured["models"]["recall"] = _probe_recall(session, run, _small(probe, run.recall_length))
    if spec is not None:
        measured["models"][spec.name] = _probe_model(session, run, spec, probe)
    measured["host_bytes"] = host_peak_bytes()


def _small(probe: Probe, length: int) -> Probe:
    """Return a probe's settings for the small model: two key/value heads, and short sequences."""
    window, block = min(probe.window, length // 4), min(probe.block, length // 8)
    return replace(probe, kv_heads=1, window=window, block=block)


def _probe_recall(session: JobSession, run: QualityRun, probe: Probe) -> dict[str, Any]:
    device, seed = session.device, session.spec.seed

    def trained(change: Change | None) -> nn.Module:
        session.events.phase("train", change=change or "exact")
        return train(with_change(probe, change), run.recall_length, run.recall_steps, device, seed)

    asked = ask(QUESTIONS, run.recall_length, torch.Generator().manual_seed(seed + _SEED))
    tokens, answers = asked.tokens.to(device), asked.answers.to(device).flatten()
    prober = Prober(trained(None), probe)

    exact = _of_questions(prober.logits(tokens, None))
    kept = _of_questions(prober.cached_logits(tokens, None))
    part = _part(exact, kept, answers, probe)
    part |= {"chance": CHANCE, "length": run.recall_length, "steps": run.recall_steps}
    part["exact"] |= shares_right(exact, asked, probe.window)
    for change in run.changes:
        if change is Change.KERNEL:
            continue
        session.events.phase("probe", change=change)
        is_system = change in SYSTEM_CHANGES
        ways = prober.cached_logits if is_system else prober.logits
        found = _of_questions(ways(tokens, change))
        row = divergence(kept if is_system else exact, found, answers)
        part["changes"][str(change)] = row | shares_right(found, asked, probe.window)
        if run.retrain and variable_of(change) is Variable.ALGORITHM:
            row = part["changes"][str(change)]
            row |= _retrained(trained(change), probe, change, asked, device)
    return part


def _of_questions(logits: Tensor) -> Tensor:
    """Return the logits (B x ASKED, vocabulary) of the tokens that ask."""
    return logits[:, -ASKED:].float().flatten(0, 1)


def _retrained(
    model: nn.Module, probe: Probe, change: Change, asked: Questions, device: torch.device
) -> dict[str, Any]:
    """Return the shares of right answers of a model that was trained with the change."""
    logits = _of_questions(Prober(model, probe).logits(asked.tokens.to(device), change))
    shares = shares_right(logits, asked, probe.window)
    return {f"retrained_{name}": share for name, share in shares.items()}


def _part(exact: Tensor, kept: Tensor, targets: Tensor, probe: Probe) -> dict[str, Any]:
    """Begin a model's table: the exact row, and what two exact ways differ by."""
    return {
        "exact": divergence(exact, exact, targets),
        "floor": rounding_floor(exact, kept),
        "positions": len(targets),
        "settings": dict(settings_of(probe)),
        "changes": {},
    }


def _probe_model(
    session: JobSession, run: QualityRun, spec: ModelSpec, probe: Probe
) -> dict[str, Any]:
    session.events.phase("build")
    device = session.device
    prober = Prober(_build(session, run, spec), probe)
    generator = torch.Generator(device).manual_seed(session.spec.seed)
    size = (run.rows, run.length)
    tokens = torch.randint(spec.vocab_size, size, generator=generator, device=device)
    targets = tokens[:, CHUNK_TOKENS + 1 :].flatten()

    def compared(logits: Tensor) -> Tensor:
        # The first tokens are run before any is read from the cache; the last has no successor.
        return logits[:, CHUNK_TOKENS:-1].flatten(0, 1)

    exact = compared(prober.logits(tokens, None))
    kept = compared(prober.cached_logits(tokens, None))
    part = _part(exact, kept, targets, probe)
    part |= {"weights": "own" if run.weights else "random", "length": run.length}
    for change in run.changes:
        session.events.phase("probe", change=change)
        is_system = change in SYSTEM_CHANGES
        found = compared((prober.cached_logits if is_system else prober.logits)(tokens, change))
        part["changes"][str(change)] = divergence(kept if is_system else exact, found, targets)
    return part


def _build(session: JobSession, run: QualityRun, spec: ModelSpec) -> nn.Module:
    """Return the model in evaluation mode, with random weights or those of the folder."""
    register()
    options: dict[str, Any] = {"attn_implementation": NAME, "dtype": DTYPES[run.dtype]}
    if run.weights is not None:
        try:
            model: nn.Module = AutoModelForCausalLM.from_pretrained(
                run.weights, local_files_only=True, **options
            )
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:120]
            sentence = f"quality.weights is {run.weights!r}: no model can be read there ({reason})."
            raise PlanError("quality.weights", run.weights, "a folder", sentence=sentence) from None
        return model.to(session.device).requires_grad_(False).eval()
    torch.manual_seed(session.spec.seed)
    config = AutoConfig.for_model(**spec.hf_config)
    with session.device:
        model = AutoModelForCausalLM.from_config(config, **options)
    return model.requires_grad_(False).eval()


if __name__ == "__main__":
    sys.exit(run_job(JobKind.QUALITY, measure_quality))
