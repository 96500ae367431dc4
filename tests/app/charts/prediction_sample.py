"""A prediction of the contract's shape whose numbers are chosen by hand, for figures and pages."""

from __future__ import annotations

from typing import Any

GIB = 1_073_741_824
COMPONENTS = {
    "parameters": 16 * GIB,
    "gradients": 2 * GIB,
    "optimizer": 12 * GIB,
    "gathered": 1 * GIB,
    "activations": 8 * GIB,
    "attention": 3 * GIB,
    "logits": 4 * GIB,
    "temporary": 0,
}
OVERHEADS = {"segments": 2 * GIB, "context": GIB // 2}


def sample_memory() -> dict[str, Any]:
    """A memory object: 46 GiB allocated, 48 reserved, 48.5 on the device; peak in loss backward."""
    half = {name: size // 2 for name, size in COMPONENTS.items()}
    return {
        "allocated_bytes": 46 * GIB,
        "reserved_bytes": 48 * GIB,
        "device_bytes": 48 * GIB + GIB // 2,
        "peak_phase": "loss_backward",
        "rank": 0,
        "phases": [
            _phase("forward", "forward", half),
            _phase("loss_backward", "loss backward", COMPONENTS),
            _phase("optimizer", "optimizer step", {"parameters": 16 * GIB, "optimizer": 14 * GIB}),
        ],
        "components": [
            {"name": name, "bytes": size, "formula": f"{size} = by hand for {name}"}
            for name, size in COMPONENTS.items()
        ],
        "overheads": [
            {"name": name, "bytes": size, "formula": f"{size} = by hand for {name}"}
            for name, size in OVERHEADS.items()
        ],
        "ledger": [
            _entry("model.layers.0.self_attn.q_proj.weight", [4096, 4096], 32 * 2 * 4096 * 4096),
            _entry("lm_head.weight", [128256, 4096], 2 * 128256 * 4096),
        ],
    }


def _phase(name: str, label: str, parts: dict[str, int]) -> dict[str, Any]:
    total = sum(parts.values())
    return {"name": name, "label": label, "allocated_bytes": total, "parts": dict(parts)}


def _entry(name: str, shape: list[int], size: int) -> dict[str, Any]:
    return {
        "name": name,
        "shape": shape,
        "dtype": "bf16",
        "count": size // (2 * shape[0] * shape[1]),
        "bytes": size,
        "component": "parameters",
        "owner": "engine",
        "phases": ["forward", "backward"],
        "formula": "count × rows × columns × 2",
    }
