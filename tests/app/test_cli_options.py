"""Options of the command line beyond presets: custom GPUs, usable share, rare choices."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from app import cli_line, state
from app.commands import json_file
from app.commands.options import SERVE_OPTIONS, SIZE_OPTIONS, TARGET_OPTIONS, plan_from
from app.commands.output import InputError
from planner.errors import PlanError
from planner.workload import Parallelism, ServingWorkload, TrainingWorkload

NUMBERS: dict[str, Any] = {"gpu_gib": 24.0, "gpu_tb_s": 1.0, "gpu_tflop_s": 150.0}


def test_a_custom_gpu_is_given_by_its_numbers() -> None:
    gpu = plan_from({**NUMBERS, "gpu_link_gb_s": 10.0}).hardware
    assert gpu.kind == "custom"
    assert gpu.visible_bytes == 24 * 2**30
    assert gpu.mem_bandwidth_bytes_s == 1e12
    assert gpu.peak_dense_flop_s["bf16"] == 150e12
    assert gpu.interconnect_bytes_s == 10e9


@pytest.mark.parametrize("missing", sorted(NUMBERS))
def test_a_custom_gpu_lacks_no_number(missing: str) -> None:
    given = {name: value for name, value in NUMBERS.items() if name != missing}
    with pytest.raises(InputError, match=f"--{missing.replace('_', '-')} is missing"):
        plan_from({**given, "gpu": "custom"})


def test_a_custom_gpu_out_of_range_is_told_in_the_unit_that_was_typed() -> None:
    # -24 GiB are -24 x 2^30 bytes.
    with pytest.raises(InputError, match=r"--gpu-gib is -24, so .*visible_bytes is -25769803776:"):
        plan_from({**NUMBERS, "gpu_gib": -24.0})
    with pytest.raises(InputError, match=r"--gpu-link-gb-s is 0, so"):
        plan_from({**NUMBERS, "gpu_link_gb_s": 0.0})


def test_numbers_beside_a_preset_are_refused() -> None:
    with pytest.raises(InputError, match="--gpu-gib describes a custom GPU"):
        plan_from({"gpu": "h200", "gpu_gib": 24.0})


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_custom_gpu_can_be_a_file(tmp_path: Path, wrapped: bool) -> None:
    numbers = {
        "name": "card",
        "visible_bytes": 2**34,
        "mem_bandwidth_bytes_s": 5e11,
        "peak_dense_flop_s": {"bf16": 1e14, "fp32": 2e13},
        "interconnect_bytes_s": 1e10,
    }
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"custom": numbers} if wrapped else numbers))
    assert plan_from({"gpu": str(path)}).hardware.to_dict() == {"custom": numbers}


@pytest.mark.parametrize("text", ["", "[", "[1]", '"h200"', '{"visible_bytes": 1}', "{" * 9000])
def test_a_file_that_is_no_gpu_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "card.json"
    path.write_text(text)
    with pytest.raises((InputError, PlanError)):
        plan_from({"gpu": str(path)})
    with pytest.raises(InputError, match="cannot be read as JSON: No such file"):
        plan_from({"gpu": str(tmp_path / "none.json")})


def test_a_file_without_an_end_is_not_read_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "MAX_FILE_BYTES", 1000)
    path = tmp_path / "endless.json"
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="cannot be read as JSON: it has more than 1,000 bytes"):
        plan_from({"gpu": str(path)})


def test_the_usable_share_is_an_option_of_serving() -> None:
    workload = plan_from({"serve": True, "utilization": 0.5}).workload
    assert isinstance(workload, ServingWorkload) and workload.utilization == 0.5
    with pytest.raises(InputError, match="--utilization is an option of serving"):
        plan_from({"utilization": 0.5})
    with pytest.raises(PlanError, match="utilization"):
        plan_from({"serve": True, "utilization": 2.0})


def test_rare_choices_are_options_of_training() -> None:
    with pytest.raises(InputError, match="--lora-rank is an option of training"):
        plan_from({"serve": True, "lora_rank": 8})


def test_every_field_of_a_plan_is_an_option_and_has_the_planners_default() -> None:
    renamed = {
        "sequence_length": "seq",
        "context_length": "context",
        "zero_stage": "zero",
        "world_size": "gpus",
    }
    options = {*TARGET_OPTIONS, *SIZE_OPTIONS, *SERVE_OPTIONS}
    for kind in (TrainingWorkload, ServingWorkload, Parallelism):
        for name in inspect.signature(kind).parameters:
            option = renamed.get(name, name)
            assert option in options
            assert state.DEFAULTS[option] == getattr(kind(), name)


def test_the_command_under_the_answer_has_every_option_of_the_commands() -> None:
    known = {*TARGET_OPTIONS, *SIZE_OPTIONS, *SERVE_OPTIONS} - {"model", "config", "gpu", "serve"}
    written = {
        *cli_line.TRAINING_OPTIONS,
        *cli_line.PARALLEL_OPTIONS,
        *cli_line.SERVING_OPTIONS,
        *cli_line.RARE_SERVING_OPTIONS,
        *cli_line.CUSTOM_NUMBERS,
        *state.RARE_TRAINING,
        *state.MODEL_PARALLEL,
    }
    assert written == known
