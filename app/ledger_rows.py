"""A prediction's ledger as table rows: shapes in numbers, shares, and the filter over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any


def ledger_rows(prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the ledger's tensors, largest first; flat, so that they can be CSV.

    `shape` is as traced ("batch x seq x hidden"), `shape_text` has the plan's numbers in it, and
    `phases` are the names of the phases in which the tensor lives: what belongs to the running
    operation lives at the peak only.
    """
    memory, sizes = prediction["memory"], symbol_sizes(prediction)
    whole_bytes = memory["allocated_bytes"]
    rows = [
        {
            "name": " ".join(entry["name"].split()),
            "component": entry["component"],
            "owner": entry["owner"],
            "shape": " x ".join(str(side) for side in entry["shape"]),
            "shape_text": " × ".join(_side(side, sizes) for side in entry["shape"]),
            "dtype": entry["dtype"],
            "count": entry["count"],
            "bytes": entry["bytes"],
            "share_percent": round(100 * entry["bytes"] / whole_bytes, 3) if whole_bytes else 0.0,
            "phases": ", ".join(entry["phases"] or (memory["peak_phase"],)),
            "formula": entry["formula"],
        }
        for entry in memory["ledger"]
        # A served model's ledger has the tensors of all phases, not of the peak alone.
        if not prediction["serving"] or memory["peak_phase"] in entry["phases"]
    ]
    return sorted(rows, key=lambda row: -row["bytes"])


def symbol_sizes(prediction: Mapping[str, Any]) -> dict[str, int]:
    """Return the numbers behind the symbols of traced shapes, as far as the plan names them."""
    model, workload = prediction["model"], prediction["plan"]["workload"]
    latent = model.get("latent") or {}
    head_dim, heads = model.get("head_dim") or 0, model.get("num_heads") or 0
    group = heads // (model.get("num_kv_heads") or 1)
    value_dim = latent.get("value_dim", head_dim)
    found = {
        "batch": workload.get("micro_batch"),
        "seq": workload.get("sequence_length"),
        "hidden": model.get("hidden_size"),
        "heads": model.get("num_heads"),
        "kv_heads": model.get("num_kv_heads"),
        "head_dim": model.get("head_dim"),
        "ffn": model.get("intermediate_size"),
        "vocab": model.get("vocab_size"),
        "experts": model.get("num_experts"),
        "top_k": model.get("experts_per_token"),
        "moe_ffn": model.get("expert_size"),
        "shared_ffn": model.get("shared_expert_size"),
        "group": group,
        "group_plus_2": group + 2,
        "half_head_dim": head_dim // 2,
        "rotary_dim": model.get("rotary_dim"),
        "half_rotary": (model.get("rotary_dim") or 0) // 2,
        "qk_dim": head_dim,
        "value_dim": value_dim,
        "nope_dim+value_dim": latent.get("nope_dim", 0) + value_dim,
        "q_rank": latent.get("q_rank"),
        "kv_rank": latent.get("kv_rank"),
        "kv_rank+rotary_dim": latent.get("kv_rank", 0) + (model.get("rotary_dim") or 0),
        "lora_rank": workload.get("lora_rank"),
        "seq_and_one": workload.get("sequence_length", 0) + 1,
    }
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _side(side: int | str, sizes: Mapping[str, int]) -> str:
    """One side of a shape in numbers; a symbol that the plan does not name stays a word."""
    factors = str(side).split("*")
    numbers = [int(f) if f.isdecimal() else sizes.get(f) for f in factors]
    known = [number for number in numbers if number is not None]
    return f"{prod(known):,}" if len(known) == len(factors) else str(side)


def matching(
    rows: Iterable[Mapping[str, Any]],
    phases: Sequence[str],
    components: Sequence[str],
    text: str,
) -> list[dict[str, Any]]:
    """Return the rows of any of these phases and components that contain all words of `text`.

    Empty phases, components or text keep everything.
    """
    wanted = text.lower().split()
    return [
        dict(row)
        for row in rows
        if (not components or row["component"] in components)
        and (not phases or not set(phases).isdisjoint(row["phases"].split(", ")))
        and all(word in _searched(row) for word in wanted)
    ]


def _searched(row: Mapping[str, Any]) -> str:
    fields = ("name", "component", "owner", "shape", "shape_text", "dtype")
    return " ".join(str(row[name]) for name in fields).lower()
