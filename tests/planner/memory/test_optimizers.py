"""States and temporaries of the optimizers, by hand and against torch's own steps."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.memory.optimizers import (
    Stepped,
    keeps_step_on_device,
    optimizer_states,
    temporaries_peak_bytes,
    tensor_states,
)
from planner.workload import Optimizer
from runners.zero.optimizer import build_optimizers

SHAPES = ((11, 300), (300, 11), (40, 50), (90,), (2, 30, 20))
SCALAR_BYTES = 16  # norms, means and step counters are not described


class Watch(TorchDispatchMode):
    """Sums the bytes of tensors larger than a scalar that are alive beside the given ones."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak_bytes = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return out

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size_bytes = storage._cdata, storage.nbytes()
        if key not in self.live and key not in self._known and size_bytes > SCALAR_BYTES:
            self.live[key] = size_bytes
            weakref.finalize(storage, self.live.pop, key)


# The others' kernels need a GPU.
ON_CPU = [o for o in Optimizer if o not in (Optimizer.ADAMW_8BIT, Optimizer.ADAMW_TRITON)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ON_CPU)
def test_states_and_temporaries_are_those_of_torch_s_step(
    kind: Optimizer, dtype: torch.dtype
) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in SHAPES]
    optimizers = build_optimizers(str(kind), tensors, 1e-3)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape).to(dtype)
    for optimizer in optimizers:
        optimizer.step()  # makes the states
    states = [s for o in optimizers for state in o.state.values() for s in state.values()]
    stepped = [Stepped(shape, tensors[0].element_size()) for shape in SHAPES]
    expected = {(s.name, s.dtype): s.size_bytes for s in optimizer_states(kind, stepped)}
    seen: dict[tuple[str, str], int] = {}
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, values in state.items():
                if name != "step":
                    key = (name, str(values.dtype).removeprefix("torch."))
                    seen[key] = seen.get(key, 0) + values.numel() * values.element_size()
    assert expected == seen
    with Watch([*tensors, *(t.grad for t in tensors), *states]) as watch:
        for optimizer in optimizers:
            optimizer.step()
    assert watch.peak_bytes == temporaries_peak_bytes(kind, stepped)


def test_adafactor_factors_the_last_two_dimensions() -> None:
    # 30 x 20 twice: 2 * 30 row means and 2 * 20 column means; a vector keeps all its squares.
    assert [s.size_bytes for s in tensor_states(Optimizer.ADAFACTOR, Stepped((2, 30, 20), 4))] == [
        240,
        160,
    ]
    assert [s.size_bytes for s in tensor_states(Optimizer.ADAFACTOR, Stepped((90,), 2))] == [180]


def test_muon_keeps_one_momentum_of_a_layer_s_matrix_and_two_moments_of_the_rest() -> None:
    def state_bytes(tensor: Stepped) -> int:
        return sum(s.size_bytes for s in tensor_states(Optimizer.MUON, tensor))

    assert state_bytes(Stepped((10, 20), 4)) == 800
    assert state_bytes(Stepped((10, 20), 4, in_layer=False)) == 1600
    assert state_bytes(Stepped((20,), 4)) == 160
    assert not keeps_step_on_device(Optimizer.MUON, Stepped((10, 20), 4))
    assert keeps_step_on_device(Optimizer.MUON, Stepped((20,), 4))


def test_eight_bit_adamw_keeps_a_byte_and_a_scale_per_256_elements() -> None:
    # 10,000 elements: 2 x 10,000 B, 2 x 40 blocks x 4 B, 2 tables of 1 KiB for the optimizer.
    states = optimizer_states(Optimizer.ADAMW_8BIT, [Stepped((10_000,), 4)])
    assert sum(int(s.size_bytes) for s in states) == 20_000 + 320 + 2048
    assert {s.name: s.dtype for s in states if s.name == "state1"} == {"state1": "uint8"}
    # 4,095 elements stay in fp32, and have no scales.
    small = tensor_states(Optimizer.ADAMW_8BIT, Stepped((4_095,), 4))
    assert sum(int(s.size_bytes) for s in small) == 8 * 4_095


def test_sizes_may_be_arrays_over_world_sizes() -> None:
    shards = np.array([10_000, 4_095])
    for kind in (Optimizer.ADAMW_LOOP, Optimizer.ADAMW_8BIT):
        both = optimizer_states(kind, [Stepped((shards,), 4)])
        for index, numel in enumerate(shards.tolist()):
            one = optimizer_states(kind, [Stepped((numel,), 4)])
            assert sum(s.size_bytes for s in one) == sum(
                np.broadcast_to(s.size_bytes, 2)[index] for s in both
            )
    peak = temporaries_peak_bytes(Optimizer.ADAMW_LOOP, [Stepped((shards,), 4)])
    assert peak.tolist() == [80_000, 8 * 4_095]
