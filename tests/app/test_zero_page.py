"""The ZeRO page: stages of the plan in the URL, measurements beside, findings in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamlit.testing.v1 import AppTest

from app import zero_beside, zero_rows
from app.components.problems import OUR_FAULT
from planner.units import GIB_BYTES as GIB
from planner.units import format_bytes
from planner.zero import work_of
from tests.app.drawn import texts

Opened = Callable[..., AppTest]
PAGE = "app_pages/zero.py"


def page(opened: Opened, **query: str) -> AppTest:
    app = opened(**query)
    app.switch_page(PAGE).run()
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def test_every_stage_of_every_engine_is_shown_beside_what_was_measured(opened: Opened) -> None:
    app = page(opened, model="Qwen/Qwen2.5-0.5B", gpus="2")
    table = next(frame.value for frame in app.dataframe if "above ideal %" in frame.value)
    places = list(zip(table["engine"], table["stage"], strict=True))
    assert places == [
        *(("peakmark", stage) for stage in (0, 1, 2, 3)),
        *(("fsdp2", stage) for stage in (2, 3)),
        *(("deepspeed", stage) for stage in (1, 2, 3)),
    ]
    # Two GPUs ran these stages of FSDP2 for the recorded rows.
    fsdp2 = table[table["engine"] == "fsdp2"]
    assert "not measured" not in set(fsdp2["measured"])
    assert fsdp2["step over ours in the same run"].dropna().gt(1).all()
    shown = texts(app)
    assert "Qwen2.5-0.5B · train 1 × 4,096 tokens" in shown
    assert "**Stage 1**, peakmark × 2 saves" in shown
    assert "at stages 1 and 2 it gathers them once a step" in shown
    assert "ddp is not shown: workload.precision is 'mixed'" in shown
    assert "ZeRO is not the answer here" in shown and "full checkpointing" in shown
    serving = page(opened, job="serve")
    assert [error.value for error in serving.error] == [
        "job is 'serve': it must be train, as ZeRO shards the state of training."
    ]


def test_real_ranks_stand_beside_one_alone(opened: Opened) -> None:
    app = page(opened, model="Qwen/Qwen2.5-0.5B", gpus="2")
    table = next(frame.value for frame in app.dataframe if "exposed ms" in frame.value)
    assert set(table["plan"]) == {"Qwen2.5-0.5B, 1 × 4,096 tokens"}
    ours = table[(table["engine"] == "peakmark") & (table["stage"] == 3)].iloc[0]
    # A rank alone allocates what each of two real ones does.
    assert ours["allocated"] == ours["alone allocated"]
    assert ours["step ms"] > ours["exposed ms"] > 0
    timed = next(frame.value for frame in app.dataframe if "bus bandwidth" in frame.value)
    gathers = timed[(timed["engine"] == "peakmark") & (timed["stage"] == 3)].iloc[0]
    # 26 groups, of which the last one's parameters stay for its backward: 26 + 25.
    assert (gathers["collective"], gathers["calls"]) == ("all-gather", 51)
    assert gathers["bus bandwidth"].endswith("GB/s")
    # This run's calls were not kept apart: docs/zero.md says "with waits" of it.
    assert gathers["with waits"] == "yes"
    other = page(opened, model="Qwen/Qwen2.5-0.5B", gpus="2", seq="1024")
    assert "No stored run of this plan's work had several GPUs; these had." in texts(other)


def test_offloading_says_what_it_costs_and_stages_that_they_train_alike(opened: Opened) -> None:
    app = page(opened, model="Qwen/Qwen3-1.7B", gpus="8", stage="3")
    offloaded = next(frame.value for frame in app.dataframe if "kept: step ms" in frame.value)
    three = offloaded[(offloaded["stage"] == "3") & (offloaded["N"] == "8")].iloc[0]
    # 22.11 GiB with the optimizer on the device; on the host are 12 bytes of an eighth of 1.72 billion
    # parameters and the buffers.
    assert float(three["here"]) < float(three["kept"]) == 22.11
    assert 12 * 1.72e9 / 8 / GIB < float(three["host"]) < 3.2
    alike = next(frame.value for frame in app.dataframe if "compared with" in frame.value)
    assert {"peakmark, stage 1", "peakmark, stage 3", "ddp, stage 0"} <= set(alike["trained by"])
    assert f"{len(alike)} of {len(alike)} trainings" in texts(app)


def test_a_training_that_differs_is_not_counted_as_alike() -> None:
    equal = {"losses": "equal", "gradients": "-", "parameters": "equal"}
    lines = [equal, {**equal, "gradients": "differ"}]
    assert zero_beside.alike_sentence(lines).startswith("1 of 2 trainings")


def line(stage: int, peak: int, sent: float) -> dict[str, Any]:
    return {
        "engine": "peakmark",
        "zero_stage": stage,
        "world_size": 8,
        "allocated_bytes": peak,
        "sent": [{"sent_bytes": sent}],
    }


def test_a_saving_is_said_with_its_price() -> None:
    steps = [
        (line(0, 40 * GIB, 4 * GIB), line(1, 20 * GIB, 4 * GIB)),
        (line(1, 20 * GIB, 4 * GIB), line(2, 20 * GIB, 4 * GIB)),
        (line(2, 20 * GIB, 4 * GIB), line(3, 21 * GIB, 6 * GIB)),
    ]
    assert zero_rows.saving_sentences(steps, format_bytes) == [
        "**Stage 1**, peakmark × 8 saves **20.00 GiB** (50 % of stage 0's peak) and sends as much.",
        "**Stage 2**, peakmark × 8 saves nothing at the peak and sends as much.",
        "**Stage 3**, peakmark × 8 costs **1.00 GiB** (5 % of stage 2's peak) and sends 2.00 GiB more "
        "a step.",
    ]


def test_a_measurement_counts_for_the_same_work_only() -> None:
    plan = {"job": "train", "model": {"preset": "a"}, "workload": {}, "parallelism": {}}
    measured = {
        "allocated_bytes": 9,
        "state": {"parameter_bytes": 2, "gradient_bytes": 1, "optimizer_bytes": 3},
    }
    work = work_of(plan)[0]
    other_stage = {**plan, "parallelism": {"zero_stage": 1}}
    assert zero_rows.measured_row(work, other_stage, measured) == {
        "engine": "peakmark",
        "zero_stage": 1,
        "world_size": 8,
        "allocated_bytes": 9,
        "step_time_s": None,
        "parameters": 2,
        "optimizer": 3,
    }
    assert zero_rows.measured_row(work, {**plan, "model": {"preset": "b"}}, measured) is None
    assert zero_rows.measured_row(work, plan, {"allocated_bytes": None}) is None


def test_a_row_says_what_its_step_took_beside_ours() -> None:
    row = {**line(2, GIB, 0.0), "engine": "fsdp2", "ideal_bytes": GIB, "distance_percent": 0.0}
    row |= {"verdict": "fits", "peak_phase": "loss", "parts": {}}
    row |= {"reserved_bytes": GIB, "device_bytes": GIB}
    seen = {"engine": "fsdp2", "zero_stage": 2, "world_size": 8, "allocated_bytes": GIB}
    timed = [{"peer": "fsdp2", "stage": 2, "ranks": 8, "ratio": 0.8}]
    told = zero_rows.table_rows([row], [{**seen, "step_time_s": 0.5, "world": "solo"}], timed)[0]
    assert (told["measured_step_ms"], told["step_over_ours_in_the_same_run"]) == (500.0, 1.25)
    told = zero_rows.table_rows([row], [])[0]
    assert told["measured_step_ms"] is told["step_over_ours_in_the_same_run"] is None


def test_engines_timed_in_turns_are_told_with_their_mean() -> None:
    pairs: list[dict[str, Any]] = [
        {"model": "m", "checkpointing": "none", "peer": "fsdp2", "ratio": 0.5, "ours_ms": 1.26},
        {"model": "m", "checkpointing": "none", "peer": "fsdp2", "ratio": 2.0, "ours_ms": None},
    ]
    assert zero_rows.timed_table(pairs) == [
        {"peer": "fsdp2", "ratio": 0.5, "ours ms": 1.3},
        {"peer": "fsdp2", "ratio": 2.0, "ours ms": None},
    ]
    said = zero_rows.timed_sentence(pairs)
    assert said.startswith(
        "Step time of ours over fsdp2, in turns on one GPU in one run: geometric"
    )
    assert "mean **1.000** over 2 pairs" in said
