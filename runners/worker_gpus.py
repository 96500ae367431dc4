"""Choose the GPUs of a run among those attached, by UUID, and refuse those that are busy."""

from __future__ import annotations

from collections.abc import Sequence

from planner.attached import AttachedGpu
from planner.units import GIB_BYTES, format_bytes
from runners.contract import JobSpec, World
from runners.launch import num_ranks

# A context or a display takes a few hundred MiB; more than this belongs to somebody's job.
BUSY_BYTES = 2 * GIB_BYTES


def choose_gpus(
    spec: JobSpec, attached: Sequence[AttachedGpu], visible: str | None
) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that a run shall see, the emptiest first.

    `visible` is our own CUDA_VISIBLE_DEVICES, which a run never exceeds. A spec that names its
    device (`cuda:1`) gets that one. Raises ValueError when there are too few, or they are busy.
    """
    allowed = _visible_only(attached, visible)
    if spec.device is not None:
        wanted = [_by_torch_name(spec.device, allowed)]
    else:
        needed = num_ranks(spec) if spec.world is World.NCCL else 1
        if len(allowed) < needed:
            raise ValueError(
                f"the world {spec.world} needs {needed} GPUs and {len(allowed)} can be used here"
            )
        wanted = sorted(allowed, key=lambda gpu: gpu.used_bytes)[:needed]
    for gpu in wanted:
        _require_free(gpu)
    return tuple(gpu.uuid for gpu in wanted)


def _visible_only(attached: Sequence[AttachedGpu], visible: str | None) -> list[AttachedGpu]:
    if visible is None:
        return list(attached)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        gpu
        for name in names
        for gpu in attached
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
    ]


def _by_torch_name(device: str, allowed: Sequence[AttachedGpu]) -> AttachedGpu:
    kind, _, number = device.partition(":")
    index = int(number) if number.isdecimal() else 0 if not number else -1
    if kind != "cuda" or not 0 <= index < len(allowed):
        raise ValueError(f"device is {device!r}: it must be one of the {len(allowed)} GPUs here")
    return allowed[index]


def _require_free(gpu: AttachedGpu) -> None:
    if gpu.used_bytes > BUSY_BYTES:
        raise ValueError(
            f"GPU {gpu.index} ({gpu.name}) is busy: other programs hold "
            f"{format_bytes(gpu.used_bytes)} of it, so a measurement would mean nothing"
        )
