"""Save and load the ZeRO engine through torch.distributed.checkpoint, at any world size and stage.

What is saved: every parameter (its fp32 master where there is one), the optimizer's states by
parameter, and the step. Learning rates are the engine's own; random state and the place in the
data are the caller's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from runners.zero.checkpoint_files import (
    CheckpointError,
    Description,
    DescriptionReader,
    NotingWriter,
    StoredTensor,
    begin_step,
    commit_step,
    describe_tensors,
    file_sizes,
    find_step,
    keep_newest,
    read_description,
)
from runners.zero.checkpoint_plans import Piece, PieceLoadPlanner, PieceSavePlanner
from runners.zero.collectives import LocalCollectives, ProcessGroupCollectives
from runners.zero.engine import ZeroEngine
from runners.zero.groups import FlatGroup, Slot
from runners.zero.optimizer import ADAMW_KINDS, ShardOptimizer

States = list[dict[str, Tensor]]
Answer = TypeVar("Answer")


def save_checkpoint(
    engine: ZeroEngine, directory: Path, *, step: int, keep: int | None = None
) -> Path:
    """Save the engine between two steps as `directory`/step-NNNNNNNN; all ranks call it.

    The step appears complete or not at all. With `keep` older steps beyond that many are removed,
    after the new one is on disk. Raises CheckpointError, on every rank, saying what to do.
    """
    _check_can_save(engine)
    engine.release_parameters()
    pieces: dict[str, Piece] = {}
    scalars: dict[str, float] = {}
    for group, optimizer in engine.stepped_groups():
        states = optimizer.states() if optimizer else []
        pieces |= _pieces(group, optimizer, states, _own_range(group))
        scalars |= _scalars(group, optimizer, states)
    needed_bytes = sum(prod(p.shape) * p.values.element_size() for p in pieces.values())
    begun = _on_first_rank(engine, lambda: begin_step(directory, step, needed_bytes))
    is_first = engine.collectives.rank == 0
    try:
        tensors = _write(engine, begun.partial, pieces)
        return _on_first_rank(
            engine, lambda: _commit(engine, begun.partial, step, tensors, scalars, keep)
        )
    except CheckpointError:
        if is_first:
            begun.remove()
        raise
    finally:
        if is_first:
            begun.end()


def load_checkpoint(engine: ZeroEngine, path: Path) -> int:
    """Load a step's directory, or the newest complete step in `path`; return its step.

    All ranks call it. Model and optimizer must be those saved; world size and stage need not.
    Raises CheckpointError, on every rank, saying what to do.
    """
    _check_has_ranks(engine)
    engine.release_parameters()
    found, data = _on_first_rank(engine, lambda: _find(path))
    description = Description.from_dict(data)
    _check_optimizer(engine, description)
    pieces: dict[str, Piece] = {}
    restored: list[tuple[FlatGroup, ShardOptimizer | None, States]] = []
    for group, optimizer in engine.stepped_groups():
        states = _empty_states(group, optimizer, description) if optimizer else []
        is_whole = optimizer is not None and engine.stage == 0
        held = (0, group.layout.numel) if is_whole else _own_range(group)
        pieces |= _pieces(group, optimizer, states, held)
        restored.append((group, optimizer, states))
    _check_model(pieces, description, found)
    with _one_clear_error(f"{found} could not be read", "load another step into a new engine"):
        load(
            dict(pieces),
            storage_reader=DescriptionReader(found, description),
            planner=PieceLoadPlanner(pieces),
            **_group_of(engine),
        )
    _put_back(engine, restored)
    return description.step


def _write(engine: ZeroEngine, partial: Path, pieces: dict[str, Piece]) -> dict[str, StoredTensor]:
    """Write all ranks' pieces; return, on the first rank, what lies where."""
    writer = NotingWriter(partial)
    with _one_clear_error(f"{partial} could not be written", "free disk space or save elsewhere"):
        metadata: Metadata = save(
            dict(pieces),
            storage_writer=writer,
            planner=PieceSavePlanner(pieces),
            **_group_of(engine),
        )
    return describe_tensors(metadata, writer.places) if engine.collectives.rank == 0 else {}


def _commit(
    engine: ZeroEngine,
    partial: Path,
    step: int,
    tensors: dict[str, StoredTensor],
    scalars: dict[str, float],
    keep: int | None,
) -> Path:
    description = Description(
        step=step,
        optimizer=_family(engine),
        stage=engine.stage,
        world_size=engine.collectives.world_size,
        tensors=tensors,
        scalars=scalars,
        files=file_sizes(partial),
    )
    final = commit_step(partial, description)
    if keep is not None:
        keep_newest(final.parent, max(keep, 1))
    return final


def _find(path: Path) -> tuple[Path, dict[str, object]]:
    found = find_step(path)
    return found, read_description(found).to_dict()


def _put_back(
    engine: ZeroEngine, restored: list[tuple[FlatGroup, ShardOptimizer | None, States]]
) -> None:
    """Make everything that follows from the loaded values: states, working copies, frozen groups."""
    with torch.no_grad(), engine.collectives.uncounted():
        for group, optimizer, states in restored:
            if optimizer is not None:
                optimizer.restore(states)
            if optimizer is None and engine.stage < 3:
                engine.collectives.all_gather(group.flat, group.shard)


def _own_range(group: FlatGroup) -> tuple[int, int]:
    """Return the elements of the flat buffer that are this rank's, without padding."""
    start = group.rank * group.layout.shard_numel
    return start, min(start + group.layout.shard_numel, group.layout.numel)


def _pieces(
    group: FlatGroup, optimizer: ShardOptimizer | None, states: States, held: tuple[int, int]
) -> dict[str, Piece]:
    """Name what `held` of the flat buffer covers of each parameter and of its states.

    A state that is not one value per element (Adafactor's rows and columns) belongs to rank 0
    when it is saved, and is loaded by all.
    """
    values = optimizer.values if optimizer else group.shard
    is_flat_whole = values.numel() == group.layout.padded_numel
    base = 0 if is_flat_whole else group.rank * group.layout.shard_numel
    pieces = {}
    for index, slot in enumerate(group.layout.slots):
        pieces[f"model.{slot.name}"] = _cut(slot, values, base, held)
        for key, state in _of_slot(optimizer, states, index).items():
            name = f"optimizer.{slot.name}.{key}"
            if state.dim() == 0:
                continue
            if optimizer and not optimizer.is_split:
                pieces[name] = _cut(slot, state, base, held)
            elif state.shape == slot.shape:
                pieces[name] = _cut(slot, state.view(-1), slot.offset, held)
            else:
                is_mine = group.rank == 0 or held == (0, group.layout.numel)
                flat = state.view(-1)
                pieces[name] = Piece(tuple(state.shape), 0, flat if is_mine else flat[:0])
    return pieces


def _cut(slot: Slot, buffer: Tensor, base: int, held: tuple[int, int]) -> Piece:
    """Return what `held` covers of a slot; `buffer` begins at element `base` of the group."""
    start = max(slot.offset, held[0])
    stop = max(start, min(slot.offset + slot.numel, held[1]))
    if start == stop:
        return Piece(tuple(slot.shape), 0, buffer[:0])
    return Piece(tuple(slot.shape), start - slot.offset, buffer[start - base : stop - base])


def _of_slot(optimizer: ShardOptimizer | None, states: States, index: int) -> dict[str, Tensor]:
    if optimizer is None:
        return {}
    return states[index if optimizer.is_split else 0]


def _scalars(
    group: FlatGroup, optimizer: ShardOptimizer | None, states: States
) -> dict[str, float]:
    return {
        f"optimizer.{slot.name}.{key}": state.item()
        for index, slot in enumerate(group.layout.slots)
        for key, state in _of_slot(optimizer, states, index).items()
        if state.dim() == 0
    }


def _empty_states(group: FlatGroup, optimizer: ShardOptimizer, description: Description) -> States:
    """Return states as the checkpoint names them, to be filled: one set, or one per parameter."""
    slots, stepped = group.layout.slots, optimizer.stepped
    return [
        _empty_state(slot.name, tensor, description, is_flat=not optimizer.is_split)
        for slot, tensor in zip(slots[: len(stepped)], stepped, strict=True)
    ]


def _empty_state(
    name: str, stepped: Tensor, description: Description, *, is_flat: bool
) -> dict[str, Tensor]:
    prefix = f"optimizer.{name}."
    state = {
        key.removeprefix(prefix): torch.tensor(value, dtype=torch.float32)
        for key, value in description.scalars.items()
        if key.startswith(prefix)
    }
    for key, stored in description.tensors.items():
        if key.startswith(prefix):
            shape = stepped.shape if is_flat else stored.shape
            state[key.removeprefix(prefix)] = stepped.new_zeros(shape)
    return state


def _family(engine: ZeroEngine) -> str:
    """Return the optimizer's kind; AdamW's variants keep the same states."""
    kinds = {optimizer.kind for _, optimizer in engine.stepped_groups() if optimizer}
    kind = kinds.pop()
    return "adamw" if kind in ADAMW_KINDS else kind


def _check_has_ranks(engine: ZeroEngine) -> None:
    collectives = engine.collectives
    if isinstance(collectives, LocalCollectives) and collectives.world_size > 1:
        raise CheckpointError(
            f"rank {collectives.rank} of {collectives.world_size} runs alone here, so the other "
            "ranks' shards do not exist: save and load with all ranks running"
        )


def _check_can_save(engine: ZeroEngine) -> None:
    _check_has_ranks(engine)
    if _family(engine) == "adamw_8bit":
        raise CheckpointError(
            "adamw_8bit keeps moments in blocks of a rank's shard, which no other world size cuts "
            "alike, and cannot be saved: train with another optimizer"
        )
    if any(g.gradient is not None or g.gradient_shard is not None for g in engine.trained):
        raise CheckpointError("a step is unfinished, and gradients are not saved: step first")


def _check_optimizer(engine: ZeroEngine, description: Description) -> None:
    if _family(engine) != description.optimizer:
        raise CheckpointError(
            f"the checkpoint holds the states of {description.optimizer} and this engine steps "
            f"with {_family(engine)}: load it with {description.optimizer}"
        )


def _check_model(pieces: dict[str, Piece], description: Description, path: Path) -> None:
    """Raise CheckpointError where names, shapes or dtypes are not those saved."""
    advice = "build the model and precision that were saved, or load another checkpoint"
    lacking, unknown = pieces.keys() - description.tensors, description.tensors.keys() - pieces
    if lacking or unknown:
        parts = [
            f"{len(names)} tensors {where}, such as {min(names)}"
            for names, where in ((lacking, "are only in the model"), (unknown, "only in the file"))
            if names
        ]
        raise CheckpointError(f"{path} is of another model ({'; '.join(parts)}): {advice}")
    for name, piece in pieces.items():
        stored = description.tensors[name]
        dtype = str(piece.values.dtype).removeprefix("torch.")
        here, there = (list(piece.shape), dtype), (stored.shape, stored.dtype)
        if here != there:
            raise CheckpointError(
                f"{name} is {there[0]} in {there[1]} in {path} and {here[0]} in {here[1]} here: "
                f"{advice}"
            )


def _group_of(engine: ZeroEngine) -> dict[str, object]:
    """Return the process group for torch.distributed.checkpoint, or that there is none."""
    if isinstance(engine.collectives, ProcessGroupCollectives):
        return {"process_group": engine.collectives.process_group}
    return {"no_dist": True}


def _on_first_rank(engine: ZeroEngine, act: Callable[[], Answer]) -> Answer:
    """Run `act` on rank 0 and return its answer, or raise its error, on every rank."""
    said: list[object] = [None, None]
    if engine.collectives.rank == 0:
        try:
            said = [act(), None]
        except CheckpointError as error:
            said = [None, str(error)]
        except OSError as error:
            said = [None, f"{error}: give a directory that can be written to, with space left"]
    if isinstance(engine.collectives, ProcessGroupCollectives):
        group = engine.collectives.process_group
        dist.broadcast_object_list(said, group=group, group_src=0)
    if said[1] is not None:
        raise CheckpointError(said[1])
    answer: Answer = said[0]  # type: ignore[assignment]
    return answer


@contextmanager
def _one_clear_error(what: str, advice: str) -> Iterator[None]:
    """Turn the exceptions of several ranks into the first of them, in one sentence."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        raise CheckpointError(f"{what}: rank {rank} met {error!r}; {advice}") from failed
