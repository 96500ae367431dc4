"""Saving and loading in one process: what is on disk, what is refused, what survives."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

from runners.zero import checkpoint_files, saving
from runners.zero.checkpoint_files import CheckpointError
from runners.zero.checkpoint_plans import flat_boxes
from runners.zero.collectives import LocalCollectives
from runners.zero.engine import ZeroEngine
from runners.zero.saving import load_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def _load_rank_main() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "saving_models", Path(__file__).with_name("rank_main.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["saving_models"] = module
    spec.loader.exec_module(module)
    return module


rank_main = _load_rank_main()


class Training(NamedTuple):
    """A model in its engine."""

    model: nn.Module
    engine: ZeroEngine

    def steps(self, first: int, last: int) -> list[float]:
        """Train steps `first` to `last` - 1 on their own batches; return the losses."""
        losses = []
        for step in range(first, last):
            tokens = rank_main.batch(0, step, 0)
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            self.engine.backward(loss, last_micro_batch=True)
            self.engine.step()
            losses.append(loss.item())
        return losses


def begin(name: str = "llama", *, stage: int = 1, **options: Any) -> Training:
    """Return a tiny model in an engine of one rank."""
    chosen = {"optimizer": "adamw_foreach", "precision": "fp32", "lr": 1e-2, "device": CPU}
    model = rank_main.build_model(name)
    return Training(model, ZeroEngine(model, stage=stage, **{**chosen, **options}))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of parameters are equal, bit by bit."""
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with steps 2 and 4 of a stage 3 training."""
    training = begin(stage=3)
    for step in (2, 4):
        training.steps(step - 2, step)
        save_checkpoint(training.engine, tmp_path, step=step)
    return tmp_path


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (1, 6), (4, 1, 2), ()])
def test_boxes_cover_a_run_of_elements_in_order(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    elements = torch.arange(numel).view(shape)
    for start in range(numel + 1):
        for stop in range(start, numel + 1):
            boxes = flat_boxes(shape, start, stop)
            covered: list[int] = []
            for offsets, sizes in boxes:
                window = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
                covered += elements[window].reshape(-1).tolist()
            assert covered == list(range(start, stop))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("optimizer", "precision", "stages"),
    [
        ("adamw_foreach", "fp32", (3, 0)),
        ("adamw_fused", "mixed", (0, 3)),
        ("adamw_loop", "autocast", (2, 1)),
        ("sgd", "bf16", (1, 2)),
        ("adafactor", "fp32", (0, 0)),
        ("muon", "fp32", (0, 0)),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_goes_on_as_if_nothing_happened(
    tmp_path: Path, name: str, optimizer: str, precision: str, stages: tuple[int, int]
) -> None:
    options = {"optimizer": optimizer, "precision": precision}
    before = begin(name, stage=stages[0], **options)
    before.steps(0, 3)
    save_checkpoint(before.engine, tmp_path, step=3)
    after = begin(name, stage=stages[1], **options)
    assert load_checkpoint(after.engine, tmp_path) == 3
    assert before.steps(3, 6) == after.steps(3, 6)
    assert same(before.engine.full_parameters(), after.engine.full_parameters())


def test_torch_reads_whole_parameters_from_it(saved: Path) -> None:
    training = begin(stage=0)
    load_checkpoint(training.engine, saved)
    values = training.engine.full_parameters()
    read: dict[str, Any] = {f"model.{n}": torch.zeros_like(v) for n, v in values.items()}
    with pytest.warns(UserWarning, match="single process"):
        load_by_torch(read, storage_reader=FileSystemReader(saved / "step-00000004"), no_dist=True)
    assert same({n.removeprefix("model."): v for n, v in read.items()}, values)


def test_a_save_needs_nothing_of_the_metadata_that_torch_2_11_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the writer completes a copy: what `save` returns does not say where tensors lie."""
    finish = FileSystemWriter.finish

    def finish_a_copy(writer: Any, metadata: Any, results: Any) -> None:
        finish(writer, dataclasses.replace(metadata), results)

    monkeypatch.setattr(FileSystemWriter, "finish", finish_a_copy)
    before, after = begin(stage=2), begin(stage=3)
    before.steps(0, 2)
    save_checkpoint(before.engine, tmp_path, step=2)
    assert load_checkpoint(after.engine, tmp_path) == 2
    assert before.steps(2, 4) == after.steps(2, 4)


def test_the_newest_step_is_loaded_or_the_one_named(saved: Path) -> None:
    assert load_checkpoint(begin().engine, saved) == 4
    assert load_checkpoint(begin().engine, saved / "step-00000002") == 2


def test_an_interrupted_save_leaves_the_last_good_one(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin()
    load_checkpoint(training.engine, saved)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(saving, "_commit", _interrupt)
        save_checkpoint(training.engine, saved, step=6)
    assert sorted(p.name for p in saved.iterdir()) == [
        ".step-00000006.partial",
        "step-00000002",
        "step-00000004",
    ]
    with pytest.warns(
        UserWarning, match=r"\.step-00000006\.partial in .* half written, .* loading"
    ):
        assert load_checkpoint(begin().engine, saved) == 4
    save_checkpoint(training.engine, saved, step=6, keep=2)
    assert sorted(p.name for p in saved.iterdir()) == ["step-00000004", "step-00000006"]


def _interrupt(*args: Any) -> Path:
    raise KeyboardInterrupt


def test_a_process_killed_while_it_writes_leaves_the_last_good_step(saved: Path) -> None:
    """Killed for real, with its pieces on disk and the step not yet named."""
    process = multiprocessing.get_context("fork").Process(target=_save_and_die, args=(saved,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (saved / ".step-00000006.partial" / "__0_0.distcp").stat().st_size > 0
    with pytest.warns(UserWarning, match="half written"):
        assert load_checkpoint(begin().engine, saved) == 4


def _save_and_die(directory: Path) -> None:
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent
    training = begin()
    saving._commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    save_checkpoint(training.engine, directory, step=6)


def test_two_runs_do_not_save_to_one_directory_at_once(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock is of the file's opening: a second one in this process is as another process's."""
    commit, met = saving._commit, []

    def meanwhile(*arguments: Any) -> Path:
        with pytest.raises(
            CheckpointError, match=r"another run is saving to .*: wait until it has"
        ):
            checkpoint_files.begin_step(saved, 8, 0)
        met.append(arguments)
        return commit(*arguments)

    monkeypatch.setattr(saving, "_commit", meanwhile)
    training = begin()
    load_checkpoint(training.engine, saved)
    final = save_checkpoint(training.engine, saved, step=6)
    assert len(met) == 1
    assert sorted(p.name for p in final.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "checkpoint.json",
    ]
    assert load_checkpoint(begin().engine, saved) == 6


def test_a_write_that_fails_says_so_and_leaves_nothing_behind(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", fail)
    with pytest.raises(CheckpointError, match=r"rank 0 met OSError.*No space left.*free disk"):
        save_checkpoint(begin().engine, saved, step=6)
    assert sorted(p.name for p in saved.iterdir()) == ["step-00000002", "step-00000004"]


def test_a_disk_without_room_is_found_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = begin()
    # Parameters alone: no step has made moments yet.
    needed_bytes = 4 * sum(p.numel() for p in training.model.parameters())
    usage = shutil.disk_usage(tmp_path)._replace(free=needed_bytes - 1)
    monkeypatch.setattr(checkpoint_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"step 1 takes .* KiB and .* left: free some"):
        save_checkpoint(training.engine, tmp_path, step=1)
    usage = usage._replace(free=needed_bytes)
    assert save_checkpoint(training.engine, tmp_path, step=1).is_dir()


def test_a_saved_step_is_never_replaced(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step 4 is saved in .* already"):
        save_checkpoint(begin().engine, saved, step=4)


@pytest.mark.parametrize("damage", ["missing", "bytes long"])
def test_a_rank_file_that_is_missing_or_cut_is_named(saved: Path, damage: str) -> None:
    file = saved / "step-00000004" / "__0_0.distcp"
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=f"__0_0.distcp is .*{damage} .* of rank 0 of 1: copy"
    ):
        load_checkpoint(begin().engine, saved)


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 7}', '{"schema": 1}'])
def test_a_damaged_description_is_refused(saved: Path, text: str) -> None:
    (saved / "step-00000004" / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is no description .*: load anoth"):
        load_checkpoint(begin().engine, saved)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="and has none: give the directory"):
        load_checkpoint(begin().engine, tmp_path)
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(CheckpointError, match=r"only half-written ones \(step-00000001\)"):
        load_checkpoint(begin().engine, tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {}, r"is of another model \(\d+ tensors are only in the model, such as model\.tr"),
        ("llama", {"optimizer": "sgd"}, "holds the states of adamw and this engine steps with sgd"),
        ("llama", {"precision": "bf16"}, "in float32 in .* in bfloat16 here: build the model and"),
    ],
)
def test_another_model_optimizer_or_precision_is_refused(
    saved: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(begin(name, **options).engine, saved)


def test_another_shape_is_refused_by_name(saved: Path) -> None:
    path = saved / "step-00000004" / "checkpoint.json"
    description = json.loads(path.read_text())
    description["tensors"]["model.lm_head.weight"]["shape"] = [62, 10]
    path.write_text(json.dumps(description))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight is \[62, 10\] .* and \[61, 10\] in"
    ):
        load_checkpoint(begin().engine, saved)


def test_an_unfinished_step_is_not_saved(tmp_path: Path) -> None:
    training = begin()
    tokens = rank_main.batch(0, 0, 0)
    loss = training.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    training.engine.backward(loss, last_micro_batch=True)
    with pytest.raises(CheckpointError, match="a step is unfinished"):
        save_checkpoint(training.engine, tmp_path, step=1)


def test_a_rank_that_runs_alone_saves_nothing(tmp_path: Path) -> None:
    training = begin(stage=3, collectives=LocalCollectives(1, 4))
    with pytest.raises(CheckpointError, match="rank 1 of 4 runs alone here"):
        save_checkpoint(training.engine, tmp_path, step=1)
    with pytest.raises(CheckpointError, match="rank 1 of 4 runs alone here"):
        load_checkpoint(training.engine, tmp_path)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="give a directory that can be written to"):
        save_checkpoint(begin().engine, tmp_path / "file", step=1)


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    exec(example, {})
    exec(example, {})
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-00000003", "step-00000006"]
