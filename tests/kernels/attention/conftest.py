"""The accuracy rule of the attention tests, and memory that starts as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
real_empty = torch.empty


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill fresh tensors with NaN: a kernel that leaves or reads unwritten memory shows it."""

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = real_empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    # torch caches the set of functions that `with torch.device(...)` redirects: it must hold the
    # real one, or every later "meta" model of this process would take real memory.
    torch.utils._device._device_constructors()
    monkeypatch.setattr(torch, "empty", poisoned)
    yield


@pytest.fixture
def make_inputs() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return a maker of random (q, k, v), laid out as transformers has them: (B, S, H, D)."""

    def make(
        batch: int,
        heads: tuple[int, int],
        seqs: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        spread: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seqs[0] + 10 * seqs[1] + head_dim)
        sizes = [(heads[0], seqs[0]), (heads[1], seqs[1]), (heads[1], seqs[1])]
        rows = [torch.randn(batch, s, h, head_dim, generator=generator) * spread for h, s in sizes]
        q, k, v = (row.to(DEVICE, dtype).transpose(1, 2).requires_grad_() for row in rows)
        return q, k, v

    return make


def assert_as_good_as_plain(name: str, ours: Tensor, exact: Tensor, plain: Tensor) -> None:
    """Assert that our error is at most twice that of the same maths in plain low precision.

    The allowance on top is twice the rounding of `exact` around 0.3 in the tested dtype, and a
    hundredth of that dtype's epsilon, for gradients that are exactly zero (1e-5 in fp16).
    """
    assert ours.isfinite().all(), f"{name} is not finite everywhere"
    rounded = exact.to(ours.dtype)
    allowance = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    allowance += torch.finfo(ours.dtype).eps / 100
    limit = 2 * (plain.double() - exact).abs().max().item() + allowance
    error = (ours.double() - exact).abs().max().item()
    assert error <= limit, f"{name} errs by {error}, allowed {limit}"


def results_and_gradients(
    attention: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (lse, {"out", "dq", "dk", "dv"}) of an attention function."""
    out, lse = attention(*inputs, **options)
    dq, dk, dv = torch.autograd.grad(out, inputs, dout.to(out.dtype))
    return lse.detach(), {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


@pytest.fixture
def assert_accurate() -> Callable[..., None]:
    """Return a check of flash_attention's output, lse and gradients against float64."""
    from kernels.attention.reference import reference_attention
    from kernels.attention.triton import flash_attention_with_lse

    def check(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float | None = None,
        dout: Tensor | None = None,
    ) -> None:
        dout = torch.randn(q.shape, device=q.device).to(q.dtype) if dout is None else dout
        doubles = tuple(t.detach().double().requires_grad_() for t in (q, k, v))
        options = {"causal": causal, "scale": scale}
        lse, ours = results_and_gradients(flash_attention_with_lse, (q, k, v), dout, **options)
        exact_lse, exact = results_and_gradients(reference_attention, doubles, dout, **options)
        options["dtype"] = q.dtype
        _, plain = results_and_gradients(reference_attention, (q, k, v), dout, **options)
        for name in ours:
            assert_as_good_as_plain(name, ours[name], exact[name], plain[name])
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)

    return check
