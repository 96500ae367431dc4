"""Why a step peaks where it does, in plain words: pure text from a prediction's phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_SHOWN = 4
# What a person can turn to make a part smaller.
LEVERS: Mapping[str, str] = {
    "parameters": "a ZeRO stage that shards parameters (3), more GPUs, or a smaller precision",
    "gradients": "ZeRO stage 2 or 3, more GPUs, or a smaller precision",
    "optimizer": "ZeRO stage 1 to 3, more GPUs, or an optimizer with fewer states",
    "gathered": "ZeRO stage 3 instead of 1 or 2, an engine that gathers fewer layers at once, or tensor "
    "parallelism",
    "activations": "checkpointing, a smaller micro-batch or a shorter sequence",
    "attention": "an attention kernel that stores no scores: sdpa or triton",
    "logits": "a smaller micro-batch, a shorter sequence, or a loss that never holds all logits",
    "temporary": "a smaller micro-batch, a shorter sequence, or another optimizer implementation",
}
SERVING_LEVERS: Mapping[str, str] = {
    "parameters": "a smaller dtype of the weights",
    "kv_cache": "fewer sequences, a shorter context, or a smaller dtype of the cache",
}

# Names of parts as they read in a sentence.
PART_WORDS: Mapping[str, str] = {
    "optimizer": "optimizer states",
    "gathered": "gathered parameters",
    "attention": "attention scores",
    "temporary": "temporaries",
    "workspace": "library workspaces",
    "rounding": "unsplit ends of blocks",
    "kv_cache": "the key-value cache",
}


def phase_rows(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every phase with its total and how far below the peak it stays, in bytes."""
    peak_bytes = memory["allocated_bytes"]
    return [
        {
            "phase": phase["label"],
            "allocated_bytes": phase["allocated_bytes"],
            "below_peak_bytes": peak_bytes - phase["allocated_bytes"],
            "is_peak": phase["name"] == memory["peak_phase"],
        }
        for phase in memory["phases"]
    ]


def peak_and_next(
    memory: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Return the phase of the peak and the next highest one; None where there is one phase."""
    ordered = sorted(
        memory["phases"],
        key=lambda phase: (phase["name"] != memory["peak_phase"], -phase["allocated_bytes"]),
    )
    return ordered[0], ordered[1] if len(ordered) > 1 else None


def contributors(memory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of the peak, largest first: bytes, share, and how much more than next."""
    peak, following = peak_and_next(memory)
    below = following["parts"] if following else {}
    whole_bytes = peak["allocated_bytes"]
    rows = [
        {
            "component": name,
            "bytes": size_bytes,
            "share_percent": round(100 * size_bytes / whole_bytes, 2) if whole_bytes else 0.0,
            "more_than_next_bytes": size_bytes - below.get(name, 0),
        }
        for name, size_bytes in peak["parts"].items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def reason_sentences(
    memory: Mapping[str, Any], size: Any, levers: Mapping[str, str] = LEVERS
) -> list[str]:
    """Return the sentences that say why the peak is there; `size` turns bytes into text.

    `levers` says what makes each part smaller.
    """
    peak, following = peak_and_next(memory)
    rows = contributors(memory)
    said = [
        f"Memory is highest in **{peak['label'].lower()}**, at "
        f"{size(peak['allocated_bytes'])} allocated.",
        _largest_sentence(rows, size),
    ]
    if following is not None:
        said += _next_sentences(memory, following, rows, size, levers)
    return said


def _largest_sentence(rows: Sequence[Mapping[str, Any]], size: Any) -> str:
    largest = [
        f"{_words(row['component'])} {size(row['bytes'])} ({row['share_percent']:.0f} %)"
        for row in rows[:LARGEST_SHOWN]
    ]
    return f"There it holds mostly {_listed(largest)}."


def _next_sentences(
    memory: Mapping[str, Any],
    following: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    size: Any,
    levers: Mapping[str, str],
) -> list[str]:
    gap_bytes = memory["allocated_bytes"] - following["allocated_bytes"]
    label = following["label"].lower()
    said = [f"Next comes {label} at {size(following['allocated_bytes'])}, {size(gap_bytes)} lower."]
    only_here = sorted(
        (row for row in rows if row["more_than_next_bytes"] > 0),
        key=lambda row: -row["more_than_next_bytes"],
    )
    if gap_bytes > 0 and only_here:
        first = only_here[0]
        said.append(
            f"What makes the difference is {_words(first['component'])}: "
            f"{size(first['more_than_next_bytes'])} more than in {label}."
        )
        said.append(_shrink_sentence(first, gap_bytes, label, size, levers))
    said.append(_both_sentence(rows, size, levers))
    return said


def _shrink_sentence(
    row: Mapping[str, Any], gap_bytes: int, label: str, size: Any, levers: Mapping[str, str]
) -> str:
    lever = levers.get(row["component"])
    how = f" ({lever})" if lever else ""
    return (
        f"To lower the peak, shrink {_words(row['component'])}{how}. That pays for the first "
        f"{size(gap_bytes)}; then {label} is the peak."
    )


def _both_sentence(rows: Sequence[Mapping[str, Any]], size: Any, levers: Mapping[str, str]) -> str:
    """What both phases hold moves both, and so goes on paying."""
    shared = max(rows, key=lambda row: row["bytes"] - max(row["more_than_next_bytes"], 0))
    both_bytes = shared["bytes"] - max(shared["more_than_next_bytes"], 0)
    lever = levers.get(shared["component"])
    how = f" with {lever}" if lever else ""
    return (
        f"The largest part that both hold is {_words(shared['component'])} "
        f"({size(both_bytes)}): less of it{how} lowers both."
    )


def _words(name: str) -> str:
    return PART_WORDS.get(name, name.replace("_", " "))


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
