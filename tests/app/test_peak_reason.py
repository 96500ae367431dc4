"""Why the peak is where it is, said of numbers that can be checked by hand."""

from __future__ import annotations

from typing import Any

from app.peak_reason import (
    SERVING_LEVERS,
    contributors,
    peak_and_next,
    phase_rows,
    reason_sentences,
)

MEMORY: dict[str, Any] = {
    "allocated_bytes": 100,
    "peak_phase": "loss_backward",
    "phases": [
        {
            "name": "forward",
            "label": "Forward",
            "allocated_bytes": 70,
            "parts": {"parameters": 40, "activations": 30},
        },
        {
            "name": "loss_backward",
            "label": "Loss backward",
            "allocated_bytes": 100,
            "parts": {"parameters": 40, "activations": 20, "logits": 40},
        },
        {
            "name": "optimizer",
            "label": "Optimizer step",
            "allocated_bytes": 60,
            "parts": {"parameters": 40, "gradients": 20},
        },
    ],
}


def sentences() -> str:
    return " ".join(reason_sentences(MEMORY, lambda size: f"{size} B"))


def test_the_next_phase_is_the_highest_of_the_others() -> None:
    peak, following = peak_and_next(MEMORY)
    assert following is not None
    assert (peak["name"], following["name"]) == ("loss_backward", "forward")


def test_phases_say_how_far_below_the_peak_they_stay() -> None:
    assert [row["below_peak_bytes"] for row in phase_rows(MEMORY)] == [30, 0, 40]
    assert [row["is_peak"] for row in phase_rows(MEMORY)] == [False, True, False]


def test_contributors_are_compared_with_the_next_phase() -> None:
    rows = {row["component"]: row for row in contributors(MEMORY)}
    assert list(rows)[:2] == ["parameters", "logits"]
    assert rows["logits"]["more_than_next_bytes"] == 40
    assert rows["activations"]["more_than_next_bytes"] == -10
    assert rows["parameters"]["share_percent"] == 40


def test_the_sentences_name_peak_gap_and_what_has_to_shrink() -> None:
    said = sentences()
    assert "Memory is highest in **loss backward**, at 100 B" in said
    assert "Next comes forward at 70 B, 30 B lower." in said
    assert "logits: 40 B more than in forward" in said
    # Logits 40 larger, activations 10 smaller: 30 bytes less of logits and forward is as high.
    assert "pays for the first 30 B; then forward is the peak" in said
    assert "largest part that both hold is parameters (40 B)" in said


def test_a_whole_gathered_model_asks_for_stage_3() -> None:
    memory = {**MEMORY, "phases": [{**MEMORY["phases"][1], "parts": {"gathered": 100}}]}
    memory["phases"].append({**MEMORY["phases"][0], "parts": {"gathered": 70}})
    assert "ZeRO stage 3 instead of 1 or 2" in " ".join(reason_sentences(memory, str))


def test_one_phase_alone_has_nothing_beside_it() -> None:
    only = {**MEMORY, "phases": [MEMORY["phases"][1]]}
    assert len(reason_sentences(only, str)) == 2


def test_what_makes_a_part_smaller_depends_on_the_job() -> None:
    assert "ZeRO stage that shards parameters" in sentences()
    served = " ".join(reason_sentences(MEMORY, str, SERVING_LEVERS))
    assert "ZeRO" not in served and "a smaller dtype of the weights" in served
