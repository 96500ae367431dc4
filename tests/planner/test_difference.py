"""Plans side by side: only what differs, and waterfalls that come out to the byte."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations
from typing import Any

import pytest

from planner.difference import (
    ComparedPlan,
    DifferenceRow,
    Measure,
    alike,
    compare_plan,
    differing,
    memory_parts,
    option_rows,
    percent,
    quantity_rows,
    waterfall,
)
from planner.units import format_bytes

BASE: dict[str, Any] = {
    "model": {"preset": "Qwen/Qwen2.5-0.5B"},
    "hardware": {"preset": "h200-sxm5-141gb"},
    "workload": {"sequence_length": 1024},
    "parallelism": {"world_size": 4},
}


def plan(**parts: Mapping[str, Any]) -> dict[str, Any]:
    merged = {name: {**BASE[name], **parts.get(name, {})} for name in BASE}
    return {**parts, **merged}


SERVED = {**BASE, "job": "serve", "workload": {}, "parallelism": {}}


@pytest.fixture(scope="module")
def compared() -> list[ComparedPlan]:
    return [
        compare_plan(document)
        for document in (
            BASE,
            plan(workload={"checkpointing": "full"}, parallelism={"zero_stage": 1}),
            plan(parallelism={"engine": "fsdp2", "zero_stage": 0}),
            SERVED,
        )
    ]


def row(rows: Any, name: str) -> tuple[Any, ...]:
    return next(found.values for found in rows if found.name == name)


def test_a_waterfall_comes_out_to_the_byte(compared: list[ComparedPlan]) -> None:
    predictions = [one.prediction for one in compared if one.prediction]
    for first, second in permutations(predictions, 2):
        for measure in (Measure.DEVICE, Measure.ALLOCATED):
            fall = waterfall(first, second, measure)
            key = f"{measure}_bytes"
            assert (fall.start, fall.end) == (first["memory"][key], second["memory"][key])
            assert fall.start + fall.change == fall.end
            assert all(isinstance(change, int) and change for _, change in fall.moves)
        fall = waterfall(first, second, Measure.STEP_TIME)
        assert fall.start + fall.change == pytest.approx(fall.end, rel=1e-12)
        assert fall.end == second["throughput"]["step_time_s"]


def test_a_waterfall_names_each_part_once_the_largest_first() -> None:
    def prediction(parts: Mapping[str, int], overhead: int) -> dict[str, Any]:
        components = [{"name": name, "bytes": size} for name, size in parts.items()]
        return {
            "memory": {
                "components": components,
                "overheads": [{"name": "context", "bytes": overhead}],
                "allocated_bytes": sum(parts.values()),
                "device_bytes": sum(parts.values()) + overhead,
            }
        }

    first = prediction({"parameters": 1000, "activations": 500, "logits": 7}, 100)
    second = prediction({"parameters": 1000, "activations": 200, "kv_cache": 50}, 120)
    fall = waterfall(first, second, Measure.DEVICE)
    assert fall.moves == (("activations", -300), ("kv cache", 50), ("context", 20), ("logits", -7))
    assert (fall.start, fall.end, fall.change) == (1607, 1370, -237)
    assert fall.sentence(format_bytes, ("A", "B")) == (
        "The device memory of B is 237 B less than that of A (−14.7 %): activations −300 B, "
        "kv cache +50 B, context +20 B, all else −7 B."
    )
    assert waterfall(first, second, Measure.ALLOCATED).change == -257
    same = waterfall(first, first, Measure.DEVICE)
    assert same.sentence(format_bytes, ("A", "B")) == (
        "The device memory of B is predicted the same as that of A."
    )


def test_only_the_options_that_differ_are_named(compared: list[ComparedPlan]) -> None:
    rows = differing(option_rows(compared[:3]))
    assert {found.name: found.values for found in rows} == {
        "checkpointing": ("none", "full", "none"),
        "engine": ("peakmark", "peakmark", "fsdp2"),
        "zero stage": (3, 1, 0),
    }
    smaller = compare_plan(plan(model={"overrides": {"num_hidden_layers": 6}}))
    changed = differing(option_rows([compared[0], smaller]))
    assert [(found.group, found.name, found.values) for found in changed] == [
        ("model", "num layers", (24, 6))
    ]


def test_a_plan_that_cannot_be_planned_stays_with_its_sentence(
    compared: list[ComparedPlan],
) -> None:
    refused = compared[2]
    assert refused.prediction is None
    assert str(refused.refusal).startswith("parallelism.zero_stage is 0: fsdp2 shards")
    rows = quantity_rows(compared[:3])
    assert all(found.values[2] is None for found in rows)
    # What is not known of it is no difference.
    alike = differing(quantity_rows([compared[0], refused]))
    assert alike == []
    nothing = compare_plan(["no plan"])
    assert nothing.refusal == "plan is a list of 1 values: it must be an object with named fields."
    assert differing(option_rows([compared[0], nothing])) == []


def test_quantities_are_those_of_the_prediction(compared: list[ComparedPlan]) -> None:
    rows = quantity_rows(compared)
    # 494,032,768 parameters: fp32 master weights alone over four ranks; served in bf16.
    sharded, gathered = row(rows, "parameters")[:2]
    assert sharded == gathered == 494_032_768
    memory = [found for found in rows if found.group == "memory"]
    assert row(memory, "parameters")[0] == pytest.approx(494_032_768, rel=1e-3)
    assert row(memory, "parameters")[3] == 2 * 494_032_768
    assert row(memory, "kv cache")[:2] == (0, 0)
    for index in (0, 1, 3):
        prediction = compared[index].prediction
        assert prediction is not None
        parts = [row(memory, name.replace("_", " "))[index] for name in memory_parts(prediction)]
        assert sum(parts) == row(memory, "device")[index] == prediction["memory"]["device_bytes"]
    assert row(rows, "verdict") == ("fits", "fits", None, "fits")
    assert row(rows, "max sequences")[0] is None


def test_a_relative_change_reads_well() -> None:
    assert percent(-0.125) == "−12.5 %"
    assert percent(0.2) == "+20.0 %"
    assert percent(15.0) == "× 16.0"
    assert percent(8191.0) == "× 8,192"


def test_rounding_of_sums_is_no_difference() -> None:
    other = 0.1 + 0.2
    assert other != 0.3 and alike(other, 0.3)
    row = DifferenceRow(group="time", name="loss", unit="s", values=(other, 0.3))
    assert differing([row]) == []
    # Bytes are whole numbers: one of them is a difference.
    assert not alike(10**12, 10**12 + 1)
