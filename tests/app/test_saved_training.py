"""Asking for a saved step on the command line, and what a run then says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app import services
from db.measurements import StoredResult, store_result
from db.queue import WorkerIdentity, claim_next_run
from db.repository import list_runs
from db.types import RunState
from planner.plan import default_plan

Run = Callable[..., tuple[int, str, str]]
SAID = {"zero_stage": 3, "bytes": 3 * 2**30, "time_s": 4.25}
LOADED = {**SAID, "path": "/data/a_b_c/step-00000007", "step": 7, "world_size": 1}
SAVED = {**SAID, "path": "/data/a_b_c/step-00000014", "step": 14, "world_size": 4}
TOKENIZER = ("--model", "qwen2.5-0.5b", "--tokenizer", "nowhere")
LINES = [
    "Went on from step 7 of 1 rank at stage 3, 3.00 GiB in /data/a_b_c/step-00000007: loaded in "
    "4.25 s.",
    "Saved step 14 of 4 ranks at stage 3, 3.00 GiB in /data/a_b_c/step-00000014, in 4.25 s.",
]


def finished(**measured: object) -> str:
    """Queue a run and end it as a worker would; return its id."""
    run_id = services.submit_proof(default_plan(), "cpu", "a")
    held = claim_next_run(services.database(), WorkerIdentity(host="h", pid=1, pid_start_ticks=1))
    assert held is not None
    result = StoredResult(state=RunState.DONE, measured=measured, environment={})
    store_result(services.database(), held.lease, result)
    return run_id


def test_the_page_and_the_command_line_say_what_was_loaded_and_saved(
    opened: Callable[..., AppTest], run: Run
) -> None:
    run_id = finished(loaded=LOADED, saved=SAVED)
    app = opened(run=run_id)
    app.switch_page("app_pages/run.py").run()
    assert not app.exception
    assert [text.value for text in app.text] == LINES
    code, out, _ = run("runs", "show", run_id)
    assert code == 0
    assert out.splitlines()[-2:] == LINES


def test_the_page_asks_for_folders_and_says_what_is_wrong_with_them(
    opened: Callable[..., AppTest], tiny_config: str
) -> None:
    app = opened(source="config", gpus="2", seq="32")
    app.text_area(key="config_text").set_value(tiny_config).run()
    app.text_input(key="proof_save_to").set_value("steps").run()
    app.button(key="prove").click().run()
    assert [error.value for error in app.error] == [
        "save_to is 'steps': it must be an absolute path without .., of at most 1024 characters."
    ]
    assert list_runs(services.database()) == []
    app.text_input(key="proof_save_to").set_value("/data/steps").run()
    app.button(key="prove").click().run()
    [run] = list_runs(services.database())
    spec = services.run_detail(run.id)["spec"]
    assert (spec["save_to"], spec["load_from"]) == ("/data/steps", None)


def test_a_loss_that_is_not_finite_is_told(opened: Callable[..., AppTest]) -> None:
    app = opened(run=finished(step_time_s=0.1, losses=[4.0, None, None]))
    app.switch_page("app_pages/run.py").run()
    assert not app.exception
    assert "Last loss" not in [metric.label for metric in app.metric]
    assert "loss of measured step 2 is not finite" in app.warning[0].value


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--engine", "fsdp2", "--save-to", "steps"), "save_to cannot be done: the engine fsdp2 "),
        (("--save-to", "/a\tb"), "save_to is '/a\\tb': it must be an absolute path without .."),
    ],
)
def test_what_cannot_be_saved_is_refused_before_it_is_queued(
    run: Run, tmp_path: Path, tiny_config: str, options: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(tiny_config)
    tiny = ("--config", str(tmp_path / "config.json"), "--seq", "32", "--world", "cpu")
    code, _, err = run("prove", *tiny, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err
    assert list_runs(services.database()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["prove", "--load-from", "nowhere"], "--load-from is 'nowhere': it must be a folder that"),
        (["prove", "--load-from", "a_file"], "--load-from is 'a_file', which is a file: it must"),
        (["prove", "--save-to", "a_file"], "--save-to is 'a_file', which is a file: it must be a"),
        (["quality", "--weights", "nowhere"], "--weights is 'nowhere': it must be a folder that"),
        (["decode", "--profile", *TOKENIZER], "--tokenizer is 'nowhere': it must be a folder"),
        (["profile", "--seq", "32", *TOKENIZER], "--tokenizer is 'nowhere': it must be a folder"),
    ],
)
def test_a_folder_that_is_none_is_told_before_anything_is_queued(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a_file").touch()
    code, _, error = run(*arguments)
    assert code == 2
    assert sentence in error
    assert list_runs(services.database()) == []
