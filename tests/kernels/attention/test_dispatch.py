"""Which backend computes a call: the rule as a table, overrides, and what is remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.attention import dispatch
from kernels.attention.dispatch import Backend, Direction, Problem

HOPPER = Problem(
    capability=(9, 0),
    triton_version=(3, 6),
    dtype=torch.bfloat16,
    head_dim=128,
    value_head_dim=128,
    mask="causal",
    plain=True,
    empty=False,
    tiles=4096,
    misaligned=None,
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"triton_version": (3, 7)},
        {"dtype": torch.float16},
        {"head_dim": 96, "value_head_dim": 96},
        {"mask": "full"},
        {"mask": "window"},
        {"head_dim": 256, "value_head_dim": 256},
        {"head_dim": 192},
        {"value_head_dim": 64},
        {"plain": False},
    ],
)
def test_hopper_computes_what_it_can(change: dict[str, object]) -> None:
    choice = dispatch.choose(replace(HOPPER, **change))
    assert (choice.backend, choice.reason) == (Backend.HOPPER, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (8, 0)}, "not a Hopper GPU"),
        ({"capability": (10, 0)}, "not a Hopper GPU"),
        ({"capability": None}, "not a Hopper GPU"),
        ({"triton_version": (3, 5)}, "Triton is older"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"value_head_dim": 264}, "head size 264"),
        ({"mask": "prefix"}, "of kind prefix"),
        ({"empty": True}, "no element"),
        ({"tiles": 2**31}, "2147483648 tiles"),
        ({"misaligned": "k"}, "k is not laid out"),
    ],
)
def test_triton_takes_the_rest_and_the_reason_is_told(
    change: dict[str, object], reason: str
) -> None:
    problem = replace(HOPPER, **change)
    choice = dispatch.choose(problem)
    assert choice.backend is Backend.TRITON
    assert choice.reason is not None and reason in choice.reason
    with pytest.raises(ValueError, match=reason):
        dispatch.choose(problem, "hopper")


def test_triton_can_be_asked_for_and_nonsense_is_refused() -> None:
    assert dispatch.choose(HOPPER, "triton").backend is Backend.TRITON
    with pytest.raises(ValueError, match="is 'cudnn'; allowed are auto, hopper, triton"):
        dispatch.choose(HOPPER, "cudnn")


@pytest.mark.parametrize(
    ("shape", "strides", "address", "expected"),
    [
        ((2, 4, 300, 128), (4 * 300 * 128, 128, 512, 1), 0, False),
        ((2, 4, 300, 128), (4 * 300 * 128, 128, 512, 1), 8, True),
        # A head size of 100 in bf16 puts rows 200 bytes apart.
        ((2, 4, 300, 100), (120000, 30000, 100, 1), 0, True),
        # Expanded heads.
        ((2, 4, 300, 128), (4 * 300 * 128, 0, 128, 1), 0, True),
        # One batch, one head: their strides are not read.
        ((1, 1, 300, 128), (3, 0, 128, 1), 0, False),
        ((2, 4, 300, 128), (153600, 38400, 1, 300), 0, True),
        ((2, 4, 300, 1), (9600, 2400, 8, 5), 0, False),
        ((2, 4, 300, 128), (2**39, 128, 512, 1), 0, True),
    ],
)
def test_alignment_by_hand(
    shape: tuple[int, ...], strides: tuple[int, ...], address: int, expected: bool
) -> None:
    assert dispatch.misalignment(shape, strides, address, 2) is expected


def test_a_call_is_described() -> None:
    q = torch.empty(2, 300, 4, 96, dtype=torch.bfloat16).transpose(1, 2)
    k = torch.empty(2, 413, 2, 96, dtype=torch.bfloat16).transpose(1, 2)
    tensors = {"q": q, "k": k, "v": k}
    problem = dispatch.problem_of(tensors, mask="full", plain=True)
    # 2 * 4 heads of ceil(300 / 128) tiles.
    assert (problem.capability, problem.tiles, problem.empty) == (None, 24, False)
    assert (problem.head_dim, problem.misaligned) == (96, None)
    tensors["v"] = torch.empty(2, 2, 413, 96, dtype=torch.bfloat16)[..., 1:]
    assert dispatch.problem_of(tensors, mask="full", plain=True).misaligned == "v"
    tensors["v"] = k[:, :, :0]
    tensors["k"] = k[:, :, :0]
    assert dispatch.problem_of(tensors, mask="full", plain=True).empty


def test_the_choice_is_remembered_per_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.pick(Direction.FORWARD, HOPPER) is Backend.HOPPER
    assert dispatch.pick(Direction.BACKWARD, replace(HOPPER, mask="blocks")) is Backend.TRITON
    forward, backward = map(dispatch.last_choice, (Direction.FORWARD, Direction.BACKWARD))
    assert forward == dispatch.Choice(Backend.HOPPER, None)
    assert backward is not None
    assert backward.reason == "its mask is of kind blocks, not full, causal or window"


def test_the_hopper_backward_takes_what_it_can() -> None:
    for mask in ("full", "causal", "window"):
        auto = dispatch.choose(replace(HOPPER, mask=mask), direction=Direction.BACKWARD)
        assert auto == dispatch.Choice(Backend.HOPPER, None)
    refused = [
        ({"mask": "prefix"}, "kind prefix"),
        ({"deterministic": True}, "order"),
        ({"head_dim": 192}, "head size 192"),
        ({"value_head_dim": 64}, "another head size"),
        ({"plain": False}, "softcap"),
    ]
    for change, said in refused:
        other = dispatch.choose(replace(HOPPER, **change), direction=Direction.BACKWARD)
        assert other.backend is Backend.TRITON and other.reason is not None
        assert said in other.reason
        with pytest.raises(ValueError, match=said):
            dispatch.choose(replace(HOPPER, **change), "hopper", Direction.BACKWARD)


def test_every_backend_that_ran_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[Direction, set[Backend]] = {direction: set() for direction in Direction}
    monkeypatch.setattr(dispatch, "_backends", ran)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert dispatch.chosen_backends() == {"forward": [], "backward": []}
    dispatch.pick(Direction.BACKWARD, replace(HOPPER, mask="prefix"))
    dispatch.pick(Direction.BACKWARD, HOPPER)
    assert dispatch.chosen_backends() == {"forward": [], "backward": ["hopper", "triton"]}


def test_environment_and_argument_overrule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    assert dispatch.pick(Direction.FORWARD, HOPPER) is Backend.TRITON
    with dispatch.forced_backend("hopper"):
        assert dispatch.pick(Direction.FORWARD, HOPPER) is Backend.HOPPER
        with dispatch.forced_backend("auto"):
            assert dispatch.pick(Direction.FORWARD, HOPPER) is Backend.HOPPER
    assert dispatch.pick(Direction.FORWARD, HOPPER) is Backend.TRITON


def test_every_backend_and_its_variable_are_told() -> None:
    document = (Path(__file__).resolve().parents[3] / "docs/kernels.md").read_text()
    for word in (*(backend.value for backend in Backend), dispatch.VARIABLE):
        assert f"`{word}`" in document


@pytest.mark.parametrize(("hip", "expected"), [(None, (9, 0)), ("6.4.2", None)])
def test_an_amd_gpu_of_the_same_number_is_no_hopper_gpu(
    hip: str | None, expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert dispatch._capability.__wrapped__(torch.device("cuda", 0)) == expected
