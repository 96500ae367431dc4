"""What tracers, compilers and mistaken callers see of flash_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import launch
from kernels.attention import triton as flash
from kernels.attention.triton import flash_attention

Make = Callable[..., tuple[Tensor, Tensor, Tensor]]
BF16, FP32 = torch.bfloat16, torch.float32


class AllocationLog(TorchDispatchMode):
    """Collect (operator, shapes and dtypes of its results) for our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[tuple[int, ...], torch.dtype]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "peakmark":
            tensors = result if isinstance(result, tuple) else (result,)
            name = func._schema.name.removeprefix("peakmark::")
            self.seen.append((name, [(tuple(t.shape), t.dtype) for t in tensors]))
        return result


def test_a_fake_trace_shows_what_is_saved_and_allocated() -> None:
    q_shape, kv_shape, rows = (2, 8, 33, 64), (2, 2, 33, 64), (2, 8, 33)
    saved = []
    with FakeTensorMode(), AllocationLog() as log:
        q, k, v = (torch.randn(s, dtype=BF16) for s in (q_shape, kv_shape, kv_shape))
        q, k, v = (tensor.requires_grad_() for tensor in (q, k, v))
        with saved_tensors_hooks(
            lambda t: saved.append((tuple(t.shape), t.dtype)) or t, lambda t: t
        ):
            out = flash_attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert saved == [
        (q_shape, BF16), (kv_shape, BF16), (kv_shape, BF16), (q_shape, BF16), (rows, FP32),
    ]  # fmt: skip
    assert log.seen == [
        ("attention_forward", [(q_shape, BF16), (rows, FP32)]),
        ("attention_delta", [(rows, FP32)]),
        ("attention_backward", [(q_shape, BF16), (kv_shape, BF16), (kv_shape, BF16)]),
    ]


def test_a_real_run_allocates_what_the_fake_trace_shows(make_inputs: Make) -> None:
    def layout(tensors: tuple[Tensor, ...]) -> list[Any]:
        return [(t.shape, t.stride(), t.dtype) for t in tensors]

    q, k, v = (tensor.detach() for tensor in make_inputs(2, (4, 2), (9, 12), 16))
    real = flash.attention_forward(q, k, v, True, 0.25)
    delta = flash.attention_delta(real[0], q)
    grads = flash.attention_backward(q, q, k, v, real[1], delta, True, 0.25)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(tensor) for tensor in (q, k, v))
        fake = flash.attention_forward(q, k, v, True, 0.25)
        fake_delta = flash.attention_delta(fake[0], q)
        fake_grads = flash.attention_backward(q, q, k, v, fake[1], fake_delta, True, 0.25)
    assert layout((*real, delta, *grads)) == layout((*fake, fake_delta, *fake_grads))


def test_the_operator_passes_torchs_own_checks(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (5, 7), 16)
    torch.library.opcheck(flash.attention_forward, (q, k, v, True, 0.25))


def test_compiled_and_eager_agree(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (2, 1), (9, 9), 16)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attention(q, k, v, causal=True).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    eager_grads = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for ours, expected in zip(
        torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager_grads, strict=True
    ):
        torch.testing.assert_close(ours, expected)


def test_autocast_casts_as_torchs_attention_does(make_inputs: Make) -> None:
    q, k, v = make_inputs(1, (1, 1), (9, 9), 16)
    with torch.autocast(q.device.type, dtype=torch.float16):
        out = flash_attention(q, k.half(), v, causal=True)
    assert out.dtype == torch.float16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == FP32


def change(**tensors: Tensor) -> dict[str, Tensor]:
    """Return arguments that are valid but for the given ones."""
    valid = {"q": torch.zeros(1, 4, 8, 16), "k": torch.zeros(1, 2, 8, 16)}
    return valid | {"v": torch.zeros(1, 2, 8, 16)} | tensors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (change(q=torch.zeros(4, 8, 16)), r"q has shape \(4, 8, 16\); it must be \(B, H, S, D\)"),
        (change(v=torch.zeros(1, 2, 7, 16)), r"v has shape .* it must be k's, \(1, 2, 8, 16\)"),
        (change(q=torch.zeros(2, 4, 8, 16)), "k has batch size 1; it must be q's, 2"),
        (change(q=torch.zeros(1, 4, 8, 32)), "k has head size 16; it must be q's, 32"),
        (change(q=torch.zeros(1, 3, 8, 16)), "q has 3 heads; it must be a multiple of k's 2"),
        (change(q=torch.zeros(1, 4, 8, 16).double()), "q has dtype torch.float64; allowed are"),
        (change(k=torch.zeros(1, 2, 8, 16).half()), "k has dtype torch.float16; it must be q's"),
        (change(v=torch.zeros(1, 2, 8, 16, device="meta")), "v is on meta; it must be on q's"),
        (
            {name: torch.zeros(1, 1, 8, 257) for name in "qkv"},
            "q has head size 257; allowed are 1 to 256",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(arguments: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(**arguments, causal=True)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale is .*; it must be a positive finite number"):
        flash_attention(**change(), causal=True, scale=scale)


@pytest.mark.skipif(not launch.INTERPRETED, reason="only the interpreter lacks bfloat16")
def test_the_interpreter_refuses_bfloat16() -> None:
    inputs = {name: tensor.bfloat16() for name, tensor in change().items()}
    with pytest.raises(ValueError, match="q is bfloat16; Triton's CPU interpreter"):
        flash_attention(**inputs, causal=True)


def test_a_tensor_on_the_cpu_is_refused_without_the_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="q is on cpu; it must be on a CUDA device"):
        flash_attention(**change(), causal=True)
