"""What the Attention page shows, as plain data: predictions, measurements of the shape, the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from app import services
from app.attention_job import queue
from db.database import display_name, resolve_url
from db.measurements import measurements
from db.recorded import RECORDED_DIRECTORY
from db.types import Origin, RunKind
from planner.attention.answer import WORDS, AttentionAnswer
from planner.attention.measured import Seen, best_of, seen_in_benches, seen_in_row
from planner.attention.problem import EXACT_VARIANTS, AttentionProblem, Variant
from planner.units import format_share

MEASURED_TTL_S = 20
BENCHES = RECORDED_DIRECTORY / "kernels"


def seen_of(problem: AttentionProblem) -> list[Seen]:
    """Return every stored or recorded measurement of `problem` at any length and batch, by age."""
    found = [*_benches(), *_stored(display_name(resolve_url(None)))]
    return [one for one in found if one.is_of(problem, any_length=True, any_batch=True)]


@st.cache_data(max_entries=1, show_spinner=False)
def _benches() -> list[Seen]:
    paths = sorted(BENCHES.glob("*attention*.jsonl"))
    lines = [line for path in paths for line in path.read_text().splitlines() if line.strip()]
    return seen_in_benches([json.loads(line) for line in lines])


@st.cache_data(max_entries=4, ttl=MEASURED_TTL_S, show_spinner=False)
def _stored(url: str) -> list[Seen]:
    rows = measurements(services.database(), kinds=[RunKind.ATTENTION])
    return [
        seen
        for row in rows
        for seen in seen_in_row(
            row.spec,
            row.measured,
            row.environment,
            row=row.id,
            here=row.origin is Origin.HERE,
        )
    ]


def on_gpus(seen: Sequence[Seen]) -> list[Seen]:
    """Return what was measured on a GPU: a CPU's times and bytes are no answer about one."""
    return [one for one in seen if one.world != "cpu"]


def at_problem(problem: AttentionProblem, seen: Sequence[Seen]) -> dict[Variant, Seen]:
    """Return the best measurement of each variant at exactly `problem`."""
    return best_of([one for one in seen if one.is_of(problem)])


def at_lengths(problem: AttentionProblem, seen: Sequence[Seen]) -> list[Seen]:
    """Return the best measurement of each variant at every length of `problem`."""
    alike = [one for one in seen if one.is_of(problem, any_length=True)]
    lengths = sorted({one.problem.sequence_length for one in alike})
    return [
        best
        for length in lengths
        for best in best_of([s for s in alike if s.problem.sequence_length == length]).values()
    ]


def at_any_batch(problem: AttentionProblem, seen: Sequence[Seen]) -> dict[Variant, Seen]:
    """Return the best measurement of each variant at `problem`, else at another batch of it."""
    alike = best_of([one for one in seen if one.is_of(problem, any_batch=True)])
    return {**alike, **at_problem(problem, seen)}


def variant_name(variant: str) -> str:
    """Return a variant's name as people read it."""
    return WORDS[Variant(variant)]


def kind_words(variant: Variant) -> str:
    """Say whether a variant is a kernel (a system variable) or an algorithm."""
    return "kernel, exact" if variant in EXACT_VARIANTS else "algorithm, changes the model"


def table_rows(found: AttentionAnswer, seen: Mapping[Variant, Seen]) -> list[dict[str, Any]]:
    """Return the page's table: one line per variant, predicted beside measured."""
    lines = []
    for one in found.variants:
        row = seen.get(one.variant)
        line: dict[str, Any] = {
            "variant": WORDS[one.variant],
            "kind": kind_words(one.variant),
            "exact or not": one.exactness,
            "predicted backends": _both(one.forward_backend, one.backward_backend),
        }
        for name, done in (("forward", one.forward), ("backward", one.backward)):
            measured_s = getattr(row, f"{name}_s") if row else None
            line |= {
                f"{name} GFLOP": done.flops / 1e9,
                f"{name}_hbm_bytes": round(done.hbm_bytes),
                f"{name} predicted ms": 1e3 * done.time_s,
                f"{name} measured ms": None if measured_s is None else 1e3 * measured_s,
                f"{name}_peak_bytes": getattr(one, f"{name}_peak_bytes"),
                f"{name}_peak_measured_bytes": _measured(row, f"{name}_peak_requested_bytes"),
                f"{name}_peak_allocated_bytes": _measured(row, f"{name}_peak_bytes"),
            }
        line |= {
            "device_bytes": one.device_bytes,
            "fits": one.fits,
            "longest sequence": one.longest,
            "outcome": _measured(row, "outcome"),
            "error": _measured(row, "error"),
            "distance from exact": _measured(row, "apart_from_exact"),
            "ran": _backends(row),
            "measured on": row.gpu if row else None,
        }
        lines.append(line)
    return lines


def _measured(row: Seen | None, name: str) -> Any:
    return None if row is None else getattr(row, name)


def _backends(row: Seen | None) -> str | None:
    if row is None:
        return None
    return _both(row.forward_backend, row.backward_backend)


def _both(forward: str | None, backward: str | None) -> str | None:
    """Name the kernels of both directions, once where they are one."""
    return ", ".join(dict.fromkeys(name for name in (forward, backward) if name)) or None


def findings(found: AttentionAnswer, show: Callable[[float], str]) -> list[str]:
    """Say, with sizes as `show` writes them, what stands out: scores stored, what exact kernels save, what algorithms give up."""
    by_variant = {one.variant: one for one in found.variants}
    eager, ours = by_variant.get(Variant.EAGER), by_variant.get(Variant.TRITON)
    sentences = []
    if eager is not None:
        sentences.append(_eager_sentence(found, eager.longest, show(eager.backward_peak_bytes)))
    if eager is not None and ours is not None:
        times = eager.backward_peak_bytes / ours.backward_peak_bytes
        sentences.append(
            f"**Ours** gives the same result with {show(ours.backward_peak_bytes)}, "
            f"{times:,.0f} times less. Its FLOPs still grow with the square of the sequence: "
            f"{ours.forward.flops / 1e12:,.3g} TFLOP forward. What it saves is memory and traffic "
            f"({show(ours.forward.hbm_bytes)} instead of "
            f"{show(eager.forward.hbm_bytes)})."
        )
    changed = [one for one in found.variants if not one.exact]
    if ours is not None and changed:
        shares = ", ".join(
            f"{WORDS[one.variant]} {format_share(one.forward.flops / ours.forward.flops)}"
            for one in changed
        )
        sentences.append(
            f"**Algorithms** compute fewer products, of ours: {shares}. A model gives other results "
            "with them: they are choices about the model, not about its kernels."
        )
    return sentences


def _eager_sentence(found: AttentionAnswer, longest: int | None, peak: str) -> str:
    text = f"**Eager** stores the scores: {peak} at the peak of its backward"
    if longest is None:
        return f"{text}."
    return f"{text}; on {found.gpu.name} it does not fit beyond **{longest:,} tokens**."


def submit(found: AttentionAnswer, world: str, *, key: str) -> str:
    """Queue the run of an answer's variants; the same key never queues twice. Returns the run id."""
    return queue(services.database(), found, world, key=key, who="page")
