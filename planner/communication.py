"""What the ranks of a step send: collectives, their bytes on the wire and the time they take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np

from planner.families import parameter_shapes
from planner.hardware import Gpu
from planner.model import ModelSpec
from planner.operations import Numbers
from planner.workload import Engine, Parallelism, Precision, TrainingWorkload

# Between nodes: one 400 Gb/s port per GPU, the usual network of eight-GPU H100 and H200 nodes.
_NETWORK_ID = "infiniband-ndr400"
# Where a card's own link is unknown: the slowest link of the table that joins GPUs of a node.
_FALLBACK_LINK_ID = "pcie4-x16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective in a step: bytes that a rank sends, calls, time."""

    collective: str
    bytes: Numbers
    count: int
    time_s: Numbers


@cache
def _table_rate_bytes_s(link_id: str) -> float:
    rows = json.loads(files("planner").joinpath("data/interconnects.json").read_text())
    rates = {row["id"]: row["per_gpu_bandwidth_each_direction_bytes_s"] for row in rows}
    return float(rates[link_id])


def link_bytes_s(gpu: Gpu, world_size: Numbers) -> Numbers:
    """Return the slowest link of a ring: within a node the card's own, beyond it the network."""
    own = gpu.interconnect_bytes_s or _table_rate_bytes_s(_FALLBACK_LINK_ID)
    across = min(own, _table_rate_bytes_s(_NETWORK_ID))
    return np.where(np.asarray(world_size) > gpu.gpus_per_node, across, own)


def link_notes(gpu: Gpu, world_size: int) -> list[str]:
    """Return what was assumed about the links of this plan."""
    notes = []
    if gpu.interconnect_bytes_s is None and world_size > 1:
        notes.append("The GPU's link is not given: PCIe 4 x16 (31.5 GB/s) is assumed.")
    if world_size > gpu.gpus_per_node:
        notes.append(
            f"Beyond {gpu.gpus_per_node} GPUs the slower of the GPU's link and one 400 Gb/s "
            "network port per GPU (50 GB/s) is assumed."
        )
    return notes


def _element_bytes(engine: Engine, precision: Precision) -> tuple[int, int]:
    """Return the bytes per parameter that gathers and reductions carry."""
    compute = 2 if precision in (Precision.MIXED, Precision.BF16) else 4
    if engine is Engine.FSDP2 and precision is Precision.MIXED:
        return 2, 4
    return compute, compute


def _volumes(
    spec: ModelSpec, workload: TrainingWorkload, engine: Engine, stage: int
) -> list[tuple[str, float, int]]:
    """Return (collective, bytes before the ring factor, calls) of one step.

    With P parameters and k micro-batches. Stage 0 reduces and gathers P once (2P). Stage 1
    reduce-scatters P and gathers the updated P once (2P). Stage 2 reduce-scatters P for every
    micro-batch and gathers P once. Stage 3 gathers the layers for forward and backward, embedding
    and head once, and reduce-scatters P, all for every micro-batch (3P without the ends). FSDP2
    reduces for every micro-batch; its stage 2 gathers P for each forward.
    """
    gather_bytes, reduce_bytes = _element_bytes(engine, workload.precision)
    total, groups = spec.parameters, spec.num_layers + 2
    layers = sum(p.total_numel for p in parameter_shapes(spec) if p.group == "layer")
    rounds = workload.grad_accumulation
    if stage == 0:
        return [("all_reduce", 2.0 * total * reduce_bytes, groups)]
    reductions = rounds if stage >= 2 else 1
    scatter = (
        "reduce_scatter",
        float(total) * reduce_bytes * reductions,
        groups * reductions,
    )
    if stage == 3:
        gathered = float(total + layers) * gather_bytes * rounds
        return [("all_gather", gathered, (groups + spec.num_layers) * rounds), scatter]
    gathers = rounds if engine is Engine.FSDP2 else 1
    return [("all_gather", float(total) * gather_bytes * gathers, groups * gathers), scatter]


def step_collectives(
    spec: ModelSpec,
    workload: TrainingWorkload,
    parallelism: Parallelism,
    gpu: Gpu,
    world_size: Numbers,
) -> list[Collective]:
    """Return the collectives of one step; a ring sends (N-1)/N of each volume per rank.

    `world_size` may be an array and stands in for the one in `parallelism`.
    """
    ring = (world_size - 1.0) / world_size
    rate = link_bytes_s(gpu, world_size)
    volumes = _volumes(spec, workload, parallelism.engine, parallelism.zero_stage)
    return [
        Collective(collective=name, bytes=volume * ring, count=count, time_s=volume * ring / rate)
        for name, volume, count in volumes
    ]
