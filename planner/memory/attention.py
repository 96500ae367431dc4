"""What attention kernels hold beside their inputs and results: while a backward runs, and for good."""

from __future__ import annotations

from planner.hardware import Gpu
from planner.memory.overheads import attention_workspace_bytes
from planner.model import ModelSpec
from planner.workload import Attention, Precision, TrainingWorkload

DIRECTIONS = FORWARD, BACKWARD = "forward", "backward"
# Of our kernels for compute capability 9.0 (kernels/attention): the head sizes they take, in steps
# of the 16 bytes that TMA reads; the rows that lse and delta are padded to in the backward; the rows
# of a forward's tile by its columns; the multiprocessors, an H200's, among which tiles are dealt.
_HOPPER, _MAX_HEAD_DIM, _HEAD_DIM_STEP = "9.0", {FORWARD: 256, BACKWARD: 128}, 8
_PADDED_ROWS, _TILE_ROWS = 128, {64: 192, 128: 128}
_MULTIPROCESSORS = 132
_FP32_BYTES = 4


def attention_workspaces(
    spec: ModelSpec, workload: TrainingWorkload, hardware: Gpu | None
) -> tuple[tuple[int, ...], ...]:
    """Bytes of what each layer's attention takes behind its gradients, and gives back at its end."""
    if workload.attention is not Attention.TRITON:
        taken = attention_workspace_bytes(spec, workload, hardware)
        return ((taken,) if taken else (),) * spec.num_layers
    if not _runs_on_hopper(spec, workload, hardware, BACKWARD):
        return ((),) * spec.num_layers
    ours = hopper_backward_bytes(workload.micro_batch, spec, workload.sequence_length)
    return (ours,) * spec.num_layers


def hopper_backward_bytes(batch: int, spec: ModelSpec, length: int) -> tuple[int, int]:
    """Padded rows of lse and delta, then the accumulator of the queries' gradients; all in fp32."""
    rows = batch * spec.num_heads
    padded = -(-length // _PADDED_ROWS) * _PADDED_ROWS
    return 2 * _FP32_BYTES * rows * padded, _FP32_BYTES * rows * length * spec.head_dim


def tile_list_bytes(spec: ModelSpec, workload: TrainingWorkload, hardware: Gpu | None) -> int:
    """Bytes of the tiles' list that our forward makes at its first call and keeps, or 0.

    Where a list begins for each multiprocessor and where the last one ends, then all tiles. Layers
    with a window need none.
    """
    layers = range(spec.num_layers)
    windowed = all(_has_window(spec, workload, layer) for layer in layers)
    if windowed or not _runs_on_hopper(spec, workload, hardware, FORWARD):
        return 0
    tile_rows = _TILE_ROWS[64 if spec.head_dim <= 64 else 128]
    tiles = -(-workload.sequence_length // tile_rows) * workload.micro_batch * spec.num_heads
    return _FP32_BYTES * (1 + min(_MULTIPROCESSORS, tiles) + tiles)


def _runs_on_hopper(
    spec: ModelSpec, workload: TrainingWorkload, hardware: Gpu | None, direction: str
) -> bool:
    """Whether our kernels for Hopper compute a model's attention (kernels/attention/dispatch.py).

    Without a GPU's compute capability it is taken for Hopper's, as cuBLAS' workspaces are.
    """
    capability = (hardware and hardware.compute_capability) or _HOPPER
    return (
        workload.attention is Attention.TRITON
        and capability == _HOPPER
        and workload.precision is not Precision.FP32
        and direction not in spec.portable_attention
        and takes_head_sizes(spec, direction)
    )


def takes_head_sizes(spec: ModelSpec, direction: str) -> bool:
    """Whether our kernels for Hopper take a model's heads in one direction."""
    is_even = spec.head_dim % _HEAD_DIM_STEP == 0
    return is_even and spec.value_dim == spec.head_dim <= _MAX_HEAD_DIM[direction]


def _has_window(spec: ModelSpec, workload: TrainingWorkload, layer: int) -> bool:
    """Whether a layer's sliding window hides anything (kernels/attention/hf.py)."""
    window = spec.sliding_window
    return spec.sliding_layers[layer] and window is not None and window < workload.sequence_length
