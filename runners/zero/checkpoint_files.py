"""Checkpoints on disk: a directory per step, complete or not there, and what each one holds.

DIRECTORY/step-00000010/ has one .distcp file per rank, the .metadata of
torch.distributed.checkpoint for other readers, and checkpoint.json, which is all that we read of
it: nothing is unpickled. It is written as .step-00000010.partial and renamed when complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from planner.units import format_bytes

SCHEMA = 1
DESCRIPTION_FILE = "checkpoint.json"
_LOCK_FILE = "being-written"


class CheckpointError(Exception):
    """A checkpoint cannot be written or read; the message says what to do next."""


class Chunk(NamedTuple):
    """One box of a tensor, and where its bytes lie."""

    offsets: list[int]
    sizes: list[int]
    file: str
    position: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` by torch's name for it, such as float32."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a checkpoint holds. `scalars` are optimizer states of one number, `files` bytes."""

    step: int
    optimizer: str
    stage: int
    world_size: int
    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, float]
    files: Mapping[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with its schema version."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Description:
        """Read the JSON form; raises KeyError, TypeError or ValueError where it is none."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"its schema is {data['schema']!r} and this version reads {SCHEMA}")
        values = {name: data[name] for name in cls.__dataclass_fields__}
        values["tensors"] = {
            name: StoredTensor(
                dtype=tensor["dtype"],
                shape=tensor["shape"],
                chunks=[Chunk(*chunk) for chunk in tensor["chunks"]],
            )
            for name, tensor in data["tensors"].items()
        }
        return cls(**values)


class NotingWriter(FileSystemWriter):
    """Notes where each piece was written: what torch 2.11's `save` returns does not say it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.places: dict[MetadataIndex, _StorageInfo] = {}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on the rank that coordinates: the first."""
        self.places = {found.index: found.storage_data for rank in results for found in rank}
        super().finish(metadata, results)


def describe_tensors(
    metadata: Metadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> dict[str, StoredTensor]:
    """Return what torch.distributed.checkpoint says that it wrote, and `places` says where."""
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        chunks = []
        for chunk in stored.chunks:
            at = places[MetadataIndex(name, chunk.offsets)]
            place = (at.relative_path, at.offset, at.length)
            chunks.append(Chunk(list(chunk.offsets), list(chunk.sizes), *place))
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(dtype=dtype, shape=list(stored.size), chunks=chunks)
    return tensors


class DescriptionReader(FileSystemReader):
    """Reads a checkpoint's tensors by its description instead of its pickled .metadata."""

    def __init__(self, path: Path, description: Description) -> None:
        super().__init__(path)
        self._tensors = description.tensors

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the description in torch's own words."""
        metadata = Metadata({}, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))
        for name, tensor in self._tensors.items():
            boxes = []
            for chunk in tensor.chunks:
                offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.sizes)
                boxes.append(ChunkStorageMetadata(offsets, sizes))
                at = _StorageInfo(chunk.file, chunk.position, chunk.length_bytes)
                metadata.storage_data[MetadataIndex(name, offsets)] = at
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            stored = TensorStorageMetadata(properties, torch.Size(tensor.shape), boxes)
            metadata.state_dict_metadata[name] = stored
        return metadata


def check_step_is_free(directory: Path, step: int) -> Path:
    """Return where a step is going to lie; raises CheckpointError where one is there already."""
    final = _step_directory(directory, step)
    if final.exists():
        raise CheckpointError(
            f"step {step} is saved in {final} already, and a save replaces nothing: move it away "
            "or save to another directory"
        )
    return final


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A step being written; rank 0 holds `lock`, a descriptor of its own, until the end."""

    partial: Path
    lock: int

    def remove(self) -> None:
        """Remove what was written of a step that failed."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def end(self) -> None:
        """Let go of the lock."""
        os.close(self.lock)


def begin_step(directory: Path, step: int, needed_bytes: int) -> BegunStep:
    """Make an empty directory for a step that is about to be written.

    What interrupted saves left is removed first. Raises CheckpointError where the step is there
    already, another run is saving to `directory`, or the disk has no room.
    """
    final = check_step_is_free(directory, step)
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in _partial_directories(directory):
        _remove_leftover(leftover)
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise CheckpointError(
            f"step {step} takes {format_bytes(needed_bytes)} and {directory} has "
            f"{format_bytes(free_bytes)} left: free some or save to another disk; what was saved "
            "before is untouched"
        )
    partial = directory / f".{final.name}.partial"
    partial.mkdir()
    lock = os.open(partial / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    _take(lock)
    return BegunStep(partial, lock)


def _remove_leftover(partial: Path) -> None:
    """Remove a half-written step; raises CheckpointError where a living process writes it."""
    if (partial / _LOCK_FILE).exists():
        lock = os.open(partial / _LOCK_FILE, os.O_RDWR)
        try:
            is_free = _take(lock)
        finally:
            os.close(lock)
        if not is_free:
            raise CheckpointError(
                f"another run is saving to {partial} now: wait until it has, or save to another "
                "directory"
            )
    shutil.rmtree(partial)


def _take(lock: int) -> bool:
    """Return False where another process holds a lock; a disk that knows no locks says nothing."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def commit_step(partial: Path, description: Description) -> Path:
    """Write the description, flush, and give the directory its name in one rename."""
    for name in {chunk.file for t in description.tensors.values() for chunk in t.chunks}:
        if not (partial / name).is_file():
            raise CheckpointError(
                f"{name} was written by another host and is not seen in {partial} here: save to a "
                "directory that all hosts share"
            )
    with (partial / DESCRIPTION_FILE).open("w") as file:
        json.dump(description.to_dict(), file)
        file.flush()
        os.fsync(file.fileno())
    _flush_directory(partial)
    final = partial.rename(_step_directory(partial.parent, description.step))
    # Only now: without it another run would take the step for one that was left.
    (final / _LOCK_FILE).unlink(missing_ok=True)
    _flush_directory(final.parent)
    return final


def keep_newest(directory: Path, number: int) -> None:
    """Remove all but the `number` newest complete steps; each first loses its name."""
    for old in _complete_directories(directory)[:-number]:
        shutil.rmtree(old.rename(directory / f".{old.name}.partial"))


def find_step(path: Path) -> Path:
    """Return `path` if it is a step's directory, else the newest complete step in it.

    Says in one warning which half-written ones it ignores; raises CheckpointError if none is whole.
    """
    if (path / DESCRIPTION_FILE).is_file():
        return path
    complete = _complete_directories(path)
    broken = [p.name for p in _partial_directories(path)]
    broken += [p.name for p in path.glob("step-*") if p not in complete]
    if not complete:
        reason = f"only half-written ones ({', '.join(broken)})" if broken else "none"
        raise CheckpointError(
            f"{path} should hold complete checkpoints, step-NNNNNNNN with a {DESCRIPTION_FILE}, "
            f"and has {reason}: give the directory that was saved to, or start without loading"
        )
    if broken:
        warnings.warn(
            f"{', '.join(broken)} in {path} are half written, by saves that were interrupted, and "
            f"are ignored: loading {complete[-1].name}",
            stacklevel=2,
        )
    return complete[-1]


def read_description(path: Path) -> Description:
    """Read a step's description and see that all its files are there, whole.

    Raises CheckpointError naming the file that is missing, cut short or not a description.
    """
    try:
        description = Description.from_dict(json.loads((path / DESCRIPTION_FILE).read_text()))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / DESCRIPTION_FILE} is no description of a checkpoint ({error}): load another "
            "step"
        ) from error
    for name, size_bytes in description.files.items():
        file = path / name
        found = f"{file.stat().st_size} bytes long" if file.is_file() else "missing"
        if found != f"{size_bytes} bytes long":
            raise CheckpointError(
                f"{file} is {found} and should have {size_bytes} bytes, of rank "
                f"{name.split('_')[2]} of {description.world_size}: copy it again from where the "
                "checkpoint was saved, or load another step"
            )
    return description


def file_sizes(partial: Path) -> dict[str, int]:
    """Return the bytes of every rank's file."""
    return {file.name: file.stat().st_size for file in sorted(partial.glob("*.distcp"))}


def _step_directory(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def _complete_directories(directory: Path) -> list[Path]:
    found = [p.parent for p in directory.glob(f"step-*/{DESCRIPTION_FILE}")]
    return sorted(found, key=lambda path: path.name)


def _partial_directories(directory: Path) -> list[Path]:
    return sorted(directory.glob(".step-*.partial"))


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
