"""What the planner says eager attention holds, beside the tensors that torch really makes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from planner.attention.memory import footprint
from planner.attention.problem import AttentionProblem, Variant
from planner.hardware import resolve_gpu
from runners.jobs.attention_kernels import KERNELS

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages alive at the end of every operation but `known` ones."""

    def __init__(self, known: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes())
        return result

    def now_bytes(self) -> int:
        """Bytes of what is alive now."""
        self._alive = {k: (ref, n) for k, (ref, n) in self._alive.items() if not ref.expired()}
        return sum(size for _, size in self._alive.values())

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a peak of its own."""
        self.peak_bytes = 0
        with self:
            yield


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_eager_attention_holds_what_is_said_tensor_by_tensor(
    dtype: str, causal: bool, kv_heads: int
) -> None:
    problem = AttentionProblem(
        batch=2,
        heads=4,
        kv_heads=kv_heads,
        head_dim=16,
        sequence_length=48,
        causal=causal,
        dtype=dtype,
    )
    size, small = (2, 4, 48, 16), (2, kv_heads, 48, 16)
    leaves = tuple(torch.randn(s).to(DTYPES[dtype]).requires_grad_() for s in (size, small, small))
    upstream = torch.randn(size).to(DTYPES[dtype])
    storages = Storages((*leaves, upstream))
    attend = KERNELS["eager"](problem)
    with storages.counting():
        output = attend(*leaves)
    found = footprint(problem, Variant.EAGER, resolve_gpu("h200"), 48.0)
    assert storages.peak_bytes == found.forward_peak_bytes()
    assert storages.now_bytes() == found.saved_bytes()
    with storages.counting():
        gradients = torch.autograd.grad(output, leaves, upstream)
    # On the CPU the softmax's backward makes no product of its arguments, as CUDA's does.
    on_cpu = [
        sum(size for name, size in held.items() if name != "their product")
        for held in found.backward.values()
    ]
    assert storages.peak_bytes == max(on_cpu)
    assert [tuple(gradient.shape) for gradient in gradients] == [size, small, small]
