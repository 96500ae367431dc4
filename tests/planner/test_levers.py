"""Levers say what two separate predictions say; remedies are the smallest changes that fit."""

from __future__ import annotations

from typing import Any

import pytest

from planner.changes import Change, Kind, changes_of
from planner.errors import PlanError
from planner.levers import Lever, levers_of, of_kind, remedies, saving, speeding
from planner.plan import Plan, parse_plan
from planner.predict import predict
from planner.units import GIB_BYTES, format_bytes
from planner.verdict import State


def plan_of(model: str = "llama-3.2-1b", gpu_gib: int | None = None, **parts: Any) -> Plan:
    """Return a training plan on H200s, or on GPUs like them with other memory."""
    hardware: dict[str, Any] = {"preset": "h200"}
    if gpu_gib is not None:
        rates = {"mem_bandwidth_bytes_s": 4.8e12, "peak_dense_flop_s": {"bf16": 989e12}}
        links = {"interconnect_bytes_s": 450e9}
        size = {"visible_bytes": gpu_gib * GIB_BYTES}
        hardware = {"custom": {"name": "small GPU", **size, **rates, **links}}
    return parse_plan({"model": {"preset": model}, "hardware": hardware, **parts})


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = {"micro_batch": 4, "grad_accumulation": 2, "sequence_length": 2048}
    return plan_of(workload=workload, parallelism={"world_size": 4, "zero_stage": 1})


@pytest.fixture(scope="module")
def levers(plan: Plan) -> dict[str, Lever]:
    return {lever.change.words: lever for lever in levers_of(plan)}


@pytest.mark.parametrize(
    ("words", "part", "values"),
    [
        ("checkpointing full", "workload", {"checkpointing": "full"}),
        ("attention eager", "workload", {"attention": "eager"}),
        ("chunked loss", "workload", {"loss": "chunked"}),
        ("micro-batch 2 × 4 accumulated", "workload", {"micro_batch": 2, "grad_accumulation": 4}),
        ("micro-batch 8", "workload", {"micro_batch": 8, "grad_accumulation": 1}),
        ("ZeRO stage 3", "parallelism", {"zero_stage": 3}),
        ("engine fsdp2 at stage 2", "parallelism", {"engine": "fsdp2", "zero_stage": 2}),
        ("precision bf16", "workload", {"precision": "bf16"}),
        ("LoRA of rank 16", "workload", {"lora_rank": 16}),
    ],
)
def test_a_lever_is_the_difference_of_two_predictions(
    plan: Plan, levers: dict[str, Lever], words: str, part: str, values: dict[str, Any]
) -> None:
    document = plan.to_dict()
    document[part] = {**document[part], **values}
    before, after = predict(plan), predict(parse_plan(document))
    lever = levers[words]
    assert lever.plan == after.plan
    assert lever.device_bytes == after.memory["device_bytes"]
    assert lever.saved_bytes == before.memory["device_bytes"] - after.memory["device_bytes"]
    old, new = before.throughput, after.throughput
    assert lever.step_ratio == pytest.approx(new.step_time_s / old.step_time_s)
    # The same sequences and GPUs: time per token is the step's.
    assert lever.cost_ratio == pytest.approx(lever.step_ratio)
    assert lever.is_same_work
    assert lever.state is after.verdict.state
    percent = round(100 * (new.step_time_s / old.step_time_s - 1))
    assert f"{percent:+d} % step" in lever.effect()
    assert lever.effect().startswith("-" if lever.saved_bytes >= 0 else "+")
    assert format_bytes(abs(lever.saved_bytes)) in lever.effect()


def test_more_gpus_keep_the_sequences_of_a_step_where_they_can(
    plan: Plan, levers: dict[str, Lever]
) -> None:
    double, octuple = levers["8 GPUs"], levers["32 GPUs"]
    assert (double.plan.workload.grad_accumulation, double.change.caution) == (1, "")  # type: ignore[union-attr]
    assert octuple.plan.workload.grad_accumulation == 2  # type: ignore[union-attr]
    assert octuple.change.caution == "a step has 8 times the sequences"
    assert (double.gpu_ratio, octuple.gpu_ratio, levers["2 GPUs"].gpu_ratio) == (2, 8, 0.5)
    old, new = predict(plan).throughput, predict(double.plan).throughput
    gain = round(100 * (new.tokens_per_s / old.tokens_per_s - 1))
    assert double.time_words() == f"{gain:+d} % tokens/s"


def test_splits_stay_on_the_same_gpus(levers: dict[str, Lever]) -> None:
    split = levers["tensor parallel 2 on the same GPUs"]
    parallelism, workload = split.plan.parallelism, split.plan.workload
    assert (parallelism.tensor_parallel, parallelism.world_size) == (2, 2)
    assert parallelism.sequence_parallel
    assert workload.grad_accumulation == 4  # type: ignore[union-attr]
    assert split.is_same_work


def test_the_algorithm_is_kept_apart(plan: Plan, levers: dict[str, Lever]) -> None:
    apart = {lever.change.words for lever in of_kind(levers.values(), Kind.ALGORITHM)}
    assert apart == {
        "sequences of 1,024 tokens",
        "LoRA of rank 16",
        "4 key-value heads",
        "1 key-value head",
    }
    for lever in of_kind(levers.values(), Kind.SYSTEM):
        assert lever.plan.model == plan.model
        assert lever.plan.workload.sequence_length == 2048  # type: ignore[union-attr]
        assert lever.plan.workload.lora_rank == 0  # type: ignore[union-attr]
    assert levers["4 key-value heads"].plan.model.num_kv_heads == 4


def test_a_window_is_offered_where_the_model_can_have_one() -> None:
    words = {change.words for change in changes_of(plan_of("mistral-7b-v0.1"))}
    assert "sliding window of 1,024 tokens" in words
    # 4,096 tokens see no further than a window of 4,096.
    assert "sliding window of 4,096 tokens" not in words


def test_levers_are_ranked_and_noticed(plan: Plan, levers: dict[str, Lever]) -> None:
    every = list(levers.values())
    assert [lever.saved_bytes for lever in every] == sorted(
        (lever.saved_bytes for lever in every), reverse=True
    )
    savers = saving(every, plan.hardware.visible_bytes)
    assert savers[0].device_bytes == min(lever.device_bytes for lever in every)
    assert all(lever.saved_bytes > 0.002 * plan.hardware.visible_bytes for lever in savers)
    quick = speeding(every)
    assert quick and all(lever.state is State.FITS for lever in quick)
    speeds = [predict(lever.plan).throughput.tokens_per_s_per_gpu for lever in quick]
    assert speeds == sorted(speeds, reverse=True)
    assert min(speeds) > predict(plan).throughput.tokens_per_s_per_gpu
    # Fewer GPUs cost less per token and take longer.
    everywhere = [predict(lever.plan).throughput.tokens_per_s for lever in quick]
    assert min(everywhere) > predict(plan).throughput.tokens_per_s


def test_one_change_that_fits_is_the_smallest() -> None:
    tight = plan_of(gpu_gib=24, workload={"micro_batch": 4})
    before = predict(tight)
    assert before.verdict.state is State.DOES_NOT_FIT
    levers = levers_of(tight, before)
    found = remedies(tight, levers, before)
    assert found.singles and not found.pairs and found.closest is None
    for lever in found.singles:
        assert lever.change.kind is Kind.SYSTEM
        assert predict(lever.plan).verdict.state is State.FITS
    rivals = [
        lever
        for lever in of_kind(levers, Kind.SYSTEM)
        if lever.state is State.FITS and lever.gpu_ratio <= 1 and not lever.change.caution
    ]
    least = min(lever.cost_ratio for lever in rivals)
    assert found.singles[0].cost_ratio == pytest.approx(least, abs=1e-4)
    assert all(lever.change.kind is Kind.ALGORITHM for lever in found.algorithms)


def test_two_changes_are_sought_where_one_is_not_enough() -> None:
    far = plan_of(gpu_gib=16, workload={"micro_batch": 4, "sequence_length": 8192})
    before = predict(far)
    levers = levers_of(far, before)
    assert not any(lever.state is State.FITS for lever in of_kind(levers, Kind.SYSTEM))
    found = remedies(far, levers, before)
    assert found.pairs and not found.singles
    alone = [lever.change.words for lever in of_kind(levers, Kind.SYSTEM)]
    for lever in found.pairs:
        assert sum(words in lever.change.words for words in alone) >= 2
        assert predict(lever.plan).verdict.state is State.FITS


def test_three_changes_are_sought_where_two_are_not_enough() -> None:
    """8B parameters, eager, 16k tokens, one H200: stored scores, activations and logits are each too much."""
    workload = {"sequence_length": 16_384, "attention": "eager"}
    far = plan_of("llama-3.1-8b", workload=workload, parallelism={"world_size": 1, "zero_stage": 0})
    before = predict(far)
    found = remedies(far, levers_of(far, before, replay=False), before)
    assert found.triples and not (found.singles or found.pairs) and found.closest is None
    assert found.system == found.triples
    for lever in found.triples:
        assert lever.change.words.count(", ") == lever.change.words.count(" and ") == 1
        assert predict(lever.plan).verdict.state is State.FITS
    # None of the two that are left without one of the three is enough.
    document = far.to_dict()
    for values in (
        {"attention": "triton", "checkpointing": "full"},
        {"attention": "triton", "loss": "fused_linear"},
        {"checkpointing": "full", "loss": "fused_linear"},
    ):
        two = {**document, "workload": {**document["workload"], **values}}
        assert predict(parse_plan(two)).verdict.state is not State.FITS


def test_the_same_gpus_are_a_smaller_change_than_more() -> None:
    alone = plan_of(gpu_gib=8, parallelism={"world_size": 1}, workload={"sequence_length": 256})
    levers = levers_of(alone)
    found = remedies(alone, levers)
    gpus = [lever.gpu_ratio for lever in found.singles]
    assert gpus == sorted(gpus)
    assert (gpus[0], gpus[-1]) == (1, 8)
    # The optimizer in host memory is far slower, and asks for no other GPU.
    assert found.singles[0].cost_ratio > found.singles[-1].cost_ratio


def test_nothing_may_be_enough() -> None:
    hopeless = plan_of(gpu_gib=1, workload={"sequence_length": 8192, "attention": "eager"})
    levers = levers_of(hopeless)
    found = remedies(hopeless, levers)
    assert not found.system
    assert found.closest is not None
    assert found.closest.device_bytes == min(lever.device_bytes for lever in levers)
    assert found.to_dict()["closest"]["change"] == found.closest.change.words


def test_changes_of_the_same_field_exclude_each_other() -> None:
    def change(kind: Kind = Kind.SYSTEM, caution: str = "", **values: Any) -> Change:
        updates = {"workload": values}
        return Change(words="x", kind=kind, updates=updates, caution=caution)

    one = change(micro_batch=1)
    assert one.beside(change(micro_batch=2, loss="chunked")) is None
    both = one.beside(change(Kind.ALGORITHM, "less text", sequence_length=8))
    assert both is not None
    assert both.updates == {"workload": {"micro_batch": 1, "sequence_length": 8}}
    assert (both.kind, both.words, both.caution) == (Kind.ALGORITHM, "x and x", "less text")


def test_a_serving_plan_has_no_such_levers() -> None:
    with pytest.raises(PlanError, match="train"):
        levers_of(plan_of(job="serve"))
