"""The command line as a person and a program meet it: answers, errors, exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.commands.output import make_table, print_line, print_table
from planner.plan import default_plan, parse_plan
from planner.predict import predict

Run = Callable[..., tuple[int, str, str]]


def test_plan_without_options_answers_the_plan_that_the_page_starts_with(run: Run) -> None:
    code, out, _ = run("plan", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(predict(default_plan()).to_dict()))


def test_plan_options_reach_the_plan_and_give_the_planners_own_answer(run: Run) -> None:
    options = {
        "--model": "gpt2",
        "--gpu": "h100-sxm5-80gb",
        "--gpus": "4",
        "--engine": "fsdp2",
        "--zero": "2",
        "--micro-batch": "3",
        "--seq": "256",
        "--grad-accumulation": "2",
        "--optimizer": "adamw_foreach",
        "--precision": "bf16",
        "--attention": "eager",
        "--checkpointing": "full",
    }
    code, out, _ = run("plan", *[part for pair in options.items() for part in pair], "--json")
    document = {
        "schema": 1,
        "job": "train",
        "model": {"preset": "openai-community/gpt2"},
        "workload": {
            "sequence_length": 256,
            "micro_batch": 3,
            "grad_accumulation": 2,
            "optimizer": "adamw_foreach",
            "precision": "bf16",
            "attention": "eager",
            "checkpointing": "full",
        },
        "parallelism": {"engine": "fsdp2", "zero_stage": 2, "world_size": 4},
        "hardware": {"preset": "h100-sxm5-80gb"},
    }
    assert code == 0
    assert json.loads(out)["plan"] == document
    assert json.loads(out) == json.loads(json.dumps(predict(parse_plan(document)).to_dict()))


def test_plan_json_holds_what_programs_read(run: Run) -> None:
    _, out, _ = run("plan", "--json")
    answer = json.loads(out)
    memory = answer["memory"]
    assert {"allocated_bytes", "reserved_bytes", "device_bytes", "peak_phase"} <= set(memory)
    assert memory["ledger"]
    assert sum(part["bytes"] for part in memory["components"]) == memory["allocated_bytes"]
    assert answer["verdict"]["state"] in {"fits", "tight", "does_not_fit"}
    assert answer["throughput"]["label"] == "from measured curves"


def test_plan_in_words_names_verdict_peak_and_components(run: Run) -> None:
    code, out, _ = run("plan", "--model", "llama-3.1-8b", "--gpu", "h200")
    assert code == 0
    assert "8.03 B parameters" in out
    assert "per GPU" in out
    for word in ("Peak in", "parameters", "optimizer", "allocated", "reserved", "device"):
        assert word in out


def test_plan_for_serving_counts_the_cache_by_hand(run: Run) -> None:
    options = ("--context", "1000", "--sequences", "3", "--kv-dtype", "fp16")
    _, out, _ = run("plan", "--serve", "--model", "llama-3.1-8b", *options, "--json")
    # 2 (K and V) x 32 layers x 8 heads x 128 x 2 B = 131,072 B per token.
    assert json.loads(out)["serving"]["kv_bytes_per_token"] == 131_072
    code, words, _ = run("plan", "--serve")
    assert code == 0
    assert "sequences that fit" in words


@pytest.mark.parametrize("name", ["[/red]", "[red]tiny", ":smile:"])
def test_brackets_in_a_name_are_printed_as_they_are(run: Run, tmp_path: Path, name: str) -> None:
    """A name or reason with brackets is text, not colour; `[/red]` alone ended in a traceback."""
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    path = tmp_path / f"{name.replace('/', '')}.json"
    path.write_text(json.dumps(config))
    code, out, _ = run("plan", "--config", str(path))
    assert code == 0
    assert f"{path.stem}: " in out


def test_brackets_in_lines_and_cells_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_line("pip install 'peakmark[deepspeed]' [/red] :smile:")
    print_table(make_table("title [/red]", ("a",), (), [("cell [red]",)]))
    out = capsys.readouterr().out
    assert "pip install 'peakmark[deepspeed]' [/red] :smile:" in out
    assert "title [/red]" in out and "cell [red]" in out


def test_plan_reads_a_config_file_and_names_the_model_after_its_folder(
    run: Run, tmp_path: Path
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
    }
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    code, out, err = run("plan", "--config", str(folder / "config.json"), "--json")
    assert (code, err) == (0, "")
    # Embedding and head 100x64 each, final norm 64, and per layer q and o 64x64, k and v 32x64,
    # gate, up and down 128x64 and two norms.
    per_layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64
    assert json.loads(out)["model"]["parameters"] == 2 * 100 * 64 + 64 + 2 * per_layer
    assert json.loads(out)["model"]["name"] == "tiny"


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("--micro-batch", "-1"), "workload.micro_batch", "-1"),
        (("--micro-batch", "9" * 40), "workload.micro_batch", "must be an integer from 1 to"),
        (("--micro-batch", "nan"), "micro_batch", "--micro-batch"),
        (("--seq", ""), "seq", "--seq"),
        (("--seq", "1.5"), "seq", "--seq is '1.5': it must be a whole number."),
        (("--serve", "--utilization", "x"), "utilization", "it must be a number."),
        (
            ("--tensor-parallel", "2", "--zero", "0", "--optimizer", "muon"),
            "parallelism.tensor_parallel",
            "cuts",
        ),
        (("--seq", "0"), "workload.sequence_length", "workload.sequence_length (--seq) is 0:"),
        (("--zero", "4"), "parallelism.zero_stage", "(--zero) is 4"),
        (("--gpus", "70000"), "parallelism.world_size", "(--gpus) is 70000"),
        (("--engine", "megatron"), "parallelism.engine", "peakmark, fsdp2"),
        (("--engine", "fsdp2", "--zero", "1"), "parallelism.zero_stage", "fsdp2"),
        (("--optimizer", "lion"), "workload.optimizer", "adamw_fused"),
        (("--precision", "fp8"), "workload.precision", "mixed"),
        (("--attention", "ring"), "workload.attention", "sdpa"),
        (("--checkpointing", "some"), "workload.checkpointing", "full"),
        (("--model", "gpt-5"), "model.preset", "not a known preset"),
        (("--model", ""), "model.preset", "must be"),
        (("--gpu", "voodoo2"), "hardware.preset", "not a known preset"),
        (("--config", "nowhere.json"), "model.config", "No such file"),
        (("--serve", "--context", "0"), "workload.context_length", "(--context) is 0"),
        (("--serve", "--kv-dtype", "int2"), "workload.kv_dtype", "fp8"),
    ],
)
def test_a_wrong_value_is_one_sentence_and_exit_code_2(
    run: Run, arguments: tuple[str, ...], field: str, words: str
) -> None:
    code, out, err = run("plan", *arguments, "--json")
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("peakmark: ")
    assert "Traceback" not in out + err
    error = json.loads(out)["error"]
    assert set(error) == {"field", "value", "allowed", "message"}
    assert error["field"] == field
    assert words in error["message"]


@pytest.mark.parametrize("arguments", [("plan", "--bogus"), ("bogus",), ("runs", "--limit", "0")])
def test_a_wrong_command_line_is_one_sentence(run: Run, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_no_command_shows_the_help(run: Run) -> None:
    code, out, _ = run()
    assert code == 2
    assert "doctor" in out


@pytest.mark.parametrize("text", ["{", "[]", "12", "x" * 1_100_000])
def test_a_config_that_cannot_be_read_is_one_sentence(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, out, err = run("plan", "--config", str(path))
    assert (code, out) == (2, "")
    assert "model.config" in err
    assert len(err) < 300


def test_without_a_gpu_attached_means_a_sentence(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from planner import attached

    nothing = attached.AttachedGpus(gpus=(), reason="NVML sees no GPU.")
    monkeypatch.setattr(attached, "attached_gpus", lambda: nothing)
    code, _, err = run("plan", "--gpu", "attached")
    assert code == 2
    assert "No GPU is attached" in err


def test_sweep_covers_the_whole_grid_and_agrees_with_plan(run: Run) -> None:
    lists = ("--zero", "1,3", "--gpus", "1,8", "--micro-batch", "1,2", "--seq", "128,256")
    code, out, _ = run("sweep", "--model", "gpt2", *lists, "--json")
    assert code == 0
    points = json.loads(out)["points"]
    names = ("zero_stage", "world_size", "micro_batch", "sequence_length")
    found = {tuple(p[n] for n in names): p["device_bytes"] for p in points}
    assert len(found) == len(points) == 16
    single = ("--zero", "3", "--gpus", "8", "--micro-batch", "2", "--seq", "256")
    _, answer, _ = run("plan", "--model", "gpt2", *single, "--json")
    assert found[3, 8, 2, 256] == json.loads(answer)["memory"]["device_bytes"]


def test_sweep_counts_what_cannot_be_planned_and_says_what_to_run(run: Run) -> None:
    lists = ("--engine", "all", "--gpus", "8", "--micro-batch", "1-4", "--checkpointing", "all")
    limits = ("--global-batch", "64", "--margin", "10", "--gpu-hour-cost", "3.6")
    arguments = ("sweep", "--model", "gpt2", "--seq", "512", *lists, *limits)
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    answer = json.loads(out)
    assert sum(answer["counts"].values()) == 5 * 4 * 4 * 3
    assert sum(answer["not_planned"].values()) == answer["counts"]["not_planned"]
    # 64 sequences on 8 GPUs cannot be micro-batches of 3.
    assert {point["micro_batch"] for point in answer["points"]} == {1, 2, 4}
    for point in answer["points"]:
        assert 8 * point["micro_batch"] * point["grad_accumulation"] == 64
        per_hour = 3600 * point["tokens_per_s"] / 1e6
        assert point["cost_per_million_tokens"] == pytest.approx(8 * 3.6 / per_hour)
    fastest = max(point["tokens_per_s"] for point in answer["points"])
    assert answer["best"]["row"]["tokens_per_s"] == answer["front"][0]["tokens_per_s"] == fastest
    _, words, _ = run(*arguments)
    assert " ".join(answer["best"]["sentence"].split()) in " ".join(words.split())
    assert "Not planned, 12 x:" in words


def test_a_sweep_of_which_nothing_fits_says_so(run: Run) -> None:
    code, out, _ = run("sweep", "--model", "llama-3.1-70b", "--gpus", "1")
    assert code == 0
    assert "None of these combinations fits" in out
    assert "Of 4 combinations 4 do not fit." in out


def test_sweep_in_words_has_a_row_for_each_world_size(run: Run) -> None:
    code, out, _ = run("sweep", "--model", "gpt2", "--gpus", "1,8", "--seq", "128")
    assert code == 0
    assert "ZeRO-0" in out and "ZeRO-3" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--zero", "a"), "--zero is 'a'"),
        (("--gpus", "1,,2"), "integers separated by commas"),
        (("--gpus", "0"), "world_size"),
        (("--micro-batch", "1,70000"), "micro_batch"),
        (("--micro-batch", "4-2"), "a range such as 1-16"),
        (("--engine", "fsdp2", "--zero", "0"), "fsdp2"),
        (("--attention", "flash"), "workload.attention"),
        (("--attention", "sdpa,flash"), "sweep.attention"),
        (("--margin", "-5"), "sweep.margin is -5.0: it must be a number from 0 to 95."),
        (("--gpus", "1-60000", "--micro-batch", "1-60000"), "sweep.combinations is 14400000000"),
        (("--best", "nicest"), "fastest, cheapest"),
        (("--gpu-hour-cost", "-1"), "sweep.gpu_hour_cost"),
    ],
)
def test_a_wrong_sweep_is_one_sentence(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("sweep", "--model", "llama-3.2-1b", *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_worker_names_its_command_in_json(run: Run) -> None:
    _, out, _ = run("worker", "--once", "--json")
    assert json.loads(out)["command"] == [sys.executable, "-m", "runners.worker", "--once"]


def test_doctor_reports_every_part_and_says_what_to_do(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    needed = {"python", "torch", "triton", "transformers", "C compiler", "database", "disk"}
    assert needed | {"worker"} <= set(findings)
    assert code == 0
    assert findings["worker"]["state"] == "warn"
    assert "peakmark worker" in findings["worker"]["advice"]
    assert all(f["advice"] for f in findings.values() if f["state"] != "ok")


def test_doctor_fails_on_a_database_that_is_none(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is not a database, whatever its name says\n" * 50)
    monkeypatch.setenv("PEAKMARK_DATABASE_URL", str(path))
    code, out, _ = run("doctor", "--json")
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert code == 1
    assert findings["database"]["state"] == "fail"
    assert "not an SQLite database" in findings["database"]["advice"]


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        (("--serve", "--seq", "32768"), "seq", "training"),
        (("--serve", "--zero", "3"), "zero", "training"),
        (("--context", "5"), "context", "with --serve"),
        (("--config", "x.json", "--model", "gpt2"), "config", "give one of them"),
        (("--lora-targets", "qv"), "lora_targets", "needs --lora-rank"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    run: Run, arguments: tuple[str, ...], field: str, words: str
) -> None:
    code, out, err = run("plan", *arguments, "--json")
    assert code == 2
    assert json.loads(out)["error"]["field"] == field
    assert words in err


def test_the_rows_from_allocated_to_device_add_up(run: Run) -> None:
    code, out, _ = run("plan", "--gpus", "8")
    assert code == 0
    assert re.search(r"device +reserved \+ context \+ nccl ", out)
    assert re.search(r"device +reserved \+ context  ", run("plan", "--gpus", "1")[1])


def test_help_names_the_defaults(run: Run) -> None:
    _, out, _ = run("plan", "--help")
    assert "Usage: peakmark plan" in out
    for default in ("meta-llama/Llama-3.1-8B", "4096", "8192", "adamw_fused", "h200-sxm5-141gb"):
        # Some versions of typer put the text of a default in parentheses.
        assert re.search(rf"\[default: \(?{re.escape(default)}\)?\]", out)


def test_the_readme_s_plans_can_be_planned(run: Run) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    lines = re.findall(r"^peakmark ((?:plan|sweep) .*)$", readme, re.MULTILINE)
    assert len(lines) >= 3
    for line in lines:
        code, _, err = run(*line.split())
        assert (code, err) == (0, "")


def test_the_module_is_the_command_too() -> None:
    command = [sys.executable, "-m", "app.cli", "plan", "--zero", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_command_line_never_imports_torch_or_streamlit() -> None:
    code = (
        "import sys, app.cli; from app.commands.options import plan_from;"
        "from planner.predict import predict; predict(plan_from({}));"
        "print([m for m in ('torch', 'streamlit', 'transformers', 'pandas') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_configuration_is_named_by_its_file_or_its_folder(tmp_path: Path) -> None:
    from app.commands.options import _config_name

    folder = tmp_path / "my-model"
    folder.mkdir()
    assert _config_name(folder / "config.json") == "my-model"
    assert _config_name(folder) == "my-model"
    assert _config_name(folder / "small.json") == "small"


def test_presets_are_listed_with_their_sizes(run: Run) -> None:
    code, out, _ = run("presets", "--json")
    listed = json.loads(out)
    assert code == 0
    assert {"id": "openai-community/gpt2", "parameters": 124_439_808} in listed["models"]
    assert "h200-sxm5-141gb" in {gpu["id"] for gpu in listed["gpus"]}
    assert "openai-community/gpt2" in run("presets")[1]
