"""The environment that travels with every result."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch

from runners.environment import capture_environment, device_baseline_bytes, visible_gpu_name

CPU = torch.device("cpu")


def test_the_environment_names_versions_but_not_the_host() -> None:
    environment = capture_environment(CPU)
    text = json.dumps(environment, allow_nan=False)
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["gpu"] is None
    assert len(environment["host"]) == 12
    assert socket.gethostname() not in environment.values()
    assert "versions" in text


def test_only_named_variables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    variables = capture_environment(CPU)["variables"]
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "SECRET_TOKEN" not in variables


def test_a_visible_gpu_is_named_by_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpu_name(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, GPU-bb")
    assert visible_gpu_name(1) == "GPU-bb"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert visible_gpu_name(0) == "3"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_driver_there_is_no_baseline() -> None:
    assert device_baseline_bytes(0) is None


def test_it_says_on_what_our_attention_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.attention import dispatch

    ran = {"forward": ["hopper"], "backward": ["hopper", "triton"]}
    monkeypatch.setattr(dispatch, "chosen_backends", lambda: ran)
    assert capture_environment(CPU)["attention_kernels"] == ran
    monkeypatch.delitem(sys.modules, "kernels.attention.dispatch")
    assert capture_environment(CPU)["attention_kernels"] is None
