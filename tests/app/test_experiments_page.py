"""The Experiments page: made, filled, judged; flags and conditions in words; nothing lost."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from app import experiment_candidates, experiment_rows, services
from app.components.problems import OUR_FAULT
from db.engine import open_database
from db.experiments import add_members, create_experiment, experiment_members, list_experiments
from db.measurements import insert_measurement, measurements
from db.types import Origin, Role, RunKind, RunState
from db.views import Measurement
from planner.experiments.groups import known_figures
from planner.records import row_id
from planner.units import format_bytes
from tests.app.drawn import texts

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[2]
PAGE = "app_pages/experiments.py"
PLAN: dict[str, Any] = {
    "model": {"preset": "Qwen/Qwen2.5-0.5B"},
    "hardware": {"preset": "h200-sxm5-141gb"},
    "parallelism": {"world_size": 2},
}
GPU = {"name": "NVIDIA H200", "driver": "580", "sm_clock_mhz": 1980, "max_sm_clock_mhz": 1980}


@pytest.fixture
def empty(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database without the measurements that came with the product."""
    Path(database_url.removeprefix("sqlite:///")).unlink()
    monkeypatch.setattr(services, "open_database", partial(open_database, recorded=None))


def page(**query: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app" / "streamlit_app.py"), default_timeout=300)
    for key, value in query.items():
        app.query_params[key] = value
    return whole(app.switch_page(PAGE).run())


def whole(app: AppTest) -> AppTest:
    assert not app.exception
    assert not any(error.value == OUR_FAULT for error in app.error)
    return app


def row(step_time_s: float, workload: Mapping[str, Any], *, stage: int = 3, **gpu: Any) -> str:
    """Keep a measurement of one training step in the database; return its id."""
    spread = {**PLAN["parallelism"], "zero_stage": stage}
    plan = {**PLAN, "workload": dict(workload), "parallelism": spread}
    spec = {"schema": 1, "kind": "train_step", "world": "nccl", "plan": plan}
    measured = {"step_time_s": step_time_s, "allocated_bytes": 2**30}
    environment = {"gpu": {**GPU, **gpu}, "versions": {"torch": "2.11.0"}}
    seen = Measurement(
        id=row_id(spec, measured, environment), kind=RunKind.TRAIN_STEP, role=Role.EVIDENCE,
        recorded_at="2026-01-01T00:00:00Z", outcome=RunState.DONE, origin=Origin.RECORDED,
        run_id=None, spec=spec, measured=measured, environment=environment,
    )  # fmt: skip
    with services.database().write() as session:
        insert_measurement(session, seen)
    return seen.id


def stages_and_precision() -> int:
    """An experiment of three specs: 4 repeats, 4 repeats of another stage, 1 of both kinds at once."""
    one = create_experiment(services.database(), "Stages")
    rows = [row(0.10 + i / 1000, {}) for i in range(4)]
    rows += [row(0.20 + i / 1000, {}, stage=1, throttle_reasons=["sw_power_cap"]) for i in range(4)]
    rows += [row(0.05, {"precision": "bf16"}, stage=1, driver="590")]
    add_members(services.database(), one, row_ids=rows)
    return one


def test_an_experiment_is_made_filled_renamed_and_forgotten(empty: None) -> None:
    app = page()
    assert "An experiment is a named set of runs." in texts(app)
    app.text_input(key="experiment_new_name").input("  ")
    whole(app.button(key="experiment_create").click().run())
    assert [e.value for e in app.error] == [
        "experiment.name is '  ': it must be a text of 1 to 80 characters."
    ]
    app.text_input(key="experiment_new_name").input("Stages")
    whole(app.button(key="experiment_create").click().run())
    [made] = list_experiments(services.database())
    assert (made.name, app.query_params["experiment"]) == ("Stages", str(made.id))
    rows = [row(0.1, {}), row(0.2, {})]
    add_members(services.database(), made.id, row_ids=rows)
    create_experiment(services.database(), "Kernels")
    app.text_input(key=f"experiment_name_{made.id}").input("kernels")
    whole(app.button(key="experiment_rename").click().run())
    assert "is called 'Kernels' already" in texts(app)
    app.text_input(key=f"experiment_name_{made.id}").input("Steps")
    whole(app.button(key="experiment_rename").click().run())
    assert [one.name for one in list_experiments(services.database())] == ["Kernels", "Steps"]
    assert len(experiment_members(services.database(), made.id)) == 2
    whole(app.button(key="experiment_delete").click().run())
    assert [one.name for one in list_experiments(services.database())] == ["Kernels"]
    assert len(measurements(services.database())) == 2


def test_groups_are_judged_and_flagged_in_words(empty: None) -> None:
    app = page(experiment=str(stages_and_precision()))
    groups = next(frame.value for frame in app.dataframe if "is it real?" in frame.value)
    assert list(groups["ZeRO stage (system)"]) == ["3", "1", "1"]
    assert list(groups["precision (algorithm)"]) == ["mixed", "mixed", "bf16"]
    assert list(groups["runs"]) == ["4 of 4", "4 of 4", "1 of 1"]
    assert list(groups["is it real?"]) == ["baseline", "real", "cannot be told"]
    assert list(groups["changes"]) == ["", "system", "BOTH: algorithm + system"]
    # Medians 101.5 and 201.5 ms.
    assert list(groups["vs baseline"])[:2] == ["", "+98.5 %"]
    shown = texts(app)
    assert "Group 3 changes both the algorithm (precision: mixed → bf16)" in shown
    assert "driver: 580 (8), 590 (1)" in shown
    assert "4 of 9 runs ended with clocks that the driver had lowered" in shown
    assert "GPUs with lowered clocks in 4 of 4 runs here and 0 of 4 of the baseline" in shown
    runs = app.dataframe[-1].value
    assert list(runs["throttled"]) == ["no"] * 4 + ["yes"] * 4 + ["no"]


def test_the_file_holds_plain_numbers_and_every_variable(empty: None) -> None:
    analysis = experiment_rows.analyse(services.database(), stages_and_precision())
    base, second, third = experiment_rows.group_csv(analysis, 0, "step time")
    assert (base["n"], base["low"]) == (4, 0.1)
    assert base["high"] == pytest.approx(0.103)
    assert second["ratio"] == pytest.approx(0.2015 / 0.1015)
    assert "lie apart, which equal ones do in 2.9 % of cases" in second["reason"]
    assert third["flags"].startswith("changes both the algorithm")
    assert "checkpointing (system)" in base
    assert experiment_rows.short_labels(analysis) == [
        "1: mixed, ZeRO stage 3",
        "2: mixed, ZeRO stage 1",
        "3: bf16, ZeRO stage 1",
    ]
    lines = experiment_rows.run_rows(analysis, "allocated", None)
    assert {line["allocated"] for line in lines} == {2**30}
    texts = experiment_rows.run_rows(analysis, "allocated", format_bytes)
    assert {line["allocated"] for line in texts} == {"1.00 GiB"}


def test_rows_that_came_with_the_product_are_found(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "recorded"
    rows.mkdir()
    for name in ("h200-two-gpus-engines.jsonl", "h200-attention.jsonl"):
        (rows / name).symlink_to(ROOT / "recorded" / name)
    monkeypatch.setattr(services, "open_database", partial(open_database, recorded=rows))
    found = experiment_candidates.candidates("FSDP2 nccl")
    assert found
    assert all("fsdp2" in line["what"] and line["world"] == "nccl" for line in found)
    shapes = experiment_candidates.candidates("32/8 heads")
    assert all(line["what"].startswith("attention ") and line["row_id"] for line in shapes)
    assert experiment_candidates.candidates("no such words at all") == []


def test_the_command_line_lists_shows_and_writes_what_the_page_shows(
    run: Run, tmp_path: Path
) -> None:
    analysis = experiment_rows.analyse(services.database(), stages_and_precision())
    assert json.loads(run("experiments", "list", "--json")[1])["experiments"][0]["name"] == "Stages"
    code, out, _ = run("experiments", "show", "Stages", "--figure", "step time", "--json")
    assert code == 0
    assert json.loads(out)["groups"] == json.loads(
        json.dumps(experiment_rows.group_csv(analysis, 0, "step time"))
    )
    file = tmp_path / "stages.csv"
    assert run("experiments", "export", "stages", str(file), "--runs")[0] == 0
    with file.open() as lines:
        written = list(csv.DictReader(lines))
    figure = next(iter(known_figures(list(analysis.lines))))
    own = experiment_rows.run_rows(analysis, figure, None)
    assert [row["run"] for row in written] == [row["run"] for row in own]
    assert [float(row[figure]) for row in written] == [row[figure] for row in own]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["show", "nothing"],
            "There is no experiment 'nothing': `peakmark experiments list` names",
        ),
        (["show", "stages", "--figure", "x"], "--figure is 'x': it must be one of "),
        (["show", "stages", "--baseline", "9"], "--baseline is 9: it must be from 1 to 3."),
    ],
)
def test_what_the_command_cannot_show_is_one_sentence(
    run: Run, arguments: list[str], sentence: str
) -> None:
    stages_and_precision()
    code, _, err = run("experiments", *arguments)
    assert code == 2
    assert sentence in err


def test_an_empty_page_offers_an_example_of_recorded_measurements(database_url: str) -> None:
    app = page()
    whole(app.button(key="experiment_example").click().run())
    [made] = list_experiments(services.database())
    specs = [one.spec for one in experiment_members(services.database(), made.id)]
    spreads = [spec["plan"]["parallelism"] for spec in specs]  # type: ignore[index]
    assert {spread["engine"] for spread in spreads} == {"peakmark", "fsdp2"}
    assert {spread["world_size"] for spread in spreads} == {8}
    assert len(specs) > len({(s["engine"], s["zero_stage"]) for s in spreads})
    assert "Is the difference real?" in [box.label for box in app.expander]
