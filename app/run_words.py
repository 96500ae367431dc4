"""A listed run in a few words: its model, its plan and, once it has ended, predicted and measured bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.plan_words import plan_line
from db.views import RunDetail
from planner.comparison import compare, gpu_name

# What a run without a training plan was asked, by the field of its spec.
_ASKED = ("decode", "serve", "quality")


def run_words(detail: RunDetail) -> dict[str, Any]:
    """Return `model`, `hardware`, `plan` and the bytes of a run, None where there are none.

    `predicted_bytes` and `measured_bytes` are of the counter `counter` that its world measures: the
    allocator's peak on a GPU, the training state on the CPU.
    """
    words: dict[str, Any] = {
        "model": detail.summary.model_name or _asked_model(detail.spec),
        "hardware": detail.summary.hardware_name or _gpu_that_ran(detail),
        "plan": plan_line(detail.plan) if detail.plan else "",
        **dict.fromkeys(("counter", "predicted_bytes", "measured_bytes")),
    }
    if detail.plan is None or detail.prediction is None:
        return words
    memory = detail.prediction["memory"]
    words |= {"counter": "allocated", "predicted_bytes": memory["allocated_bytes"]}
    found = compare(detail.prediction, detail.measured or {}, detail.spec["world"])
    if not found:
        return words
    if detail.spec["world"] == "cpu":
        words |= {"counter": "state", "predicted_bytes": int(sum(c.predicted for c in found))}
        return words | {"measured_bytes": int(sum(c.measured for c in found))}
    return words | {"measured_bytes": (detail.measured or {}).get("allocated_bytes")}


def _gpu_that_ran(detail: RunDetail) -> str | None:
    return gpu_name(detail.environment) if detail.environment else None


def _asked_model(spec: Mapping[str, Any]) -> str | None:
    """Return the model of a run that has no training plan; None where it has no model either."""
    for name in _ASKED:
        model = (spec.get(name) or {}).get("model")
        if model:
            return str(model.get("name") or model.get("preset") or "custom model")
    return None
