"""`peakmark serve` from the command line, through queue, worker and supervisor, on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

Run = Callable[..., tuple[int, str, str]]
SIZES = ("--rows", "2", "--pages", "6", "--page-size", "16", "--chunk-tokens", "16")


def test_a_trace_is_served_and_kept(run: Run, decoding_config: str, tmp_path: Path) -> None:
    """Of three requests one client goes away after two tokens; what is left is as each alone."""
    request = {"arrival_s": 0.0, "prompt_tokens": 20, "new_tokens": 6}
    trace = [request, {**request, "cancel_after": 2}, {**request, "arrival_s": 0.1}]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    arguments = ("--config", decoding_config, "--trace", str(tmp_path / "trace.json"), *SIZES)
    peer = ("--peer", "transformers")
    code, out, _ = run("serve", *arguments, *peer, "--world", "cpu", "--json")
    document = json.loads(out)
    assert code == 0, document["summary"]
    measured = document["measured"]
    assert measured["states"] == {"done": 2, "cancelled": 1}
    assert [row[2] for row in measured["requests"]] == [6, 2, 6]
    assert (measured["leaked_pages"], measured["equal_alone"]) == (0, 1.0)
    assert sum(measured["host_time_s"].values()) == pytest.approx(measured["duration_s"])
    beside = measured["peers"]["transformers"]
    assert (beside["states"], beside["tokens_equal"]) == (measured["states"], 1.0), beside
    code, shown, _ = run("runs", "show", document["summary"]["id"])
    assert code == 0
    assert "2 done, 1 cancelled in" in shown and "time to first token" in shown
    assert "The same trace" in shown and "100 %" in shown


def test_a_trace_is_simulated_without_a_gpu_and_nothing_is_queued(run: Run) -> None:
    asked = ("serve", "--simulate", "--gpu", "h200", "--requests", "20", "--rate", "40")
    code, out, _ = run(*asked)
    assert code == 0
    assert "Continuous batching on H200 SXM5 141GB: 20 done in" in out
    assert "Static batching on H200 SXM5 141GB: 20 done in" in out
    assert "Simulated, nothing ran. Step times: curves measured on an NVIDIA H200" in out
    code, out, _ = run(*asked, "--json")
    document = json.loads(out)
    assert document["continuous"]["states"] == document["static"]["states"] == {"done": 20}
    assert document["continuous"]["request_columns"][4] == "ttft_s"
    code, out, _ = run("runs", "--json")
    assert json.loads(out)["runs"] == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--prompt-tokens", "many"), "--prompt-tokens is 'many': it must be two numbers, as in"),
        (("--trace", "nowhere.json"), "--trace nowhere.json cannot be read as JSON"),
        (("--new-tokens", "60,70", "--prompt-tokens", "9,9"), "it passes the 64 positions of tiny"),
        (("--requests", "1000000"), "trace.requests is 1000000: it must be an integer from 1 to"),
        (("--requests", "1000000", "--simulate"),
         "trace.requests is 1000000: it must be an integer from 1 to 100000"),
        (("--peer", "sglang"), "serve.peers is 'sglang'"),
        (("--simulate", "--gpu", "zx81"), "zx81"),
        (("--gpu", "h200"), "--gpu has no effect without --simulate: the run takes the GPU that"),
        (("--simulate", "--peer", "vllm"), "--peer has no effect beside --simulate: leave one of"),
        (("--pages", "1", "--prompt-tokens", "9,9", "--new-tokens", "9,9", "--page-size", "16"),
         "serve.pages is 1: the longest request needs 2 pages"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_one_sentence(
    run: Run, decoding_config: str, arguments: tuple[str, ...], sentence: str
) -> None:
    code, _, err = run("serve", "--config", decoding_config, *arguments)
    assert code == 2
    assert sentence in err
