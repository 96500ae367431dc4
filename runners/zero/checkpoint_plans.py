"""Plans for torch.distributed.checkpoint of tensors that are cut flat, wherever a shard ends.

A rank owns a run of a tensor's elements in row-major order. The checkpoint describes it as boxes
of the tensor's own shape, so that any reader of these checkpoints finds whole parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


class Box(NamedTuple):
    """A rectangular part of a tensor: where it begins and how long it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements [start, stop) of a row-major tensor into boxes, in order.

    There are at most 2 * dimensions - 1: a part of a row, whole rows, a part of a row.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    first, last = -(-start // row), stop // row
    if first > last:
        return _in_row(last, inner, start - last * row, stop - last * row)
    head = _in_row(first - 1, inner, start - (first - 1) * row, row) if start < first * row else []
    whole = [Box((first, *(0 for _ in inner)), (last - first, *inner))] if first < last else []
    return [*head, *whole, *_in_row(last, inner, 0, stop - last * row)]


def _in_row(row: int, inner: tuple[int, ...], start: int, stop: int) -> list[Box]:
    boxes = flat_boxes(inner, start, stop)
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's elements: `values` [n] are those of `shape` from `start` on."""

    shape: tuple[int, ...]
    start: int
    values: Tensor

    def boxes(self) -> Iterator[tuple[Box, Tensor]]:
        """Yield each box with its view of `values` in the box's shape."""
        at = 0
        for box in flat_boxes(self.shape, self.start, self.start + self.values.numel()):
            numel = math.prod(box.sizes)
            yield box, self.values[at : at + numel].view(box.sizes)
            at += numel


class PieceSavePlanner(DefaultSavePlanner):
    """Writes `pieces` by name; over all ranks the pieces of a name make up its tensor."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._views = {
            MetadataIndex(name, box.offsets): (piece, view)
            for name, piece in pieces.items()
            for box, view in piece.boxes()
        }

    def create_local_plan(self) -> SavePlan:
        """Name every box of this rank's pieces."""
        self.plan = SavePlan([_write_item(index, *at) for index, at in self._views.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the values of a box that the plan names."""
        return self._views[index][1]


def _write_item(index: MetadataIndex, piece: Piece, view: Tensor) -> WriteItem:
    assert index.offset is not None
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=index.offset, sizes=view.size()),
        properties=TensorProperties(dtype=view.dtype),
        size=torch.Size(piece.shape),
    )
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


class PieceLoadPlanner(LoadPlanner):
    """Fills `pieces` in place from a checkpoint, however that was cut."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        self._boxes = {name: list(piece.boxes()) for name, piece in pieces.items()}
        self._views = {
            MetadataIndex(name, box.offsets): view
            for name, boxes in self._boxes.items()
            for box, view in boxes
        }
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the checkpoint's description."""
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Find what each box overlaps in the checkpoint."""
        assert self._metadata is not None
        items: list[ReadItem] = []
        for name, boxes in self._boxes.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box, _ in boxes
            ]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it planned."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Read as planned."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: pieces are tensors, and bytes would have to be unpickled."""
        raise TypeError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the view that a read fills."""
        view = self._views[read_item.dest_index]
        for dim, (start, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the view was filled in place."""
