"""Within a step the host waits for nothing: torch raises where it would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, masking_utils

from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}
# What gives the host a value that the device has computed, or a size that depends on one.
READS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select")


class HostReadError(Exception):
    """The host asked for a value."""


class NoReading(TorchDispatchMode):
    """Raise where the host reads a tensor's value: on a GPU it would wait for it."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation that reads nothing."""
        if str(func).startswith(READS):
            raise HostReadError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where an operation makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trained(stage: int, syncs: bool, device: torch.device) -> tuple[nn.Module, ZeroEngine]:
    """Return a small Llama in our engine, as one of four ranks, with clipping."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **CONFIG), attn_implementation="sdpa"
    )
    engine = ZeroEngine(
        model.to(device).train(),
        stage=stage,
        optimizer="adamw_fused",
        precision="mixed",
        lr=1e-3,
        device=device,
        collectives=LocalCollectives(0, 4),
        sync_each_micro_batch=syncs,
        max_grad_norm=1.0,
    )
    return model, engine


def step(model: nn.Module, engine: ZeroEngine, tokens: torch.Tensor) -> None:
    """Run one step of two micro-batches."""
    for index in range(2):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / 2
        engine.backward(loss, last_micro_batch=index == 1)
    engine.step()


def transformers_looks_not_for_packed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what waits in every forward of transformers, whatever the engine.

    It reads from the positions whether rows hold several documents (docs/architecture.md).
    """
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_reads_no_value_of_a_tensor(
    stage: int, syncs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_looks_not_for_packed_rows(monkeypatch)
    model, engine = trained(stage, syncs, torch.device("cpu"))
    tokens = torch.randint(0, 128, (2, 32))
    step(model, engine, tokens)
    with NoReading():
        step(model, engine, tokens)


def test_transformers_reads_the_positions_in_every_forward() -> None:
    """The one wait that a step has and that is not ours: when it goes, the text on it must too."""
    model, _ = trained(0, True, torch.device("cpu"))
    tokens = torch.randint(0, 128, (2, 32))
    with NoReading(), pytest.raises(HostReadError, match="local_scalar"):
        model(input_ids=tokens, use_cache=False)


@pytest.mark.gpu
@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_host_waits_for_nothing_in_a_step(
    stage: int, syncs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_looks_not_for_packed_rows(monkeypatch)
    device = torch.device("cuda:0")
    model, engine = trained(stage, syncs, device)
    tokens = torch.randint(0, 128, (2, 32), device=device)
    step(model, engine, tokens)
    with no_waiting():
        step(model, engine, tokens)
        with pytest.raises(RuntimeError, match="synchron"):
            tokens.sum().item()
