"""What the pages ask of the planner beside a plan's own prediction."""

from __future__ import annotations

from app import plan_curves, services
from planner.plan import Plan, default_plan


def _plan(preset: str, **workload: object) -> Plan:
    document = default_plan().to_dict()
    document["model"] = {"preset": preset}
    document["workload"] = {**document["workload"], **workload}
    return services.check_plan(document)


def test_a_kernel_without_a_curve_is_named_with_the_reason() -> None:
    reasons = plan_curves.refused_kernels(_plan("gemma2-9b", attention="eager"))
    assert set(reasons) == {"sdpa", "triton"}
    assert "does not cap attention logits" in reasons["sdpa"]
    assert "no step with capped attention logits" in reasons["triton"]


def test_a_plan_that_every_kernel_can_run_names_none() -> None:
    plan = _plan("llama-3.1-8b")
    assert plan_curves.refused_kernels(plan) == {}
    assert set(plan_curves.attention_curves(plan)) == {"eager", "sdpa", "triton"}
