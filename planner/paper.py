"""The table of the ZeRO paper: model states only, mixed-precision Adam, in decimal GB.

Kept apart from our prediction on purpose: it counts no activations, buffers or allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.units import GB_BYTES

PARAMETER_BYTES = 2
GRADIENT_BYTES = 2
# fp32 copy of the parameters, momentum and variance: 4 bytes each (K = 12 in the paper).
OPTIMIZER_BYTES = 12

PAPER_PARAMETERS = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 10**12}
PAPER_WORLD_SIZES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRow:
    """Model states per device in GB (10^9 bytes) for one model and world size."""

    model: str
    world_size: int
    stage_1_gb: float
    stage_2_gb: float
    stage_3_gb: float


def paper_state_bytes(parameters: int, zero_stage: int, world_size: int) -> float:
    """Return 2P + 2P + 12P per device with what the stage shards divided by N.

    Stage 1: 4P + 12P/N; stage 2: 2P + 14P/N; stage 3: 16P/N (Rajbhandari et al., ZeRO, 2020).
    """
    optimizer = OPTIMIZER_BYTES / (world_size if zero_stage >= 1 else 1)
    gradient = GRADIENT_BYTES / (world_size if zero_stage >= 2 else 1)
    parameter = PARAMETER_BYTES / (world_size if zero_stage >= 3 else 1)
    return parameters * (parameter + gradient + optimizer)


def paper_table(
    models: dict[str, int] | None = None, world_sizes: Sequence[int] = PAPER_WORLD_SIZES
) -> list[PaperRow]:
    """Return the paper's table, or the same for other models and world sizes."""
    return [
        PaperRow(
            model=name,
            world_size=world_size,
            stage_1_gb=paper_state_bytes(parameters, 1, world_size) / GB_BYTES,
            stage_2_gb=paper_state_bytes(parameters, 2, world_size) / GB_BYTES,
            stage_3_gb=paper_state_bytes(parameters, 3, world_size) / GB_BYTES,
        )
        for name, parameters in (models or PAPER_PARAMETERS).items()
        for world_size in world_sizes
    ]
