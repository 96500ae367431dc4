"""Greedy decoding of a Hugging Face model over our caches, each step a CUDA graph where there is a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.decode_run import AttentionBackend
from runners.serving.attention import NAME, Step
from runners.serving.caches import Cache, PagedCache
from runners.serving.prefill_graphs import PrefillGraphs

WARMUPS = 2


class Decoder:
    """Decodes all rows of a cache together, greedily; rows start with `prefill`.

    The model must have been built with `attn_implementation="peakmark_serving"` (see `register`) and
    be in evaluation mode. Without a GPU, or with `graphs=False`, steps run one operation at a time.
    """

    def __init__(
        self, model: nn.Module, cache: Cache, backend: AttentionBackend, *, graphs: bool = True
    ) -> None:
        config: Any = model.config
        if config._attn_implementation != NAME:
            found = config._attn_implementation
            raise ValueError(f"the model's attention is {found!r}; it must be {NAME!r}")
        self._model = model
        self._cache = cache
        self._backend = backend
        self._layers = set(range(config.num_hidden_layers))
        device = cache.lengths.device
        self._uses_graphs = graphs and device.type == "cuda"
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._tokens = torch.zeros(cache.rows, 1, dtype=torch.long, device=device)
        self._active = torch.ones(cache.rows, dtype=torch.int32, device=device)
        self._active_rows = list(range(cache.rows))
        self.prefill_graphs: PrefillGraphs | None = None
        if self._uses_graphs and isinstance(cache, PagedCache):
            self.prefill_graphs = PrefillGraphs(self._forward, cache, backend)

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are replayed as a CUDA graph."""
        return self._uses_graphs

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, rows: slice, *, past: int = 0) -> Tensor:
        """Run tokens (B, S) as the next ones of empty rows, or of rows of `past` tokens each.

        Returns the token (B,) that follows. Raises ValueError for no token, CacheFullError where
        there is no room.
        """
        batch, seq = tokens.shape
        if seq == 0:
            raise ValueError("a prompt has no tokens; it must have at least one")
        for row in range(*rows.indices(self._cache.rows)):
            self._cache.grow(row, seq)
        self._cache.publish()
        self._cache.lengths[rows] += seq
        graphs = self.prefill_graphs
        following = None if graphs is None else graphs.run(tokens, rows, past)
        if following is None:
            positions = torch.arange(past, past + seq, device=tokens.device).expand(batch, seq)
            step = Step(self._cache, self._backend, rows, self._cache.lengths[rows], past)
            following = self._forward(tokens, positions, step)
        self._tokens[rows] = following
        return self._tokens[rows, 0].clone()

    @torch.inference_mode()
    def capture_prefill(self, rows: int, tokens: int, past: int = 0) -> bool:
        """Let later prefills of so many rows, of up to so many tokens each after `past`, be one graph.

        Returns False, and does nothing, where steps are no graphs, the cache has no pages or there are
        so many tokens that it would not matter.
        """
        graphs = self.prefill_graphs
        return graphs is not None and graphs.capture(rows, tokens, past)

    @torch.inference_mode()
    def decode(self, rows: Sequence[int] | None = None) -> Tensor:
        """Decode one token of the given rows, all if None; return (rows,) by row number.

        Other rows stay as they are, and their numbers in the result mean nothing. It is valid until the
        next step. The host waits for nothing. Raises CacheFullError where a row has no room left.
        """
        active = list(range(self._cache.rows)) if rows is None else sorted(rows)
        for row in active:
            self._cache.grow(row, 1)
        self._cache.publish()
        if active != self._active_rows:
            self._activate(active)
        width = self._width(active[-1] + 1)
        if not self._uses_graphs:
            self._step(width)
        else:
            if width not in self._graphs:
                self._graphs[width] = self._captured(width)
            self._graphs[width].replay()
        return self._tokens[:, 0]

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture the graph of every number of rows, so that no later step has to."""
        widths = {self._width(number) for number in range(1, self._cache.rows + 1)}
        self._activate([])
        for width in sorted(widths) if self._uses_graphs else ():
            self._graphs[width] = self._captured(width)

    def _activate(self, rows: list[int]) -> None:
        mask = torch.zeros(self._cache.rows, dtype=torch.int32)
        mask[rows] = 1
        self._active.copy_(mask)
        self._active_rows = rows

    def _width(self, rows: int) -> int:
        """Rows that a step computes: the next power of two, for fewer graphs, or all."""
        return min(self._cache.rows, 1 << (rows - 1).bit_length())

    def _step(self, width: int) -> None:
        """Raise the active rows' lengths, run the model, put its choice where the next step reads it."""
        rows = slice(0, width)
        active, tokens = self._active[rows], self._tokens[rows]
        self._cache.lengths[rows] += active
        lengths = self._cache.lengths[rows] * active
        positions = (lengths.long() - 1).clamp(min=0)[:, None]
        step = Step(self._cache, self._backend, rows, lengths, None)
        following = self._forward(tokens, positions, step)
        tokens.copy_(torch.where(active[:, None] > 0, following, tokens))

    def _forward(
        self, tokens: Tensor, positions: Tensor, step: Step, last: Tensor | None = None
    ) -> Tensor:
        """Return the token (B, 1) that follows the one of index `last` (1,), the last one if None."""
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=1 if last is None else last,
            serving=step,
        )
        if step.layers_seen != self._layers:
            missing = min(self._layers ^ step.layers_seen)
            raise ValueError(f"layer {missing} of this family does not attend through {NAME!r}")
        logits: Tensor = output.logits[:, -1]
        return logits.argmax(-1, keepdim=True)

    def _captured(self, width: int) -> torch.cuda.CUDAGraph:
        """Record a step as a graph and replay it once, which brings it to the device; all steps are undone."""
        tokens, lengths = self._tokens.clone(), self._cache.lengths.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self._step(width)
                # The same token is written again into the same place.
                self._tokens.copy_(tokens)
                self._cache.lengths.copy_(lengths)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(width)
        graph.replay()
        self._tokens.copy_(tokens)
        self._cache.lengths.copy_(lengths)
        return graph
