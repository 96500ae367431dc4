"""transformers' own continuous batching of the same model, trace and cache size."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from planner.serve_run import ServeRun
from runners.serving.peers import Arrivals, PeerRequest

_FIELDS = frozenset(ContinuousBatchingConfig.__dataclass_fields__)
# transformers 5.17 names a page a block.
_PAGE_SIZE = "page_size" if "page_size" in _FIELDS else "block_size"
_POLL_S = 0.05


def serve_transformers(
    model: nn.Module, run: ServeRun, requests: Sequence[PeerRequest]
) -> dict[str, Any]:
    """Replay the trace; fills `requests` and returns what is worth knowing of how it was served.

    It gets as many pages as ours, as many requests at once and as many tokens a step; attention is
    torch's. It captures what it captures before the trace begins.
    """
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    try:
        return _serve(model, run, requests)
    finally:
        model.set_attn_implementation(attention)  # type: ignore[operator]


def batching_config(run: ServeRun) -> ContinuousBatchingConfig:
    """Return its settings for a run; what a version does not know is left out."""
    asked: dict[str, Any] = {
        _PAGE_SIZE: run.page_size,
        "num_blocks": run.pages,
        "max_requests_per_batch": run.rows,
        "max_batch_tokens": run.chunk_tokens + run.rows,
        # Random prompts share nothing; looking for it would only cost.
        "allow_block_sharing": False,
        # It would fetch a kernel from the hub.
        "auto_switch_to_flash": False,
        **({} if run.graphs else {"use_cuda_graph": False}),
    }
    return ContinuousBatchingConfig(**{k: v for k, v in asked.items() if k in _FIELDS})


def _serve(model: Any, run: ServeRun, requests: Sequence[PeerRequest]) -> dict[str, Any]:
    longest = max(one.wanted for one in requests)
    generation = GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Not in inference mode, which its thread, in older versions, would not share.
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching_config(run)
    ) as manager:
        used = str(model.config._attn_implementation)
        arrivals = Arrivals(requests)
        known: dict[str, PeerRequest] = {}
        while not arrivals.is_over or known:
            for request in arrivals.due():
                name = manager.add_request(
                    request.prompt, max_new_tokens=request.wanted, record_timestamps=True
                )
                known[name] = request
            _collect(manager, known, arrivals)
    return {"attention": used, "page_size": run.page_size}


def _collect(manager: Any, known: dict[str, PeerRequest], arrivals: Arrivals) -> None:
    """Take the results that are there; raises RuntimeError where its thread has ended."""
    try:
        result = manager.get_result(timeout=_POLL_S if arrivals.is_over else 0.001)
    except queue.Empty:
        result = None
    if result is None:
        if known and not manager.is_running():
            raise RuntimeError("transformers' continuous batching ended before its requests")
        return
    if not result.is_finished():
        return
    request = known.pop(result.request_id)
    request.error = result.error
    request.tokens = list(result.generated_tokens)
    request.times_s = [moment - arrivals.start_s for moment in result.timestamps or ()]
