"""Greedy decoding of a Hugging Face model over our caches, each step a CUDA graph where there is a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from planner.decode_run import AttentionBackend
from runners.serving.attention import NAME, Step
from runners.serving.caches import Cache

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
        self._graphs = graphs and device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._tokens = torch.zeros(cache.rows, 1, dtype=torch.long, device=device)

    @property
    def uses_graphs(self) -> bool:
        """Whether steps are replayed as a CUDA graph."""
        return self._graphs

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
        positions = torch.arange(past, past + seq, device=tokens.device).expand(batch, seq)
        step = Step(self._cache, self._backend, rows, past)
        following = self._forward(tokens, positions, step)
        self._tokens[rows] = following
        return following[:, 0]

    @torch.inference_mode()
    def decode(self) -> Tensor:
        """Decode one token of every row and return them (rows,); valid until the next step.

        The host waits for nothing. Raises CacheFullError where a row has no room left.
        """
        for row in range(self._cache.rows):
            self._cache.grow(row, 1)
        self._cache.publish()
        if not self._graphs:
            self._step()
        else:
            if self._graph is None:
                self._graph = self._captured()
            self._graph.replay()
        return self._tokens[:, 0]

    def _step(self) -> None:
        """Raise the lengths, run the model, put its choice where the next step reads it."""
        self._cache.lengths += 1
        positions = self._cache.lengths.long()[:, None] - 1
        step = Step(self._cache, self._backend, slice(None), None)
        self._tokens.copy_(self._forward(self._tokens, positions, step))

    def _forward(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=1,
            serving=step,
        )
        if step.layers_seen != self._layers:
            missing = min(self._layers ^ step.layers_seen)
            raise ValueError(f"layer {missing} of this family does not attend through {NAME!r}")
        logits: Tensor = output.logits[:, -1]
        return logits.argmax(-1, keepdim=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Record a step as a graph; the steps before that, which compile, are undone."""
        tokens, lengths = self._tokens.clone(), self._cache.lengths.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                self._step()
                # The same token is written again into the same place.
                self._tokens.copy_(tokens)
                self._cache.lengths.copy_(lengths)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph
