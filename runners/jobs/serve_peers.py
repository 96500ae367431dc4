"""Other servers over the trace that ours has served, in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from planner.model import ModelSpec
from planner.serve_run import ServePeer, ServeRun
from runners.serving.engine import Request
from runners.serving.peers import PeerRequest, peer_figures
from runners.serving.transformers_peer import serve_transformers
from runners.serving.vllm_peer import serve_vllm


def measure_serve_peer(
    peer: ServePeer,
    model: nn.Module,
    spec: ModelSpec,
    run: ServeRun,
    served: Sequence[Request],
) -> dict[str, Any]:
    """Return a peer's figures over the trace of `run`; `served` are our requests, with their tokens."""
    requests = [
        PeerRequest(asked, request.prompt.tolist())
        for asked, request in zip(run.trace, served, strict=True)
    ]
    if peer is ServePeer.VLLM:
        notes = serve_vllm(dict(spec.hf_config), run, requests)
        ours = None
    else:
        notes = serve_transformers(model, run, requests)
        ours = [request.tokens for request in served]
    ends = [one.times_s[-1] for one in requests if one.times_s]
    duration_s = max(ends, default=0.0)
    if not duration_s:
        raise RuntimeError(f"{peer} served no request")
    return {**notes, **peer_figures(requests, duration_s, ours)}
