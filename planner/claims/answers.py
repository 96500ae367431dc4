"""Every claim with what was found: the one function behind page, command line and API."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from planner.claims import examples, images, kernels, steps, zero_stages
from planner.claims.claim import Answer, Claim, Findings, all_claims
from planner.claims.evidence import Evidence, Row
from planner.plan import Plan

Check = Callable[[Plan | None, Evidence], Findings]
CHECKS: Mapping[str, Check] = {
    "score_matrix": kernels.score_matrix,
    "layers": kernels.layers,
    "memory_98": kernels.memory_98,
    "linear_memory": kernels.linear_memory,
    "quadratic_flops": kernels.quadratic_flops,
    "compute_15": kernels.compute_15,
    "time_15": kernels.time_15,
    "traffic_10": kernels.traffic_10,
    "memory_3_5": steps.memory_3_5,
    "speed_2_4": steps.speed_2_4,
    "standard_2k": steps.standard_2k,
    "flash_8k": steps.flash_8k,
    "flash_100k": steps.flash_100k,
    "summaries_memory": examples.summaries_memory,
    "summaries_speed": examples.summaries_speed,
    "genes_without": examples.genes_without,
    "genes_memory": examples.genes_memory,
    "genes_speed": examples.genes_speed,
    "image_pixels": images.image_pixels,
    "image_blocks": images.image_blocks,
    "image_days": images.image_days,
    "quality": examples.quality,
    "card_65b": examples.card_65b,
    "zero_4": zero_stages.zero_4,
    "zero_8": zero_stages.zero_8,
}


def answers(
    own: Plan | None = None, rows: Iterable[Row] = (), here: Iterable[str] = ()
) -> tuple[Answer, ...]:
    """Return every claim with its figures, what `rows` measured, and the verdict.

    `own` is a person's plan, which gets a figure of its own beside the claim's cases; `here` are the
    ids of rows that this database's runs made. `rows` are in order of time.
    """
    seen = Evidence(rows=tuple(rows), here=frozenset(here))
    return tuple(answer(claim, own, seen) for claim in all_claims())


def answer(claim: Claim, own: Plan | None, seen: Evidence) -> Answer:
    """Return one claim with its figures, for a person's plan and what was measured."""
    return Answer(claim=claim, found=CHECKS[claim.id](own, seen))
