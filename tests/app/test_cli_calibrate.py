"""`peakmark calibrate` from the command line, through queue, worker and supervisor, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_machine_is_calibrated_and_kept(run: Run) -> None:
    code, out, _ = run("calibrate", "--world", "cpu", "--json")
    document = json.loads(out)
    assert code == 0, document["summary"]
    assert document["summary"]["kind"] == "calibrate"
    assert document["environment"]["versions"]["torch"]
    found = {(one["operation"], one["dtype"]): one for one in document["findings"]}
    best = max(
        (curve for curve in document["measured"]["curves"] if curve["operation"] == "copy"),
        key=lambda curve: curve["bytes"] / curve["time_s"],
    )
    assert found["copy", "bf16"]["best"] == pytest.approx(best["bytes"] / best["time_s"])
    assert found["copy", "bf16"]["sheet"] is None
    code, shown, _ = run("runs", "show", document["summary"]["id"])
    assert code == 0
    assert "matmul nt" in shown and "vendor sheet" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--world", "solo"), "--world is 'solo': it must be nccl or cpu."),
        (("--world", "nccl", "--gpus", "9"), "needs as many GPUs and"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(
    run: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("calibrate", *arguments)
    assert code == 2
    assert sentence in err
