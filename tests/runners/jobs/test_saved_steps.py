"""Runs that save their training and go on from it: in one process, and from the command line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch
from transformers import LlamaConfig, LlamaForCausalLM

from planner.errors import PlanError
from planner.plan import parse_plan
from runners.contract import JobSpec
from runners.jobs import train_step
from runners.jobs.harness import EventLog, JobSession
from runners.jobs.saved_steps import SavedSteps
from runners.worlds import Launch
from runners.zero import checkpoint_files
from runners.zero.checkpoint_files import CheckpointError

ROOT = Path(__file__).parents[3]
LEARNING_RATE = 1e-4
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 30,
    "intermediate_size": 42,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
# The first steps, of which none is measured, and the measured ones.
WARMUP, STEPS = 2, 5


def spec_of(*, steps: int = STEPS, ranks: int = 1, world: str = "cpu", **places: Any) -> JobSpec:
    """Return a job of a tiny model at stage 3, in fp32."""
    plan = {
        "schema": 1,
        "job": "train",
        "model": {"config": CONFIG, "name": "tiny"},
        "workload": {"sequence_length": 16, "precision": "fp32", "optimizer": "adamw_foreach"},
        "parallelism": {"zero_stage": 3, "world_size": ranks},
        "hardware": {"preset": "h200-sxm5-141gb"},
    }
    spec = {"schema": 1, "kind": "train_step", "world": world, "warmup": WARMUP, "steps": steps}
    return JobSpec.from_dict({**spec, "plan": plan, **places})


def run_here(spec: JobSpec, out: Path) -> dict[str, Any]:
    """Run the job in this process and return what it measured."""
    out.mkdir()
    session = JobSession(
        spec=spec, launch=Launch(), device=torch.device("cpu"), events=EventLog(out, 0)
    )
    train_step.measure_training(session)
    return session.measured


def test_a_run_goes_on_from_a_saved_one_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    kept = str(tmp_path / "kept")
    first = run_here(spec_of(save_to=kept), tmp_path / "a")
    second = run_here(spec_of(load_from=kept, save_to=kept), tmp_path / "b")
    whole = run_here(spec_of(steps=WARMUP + 2 * STEPS), tmp_path / "c")
    assert first["losses"] + whole["losses"][STEPS:-STEPS] + second["losses"] == whole["losses"]
    path = tmp_path / "kept" / "step-00000007"
    written = sum(file.stat().st_size for file in path.glob("*.distcp"))
    said = {"path": str(path), "step": 7, "zero_stage": 3, "world_size": 1, "bytes": written}
    for found in (first["saved"], second["loaded"]):
        assert found.pop("time_s") > 0
        assert found == said
    assert (second["saved"]["step"], "loaded" in first) == (14, False)


def test_what_stands_in_the_way_is_said_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "kept" / "step-00000007").mkdir(parents=True)
    plan = parse_plan(spec_of().plan)
    kept = str(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"step 7 is saved in .* already"):
        SavedSteps.of(spec_of(save_to=kept), plan, 7)
    with pytest.raises(CheckpointError, match=r"only half-written ones .*: give the directory"):
        SavedSteps.of(spec_of(load_from=kept), plan, 7)
    with pytest.raises(CheckpointError, match=r"nothing should hold complete .* has none: give"):
        SavedSteps.of(spec_of(load_from=str(tmp_path / "nothing")), plan, 7)
    spread = spec_of(ranks=4, world="solo", save_to=kept)
    with pytest.raises(PlanError, match="one of 4 ranks runs"):
        SavedSteps.of(spread, parse_plan(spread.plan), 7)


def test_a_full_disk_is_told_and_the_last_good_step_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = str(tmp_path / "kept")
    run_here(spec_of(steps=1, save_to=kept), tmp_path / "a")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"step 6 takes .* KiB and .* left: free some"):
        run_here(spec_of(steps=1, load_from=kept, save_to=kept), tmp_path / "b")
    monkeypatch.undo()
    assert run_here(spec_of(steps=1, load_from=kept), tmp_path / "c")["loaded"]["step"] == 3


def test_a_spec_with_another_path_is_refused() -> None:
    with pytest.raises(PlanError, match="save_to is 'kept': it must be an absolute path"):
        spec_of(save_to="kept")


def prove(folder: Path, *options: str) -> dict[str, Any]:
    """Run `peakmark prove` with a worker and ranks of its own; return what it answers."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "app.cli", "prove", "--config", str(folder / "config.json")]
    command += ["--seq", "16", "--precision", "fp32", "--optimizer", "adamw_foreach"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PEAKMARK_DATABASE_URL"] = str(folder / "peakmark.db")
    done = subprocess.run(
        [*command, "--world", "cpu", "--json", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def read_step(path: Path, model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Read whole parameters and moments of a step with torch's own reader."""
    names = dict(model.named_parameters())
    read = {f"model.{name}": torch.zeros_like(p) for name, p in names.items()}
    for moment in ("exp_avg", "exp_avg_sq"):
        read |= {f"optimizer.{name}.{moment}": torch.zeros_like(p) for name, p in names.items()}
    with pytest.warns(UserWarning, match="single process"):
        load_by_torch(dict(read), storage_reader=FileSystemReader(path), no_dist=True)
    return read


def train_by_torch(
    model: LlamaForCausalLM, start: dict[str, Tensor], num_done: int, num_steps: int
) -> list[float]:
    """Train `model` on two ranks' tokens with torch's AdamW, from `start`; return rank 0's losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(start[f"model.{name}"])
        moments = {k: start[f"optimizer.{name}.{k}"].clone() for k in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(num_done)), **moments}
    # The tokens of a job's rank, by its seed 0.
    tokens = [
        torch.randint(61, (1, 16), generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)
    ]
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        for rank, ids in enumerate(tokens):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / 2).backward()
            if rank == 0:
                losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.slow
def test_four_ranks_save_at_stage_3_and_two_go_on_at_stage_1(tmp_path: Path) -> None:
    """From the command line down, against torch alone going on from the same step."""
    kept = tmp_path / "kept"
    answer = prove(tmp_path, "--gpus", "4", "--zero", "3", "--save-to", str(kept))
    assert answer["measured"]["saved"]["world_size"] == 4
    options = ("--gpus", "2", "--zero", "1", "--load-from", str(kept), "--save-to", str(kept))
    measured = prove(tmp_path, *options)["measured"]
    assert (measured["loaded"]["step"], measured["loaded"]["zero_stage"]) == (7, 3)
    assert (measured["saved"]["step"], measured["saved"]["world_size"]) == (14, 2)

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
    start = read_step(kept / "step-00000007", model)
    losses = train_by_torch(model, start, num_done=7, num_steps=WARMUP + STEPS)
    assert measured["losses"] == pytest.approx(losses[WARMUP:], rel=1e-5)
    reached = read_step(kept / "step-00000014", model)
    moved = [(reached[name] - value).abs().max() for name, value in start.items()]
    assert min(moved) > 0
    for name, parameter in model.named_parameters():
        # A step moves an element by up to the learning rate: seven of them by 7e-4.
        torch.testing.assert_close(reached[f"model.{name}"], parameter.data, rtol=0, atol=2e-6)
