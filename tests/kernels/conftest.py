"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before its import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._device
from torch import Tensor

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("triton was imported before tests/kernels: set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill fresh tensors with NaN: a kernel that leaves or reads unwritten memory shows it."""

    def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return poisoned

    # torch caches the set of functions that `with torch.device(...)` redirects: it must hold the
    # real one, or every later "meta" model of this process would take real memory.
    torch.utils._device._device_constructors()
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))
    yield


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw the same inputs in every run: what fails once can be seen again."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def returned_memory() -> Iterator[None]:
    """Give freed memory back to the GPU after each test: several processes may share it."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def device() -> str:
    """Where kernels run: a GPU, or the interpreter's CPU."""
    return DEVICE


@pytest.fixture
def as_good_as_plain() -> Callable[..., None]:
    """Return a check of a result against the same maths in plain low precision.

    Our error may be at most twice that of `plain`. The allowance on top is twice the rounding of
    `exact` around 0.3 in the tested dtype, and a hundredth of that dtype's epsilon, for values that
    are exactly zero (1e-5 in fp16).
    """

    def check(name: str, ours: Tensor, exact: Tensor, plain: Tensor) -> None:
        assert ours.isfinite().all(), f"{name} is not finite everywhere"
        rounded = exact.to(ours.dtype)
        allowance = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
        allowance += torch.finfo(ours.dtype).eps / 100
        limit = 2 * (plain.double() - exact).abs().max().item() + allowance
        error = (ours.double() - exact).abs().max().item()
        assert error <= limit, f"{name} errs by {error}, allowed {limit}"

    return check


@pytest.fixture
def compile_for_gpus() -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return a compiler of kernels for GPUs that are not here (see compile_any.py)."""

    def compile_all(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        here = Path(__file__)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        finished = subprocess.run(
            [sys.executable, str(here.with_name("compile_any.py"))],
            input="".join(json.dumps(request) + "\n" for request in requests),
            env=environment | {"PYTHONPATH": str(here.parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr
        return [json.loads(line) for line in finished.stdout.splitlines()]

    return compile_all
