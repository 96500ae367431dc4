"""`peakmark compare` gives what the page gives, and says in one sentence what it cannot read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
SMALL = "model=Qwen/Qwen2.5-0.5B&seq=1024&gpus=4"


def test_differences_and_waterfalls_of_links_and_files(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(
        json.dumps(
            {
                "model": {"preset": "Qwen/Qwen2.5-0.5B"},
                "hardware": {"preset": "h200-sxm5-141gb"},
                "workload": {"sequence_length": 1024, "checkpointing": "full"},
                "parallelism": {"world_size": 4},
            }
        )
    )
    code, out, _ = run("compare", SMALL, str(file), "seq=x", "--json")
    answer = json.loads(out)
    assert code == 0
    assert [row["name"] for row in answer["options"]] == ["checkpointing"]
    assert answer["plans"][2]["refusal"] == "seq is 'x': it must be a whole number."
    assert [fall["to"] for fall in answer["waterfalls"]] == [1, 1, 1]
    for fall in answer["waterfalls"][:2]:
        assert fall["start"] + sum(move["change"] for move in fall["moves"]) == fall["end"]
    _, shown, _ = run("compare", SMALL, str(file), "--baseline", "2")
    assert "B (baseline)" in shown
    assert "The device memory of A is " in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["seq=1024"], "1 plan cannot be compared: give 2 to 4 plans."),
        (["seq=1024", "hello"], "The link cannot be used: it says nothing of a plan"),
        (["seq=1024", "nowhere.json"], "nowhere.json cannot be read as a plan's JSON: No such"),
        (["seq=1024", "run=12"], "The link is of a run"),
        (["seq=1024", "seq=abc"], "1 of 2 plans can be planned, at least two plans that can be"),
        (["seq=1024", "seq=abc"], "are needed: seq is 'abc': it must be a whole number."),
        (["seq=512", "seq=1024", "--baseline", "3"], "--baseline is 3: it must be from 1 to 2"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    run: Run, arguments: list[str], sentence: str
) -> None:
    code, _, err = run("compare", *arguments)
    assert code == 2
    assert sentence in err
