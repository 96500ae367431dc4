"""The accuracy rule of the attention tests, and memory that starts as NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import masks
from kernels.attention.masks import Mask

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


def assert_as_good_as_plain(
    name: str, ours: Tensor, exact: Tensor, plain: Tensor, factor: int = 2
) -> None:
    """Assert that our error is at most `factor` times that of the same maths in plain precision.

    The allowance on top is twice the rounding of `exact` around 0.3 in the tested dtype, and a
    hundredth of that dtype's epsilon, for gradients that are exactly zero (1e-5 in fp16).
    """
    assert ours.isfinite().all(), f"{name} is not finite everywhere"
    rounded = exact.to(ours.dtype)
    allowance = 2 * ((rounded + 0.3 - 0.3) - rounded).abs().max().item()
    allowance += torch.finfo(ours.dtype).eps / 100
    limit = factor * (plain.double() - exact).abs().max().item() + allowance
    error = (ours.double() - exact).abs().max().item()
    assert error <= limit, f"{name} errs by {error}, allowed {limit}"


def results_and_gradients(
    attention: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    dout: Tensor,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (lse, {"out", "dq", "dk", "dv"}) of an attention function; with sinks also "dsinks"."""
    sinks = options.get("sinks")
    leaves = inputs if sinks is None else (*inputs, sinks)
    out, lse = attention(*inputs, **options)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    names = ("dq", "dk", "dv", "dsinks")
    return lse.detach(), {"out": out.detach(), **dict(zip(names, grads, strict=False))}


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


@pytest.fixture
def assert_masked_accurate() -> Callable[..., None]:
    """Return a check of flash_attention under a mask, with softcap and sinks, against float64."""
    from kernels.attention.reference import reference_attention
    from kernels.attention.triton import flash_attention_with_lse

    def check(q: Tensor, k: Tensor, v: Tensor, case: Any, **options: Any) -> None:
        generator = torch.Generator().manual_seed(q.shape[2] + k.shape[2])
        dout = torch.randn(*q.shape[:3], v.shape[-1], generator=generator).to(q)
        dout = options.pop("dout", dout)
        sinks = options.pop("sinks", None)

        def run(attention: Any, to: torch.dtype, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
            leaves = tuple(t.detach().to(to).requires_grad_() for t in (q, k, v))
            # Sinks stay in fp32 or more: rounding their few gradients would be all that is seen.
            wide = torch.promote_types(to, torch.float32)
            own = None if sinks is None else sinks.detach().to(wide).requires_grad_()
            return results_and_gradients(attention, leaves, dout, sinks=own, **options, **more)

        lse, ours = run(flash_attention_with_lse, q.dtype, mask=case.mask)
        exact_lse, exact = run(reference_attention, torch.float64, visible=case.visible)
        _, plain = run(reference_attention, q.dtype, visible=case.visible, dtype=q.dtype)
        # FlashAttention's own tests allow 3 times the error where a softcap is taken.
        factor = 2 if options.get("softcap") is None else 3
        for name in ours:
            assert_as_good_as_plain(name, ours[name], exact[name], plain[name], factor)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)

    return check


# Masks of every kind, each beside the boolean matrix that its definition gives, pair by pair.
Pairs = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mask and which (query, key) pairs it lets attend, (Sq, Sk) or (B, H, Sq, Sk)."""

    mask: Mask
    visible: Tensor


def by_position(seqs: tuple[int, int], device: str, see: Pairs) -> Tensor:
    """Evaluate `see` of a query's own key position and a key's, for every pair."""
    own = torch.arange(seqs[0], device=device)[:, None] + seqs[1] - seqs[0]
    keys = torch.arange(seqs[1], device=device)[None, :]
    return see(own, keys) & (keys >= 0)


WINDOWS: dict[str, tuple[Mask, Pairs]] = {
    "full": (masks.FULL, lambda i, j: (i >= i) & (j >= 0)),
    "causal": (masks.CAUSAL, lambda i, j: j <= i),
    "window 1": (masks.window(1), lambda i, j: (j == i) | (j == i - 1)),
    "window 20": (masks.window(20), lambda i, j: (j <= i) & (j >= i - 20)),
    "window 1000": (masks.window(1000), lambda i, j: (j <= i) & (j >= i - 1000)),
    "local 9": (masks.window(9, 9), lambda i, j: (j - i).abs() <= 9),
    "ahead 5": (masks.window(None, 5), lambda i, j: j <= i + 5),
    "back 40, ahead all": (masks.window(40, None), lambda i, j: j >= i - 40),
    "prefix 45": (masks.prefix(45), lambda i, j: (j <= i) | (j < 45)),
    "prefix 0": (masks.prefix(0), lambda i, j: j <= i),
    "prefix 1000": (masks.prefix(1000), lambda i, j: (j <= i) | (j < 1000)),
    "prefix 33, local 6": (masks.prefix(33, 6, 6), lambda i, j: ((j - i).abs() <= 6) | (j < 33)),
    "global 10, window 12": (
        masks.global_local(10, 12),
        lambda i, j: (j <= i) & ((j >= i - 12) | (j < 10)),
    ),
    "global 64, window 3": (
        masks.global_local(64, 3),
        lambda i, j: (j <= i) & ((j >= i - 3) | (j < 64)),
    ),
}


def make_window_case(name: str, seqs: tuple[int, int], device: str) -> Case:
    """Return one of the kinds that need no table."""
    mask, see = WINDOWS[name]
    return Case(mask=mask, visible=by_position(seqs, device, see))


def make_document_case(
    lengths: list[int],
    seq: int,
    device: str,
    left: int | None = None,
    right: int | None = 0,
) -> Case:
    """Return packed documents of these lengths in a row of `seq` tokens."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    owners = [d for d, n in enumerate(lengths) for _ in range(n)]
    owners += [-1] * (seq - len(owners))
    document = torch.tensor(owners, device=device)
    same = (document[:, None] == document[None, :]) & (document >= 0)[:, None]
    before, after = (10**6 if n is None else n for n in (left, right))
    inside = by_position((seq, seq), device, lambda i, j: (j >= i - before) & (j <= i + after))
    mask = masks.documents(ends.to(device), seq, left=left, right=right)
    return Case(mask=mask, visible=same & inside)


def make_block_case(
    table: Tensor, block: int, seqs: tuple[int, int], *, causal: bool = False
) -> Case:
    """Return a block table of any leading sizes."""
    pairs = table.repeat_interleave(block, -2).repeat_interleave(block, -1)
    pairs = pairs[..., : seqs[0], : seqs[1]]
    if causal:
        pairs = pairs & by_position(seqs, str(table.device), lambda i, j: j <= i)
    return Case(mask=masks.block_sparse(table, block, seqs, causal=causal), visible=pairs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `window_name` once for each mask that needs no table."""
    if "window_name" in metafunc.fixturenames:
        metafunc.parametrize("window_name", list(WINDOWS))


@pytest.fixture
def window_case() -> Callable[..., Case]:
    """Return the maker of masks that need no table, by name."""
    return make_window_case


@pytest.fixture
def document_case() -> Callable[..., Case]:
    """Return the maker of packed documents."""
    return make_document_case


@pytest.fixture
def block_case() -> Callable[..., Case]:
    """Return the maker of block tables."""
    return make_block_case
