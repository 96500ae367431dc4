"""Prefills as CUDA graphs: their host starts a few hundred kernels, which takes longer than the GPU needs.

A graph is made for a number of rows, of tokens and of tokens before them, and serves any rows of a paged
cache: it reads block tables of its own. A shorter chunk is padded behind its end. No query sees what comes
behind it, and what is written there goes behind a row's length or into a page that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from planner.decode_run import AttentionBackend
from planner.serve_run import MAX_GRAPH_TOKENS
from runners.serving.attention import Step
from runners.serving.caches import PagedCache, StagedRows

# Runs the model over tokens (B, S) at positions (B, S); returns the token (B, 1) after that of index (1,).
Forward = Callable[[Tensor, Tensor, Step, Tensor], Tensor]


class _Prefill:
    """One graph, and the tensors that it reads and writes."""

    def __init__(
        self, forward: Forward, cache: PagedCache, backend: AttentionBackend, key: tuple[int, ...]
    ) -> None:
        rows, tokens, past = key
        device = cache.lengths.device
        self._forward = forward
        self._tokens = torch.zeros(rows, tokens, dtype=torch.long, device=device)
        self._last = torch.zeros(1, dtype=torch.long, device=device)
        self._positions = torch.arange(past, past + tokens, device=device).expand(rows, tokens)
        self._lengths = torch.full((rows,), past + tokens, dtype=torch.int32, device=device)
        self._staged = StagedRows(cache, rows, past + tokens)
        self._backend, self._past = backend, past
        self.following = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.replay: Callable[[], object] = self.run

    def run(self) -> None:
        """Run the model once over what the tensors hold."""
        rows = slice(0, len(self._tokens))
        step = Step(self._staged, self._backend, rows, self._lengths, self._past)
        found = self._forward(self._tokens, self._positions, step, self._last)
        self.following.copy_(found)

    def take(self, tokens: Tensor, rows: slice) -> None:
        """Put tokens (B, S) of rows of the cache where the graph reads them."""
        seq = tokens.shape[1]
        self._tokens[:, :seq] = tokens
        self._last.fill_(seq - 1)
        self._staged.hold(rows, self._past + seq)


class PrefillGraphs:
    """The captured prefills of a decoder over a paged cache; all share one pool of memory."""

    def __init__(self, forward: Forward, cache: PagedCache, backend: AttentionBackend) -> None:
        self._forward, self._cache, self._backend = forward, cache, backend
        self._prefills: dict[tuple[int, int], dict[int, _Prefill]] = {}
        self._stream = torch.cuda.Stream() if cache.lengths.is_cuda else None
        self._pool = torch.cuda.graph_pool_handle() if cache.lengths.is_cuda else None

    def capture(self, rows: int, tokens: int, past: int) -> bool:
        """Capture the prefill of `tokens` of each of `rows` after `past`; False where that is too much."""
        if rows * tokens > MAX_GRAPH_TOKENS:
            return False
        captured = self._prefills.setdefault((rows, past), {})
        if tokens not in captured:
            prefill = _Prefill(self._forward, self._cache, self._backend, (rows, tokens, past))
            prefill.replay = self._recorded(prefill.run)
            captured[tokens] = prefill
        return True

    def run(self, tokens: Tensor, rows: slice, past: int) -> Tensor | None:
        """Prefill tokens (B, S) by the graph that pads them least; return what follows (B, 1).

        None where no graph is as long. The result is valid until the next prefill.
        """
        batch, seq = tokens.shape
        captured = self._prefills.get((batch, past), {})
        length = min((one for one in captured if one >= seq), default=None)
        if length is None:
            return None
        prefill = captured[length]
        prefill.take(tokens, rows)
        prefill.replay()
        return prefill.following

    def _recorded(self, run: Callable[[], None]) -> Callable[[], object]:
        """Return what replays `run`, which is run once before: that compiles its kernels."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        # The first replay takes longer, for it brings the graph to the device: no request waits for that.
        graph.replay()
        return graph.replay
