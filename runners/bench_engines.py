"""Time our engine against a peer in turns: `python -m runners.bench_engines MATRIX OUT`.

Each spec of MATRIX, a matrix as `runners.record` reads it whose engine is ours, runs four times on
the same GPU: ours, the peer, the peer, ours. Every turn is a fresh process with its own CUDA context,
forked from this one, which has imported what they need and never touches CUDA; so nothing else
computes on the host while steps are timed. The next process builds its model while the one before
makes its engine, and waits for the GPU. Rows of whole pairs are appended to OUT (`measured.same_run`
names run, pair and turn), and the last lines are the ratios of step times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from planner.plan import parse_plan
from planner.same_run import OURS, SameRunPair, geometric_mean, same_run_pairs
from planner.workload import Engine
from runners.contract import RESULT_FILE, SPEC_FILE, JobKind, JobResult, Outcome
from runners.jobs.harness import run_job
from runners.jobs.preload import preload
from runners.jobs.train_step import measure_training
from runners.record import Entry, make_row, read_matrix

# Ours, peer, peer, ours: what drifts with time weighs on both alike.
TURNS = (True, False, False, True)
_POLL_S = 0.05
_BUILD_LIMIT_S = 120.0
_LOG_TAIL_LINES = 3


class Turn:
    """One process: a spec run by one engine."""

    def __init__(self, entry: Entry, directory: Path) -> None:
        self.entry = entry
        self._directory = directory
        directory.mkdir(parents=True)
        (directory / SPEC_FILE).write_text(json.dumps(entry.spec.to_dict()))
        context = multiprocessing.get_context("fork")
        self._process: BaseProcess = context.Process(target=_run_job, args=(directory,))
        self._process.start()

    def has_begun(self) -> bool:
        """Whether it holds the GPU and makes its engine, or is over already."""
        events = self._directory / "events-rank0.jsonl"
        began = events.exists() and '"init"' in events.read_text()
        return began or not self._process.is_alive()

    def finish(self) -> JobResult | None:
        """Wait for its end, at most its deadline; return what it left, or None."""
        self._process.join(self.entry.spec.deadline_s)
        self.stop()
        path = self._directory / RESULT_FILE
        return JobResult.from_dict(json.loads(path.read_text())) if path.exists() else None

    def stop(self) -> None:
        """End the process if it still runs."""
        self._process.kill()
        self._process.join()

    def log_tail(self) -> str:
        """Return the last lines that the process printed."""
        lines = (self._directory / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:])


def _run_job(directory: Path) -> None:
    """What a forked process does: the job `train_step`, its output in a file."""
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["train_step", str(directory / SPEC_FILE), str(directory)]
    sys.exit(run_job(JobKind.TRAIN_STEP, measure_training))


def pair_entries(entry: Entry, peer: Engine) -> list[Entry]:
    """Return the four turns of an entry of ours; raises ValueError for another engine's."""
    plan = dict(entry.spec.plan or {})
    if plan.get("parallelism", {}).get("engine") != OURS:
        raise ValueError(f"{entry.label}: engine must be {OURS}, the peer's spec is made from it")
    theirs = {**plan, "parallelism": {**plan["parallelism"], "engine": str(peer)}}
    specs = {True: entry.spec, False: replace(entry.spec, plan=theirs)}
    return [Entry(replace(specs[ours], kernel_times=True), entry.role) for ours in TURNS]


class Bench:
    """Runs pairs until they are done or the time is up."""

    def __init__(self, out: Path, directory: Path, budget_s: float) -> None:
        self._out = out
        self._directory = directory
        self._ends_at = time.monotonic() + budget_s
        self._run_id = uuid.uuid4().hex[:12]
        self.pairs: list[SameRunPair] = []

    def run(self, pairs: Sequence[Sequence[Entry]]) -> None:
        """Run every pair that begins before the budget's end; a failed one is told and left out."""
        turns = [(n, t, entry) for n, pair in enumerate(pairs) for t, entry in enumerate(pair)]
        rows: list[dict[str, Any]] = []
        ahead: Turn | None = None
        for position, (number, turn, _) in enumerate(turns):
            if turn == 0 and time.monotonic() >= self._ends_at:
                print(f"stopped: the time is up before pair {number + 1}", flush=True)
                break
            current = ahead or self._start(turns[position])
            _wait_until_begun(current)
            ahead = self._start(turns[position + 1]) if position + 1 < len(turns) else None
            rows = [] if turn == 0 else rows
            rows += self._finish(current, number, turn)
            if turn == len(TURNS) - 1:
                self._keep(rows)
        if ahead is not None:
            ahead.stop()

    def _start(self, turn: tuple[int, int, Entry]) -> Turn:
        number, index, entry = turn
        directory = self._directory / f"pair-{number:03}-{index}"
        return Turn(entry, directory)

    def _finish(self, turn: Turn, number: int, index: int) -> list[dict[str, Any]]:
        """Return the turn's row, or none where it failed, which is told."""
        result = turn.finish()
        if result is None or result.outcome is not Outcome.DONE:
            reason = turn.log_tail() if result is None or not result.error else result.error
            print(f"failed     {turn.entry.label}\n    {reason}", flush=True)
            return []
        place = {"id": self._run_id, "pair": number, "turn": index}
        result = replace(result, measured={**result.measured, "same_run": place})
        print(
            f"    {1000 * result.measured['step_time_s']:8.1f} ms  {turn.entry.label}", flush=True
        )
        return [make_row(turn.entry, result, datetime.now(UTC))]

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        found = same_run_pairs((row["spec"], row["measured"]) for row in rows)
        if not found:
            return
        with self._out.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.pairs += found
        print(pair_line(found[0]), flush=True)


def _wait_until_begun(turn: Turn) -> None:
    give_up_at = time.monotonic() + _BUILD_LIMIT_S
    while not turn.has_begun() and time.monotonic() < give_up_at:
        time.sleep(_POLL_S)


def pair_line(pair: SameRunPair) -> str:
    """Return a pair in words: times in ms, and how they compare."""
    cells = pair.to_dict()
    sides = [
        f"{name} {cells[f'{side}_ms']:.1f} ms (GPU busy {_cell(cells[f'{side}_busy_ms'])}, "
        f"idle {_cell(cells[f'{side}_idle_ms'])}, host {cells[f'{side}_host_ms']:.1f})"
        for side, name in (("ours", "ours"), ("peer", cells["peer"]))
    ]
    busy = "" if pair.busy_ratio is None else f", busy {pair.busy_ratio:.3f}"
    return (
        f"{pair.ratio:.3f}{busy}  {cells['model']} stage {cells['stage']} x {cells['ranks']} "
        f"checkpointing {cells['checkpointing']}: {'; '.join(sides)}"
    )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def summary_lines(pairs: Sequence[SameRunPair]) -> list[str]:
    """Return the pairs' ratios of step times, and their geometric mean."""
    if not pairs:
        return ["No pair was whole."]
    ratios = [pair.ratio for pair in pairs]
    lines = [
        f"ours / {pairs[0].peer.engine}: geometric mean {geometric_mean(ratios):.3f} over "
        f"{len(ratios)} pairs, from {min(ratios):.3f} to {max(ratios):.3f}"
    ]
    busy = [ratio for pair in pairs if (ratio := pair.busy_ratio) is not None]
    if busy:
        lines.append(f"the GPU's busy time alone: geometric mean {geometric_mean(busy):.3f}")
    return lines


def main() -> int:
    """Time the pairs that the command line names; 0 when all of them are whole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("matrix", type=Path, help="matrix of job specs of our engine (JSON)")
    parser.add_argument("out", type=Path, help="file of recorded rows to append to (JSON lines)")
    parser.add_argument("--peer", type=Engine, default=Engine.FSDP2, help="the engine beside ours")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="begin no pair after this long"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Asked through CUDA, whether there is a GPU would keep the forked processes from using it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    try:
        pairs = [pair_entries(entry, arguments.peer) for entry in read_matrix(arguments.matrix)]
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    with tempfile.TemporaryDirectory(prefix="peakmark-bench-") as directory:
        bench = Bench(arguments.out, Path(directory), arguments.budget_s)
        preload([parse_plan(entry.spec.plan) for pair in pairs for entry in pair[:2]])
        bench.run(pairs)
    print("\n".join(summary_lines(bench.pairs)))
    return 0 if len(bench.pairs) == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
