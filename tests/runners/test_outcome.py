"""Every row of the outcome table, from files as a job leaves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from db.types import FINAL_STATES
from runners.contract import Outcome
from runners.outcome import Classified, Ending, StoppedBy, classify, read_ending

RESULT = {"schema": 1, "outcome": "done", "measured": {}, "environment": {}, "error": None}
TORCHRUN_TABLE = """
Failures:
[1]:
  time      : 2026-11-29_12:00:01
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4241)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_12:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 4242)
"""


def ended(
    folder: Path,
    code: int | None = 1,
    words: str = "",
    result: object = None,
    stopped_by: StoppedBy | None = None,
    oom_kills: int = 0,
) -> Classified:
    (folder / "stderr.log").write_text(words)
    if result is not None:
        text = result if isinstance(result, str) else json.dumps(result)
        (folder / "result.json").write_text(text)
    ending = Ending(exit_code=code, stopped_by=stopped_by, oom_kills=oom_kills)
    return classify(ending, folder)


def test_outcomes_and_final_states_are_the_same_words() -> None:
    assert {outcome.value for outcome in Outcome} == {state.value for state in FINAL_STATES}


@pytest.mark.parametrize("stopped_by", [None, *StoppedBy])
def test_a_valid_result_wins_over_what_happened_around_it(
    tmp_path: Path, stopped_by: StoppedBy | None
) -> None:
    seen = ended(tmp_path, -15, result=RESULT, stopped_by=stopped_by)
    assert seen.outcome is Outcome.DONE
    assert seen.result is not None


@pytest.mark.parametrize(
    ("stopped_by", "outcome"),
    [
        (StoppedBy.CANCEL, Outcome.CANCELLED),
        (StoppedBy.DEADLINE, Outcome.TIMED_OUT),
        (StoppedBy.WORKER_STOPPED, Outcome.LOST),
        (StoppedBy.WORKER_GONE, Outcome.LOST),
    ],
)
def test_a_stopped_job_ends_by_what_stopped_it(
    tmp_path: Path, stopped_by: StoppedBy, outcome: Outcome
) -> None:
    echo = {**RESULT, "outcome": "failed", "error": {"message": "Connection closed by peer"}}
    assert ended(tmp_path, -15, stopped_by=stopped_by).outcome is outcome
    assert ended(tmp_path, 1, result=echo, stopped_by=stopped_by).outcome is outcome
    assert ended(tmp_path, -15, result="{", stopped_by=stopped_by).outcome is outcome


@pytest.mark.parametrize(
    ("code", "words", "outcome"),
    [
        (0, "", Outcome.FAILED),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", Outcome.OOM_DEVICE),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when", Outcome.OOM_DEVICE),
        (1, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Outcome.OOM_DEVICE),
        (1, "NCCL WARN Cuda failure 'out of memory'", Outcome.OOM_DEVICE),
        (1, "Traceback\nMemoryError", Outcome.OOM_HOST),
        (1, "DefaultCPUAllocator: can't allocate memory: you tried", Outcome.OOM_HOST),
        (1, "OSError: [Errno 28] No space left on device", Outcome.FAILED),
        (1, "CUDA error: unspecified launch failure", Outcome.CRASHED),
        (75, "", Outcome.FAILED),
        (-11, "", Outcome.CRASHED),
        (-6, "NCCL watchdog", Outcome.CRASHED),
        (-9, "", Outcome.CRASHED),
        (1, TORCHRUN_TABLE, Outcome.CRASHED),
    ],
)
def test_without_a_result_exit_code_and_last_words_decide(
    tmp_path: Path, code: int, words: str, outcome: Outcome
) -> None:
    assert ended(tmp_path, code, words).outcome is outcome


def test_sigkill_is_host_memory_only_where_the_kernel_says_so(tmp_path: Path) -> None:
    assert ended(tmp_path, -9, oom_kills=1).outcome is Outcome.OOM_HOST
    assert ended(tmp_path, 1, TORCHRUN_TABLE, oom_kills=1).outcome is Outcome.OOM_HOST
    assert ended(tmp_path, 1, oom_kills=1).outcome is Outcome.FAILED


def test_a_failure_that_echoes_a_killed_rank_is_not_believed(tmp_path: Path) -> None:
    echo = {**RESULT, "outcome": "failed", "error": {"message": "Connection closed by peer"}}
    seen = ended(tmp_path, 1, TORCHRUN_TABLE, result=echo)
    assert (seen.outcome, seen.why) == (Outcome.CRASHED, "rank 1 was killed by SIGKILL")
    assert ended(tmp_path, 1, "", result=echo).why == "Connection closed by peer"


def test_a_rank_that_nccl_waited_for_is_told(tmp_path: Path) -> None:
    rank = tmp_path / "ranks" / "none_abc" / "attempt_0" / "0"
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text(
        "[rank0]:[E1130 ProcessGroupNCCL.cpp:689] [Rank 0] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600012 ms"
    )
    seen = ended(tmp_path, 1, TORCHRUN_TABLE.replace("-9", "-6"))
    assert seen.outcome is Outcome.CRASHED
    assert (seen.why or "").startswith("a rank stopped or did not answer within NCCL's timeout")


def test_the_words_of_every_rank_are_read(tmp_path: Path) -> None:
    rank = tmp_path / "ranks" / "none_abc" / "attempt_0" / "1"
    rank.mkdir(parents=True)
    (rank / "stderr.log").write_text("torch.OutOfMemoryError: CUDA out of memory.")
    assert ended(tmp_path, 1, "ChildFailedError").outcome is Outcome.OOM_DEVICE


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ({**RESULT, "schema": 2}, "schema is 2"),
        ({**RESULT, "outcome": "splendid"}, "outcome 'splendid'"),
        ({**RESULT, "measured": [1]}, "'measured'"),
        ({"schema": 1, "outcome": "done"}, "'measured'"),
        ({**RESULT, "error": "text"}, "'error'"),
    ],
)
def test_an_unusable_result_is_a_failure_with_its_reason(
    tmp_path: Path, result: object, reason: str
) -> None:
    seen = ended(tmp_path, 0, result=result)
    assert seen.outcome is Outcome.FAILED
    assert reason in (seen.why or "")


def test_what_json_does_not_have_becomes_null(tmp_path: Path) -> None:
    seen = ended(tmp_path, 0, result={**RESULT, "measured": {"loss": float("nan")}})
    assert seen.result is not None
    assert seen.result.measured == {"loss": None}


def test_a_supervisor_that_failed_is_quoted(tmp_path: Path) -> None:
    assert classify(None, tmp_path).why == "its supervisor was killed"
    (tmp_path / "supervisor.log").write_text("Traceback\nOSError: No space left on device\n")
    seen = classify(None, tmp_path)
    assert seen.outcome is Outcome.CRASHED
    assert seen.why == "its supervisor failed: OSError: No space left on device"


def test_an_ending_is_read_back_or_counts_as_none(tmp_path: Path) -> None:
    ending = Ending(exit_code=-9, stopped_by=StoppedBy.DEADLINE, oom_kills=2)
    path = tmp_path / "supervisor.json"
    path.write_text(json.dumps(ending.to_dict()))
    assert read_ending(tmp_path) == ending
    path.write_text('{"exit_code": 1}')
    assert read_ending(tmp_path) is None
